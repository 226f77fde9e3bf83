"""TorchRec's plans: golden plain forms, there and back, its real objects where installed, refusals by name."""

from __future__ import annotations

import types

import pytest

from shoal.kernels.errors import ConfigError
from shoal.kernels.spec import TableSpec
from shoal.platform.config_train import TableConfig
from shoal.platform.planner import Constraint, plan_tables
from shoal.platform.sharding import ShardingType
from shoal.platform.topology import Topology, ragged_hosts
from shoal.platform.torchrec_plan import read_torchrec_plan, tables_from_torchrec, to_torchrec, torchrec_plan

SPECS = [TableSpec(name=kind.value, num_embeddings=10, embedding_dim=8) for kind in ShardingType]


def exported(**more):
    constraints = {
        kind.value: Constraint(
            sharding_types=(kind,),
            column_blocks=2 if kind.cuts_columns else None,
            num_row_blocks=1 if kind.is_whole else 4,
        )
        for kind in ShardingType
    }
    plan = plan_tables(SPECS, Topology(hosts=ragged_hosts([2, 2])), constraints=constraints)
    return torchrec_plan(plan, SPECS, **more)


def shard(row, column, rows, columns, rank):
    return {"shard_offsets": [row, column], "shard_sizes": [rows, columns], "placement": f"rank:{rank}/cpu"}


def test_row_wise_is_cut_as_torchrec_does():
    row_wise = exported()[""]["row_wise"]
    assert row_wise == {
        "sharding_type": "row_wise",
        "compute_kernel": "fused",
        "ranks": [0, 1, 2, 3],
        "sharding_spec": {
            "shards": [shard(0, 0, 3, 8, 0), shard(3, 0, 3, 8, 1), shard(6, 0, 3, 8, 2), shard(9, 0, 1, 8, 3)]
        },
    }


def test_other_types_name_the_ranks_that_hold_them():
    tables = exported()[""]
    assert len(tables["table_wise"]["ranks"]) == 1 and len(tables["column_wise"]["ranks"]) == 2
    for name in ("table_row_wise", "table_column_wise"):
        assert sorted(tables[name]["ranks"]) in ([0, 1], [2, 3])
    assert sorted(tables["grid_shard"]["ranks"]) == [0, 1, 2, 3]
    assert tables["data_parallel"] == {
        "sharding_type": "data_parallel",
        "compute_kernel": "dense",
        "ranks": [0, 1, 2, 3],
        "sharding_spec": None,
    }
    for name in ("column_wise", "table_column_wise", "grid_shard"):
        shards = tables[name]["sharding_spec"]["shards"]
        assert sum(s["shard_sizes"][0] * s["shard_sizes"][1] for s in shards) == 80
        assert {s["shard_offsets"][1] for s in shards} == {0, 4}


def test_modules_and_devices_are_as_asked():
    plain = exported(modules={"table_wise": "ebc"}, device="cuda")
    assert set(plain) == {"", "ebc"}
    placements = [s["placement"] for s in plain[""]["row_wise"]["sharding_spec"]["shards"]]
    assert placements == ["rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:0", "rank:3/cuda:1"]


def check_settings(settings):
    for kind in ShardingType:
        blocks = 2 if kind.cuts_columns else None
        assert settings[kind.value] == TableConfig(sharding_type=kind.value, column_blocks=blocks)


def test_an_exported_plan_comes_back_as_settings():
    check_settings(tables_from_torchrec(exported(), SPECS))


def test_objects_are_read_by_their_attributes():
    metadata = types.SimpleNamespace(shard_offsets=[0, 0], shard_sizes=[10, 8], placement="rank:1/cpu")
    spec = types.SimpleNamespace(shards=[metadata])
    sharding = types.SimpleNamespace(sharding_type="table_wise", compute_kernel="fused", ranks=[1], sharding_spec=spec)
    plan = types.SimpleNamespace(plan={"m": {"table_wise": sharding}})
    assert read_torchrec_plan(plan)["m"]["table_wise"]["sharding_spec"] == {"shards": [shard(0, 0, 10, 8, 1)]}
    assert tables_from_torchrec(plan, SPECS) == {"table_wise": TableConfig(sharding_type="table_wise")}


def test_real_objects_go_there_and_back():
    pytest.importorskip("torchrec", exc_type=ImportError)
    plain = exported()
    real = to_torchrec(plain)
    assert read_torchrec_plan(real) == plain
    check_settings(tables_from_torchrec(real, SPECS))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (3, "int is no TorchRec ShardingPlan"),
        ({"": {"x": {"sharding_type": "row_wise"}}}, "'x', which the model does not have"),
        ({"": {"row_wise": {"sharding_type": "sideways"}}}, "'row_wise': sharding type 'sideways' is unknown"),
        ({"": {"row_wise": {}}}, "'row_wise': its TorchRec sharding names no sharding_type"),
        ({key: {"row_wise": {"sharding_type": "row_wise"}} for key in "ab"}, "'row_wise' in two modules"),
        (
            {
                "": {
                    "column_wise": {
                        "sharding_type": "column_wise",
                        "sharding_spec": {"shards": [shard(0, 0, 10, 6, 0), shard(0, 6, 10, 2, 1)]},
                    }
                }
            },
            r"'column_wise': the plan cuts its columns into \[6, 2\]",
        ),
    ],
)
def test_what_cannot_be_taken_over_is_refused_by_name(plan, words):
    with pytest.raises(ConfigError, match=words):
        tables_from_torchrec(plan, SPECS)


def test_dynamic_tables_have_no_counterpart():
    spec = TableSpec(name="t", num_embeddings=0, embedding_dim=8)
    plan = plan_tables([spec], Topology(hosts=("a",)))
    with pytest.raises(ConfigError, match="'t' is dynamic"):
        torchrec_plan(plan, [spec])
