"""A checkpoint written with one cut into column blocks loads into any other, bit for bit (K1, K3)."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_fleet import assert_bit_equal, gathered, load, newest

from shoal.actors import restore
from shoal.actors.snapshot import Delta, write_snapshot
from shoal.kernels.column_blocks import cut_columns, logical_tables
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import CheckpointError
from shoal.kernels.hashing import row_blocks
from shoal.kernels.row_columns import join_columns, slice_columns
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec
from shoal.platform.chain import decide_base
from shoal.platform.checkpoint import list_checkpoints, write_manifest
from shoal.platform.export import export_parquet
from shoal.platform.loadplan import check_tables, plan_load
from shoal.platform.manifest import CheckpointName, Manifest
from shoal.platform.storage import Storage

DIM = 8
CUTS = [(DIM,), (5, 3), (2, 1, 5), (4, 4), (1,) * DIM]
KINDS = list(OptimizerKind)
TABLES = tuple(
    TableSpec(
        name=kind.name.lower(),
        num_embeddings=0,
        embedding_dim=DIM,
        num_blocks=4,
        data_type=DataType.BF16 if kind is OptimizerKind.ADAM else DataType.FP32,
        optimizer=OptimizerSpec(kind=kind),
    )
    for kind in KINDS
)


def cut(widths: Sequence[int], *, has_own_statistic: bool = False, **fields) -> tuple[TableSpec, ...]:
    tables = (dataclasses.replace(table, **fields) for table in TABLES)
    return tuple(b for t in tables for b in cut_columns(t, widths, has_own_statistic=has_own_statistic))


class Run:
    """Trained uncut tables, and checkpoints of them as a job that cut them would write them."""

    def __init__(self, folder: Path) -> None:
        self.storage = Storage(str(folder))
        self.store = RowStore(TABLES, undo_steps=0)
        self.store.add_all_blocks()
        self.step, self.saved = 0, 0
        self.deleted = torch.empty(0, dtype=torch.int64)

    def train(self, ids: Sequence[int], gone: Sequence[int] = ()) -> None:
        self.step += 1
        generator = torch.Generator().manual_seed(self.step)
        self.deleted = torch.cat([self.deleted, torch.tensor(gone, dtype=torch.int64)])
        self.store.begin_step(self.step)
        for table in range(len(TABLES)):
            gradients = torch.randn(len(ids), DIM, generator=generator)
            self.store.apply(table, torch.tensor(ids), gradients, step=self.step, lr=0.1)
            self.store.delete(table, torch.tensor(gone, dtype=torch.int64))
        self.store.commit(self.step)

    def save(self, tables: tuple[TableSpec, ...], *, parent: Manifest | None = None, num_ranks: int = 2) -> Manifest:
        run = self

        class Columns:
            def export_block(self, table: int, block: int) -> BlockRows:
                spec = tables[table]
                names = [t.name for t in TABLES]
                rows = run.store.export_block(names.index(spec.logical_name), block)
                end = spec.first_column + spec.embedding_dim
                return slice_columns(rows, spec.optimizer, spec.first_column, end)

        delta = None
        if parent is not None:
            blocks = row_blocks(self.deleted.numpy(), 4)
            known = {(t, b): self.deleted[torch.from_numpy(blocks == b)] for t in range(len(tables)) for b in range(4)}
            delta = Delta(since=parent.name.step, deleted=known)
        self.deleted = torch.empty(0, dtype=torch.int64)
        name, files = CheckpointName(0, self.step), []
        for rank in range(num_ranks):
            owned = {
                spec.name: [b for b in range(4) if (b + number) % num_ranks == rank]
                for number, spec in enumerate(tables)
            }
            files += write_snapshot(
                Columns(), owned, tables, self.storage, name.directory, rank, delta=delta, part_bytes=2000
            )
        manifest = Manifest(
            name=name,
            run="r",
            world_size=num_ranks,
            tables=tables,
            files=tuple(files),
            parent=None if parent is None else str(parent.name),
        )
        write_manifest(self.storage, manifest)
        return newest(self.storage)

    def assert_loads(self, manifest: Manifest, tables: tuple[TableSpec, ...], world_size: int = 2) -> None:
        stores = load(self.storage, manifest, world_size, tables)
        numbers = {spec.name: number for number, spec in enumerate(tables)}
        for table, blocks in enumerate(logical_tables(tables).values()):
            pieces = [gathered(stores, numbers[block.name]) for block in blocks]
            assert_bit_equal(join_columns(pieces, TABLES[table].optimizer), gathered([self.store], table))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    for step in range(3):
        run.train(range(step * 10, step * 10 + 60))
    return run


@pytest.mark.parametrize(("written", "wanted"), list(itertools.product(CUTS, CUTS)))
def test_any_cut_loads_into_any_other(run: Run, written, wanted) -> None:
    """Weights, all optimizer state, steps and counts; bf16 too."""
    manifest = run.save(cut(written))
    assert manifest.num_rows == manifest.num_rows_total == run.store.num_rows(), "a row counts once"
    run.assert_loads(manifest, cut(wanted))


@pytest.mark.parametrize("join_bytes", [1, 2**28])
@pytest.mark.parametrize(
    ("written", "wanted"), [((5, 3), (DIM,)), ((DIM,), (5, 3)), ((5, 3), (2, 1, 5)), ((5, 3), (5, 3))]
)
def test_chains_load_into_any_cut_and_number_of_row_blocks(run: Run, written, wanted, join_bytes, monkeypatch) -> None:
    monkeypatch.setattr(restore, "JOIN_BYTES", join_bytes)
    manifest = run.save(cut(written))
    for step in range(2):
        run.train(range(step, 30, 3), gone=range(50 + step, 70, 5))
        manifest = run.save(cut(written), parent=manifest, num_ranks=3)
    assert len(manifest.chain) == 3 and any(entry.kind == "deleted" for entry in manifest.files)
    for num_blocks in (4, 1, 16):
        run.assert_loads(manifest, cut(wanted, num_blocks=num_blocks), world_size=3 if num_blocks > 1 else 1)


def test_uncut_checkpoints_are_what_they_were(run: Run) -> None:
    manifest = run.save(TABLES)
    assert manifest.format_version == 2
    text = (Path(run.storage.shown_uri) / manifest.name.directory / "manifest.json").read_text()
    assert "columns" not in text
    run.train([1])
    assert run.save(cut((5, 3))).format_version == 3


def test_part_files_say_their_columns(run: Run) -> None:
    manifest = run.save(cut((5, 3)))
    folder = Path(run.storage.shown_uri) / manifest.name.directory / "tables"
    table = pyarrow.dataset.dataset(folder / "adagrad.c1", format="ipc").to_table()
    metadata = {key: table.schema.metadata[key] for key in (b"shoal.logical_table", b"shoal.columns")}
    assert metadata == {b"shoal.logical_table": b"adagrad", b"shoal.columns": b"[5, 8]"}
    assert (
        table.schema.metadata[b"shoal.logical_dim"] == b"8" and table.schema.metadata[b"shoal.table"] == b"adagrad.c1"
    )
    rows = gathered([run.store], KINDS.index(OptimizerKind.ADAGRAD))
    by_id = dict(zip(table["id"].to_pylist(), table["weight"].to_pylist()))
    assert [by_id[i] for i in rows.ids.tolist()] == rows.weights[:, 5:].tolist()


@pytest.mark.parametrize("slots", [False, True])
def test_export_writes_whole_rows(run: Run, tmp_path: Path, slots) -> None:
    manifest = run.save(cut((5, 3)))
    run.train(range(20), gone=range(55, 60))
    run.save(cut((5, 3)), parent=manifest)
    cut_report = export_parquet(run.storage.shown_uri, str(tmp_path / "cut"), slots=slots)
    assert [t.table for t in cut_report.tables] == [t.name for t in TABLES]
    run.train([0])
    run.train([0])
    manifest = run.save(TABLES)
    for table, exported in enumerate(cut_report.tables):
        found = pq.read_table(tmp_path / "cut" / exported.path).sort_by("id").to_pydict()
        rows = gathered([run.store], table)
        keep = rows.ids != 0  # trained on since
        assert found["id"][1:] == rows.ids[keep].tolist() and exported.num_rows == len(rows)
        assert found["vector"][1:] == rows.weights[keep].float().tolist()
        if slots:
            assert found["count"][1:] == rows.count[keep].tolist()


def test_another_cut_starts_a_new_chain(run: Run) -> None:
    run.save(cut((5, 3)))
    infos = list_checkpoints(run.storage)
    assert decide_base(infos, 4, cut((5, 3))).step == run.step
    for other in (TABLES, cut((3, 5)), cut((5, 3), has_own_statistic=True)):
        decision = decide_base(infos, 4, other)
        assert decision.step is None and "other column blocks" in decision.reason


def test_state_of_single_column_blocks_fits_the_same_cut_only(run: Run) -> None:
    own = cut((5, 3), has_own_statistic=True)
    manifest = run.save(own)
    assert check_tables(manifest, own) == []
    for other in (TABLES, cut((4, 4)), cut((5, 3))):
        with pytest.raises(CheckpointError, match="'rowwise_adagrad': its optimizer state") as caught:
            check_tables(manifest, other)
        assert "'adam'" not in str(caught.value), "state of single columns fits any cut"
        check_tables(manifest, other, reinit=["rowwise_adagrad"])
    run.train([1])
    whole = run.save(TABLES)
    assert check_tables(whole, own) == []


def test_differences_are_told_of_the_logical_table(run: Run) -> None:
    manifest = run.save(cut((5, 3)))
    wide = tuple(dataclasses.replace(t, embedding_dim=9) for t in TABLES[:1])
    with pytest.raises(CheckpointError, match="table 'sgd': embedding_dim: expected 9, found 8"):
        check_tables(manifest, wide, allow_missing=["*"])
    assert plan_load(manifest, cut((4, 4)), {}, reinit=[t.name for t in TABLES]) == []


def test_column_blocks_with_other_rows_are_found_damaged(run: Run, monkeypatch) -> None:
    real = slice_columns

    def off_by_one(rows: BlockRows, optimizer: OptimizerSpec, start: int, end: int) -> BlockRows:
        rows = real(rows, optimizer, start, end)
        return dataclasses.replace(rows, count=rows.count + (start > 0))

    monkeypatch.setitem(globals(), "slice_columns", off_by_one)
    manifest = run.save(cut((5, 3)))
    with pytest.raises(CheckpointError, match=r"'sgd'\): row block 0 of sgd.c0, sgd.c1: .* differ in count"):
        load(run.storage, manifest, 1, TABLES)
