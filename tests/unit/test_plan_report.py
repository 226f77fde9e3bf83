"""shoal plan: bytes from values alone, the estimate from a sample, and refusals that name what is missing."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.actors.dataset import scan_dataset
from shoal.jobs.plan_advice import advice_notes
from shoal.jobs.plan_report import PROCESS_BYTES, PlanReport, make_report
from shoal.jobs.plan_text import format_report
from shoal.kernels.errors import PlanError
from shoal.kernels.schema import Schema, SparseColumn
from shoal.platform.config import (
    DataConfig,
    FailureConfig,
    JobConfig,
    OptimizerConfig,
    RunConfig,
    ScalingConfig,
    TableConfig,
    TablesConfig,
    TrainConfig,
)
from shoal.platform.data_sample import DataSample, FeatureSample, sample_dataset

GIB = 1 << 30


def report_of(
    *,
    num_workers=2,
    memory=None,
    host_bytes=64 * GIB,
    sizes=(10_000_000, 1000),
    sample=None,
    optimizer=None,
    failure=None,
) -> PlanReport:
    config = JobConfig(
        run=RunConfig(name="r", failure=failure or FailureConfig()),
        data=DataConfig(sparse=["f0", "f1"], batch_size=1000, prefetch_batches=2, window_rows=1000),
        scaling=ScalingConfig(num_workers=num_workers, memory_per_worker=memory),
        train=TrainConfig(sparse_optimizer=OptimizerConfig(kind=optimizer)),
        tables=TablesConfig(overrides={"t1": TableConfig(sharding_type="table_wise")}),
    )
    specs = [config.table_spec(f"t{i}", num_embeddings=size, embedding_dim=16) for i, size in enumerate(sizes)]
    features = {f"t{i}": [f"f{i}"] for i in range(len(sizes))}
    return make_report(config, specs, features, dense_parameters=1000, sample=sample, host_bytes=host_bytes)


def sample_of(*, unique: int, rows: int = 1000, total_rows: int = 1_000_000) -> DataSample:
    features = {
        name: FeatureSample(name=name, ids_per_row=2.0, unique_half=unique, unique=unique, unique_per_batch=100)
        for name in ("f0", "f1")
    }
    return DataSample(rows=rows, total_rows=total_rows, features=features)


def test_row_bytes_are_weights_optimizer_and_metadata():
    table = report_of(sizes=(1000, 1000)).tables[0]
    assert (table.weight_bytes, table.optimizer_bytes, table.metadata_bytes) == (64, 4, 32)
    assert table.bytes_max == 1000 * 100
    adam = report_of(sizes=(1000, 1000), optimizer="adam").tables[0]
    assert (adam.optimizer_bytes, adam.row_bytes) == (128, 224)


def test_bytes_of_workers_add_up_to_the_tables():
    report = report_of(num_workers=3)
    for table in report.tables:
        assert sum(table.bytes_per_worker) == pytest.approx(table.bytes_max, abs=3)
    tables = sum(table.bytes_max for table in report.tables)
    assert sum(worker.tables_max for worker in report.workers) == pytest.approx(tables, abs=6)
    assert sum(1 for n in report.tables[1].bytes_per_worker if n) == 1, "table_wise: one worker"


def test_imbalance_is_the_fullest_worker_over_the_mean():
    assert report_of(num_workers=1).imbalance == 1.0
    uneven = report_of(num_workers=2, sizes=(256, 10_000_000))
    assert uneven.imbalance == pytest.approx(2.0, rel=0.01)
    assert any("uneven" in note for note in uneven.notes)


def test_estimate_scales_the_upper_bound_and_stays_below_it():
    report = report_of(sample=sample_of(unique=500))
    assert report.tables[0].rows_estimate == 500
    assert report.tables[1].rows_estimate == 500
    assert report.workers[0].tables_estimate < report.workers[0].tables_max
    capped = report_of(sample=sample_of(unique=5000))
    assert capped.tables[1].rows_estimate == 1000


def test_dense_batches_and_exchange_are_counted():
    alone, two = report_of(num_workers=0), report_of(num_workers=2)
    # Parameters, gradients, reduction buffer and Adam's two moments.
    assert two.workers[0].dense == 4 * 1000 * 5
    assert alone.workers[0].exchange == 0
    # Per feature at most 500 rows of a batch: an id and 16 floats, two buffers each way, half of them elsewhere.
    assert two.workers[0].exchange == 2 * 500 * (8 + 64) * 4 // 2
    # Four batches of 500 rows and two windows of 1,000 between two workers: two ids, offsets, label and weight.
    assert two.workers[0].batches == (4 * 500 + 1000) * (2 * 8 + 2 * 8 + 8)


def test_copies_and_versions_are_counted_where_workers_keep_copies():
    here = report_of(num_workers=2)
    assert not here.keeps_copies and here.workers[0].copies_max == here.workers[0].versions == 0
    assert "this is one" in here.recovery_reason
    kept = report_of(num_workers=2, failure=FailureConfig(recovery="replicated", protect_every_steps=10))
    first, second = kept.workers
    assert kept.keeps_copies and (first.copies_max, second.copies_max) == (second.tables_max, first.tables_max)
    # 10 steps of 1,000 rows change 10,000 rows of t0, half of them here, and all 1,000 of t1, on one worker: two
    # versions of one's own and one staged for the other, 100 bytes a row.
    owns_t1 = [bool(n) for n in kept.tables[1].bytes_per_worker]
    own = [(5000 + 1000 * has) * 100 for has in owns_t1]
    assert [first.versions, second.versions] == [2 * own[0] + own[1], 2 * own[1] + own[0]]
    assert first.total_max == first.tables_max + first.copies_max + first.other
    elsewhere = report_of(num_workers=2, host_bytes=None)
    assert elsewhere.keeps_copies and "assumed" in elsewhere.recovery_reason
    assert not report_of(num_workers=1, host_bytes=None).keeps_copies


def test_versions_stay_within_their_limit_and_partial_recovery_has_them_without_copies():
    limited = report_of(failure=FailureConfig(recovery="partial", protect_every_steps=10, version_bytes_max=1000))
    assert [worker.versions for worker in limited.workers] == [1000, 1000]
    assert limited.workers[0].copies_max == 0
    sampled = report_of(failure=FailureConfig(recovery="partial"), sample=sample_of(unique=500))
    assert sampled.workers[0].versions < 2 * 1000 * 100


def test_copies_that_do_not_fit_are_refused_with_the_way_out():
    with pytest.raises(PlanError, match=r"run\.failure\.recovery to checkpoint"):
        report_of(memory=GIB + PROCESS_BYTES, sizes=(15_000_000, 10), failure=FailureConfig(recovery="replicated"))
    assert report_of(memory=GIB + PROCESS_BYTES, sizes=(15_000_000, 10)).limit_bytes


def test_column_blocks_are_shown_under_their_table():
    config = JobConfig(
        run=RunConfig(name="r"),
        data=DataConfig(sparse=["f0", "f1"]),
        scaling=ScalingConfig(num_workers=2, exchange="hierarchical", hosts="label:rack"),
        tables=TablesConfig(overrides={"t0": TableConfig(sharding_type="column_wise", column_blocks=2)}),
    )
    specs = [
        block
        for name in ("t0", "t1")
        for block in config.tables.of(name).cut(config.table_spec(name, num_embeddings=1000, embedding_dim=16))
    ]
    report = make_report(config, specs, {}, dense_parameters=10, sample=None, host_bytes=64 * GIB)
    assert [(table.logical_name, table.first_column) for table in report.tables] == [("t0", 0), ("t0", 8), ("t1", 0)]
    lines = format_report(report).splitlines()
    assert lines[0] == "plan of r: 2 workers, 2 tables"
    table, left, right, other = (line.split() for line in lines[3:7])
    # Weights of all columns; each block has its own row-wise state and metadata.
    assert (table[0], table[3], table[6]) == ("t0", "16", "64+8+64") and table[-3:] == ["column_wise/1", "x", "2"]
    assert left[:3] == ["columns", "0-7", "8"] and right[:3] == ["columns", "8-15", "8"] and other[0] == "t1"
    assert "exchange: hierarchical; hosts: label:rack" in lines


def test_a_plan_repeats_what_an_earlier_run_measured_unless_it_was_followed():
    events = [
        {"kind": "flow_advice", "step": 10, "tables": {"t0": "flow rows would take 50% fewer bytes"}},
        {"kind": "flow_advice", "step": 20, "tables": dict.fromkeys(("t0", "t1"), "flow pooled would take 30% fewer")},
        {"kind": "exchange"},
    ]
    tables = TablesConfig(overrides={"t1": TableConfig(flow="pooled")})
    config = JobConfig(run=RunConfig(name="r"), tables=tables)
    assert advice_notes(config, events) == [
        "run r measured at step 20: table t0: flow pooled would take 30% fewer",
    ]
    assert advice_notes(config, []) == []


def test_an_elastic_job_is_planned_at_both_sizes_and_has_to_fit_at_the_smaller():
    report = report_of(num_workers=(2, 4))
    assert report.num_workers == 4 and report.at_min is not None and report.at_min.num_workers == 2
    assert report.at_min.workers[0].tables_max > report.workers[0].tables_max
    assert report.at_min == report_of(num_workers=2)
    text = format_report(report)
    assert "4 workers" in text and "as few workers as the job may have (2)" in text
    assert report.to_dict()["at_min"]["tables"][0]["row_bytes"] == 100
    assert report_of(num_workers=2).to_dict()["at_min"] is None
    with pytest.raises(PlanError, match="all 2 workers"):
        report_of(num_workers=(2, 4), memory=GIB, sizes=(15_000_000, 1000))


# Row 55 of the list of faults: refused with the table, the bytes needed, the bytes free, and the options.
def test_table_larger_than_the_configured_memory_is_refused_with_options():
    with pytest.raises(PlanError) as caught:
        report_of(memory=2 * GIB, sizes=(100_000_000, 1000))
    message = str(caught.value)
    assert "'t0'" in message and "free" in message
    assert "scaling.memory_per_worker" in message and "workers" in message


def test_table_larger_than_this_host_is_refused_with_options():
    with pytest.raises(PlanError) as caught:
        report_of(host_bytes=4 * GIB, sizes=(100_000_000, 1000), optimizer="adam")
    message = str(caught.value)
    for words in ["table 't0' does not fit", "worker 0 needs", "free for tables per worker: worker 0:", "worker 1:"]:
        assert words in message
    for option in [
        "add workers (now 2)",
        "memory_per_worker",
        "data_type to bf16",
        "rowwise_adagrad",
        "num_embeddings",
    ]:
        assert option in message, option


def test_room_for_everything_but_tables_counts_too():
    with pytest.raises(PlanError):
        report_of(memory=PROCESS_BYTES, sizes=(1000, 1000))


def test_touched_rows_that_fit_pass_on_this_host_with_a_note():
    report = report_of(host_bytes=4 * GIB, sizes=(100_000_000, 1000), sample=sample_of(unique=500))
    assert any("estimate" in note for note in report.notes)


def test_unknown_limit_is_said_so():
    report = report_of(host_bytes=None)
    assert report.limit_bytes is None
    assert "not known here" in format_report(report)


def test_report_is_shown_as_text_and_as_json():
    report = report_of(sample=sample_of(unique=500))
    text = format_report(report)
    assert "t0" in text and "64+4+32 B" in text and "row_wise/64" in text and "imbalance" in text
    values = json.loads(json.dumps(report.to_dict()))
    assert values["tables"][0]["bytes_max"] == report.tables[0].bytes_max
    dynamic = report_of(sizes=(0, 10))
    assert "dynamic" in format_report(dynamic) and any("dynamic" in note for note in dynamic.notes)


def test_sample_counts_ids_and_extrapolates_zipf_within_a_factor_of_two(tmp_path):
    rng = np.random.default_rng(3)
    rows, num_files = 40_000, 4
    ids = np.minimum(rng.zipf(1.5, size=rows), 1 << 40)
    lists = [list(range(i % 3)) for i in range(rows)]
    for i in range(num_files):
        part = slice(i * rows // num_files, (i + 1) * rows // num_files)
        table = pa.table(
            {"y": np.zeros(rows // num_files), "z": ids[part], "l": lists[part], "s": [f"k{x}" for x in ids[part]]}
        )
        pq.write_table(table, tmp_path / f"{i}.parquet")
    schema = Schema(label="y", sparse=(SparseColumn(name="z"), SparseColumn(name="l"), SparseColumn(name="s")))
    dataset = scan_dataset(str(tmp_path), schema)
    sample = sample_dataset(dataset, schema, batch_rows=100, rows_max=8000)
    assert (sample.rows, sample.total_rows) == (8000, rows)
    z = sample.features["z"]
    assert z.ids_per_row == 1.0
    assert sample.features["l"].ids_per_row == pytest.approx(1.0, rel=0.01)
    assert sample.features["s"].unique == z.unique
    true = len(np.unique(ids))
    assert 0.5 < z.unique_of(rows, sample.rows) / true < 2.0
    assert 1 <= z.unique_per_batch <= 100


@pytest.mark.parametrize("unique", [0, 1, 1000])
def test_extrapolation_at_its_ends(unique):
    feature = FeatureSample(name="f", ids_per_row=1.0, unique_half=unique // 2, unique=unique, unique_per_batch=1)
    assert feature.unique_of(10**6, 1000) <= math.ceil(10**6)
    assert feature.unique_of(1000, 1000) == unique
    if unique == 1000:
        # Twice the rows, twice the ids: every id is new, and stays so.
        assert feature.unique_of(10**6, 1000) == 10**6
