"""Readability of a checkpoint by others, and its export to Parquet."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

from shoal.actors.snapshot import write_snapshot
from shoal.kernels.cut import TORCH_DTYPES, BlockRows
from shoal.kernels.errors import CheckpointError
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec
from shoal.platform.checkpoint import write_manifest
from shoal.platform.export import export_parquet
from shoal.platform.manifest import CheckpointName, Manifest
from shoal.platform.storage import Storage

TABLES = (
    TableSpec(name="a", num_embeddings=0, embedding_dim=4, optimizer=OptimizerSpec(kind=OptimizerKind.ADAM)),
    TableSpec(name="b", num_embeddings=9, embedding_dim=2, data_type=DataType.BF16),
    TableSpec(name="none", num_embeddings=9, embedding_dim=2),
)


class Source:
    def export_block(self, table: int, block: int) -> BlockRows:
        spec = TABLES[table]
        n, width = (0 if spec.name == "none" else 5), spec.optimizer.slot_width(spec.embedding_dim)
        return BlockRows(
            ids=torch.tensor([0, 1, 5, 2**63 - 1, -1])[:n],
            weights=(torch.arange(n * spec.embedding_dim) / 4)
            .view(n, spec.embedding_dim)
            .to(TORCH_DTYPES[spec.data_type]),
            slots=torch.arange(float(n * width)).view(n, width),
            last_step=torch.arange(n),
            count=torch.arange(n) * 2,
        )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    storage = Storage(str(tmp_path / "run"))
    name = CheckpointName(0, 1)
    files = write_snapshot(Source(), {t.name: [0] for t in TABLES}, TABLES, storage, name.directory, 0, part_bytes=200)
    write_manifest(storage, Manifest(name=name, run="r", world_size=1, tables=TABLES, files=tuple(files)))
    return tmp_path / "run"


def test_part_files_are_plain_arrow(run: Path) -> None:
    folder = run / CheckpointName(0, 1).directory / "tables" / "a"
    table = pa.dataset.dataset(folder, format="ipc").to_table()
    assert table.column_names == ["id", "weight", "exp_avg", "exp_avg_sq", "last_step", "count"]
    assert table["id"].to_pylist() == [0, 1, 5, 2**63 - 1, 2**64 - 1]
    assert table["weight"].to_pylist()[1] == [1.0, 1.25, 1.5, 1.75]
    assert table["exp_avg_sq"].to_pylist()[0] == [4.0, 5.0, 6.0, 7.0]
    frame = pa.feather.read_table(folder / "part-00000-00000.arrow").to_pandas()
    assert frame["count"].tolist() == [0, 2]
    schema = pa.dataset.dataset(run / CheckpointName(0, 1).directory / "tables" / "b", format="ipc").schema
    assert schema.field("weight").type == pa.list_(pa.uint16(), 2)
    assert schema.field("weight").metadata == {b"shoal.dtype": b"bfloat16", b"shoal.stored_as": b"uint16"}
    assert schema.metadata[b"shoal.optimizer"] == b"rowwise_adagrad"


def test_export_is_parquet_with_ids_and_float_vectors(run: Path, tmp_path: Path) -> None:
    report = export_parquet(str(run), str(tmp_path / "out"))
    assert [(t.table, t.num_rows) for t in report.tables] == [("a", 5), ("b", 5), ("none", 0)]
    table = pq.read_table(tmp_path / "out" / "b")
    assert table.column_names == ["id", "vector"] and table["id"].to_pylist()[-1] == 2**64 - 1
    assert table["vector"].to_pylist() == [[0, 0.25], [0.5, 0.75], [1, 1.25], [1.5, 1.75], [2, 2.25]]
    assert pq.read_table(tmp_path / "out" / "none").num_rows == 0


def test_export_with_slots_and_chosen_tables(run: Path, tmp_path: Path) -> None:
    folder = run / CheckpointName(0, 1).directory
    export_parquet(str(folder), str(tmp_path / "out"), ["a"], slots=True)
    assert not (tmp_path / "out" / "b").exists()
    table = pq.read_table(tmp_path / "out" / "a")
    assert table.column_names == ["id", "vector", "exp_avg", "exp_avg_sq", "last_step", "count"]
    assert table["exp_avg"].to_pylist()[4] == [32.0, 33.0, 34.0, 35.0]
    with pytest.raises(CheckpointError, match="has no table 'zzz'; it has 'a', 'b', 'none'"):
        export_parquet(str(folder), str(tmp_path / "out"), ["zzz"])


def test_export_of_a_damaged_part_names_it(run: Path, tmp_path: Path) -> None:
    part = run / CheckpointName(0, 1).directory / "tables" / "a" / "part-00000-00001.arrow"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 4
    part.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"part-00000-00001.arrow .table 'a'.: damaged"):
        export_parquet(str(run), str(tmp_path / "out"))
