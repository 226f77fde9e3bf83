"""`check_dataset` reports every violation with file, row group and row, and counts them all."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.jobs.cli import main
from shoal.kernels.errors import DataError
from shoal.kernels.schema import Schema, SparseColumn
from shoal.platform.datacheck import Report, check_dataset

SCHEMA = Schema(
    label="y",
    dense=("d",),
    weight="v",
    sparse=(SparseColumn(name="user", column="u"), SparseColumn(name="l", weights_column="w", null_policy="error")),
)


def good(n: int = 20) -> dict[str, list]:
    return {
        "y": [i % 2 for i in range(n)],
        "d": [0.5] * n,
        "v": [1.0] * n,
        "u": list(range(n)),
        "l": [[1, 2]] * n,
        "w": [[0.5, 0.5]] * n,
    }


def write(path: Path, columns: dict[str, list]) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=8)


def found(report: Report) -> dict[tuple[str, str], int]:
    return {(finding.kind, finding.column): finding.count for finding in report.findings}


def test_a_clean_data_set_has_no_findings(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", good())
    seen: list[tuple[int, int]] = []
    report = check_dataset(
        str(tmp_path), SCHEMA, table_sizes={"user": 20}, progress=lambda done, n: seen.append((done, n))
    )
    assert report.is_ok and report.num_rows == 20 and report.num_ids == 60 and report.num_positive == 10
    assert report.id_ranges["user"] == (0, 19) and seen == [(1, 1)]
    assert list(report.lines())[-1] == "no violations"


def test_every_violation_is_counted_and_the_first_ones_are_placed(tmp_path: Path) -> None:
    bad = good()
    bad["y"][3], bad["y"][9] = 7, -1
    bad["d"][4], bad["d"][5] = float("nan"), None
    bad["v"][0] = -1.0
    bad["u"][17] = 999
    bad["u"][18] = -5
    bad["u"][2] = None
    bad["l"][11] = None
    bad["w"][12] = [1.0]
    bad["w"][13] = [1.0, float("inf")]
    write(tmp_path / "b.parquet", bad)
    report = check_dataset(str(tmp_path), SCHEMA, table_sizes={"user": 20}, max_examples=5)
    assert found(report) == {
        ("bad label", "y"): 2,
        ("bad dense", "d"): 2,
        ("bad sample weight", "v"): 1,
        ("id out of range", "u"): 2,
        ("null id", "l"): 1,
        ("weights length", "l"): 1,
        ("bad weight", "l"): 1,
    }
    text = "\n".join(report.lines())
    for place in (
        "b.parquet, row group 0, row 3: the label is 7",
        "b.parquet, row group 1, row 1: the label is -1",
        "b.parquet, row group 2, row 1: id 999 of feature 'user' is outside its table, 0 .. 19",
        "b.parquet, row group 2, row 2: id -5",
        "b.parquet, row group 1, row 3: a null id",
        "b.parquet, row group 1, row 4: 1 weights in column 'w' for 2 ids",
        "b.parquet, row group 1, row 5: a weight in column 'w'",
        "handled by policy: u: nulls: 1",
    ):
        assert place in text, text


def test_examples_are_bounded_and_counts_are_not(tmp_path: Path) -> None:
    bad = good(100)
    bad["y"] = [5] * 100
    write(tmp_path / "a.parquet", bad)
    (finding,) = check_dataset(str(tmp_path), SCHEMA, max_examples=3).findings
    assert finding.count == 100 and len(finding.examples) == 3


def test_bad_files_types_and_drift_are_reported_together(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", good())
    (tmp_path / "b.parquet").write_bytes(b"")
    drift = good()
    drift["u"] = [str(i) for i in drift["u"]]
    write(tmp_path / "c.parquet", drift)
    floats = good()
    floats["u"] = [float(i) for i in floats["u"]]
    del floats["d"]
    floats["y"][1] = 9
    write(tmp_path / "d.parquet", floats)
    report = check_dataset(str(tmp_path), SCHEMA)
    assert found(report) == {
        ("unreadable file", ""): 1,
        ("type differs between files", "u"): 1,
        ("wrong type", "u"): 1,
        ("missing column", "d"): 1,
        ("bad label", "y"): 1,
    }
    text = "\n".join(report.lines())
    assert "c.parquet: it is string, but int64 in" in text and "a.parquet" in text
    assert "d.parquet, row group 0, row 1: the label is 9" in text


def test_a_missing_label_is_reported_not_raised(tmp_path: Path) -> None:
    columns = good()
    del columns["y"]
    write(tmp_path / "a.parquet", columns)
    assert found(check_dataset(str(tmp_path), SCHEMA)) == {("missing column", "y"): 1}


def test_no_rows_at_all_is_a_violation_and_no_files_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to check"):
        check_dataset(str(tmp_path), SCHEMA)
    pq.write_table(pa.table(good()).slice(0, 0), tmp_path / "a.parquet")
    assert ("empty data set", "") in found(check_dataset(str(tmp_path), SCHEMA))


def test_the_command_exits_with_1_and_prints_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = good()
    bad["y"][3] = 7
    write(tmp_path / "b.parquet", bad)
    job = tmp_path / "job.yaml"
    job.write_text(f"data: {{train: [{tmp_path}], label: y, dense: [d], sparse: [{{name: user, column: u}}]}}\n")
    assert main(["data", "check", str(job)]) == 1
    assert "train:     " in (text := capsys.readouterr().out) and "row group 0, row 3: the label is 7" in text
    assert main(["data", "check", str(job), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["train"]["findings"][0]["kind"] == "bad label"


def test_the_command_checks_ids_against_the_models_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.parquet", good())
    job = tmp_path / "job.yaml"
    model = "{factory: shoal.jobs.models.dlrm:build, args: {num_dense: 1, tables: {user: 10}}}"
    job.write_text(
        f"model: {model}\ndata: {{train: [{tmp_path}], label: y, dense: [d], sparse: [{{name: user, column: u}}]}}\n"
    )
    assert main(["data", "check", str(job)]) == 1
    assert "id 10 of feature 'user' is outside its table, 0 .. 9" in capsys.readouterr().out
