"""Click logs: reproducible, bounded in memory, with a signal whose best AUC is known."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.jobs import synth
from shoal.jobs.clicks import CHUNK_ROWS, ClickLog, ClickLogSpec, hash_to_unit
from shoal.kernels.errors import ConfigError
from shoal.kernels.metrics import auc_reference

SMALL = (7, 50, 300, 3)


def small_log(rows: int = 3000, **changes) -> ClickLog:
    return ClickLog(ClickLogSpec(**{"rows": rows, "num_dense": 2, "cardinalities": SMALL, "seed": 5, **changes}))


def test_columns_are_criteo_shaped():
    table = ClickLog(ClickLogSpec(rows=100, cardinality_max=1000)).chunk(0).table
    assert table.schema.names == ["label", *(f"i{i}" for i in range(1, 14)), *(f"c{i}" for i in range(1, 27))]
    assert set(table.column("label").to_pylist()) <= {0, 1}
    for name, n in ClickLogSpec(rows=1, cardinality_max=1000).num_ids.items():
        ids = table.column(name).to_numpy()
        assert ids.min() >= 0 and ids.max() < n <= 1000
    dense = table.column("i1").to_numpy()
    assert dense.dtype == np.float32 and np.isfinite(dense).all() and dense.min() >= 0


def test_same_spec_same_rows_and_other_seed_other_rows(tmp_path):
    reports = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        log = small_log(seed=seed, multi_hot={"c2": 3})
        reports.append(synth.write(log, tmp_path / name))
    tables = [pq.read_table(tmp_path / name / "train") for name in "abc"]
    assert tables[0].equals(tables[1]) and not tables[0].equals(tables[2])
    assert reports[0].bayes_auc == reports[1].bayes_auc != reports[2].bayes_auc


def test_known_auc_is_the_auc_of_the_true_probabilities(tmp_path):
    log = small_log(rows=60_000, drift=0.0)
    report = synth.write(log, tmp_path / "log", valid_fraction=0.0, test_fraction=0.0)
    label = pq.read_table(tmp_path / "log" / "train").column("label").to_numpy()
    drawn = auc_reference(log.chunk(0).probability, label)
    assert abs(drawn - report.bayes_auc) < 0.006  # Three standard errors at 60,000 rows.
    assert report.bayes_auc_error_max < 1e-3
    assert abs(report.label_mean - 0.25) < 1e-6
    assert abs(label.mean() - 0.25) < 0.006


def test_a_fitted_model_comes_close_to_the_known_auc_and_not_above(tmp_path):
    linear_model = pytest.importorskip("sklearn.linear_model")
    from shoal.jobs.baseline import one_hot

    log = small_log(rows=60_000, interaction=0.0, drift=0.0, num_dense=0, alpha=0.8)
    report = synth.write(log, tmp_path / "log", test_fraction=0.4)
    x, y = {}, {}
    for split in ("train", "test"):
        table = pq.read_table(tmp_path / "log" / split)
        x[split], y[split] = one_hot(table, log.spec.num_ids, ()), table.column("label").to_numpy()
    model = linear_model.LogisticRegression(max_iter=200).fit(x["train"], y["train"])
    auc = auc_reference(model.predict_proba(x["test"])[:, 1], y["test"])
    assert report.bayes_auc - 0.02 < auc < report.bayes_auc + 0.008
    assert report.bayes_auc > 0.7


def test_no_signal_means_no_auc(tmp_path):
    report = synth.write(small_log(signal=0.0), tmp_path / "log")
    assert report.bayes_auc == pytest.approx(0.5)


def test_interaction_is_out_of_reach_of_each_feature_alone():
    log = small_log(rows=40_000, interaction=1.0, num_dense=0, drift=0.0, alpha=0.0)
    p = log.chunk(0).probability
    ids = log.chunk(0).table.column("c1").to_numpy()
    means = np.array([p[ids == i].mean() for i in range(7)])
    assert p.std() > 3 * means.std()


def test_drift_moves_the_hot_ids():
    log = small_log(rows=CHUNK_ROWS, drift=1.0, alpha=1.2)
    ids = log.chunk(0).table.column("c3").to_numpy()
    quarter = len(ids) // 4
    counts = [np.bincount(part, minlength=300) for part in (ids[:quarter], ids[-quarter:])]
    hot = [set(np.argsort(count)[-20:]) for count in counts]
    assert 0 < len(hot[0] & hot[1]) < 12
    steady = small_log(rows=CHUNK_ROWS, drift=0.0, alpha=1.2).chunk(0).table.column("c3").to_numpy()
    counts = [np.bincount(part, minlength=300) for part in (steady[:quarter], steady[-quarter:])]
    hot = [set(np.argsort(count)[-20:]) for count in counts]
    assert len(hot[0] & hot[1]) > 14


def test_effects_have_mean_zero_and_variance_one():
    values = hash_to_unit(np.arange(200_000), 3, 4)
    assert abs(values.mean()) < 0.01 and abs(values.var() - 1) < 0.01


def test_files_hold_all_rows_in_order_and_the_last_ones_are_the_test(tmp_path):
    rows = 3 * CHUNK_ROWS + 1000
    log = small_log(rows=rows)
    report = synth.write(log, tmp_path / "log", valid_fraction=0.1, test_fraction=0.3, rows_per_file=CHUNK_ROWS)
    files = {split: sorted((tmp_path / "log" / split).iterdir()) for split in ("train", "valid", "test")}
    assert report.num_files == sum(map(len, files.values())) == 6
    assert report.file_bytes == sum(f.stat().st_size for group in files.values() for f in group)
    together = pa.concat_tables([pq.read_table(f) for group in files.values() for f in group])
    assert together.num_rows == rows
    assert together.equals(pa.concat_tables([log.chunk(i).table for i in range(log.spec.num_chunks)]))
    assert report.valid_rows == pq.read_table(tmp_path / "log" / "valid").num_rows == int(rows * 0.1)
    assert report.test_rows == pq.read_table(tmp_path / "log" / "test").num_rows == int(rows * 0.3)
    meta = json.loads((tmp_path / "log" / "meta.json").read_text())
    assert meta["report"]["bayes_auc"] == report.bayes_auc
    assert report.duplication_factor * report.unique_ids_per_batch == pytest.approx(2048 * 4, rel=0.2)


def test_memory_does_not_grow_with_rows(tmp_path):
    peaks = []
    for chunks in (2, 8):
        tracemalloc.start()
        pool = pa.default_memory_pool().bytes_allocated()
        synth.write(small_log(rows=chunks * CHUNK_ROWS), tmp_path / str(chunks), rows_per_file=4 * CHUNK_ROWS)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert pa.default_memory_pool().bytes_allocated() - pool < 8 << 20
    assert peaks[1] < 1.2 * peaks[0]


def test_lists_may_be_empty_and_have_the_asked_mean_length():
    table = small_log(rows=20_000, multi_hot={"c3": 4}).chunk(0).table
    lengths = np.array([len(bag) for bag in table.column("c3").to_pylist()])
    assert lengths.min() == 0 and lengths.max() == 8 and abs(lengths.mean() - 4) < 0.1


def test_fractions_must_leave_training_rows(tmp_path):
    with pytest.raises(ConfigError, match="fraction"):
        synth.synth(tmp_path / "x", rows=10, valid_fraction=0.5, test_fraction=0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "rows"),
        ({"alpha": -1.0}, "alpha"),
        ({"label_mean": 1.0}, "label_mean"),
        ({"interaction": 2.0}, "interaction"),
        ({"multi_hot": {"x": 3}}, "multi_hot"),
    ],
)
def test_bad_specs_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_log(**changes)


def test_a_folder_with_contents_is_refused(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        synth.synth(tmp_path, rows=10)


def test_generator_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, shoal.jobs.synth; assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
