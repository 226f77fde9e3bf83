"""The configuration classes: types, ranges, inheritance, and that nothing heavy is imported for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.kernels.errors import ConfigError
from shoal.kernels.spec import DataType, OptimizerKind, WeightDecayMode
from shoal.platform.config import (
    DataConfig,
    DenseOptimizerConfig,
    FailureConfig,
    JobConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    ScheduleConfig,
    SparseColumnConfig,
    TableConfig,
    TablesConfig,
    TrainConfig,
)


def job(**sections) -> JobConfig:
    return JobConfig(**{"run": RunConfig(name="r"), **sections})


def failure(**fields) -> RunConfig:
    return RunConfig(name="r", failure=FailureConfig(**fields))


def dense_optimizer(**fields) -> TrainConfig:
    return TrainConfig(dense_optimizer=DenseOptimizerConfig(**fields))


def problem_of(config) -> str:
    with pytest.raises(ConfigError) as caught:
        config.validate()
    return str(caught.value)


def test_import_of_config_needs_neither_torch_nor_ray_nor_numpy():
    code = (
        "import sys, shoal.platform.config, shoal.platform.config_file, shoal.platform.config_ray;"
        "heavy = {'torch', 'ray', 'numpy', 'pyarrow'} & set(sys.modules); sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_defaults_are_valid_once_the_run_has_a_name():
    job().validate()
    assert "run.name is ''" in problem_of(JobConfig())


def test_types_are_converted_and_short_forms_understood():
    data = DataConfig(train="a.parquet", sparse=["user", {"name": "genres", "kind": "list"}])
    assert data.train == ("a.parquet",)
    assert data.sparse == (SparseColumnConfig(name="user"), SparseColumnConfig(name="genres", kind="list"))
    assert ScalingConfig(memory_per_worker="1.5GiB").memory_per_worker == 3 << 29
    assert TrainConfig(max_steps=1e3).max_steps == 1000
    assert JobConfig(model="a.b:c").model == ModelConfig(factory="a.b:c")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: TrainConfig(lr="fast"), ["TrainConfig.lr", "'fast'", "a number"]),
        (lambda: TrainConfig(epochs=1.5), ["epochs", "1.5", "an integer"]),
        (lambda: TrainConfig(epochs=True), ["epochs", "True"]),
        (lambda: DataConfig(shuffle="no"), ["shuffle", "'no'", "write false"]),
        (lambda: OptimizerConfig(kind="adm"), ["kind", "'adm'", "did you mean 'adam'"]),
        (lambda: OptimizerConfig(betas=[0.9]), ["betas", "2 entries"]),
        (lambda: DataConfig(sparse=[{"nme": "x"}]), ["sparse.0.nme", "not a known key", "'name'"]),
        (lambda: DataConfig(sparse=[{"kind": "id"}]), ["sparse.0.name", "is required"]),
        (lambda: ScalingConfig(memory_per_worker="8 gigs"), ["memory_per_worker", "8GiB"]),
        (lambda: RunConfig(resume="maybe"), ["resume", "auto, must, never or an integer"]),
        (lambda: RunConfig(name=3), ["name", "put it in quotes"]),
    ],
)
def test_wrong_type_names_field_value_and_what_is_allowed(build, words):
    with pytest.raises(ConfigError) as caught:
        build()
    assert all(word in str(caught.value) for word in words), str(caught.value)


# Row 56 of the list of faults: min > max, batch < 1, GPU absent; each before any actor starts.
@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"scaling": ScalingConfig(num_workers=(4, 2))}, ["scaling.num_workers", "[4, 2]", "min is greater than max"]),
        ({"scaling": ScalingConfig(num_workers=(0, 4))}, ["scaling.num_workers", "min must be >= 1"]),
        ({"run": failure(on_loss="standby")}, ["run.failure.num_standby", "at least one"]),
        ({"run": failure(num_standby=2)}, ["run.failure.num_standby", "on_loss standby"]),
        ({"run": failure(orphan_s=10)}, ["run.failure.lease_s", "5, 60, 10"]),
        ({"run": failure(max_failures=-2)}, ["run.failure.max_failures", ">= -1"]),
        ({"run": failure(protect_every_steps=0)}, ["run.failure.protect_every_steps", ">= 1"]),
        ({"scaling": ScalingConfig(num_workers=-1)}, ["scaling.num_workers", ">= 0"]),
        ({"data": DataConfig(batch_size=0)}, ["data.batch_size", "is 0", ">= 1"]),
        ({"train": TrainConfig(lr=float("nan"))}, ["train.lr", "nan"]),
        ({"train": TrainConfig(lr=-0.1)}, ["train.lr", "-0.1", ">= 0"]),
        ({"train": TrainConfig(sparse_optimizer=OptimizerConfig(betas=(0.9, 1.0)))}, ["betas", "< 1"]),
        ({"train": TrainConfig(schedule=ScheduleConfig(kind="cosine"))}, ["train.schedule.decay_steps", "cosine"]),
        ({"train": TrainConfig(eval_every_steps=5)}, ["train.eval_every_steps", "data.eval"]),
        (
            {"train": TrainConfig(overlap=True), "scaling": ScalingConfig(exchange="hierarchical")},
            ["train.overlap", "scaling.exchange hierarchical", "leave it out"],
        ),
        ({"scaling": ScalingConfig(transport="nccl")}, ["scaling.transport", "use_gpu"]),
        ({"scaling": ScalingConfig(resources_per_worker={"GPU": 1})}, ["scaling.use_gpu", "set it to true"]),
        ({"scaling": ScalingConfig(resources_per_worker={"memory": 1})}, ["memory_per_worker"]),
        ({"scaling": ScalingConfig(resources_per_worker={"CPU": 0})}, ["scaling.resources_per_worker.CPU", "is 0"]),
        ({"train": dense_optimizer(kind="sgd", eps=1e-6)}, ["train.dense_optimizer.eps", "sgd"]),
        ({"train": dense_optimizer(kind="adagrad", betas=(0.8, 0.9))}, ["dense_optimizer.betas", "adagrad"]),
        ({"train": dense_optimizer(kind="adam", momentum=0.9)}, ["dense_optimizer.momentum", "adam"]),
        ({"data": DataConfig(dense=["label"])}, ["data.dense", "label"]),
        ({"data": DataConfig(sparse=["a", "a"])}, ["data.sparse", "'a' twice"]),
        ({"tables": TablesConfig(defaults=TableConfig(num_blocks=3))}, ["tables.defaults.num_blocks", "power of two"]),
        ({"tables": TablesConfig(overrides={"t": TableConfig(init_min=1)})}, ["tables.overrides.t.init_min"]),
        ({"run": RunConfig(name="a/b")}, ["run.name", "'a/b'"]),
        ({"model": ModelConfig(factory="no-colon")}, ["model.factory", "package.module:function"]),
    ],
)
def test_validate_names_field_value_and_range(sections, words):
    message = problem_of(job(**sections))
    assert all(word in message for word in words), message


def test_all_problems_are_reported_at_once():
    message = problem_of(job(data=DataConfig(batch_size=0), train=TrainConfig(lr=-1)))
    assert "2 problems" in message and "batch_size" in message and "train.lr" in message


def test_table_settings_come_from_override_then_defaults_then_model():
    config = job(
        train=TrainConfig(lr=0.5, sparse_optimizer=OptimizerConfig(kind="adam", weight_decay=0.1)),
        tables=TablesConfig(
            defaults=TableConfig(data_type="bf16", optimizer=OptimizerConfig(eps=1e-6)),
            overrides={"user": TableConfig(num_embeddings=0, optimizer=OptimizerConfig(lr=0.25))},
        ),
    )
    user = config.table_spec("user", num_embeddings=100, embedding_dim=8, seed=7)
    item = config.table_spec("item", num_embeddings=100, embedding_dim=8, init_min=-1, init_max=1)
    assert (user.num_embeddings, user.data_type, user.seed) == (0, DataType.BF16, 7)
    assert (user.optimizer.kind, user.optimizer.lr, user.optimizer.eps) == (OptimizerKind.ADAM, 0.25, 1e-6)
    assert user.optimizer.weight_decay_mode is WeightDecayMode.L2
    assert (item.num_embeddings, item.optimizer.lr) == (100, 0.5)
    assert (item.init_min, item.init_max) == (-1, 1)


def test_default_initial_weights_are_torchrecs_bound():
    spec = job().table_spec("t", num_embeddings=400, embedding_dim=4)
    assert (spec.init_min, spec.init_max) == (-0.05, 0.05)


def test_table_wise_table_is_one_block_unless_configured():
    table_wise = job(tables=TablesConfig(defaults=TableConfig(sharding_type="table_wise")))
    assert table_wise.table_spec("t", num_embeddings=10**6, embedding_dim=4).num_blocks == 1
    assert job().table_spec("t", num_embeddings=10**6, embedding_dim=4).num_blocks > 1
    assert job().table_spec("t", num_embeddings=3, embedding_dim=4).num_blocks == 1


def test_column_blocks_follow_from_type_and_number():
    def widths(dim: int = 256, **fields) -> list[int]:
        config = job(tables=TablesConfig(overrides={"t": TableConfig(**fields)}))
        spec = config.table_spec("t", num_embeddings=10**6, embedding_dim=dim)
        return [block.embedding_dim for block in config.tables.of("t").cut(spec)]

    assert (
        widths() == widths(sharding_type="table_wise") == widths(sharding_type="column_wise", column_blocks=1) == [256]
    )
    assert widths(sharding_type="column_wise") == [128, 128]
    assert widths(sharding_type="column_wise", dim=64) == [64]
    assert widths(column_blocks=3) == [88, 84, 84]
    with pytest.raises(ConfigError, match="'t': 9 column blocks of 8 columns"):
        widths(column_blocks=9, dim=8)
    with pytest.raises(ConfigError, match="data_parallel table is kept whole"):
        TableConfig(sharding_type="data_parallel", num_embeddings=5, column_blocks=2).validate()


def test_row_wise_state_of_column_blocks_is_the_tables_unless_asked():
    for scope, is_shared in ((None, True), ("table", True), ("shard", False)):
        table = TableConfig(column_blocks=2, optimizer_scope=scope)
        spec = job().table_spec("t", num_embeddings=10, embedding_dim=8)
        assert [block.shares_statistic for block in table.cut(spec)] == [is_shared] * 2


def test_learning_rates_are_pure_functions_of_the_step():
    schedule = ScheduleConfig(kind="linear", warmup_steps=4, decay_steps=10, min_factor=0.1)
    config = job(train=TrainConfig(lr=1.0, schedule=schedule))
    rates = [config.dense_lr(step) for step in range(20)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0 and rates[9] == pytest.approx(0.55) and rates[14] == rates[19] == pytest.approx(0.1)
    assert [config.table_lr("t", step) for step in reversed(range(20))] == rates[::-1]


def test_cosine_schedule_ends_at_min_factor():
    schedule = ScheduleConfig(kind="cosine", decay_steps=8, min_factor=0.2)
    assert schedule.factor(0) == 1.0
    assert schedule.factor(4) == pytest.approx(0.6)
    assert schedule.factor(8) == schedule.factor(1000) == pytest.approx(0.2)


def test_run_dir_keeps_the_options_of_a_uri_at_its_end():
    assert RunConfig(name="r", storage_path="/tmp/runs/").run_dir == "/tmp/runs/r"
    assert RunConfig(name="r", storage_path="s3://b/p?region=x").run_dir == "s3://b/p/r?region=x"


def test_schema_carries_every_column_setting():
    data = DataConfig(
        label="y",
        dense=["a"],
        weight="w",
        extras=["uid"],
        sparse=[
            {"name": "f", "column": "c", "kind": "list", "max_length": 3, "null_policy": "oov", "id_policy": "oov"}
        ],
    )
    schema = data.schema()
    assert schema.columns == ["y", "a", "c", "w", "uid"]
    assert (schema.sparse[0].name, schema.sparse[0].max_length, schema.sparse[0].null_policy) == ("f", 3, "oov")
    assert data.id_policies == {"f": "oov"}
