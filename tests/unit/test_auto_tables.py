"""Tables left to the planner: what a sample says of them, the settings they get, a run and a plan with them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.jobs.plan_report import plan_job
from shoal.jobs.plan_text import format_report
from shoal.jobs.plan_traffic import owners_text
from shoal.jobs.train import ElasticTrainer
from shoal.kernels.column_blocks import cut_columns
from shoal.kernels.spec import FeatureSpec, PoolingType, TableSpec, WireCodecs
from shoal.platform.auto_tables import has_auto, job_topology, plan_job_tables, resolve_auto, table_profiles
from shoal.platform.config import DataConfig, JobConfig, ModelConfig, RunConfig, TableConfig, TablesConfig
from shoal.platform.data_sample import DataSample, FeatureSample
from shoal.platform.job import LoadOf
from shoal.platform.placement import table_bytes
from shoal.platform.run_folder import read_run_config

SPECS = (
    TableSpec(name="user", num_embeddings=10**6, embedding_dim=64, num_blocks=64),
    TableSpec(name="tag", num_embeddings=50, embedding_dim=64),
)
FEATURES = (
    FeatureSpec(name="user", table=0, collection=0),
    FeatureSpec(name="friend", table=0, collection=0, pooling=PoolingType.NONE),
    FeatureSpec(name="tag", table=1, collection=0, is_weighted=True),
)


def sample_of() -> DataSample:
    def feature(name: str, ids: float, unique: int) -> FeatureSample:
        return FeatureSample(name=name, ids_per_row=ids, unique_half=unique, unique=unique, unique_per_batch=unique)

    found = [feature("user", 1.0, 90), feature("friend", 3.0, 200), feature("tag", 0.5, 60)]
    return DataSample(rows=1000, total_rows=1000, features={f.name: f for f in found})


def test_features_of_a_table_are_added_up():
    profiles = table_profiles(SPECS, FEATURES, sample_of(), 100)
    user, tag = profiles["user"], profiles["tag"]
    assert (user.num_unique, user.num_ids, user.num_bags) == (290, 400, 400)
    assert user.needs_rows and not user.is_weighted and user.growth == 0
    assert (tag.num_unique, tag.num_ids, tag.num_bags, tag.is_weighted) == (50, 50, 50, True)
    blocks = cut_columns(SPECS[0], [32, 32])
    features = [FeatureSpec(name="user", table=0, collection=0), FeatureSpec(name="user", table=1, collection=0)]
    assert table_profiles(blocks, features, sample_of(), 100)["user"].num_ids == 100
    assert table_profiles(SPECS, FEATURES, None, 100) is None


def job_of(**tables: TableConfig) -> JobConfig:
    return JobConfig(data=DataConfig(batch_size=200), tables=TablesConfig(overrides=tables))


def test_choices_replace_auto_and_loads_say_how_busy_tables_are():
    config = job_of(user=TableConfig(sharding_type="auto"))
    topology = job_topology(config, 2, is_one_host=True)
    assert topology.num_hosts == 1
    plan = plan_job_tables(config, SPECS, FEATURES, sample_of(), topology)
    resolved = resolve_auto(config, plan)
    assert resolved.tables.of("user").sharding_type == plan.find("user").sharding.value
    assert resolved.tables.of("tag").sharding_type is None
    loads = [LoadOf(resolved)(spec) for spec in SPECS]
    bytes_in_all = sum(map(table_bytes, SPECS))
    assert sum(loads) == pytest.approx(bytes_in_all, rel=1e-3)
    assert loads[1] > 100 * table_bytes(SPECS[1]), "few bytes, much traffic"
    without = plan_job_tables(config, SPECS, FEATURES, None, topology)
    assert resolve_auto(config, without).tables.of("user").load_factor is None
    assert job_topology(config, 2, is_one_host=False).num_hosts == 2


def test_flow_auto_follows_the_sample_and_is_kept_in_the_settings():
    specs = (
        TableSpec(name="long", num_embeddings=10**6, embedding_dim=64),
        TableSpec(name="read", num_embeddings=10**6, embedding_dim=64),
        TableSpec(name="scaled", num_embeddings=10**6, embedding_dim=64),
        TableSpec(name="cut", num_embeddings=10**6, embedding_dim=64, num_blocks=64),
        TableSpec(name="kept", num_embeddings=10**6, embedding_dim=64),
    )
    features = tuple(
        FeatureSpec(
            name=spec.name,
            table=t,
            collection=0,
            pooling=PoolingType.NONE if spec.name == "read" else PoolingType.SUM,
            is_weighted=spec.name == "scaled",
        )
        for t, spec in enumerate(specs)
    )
    found = {
        spec.name: FeatureSample(name=spec.name, ids_per_row=40, unique_half=1500, unique=3000, unique_per_batch=3000)
        for spec in specs
    }
    sample = DataSample(rows=1000, total_rows=1000, features=found)
    auto = {"flow": "auto", "sharding_type": "table_wise"}
    config = job_of(
        long=TableConfig(**auto),
        read=TableConfig(**auto),
        scaled=TableConfig(**auto),
        cut=TableConfig(flow="auto"),
        kept=TableConfig(flow="auto", sharding_type="data_parallel"),
    )
    topology = job_topology(config, 2, is_one_host=False)
    plan = plan_job_tables(config, specs, features, sample, topology)
    resolved = resolve_auto(config, plan)
    flows = {spec.name: resolved.tables.of(spec.name).flow for spec in specs}
    # Sequences and weights that may be learned need rows; over 64 row blocks a bag is as many sums as ids.
    assert flows == {"long": "pooled", "read": "rows", "scaled": "rows", "cut": "rows", "kept": "rows"}
    assert not has_auto(resolved) and has_auto(config)
    assert "bytes of rows" in plan.find("long").reason
    by_owner = job_of(cut=TableConfig(flow="auto", placement_exact=False))
    assert plan_job_tables(by_owner, specs, features, sample, topology).find("cut").flow == "pooled"
    without = resolve_auto(config, plan_job_tables(config, specs, features, None, topology))
    assert {without.tables.of(spec.name).flow for spec in specs} == {"rows"}, "nothing is known: rows"
    assert config.tables.of("long").codecs == WireCodecs(), "unresolved, it stands for rows"


def build_model():
    from torch import nn

    from shoal.actors.embedding import EmbeddingBagCollection
    from shoal.kernels.tables import EmbeddingBagConfig

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = EmbeddingBagCollection(
                tables=[
                    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
                    for name, rows in (("user", 5000), ("tag", 20))
                ]
            )
            self.top = nn.Linear(16, 1)

        def forward(self, batch):
            logits = self.top(self.ebc(batch.sparse_features).values()).squeeze(1)
            return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")

    return Model()


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(1)
    columns = {"label": rng.integers(0, 2, 400), "user": rng.integers(0, 5000, 400), "tag": rng.integers(0, 20, 400)}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    return {"train": [str(tmp_path / "train.parquet")], "sparse": ["user", "tag"], "batch_size": 100}


def test_a_run_with_auto_keeps_the_choices_in_its_config(data, tmp_path):
    trainer = ElasticTrainer(
        model=build_model,
        data=data,
        tables={"defaults": {"sharding_type": "auto", "flow": "auto"}},
        scaling={"num_workers": 0},
        run=RunConfig(name="auto", storage_path=str(tmp_path / "runs")),
    )
    trainer.fit()
    kept = read_run_config(str(tmp_path / "runs" / "auto"))
    assert {name: kept.tables.of(name).sharding_type for name in ("user", "tag")} == {
        "user": "table_wise",
        "tag": "table_wise",
    }
    assert {kept.tables.of(name).flow for name in ("user", "tag")} == {"rows"}, "one worker exchanges nothing"


def test_plan_shows_what_is_expected_and_the_public_planners(data, monkeypatch):
    config = JobConfig(
        model=ModelConfig(factory=f"{__name__}:build_model"),
        data=DataConfig(**data),
        tables=TablesConfig(defaults=TableConfig(sharding_type="auto")),
        run=RunConfig(name="p"),
    )
    config = config.replace(scaling=config.scaling.replace(num_workers=2))
    report = plan_job(config)
    text = format_report(report)
    assert "expected per step" in text and "greedy by size_lookup" in text and "within hosts" in text
    shown = report.to_dict()["traffic"]
    assert shown["imbalance"] >= 1 and shown["bytes_between_hosts"] == 0 and shown["bytes_within_hosts"] > 0
    assert {table["flow"] for table in shown["tables"]} == {"rows"}
    assert plan_job(config, use_sample=False).traffic is None


def test_owners_are_shown_as_ranges():
    assert owners_text([(0, 1, 2, 5), (3,)]) == "0-2,5 | 3"
