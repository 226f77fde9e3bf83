"""Table configs: TorchRec's fields and defaults, seeds, and what cannot become a TableSpec."""

import math
import subprocess
import sys

import pytest
import torch

from shoal.kernels.errors import ConfigError
from shoal.kernels.spec import OptimizerKind, OptimizerSpec
from shoal.kernels.tables import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    VirtualTableEvictionPolicy,
    row_dtype,
    table_seed,
    table_spec,
)


def bag(**changes) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(**({"num_embeddings": 100, "embedding_dim": 8, "name": "t"} | changes))


def test_defaults_are_torchrecs():
    config = bag()
    assert config.get_weight_init_max() == math.sqrt(1 / 100) == -config.get_weight_init_min()
    assert (config.pooling, config.data_type, config.feature_names) == (PoolingType.SUM, DataType.FP32, [])
    assert float(config.init_fn(torch.empty(1000)).abs().max()) <= 0.1


def test_spec_carries_size_type_bounds_seed_and_optimizer():
    optimizer = OptimizerSpec(kind=OptimizerKind.ADAM, lr=0.5)
    spec = table_spec(bag(data_type=DataType.BF16, weight_init_max=0.25), seed=7, optimizer=optimizer, num_blocks=16)
    assert (spec.name, spec.num_embeddings, spec.embedding_dim, spec.num_blocks, spec.seed) == ("t", 100, 8, 16, 7)
    assert (spec.data_type, spec.init_min, spec.init_max, spec.optimizer) == (DataType.BF16, -0.1, 0.25, optimizer)
    assert table_spec(EmbeddingConfig(num_embeddings=4, embedding_dim=2, name="s"), seed=0).num_blocks == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_type": DataType.INT8}, "data_type INT8 cannot be trained"),
        ({"use_virtual_table": True}, "use_virtual_table=True is not supported"),
        ({"virtual_table_eviction_policy": VirtualTableEvictionPolicy()}, "virtual_table_eviction_policy"),
        ({"num_embeddings_post_pruning": 5}, "num_embeddings_post_pruning=5"),
        ({"need_pos": True}, "need_pos"),
        ({"input_dim": 3}, "input_dim"),
        ({"total_num_buckets": 4}, "total_num_buckets"),
        ({"enable_embedding_update": True}, "enable_embedding_update"),
        ({"stash_weights": True}, "stash_weights"),
        ({"init_fn": torch.nn.init.zeros_}, "init_fn cannot be used in a sharded table"),
        ({"name": ""}, "no name"),
        ({"embedding_dim": 0}, "embedding_dim is 0"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        table_spec(bag(**changes), seed=0)


def test_a_table_without_rows_needs_bounds():
    with pytest.raises(ConfigError, match="table 't': num_embeddings is 0"):
        bag(num_embeddings=0)


def test_table_seed_depends_on_run_and_name_and_on_nothing_else():
    seeds = {table_seed(run, name) for run in range(20) for name in ("a", "b", "1:a", "")}
    assert len(seeds) == 80 and all(0 <= seed < 1 << 63 for seed in seeds)
    code = "from shoal.kernels.tables import table_seed; print(table_seed(3, 'clicks'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(other.stdout) == table_seed(3, "clicks")


def test_row_dtypes():
    assert [row_dtype(bag(data_type=t)) for t in (DataType.FP32, DataType.FP16, DataType.BF16)] == [
        torch.float32,
        torch.float16,
        torch.bfloat16,
    ]
