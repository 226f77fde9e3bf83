"""Checkpoints end to end: write from stores, make visible, load on another world size; crashes and damage (K1-K3)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch

from shoal.actors.datafile import FileEntry
from shoal.actors.partfile import concatenate, take
from shoal.actors.restore import load_rows, read_dense
from shoal.actors.snapshot import write_blob, write_dense, write_snapshot
from shoal.kernels.cut import TORCH_DTYPES, BlockRows
from shoal.kernels.errors import CheckpointError
from shoal.kernels.hashing import row_blocks
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec
from shoal.platform import checkpoint
from shoal.platform.checkpoint import CheckpointState, decide_resume, list_checkpoints, verify_checkpoint
from shoal.platform.loadplan import plan_load
from shoal.platform.manifest import CheckpointName, Manifest
from shoal.platform.storage import Storage

FIELDS = ("ids", "weights", "slots", "last_step", "count")
TABLES = (
    TableSpec(name="user", num_embeddings=0, embedding_dim=8, num_blocks=8),
    TableSpec(
        name="item/odd name",
        num_embeddings=1000,
        embedding_dim=5,
        data_type=DataType.BF16,
        optimizer=OptimizerSpec(kind=OptimizerKind.ADAM),
        num_blocks=4,
    ),
    TableSpec(
        name="half",
        num_embeddings=500,
        embedding_dim=3,
        data_type=DataType.FP16,
        optimizer=OptimizerSpec(kind=OptimizerKind.ADAGRAD),
        num_blocks=16,
    ),
    TableSpec(
        name="sgd", num_embeddings=50, embedding_dim=4, optimizer=OptimizerSpec(kind=OptimizerKind.SGD), num_blocks=1
    ),
    TableSpec(name="empty", num_embeddings=10, embedding_dim=2, num_blocks=2),
)


def random_rows(spec: TableSpec, ids: np.ndarray, seed: int) -> BlockRows:
    generator = torch.Generator().manual_seed(seed)
    n = len(ids)
    return BlockRows(
        ids=torch.from_numpy(ids.astype(np.uint64).view(np.int64)),
        weights=torch.randn(n, spec.embedding_dim, generator=generator).to(TORCH_DTYPES[spec.data_type]),
        slots=torch.rand(n, spec.optimizer.slot_width(spec.embedding_dim), generator=generator),
        last_step=torch.randint(0, 1000, (n,), generator=generator),
        count=torch.randint(0, 2**30, (n,), generator=generator),
    )


def table_rows(spec: TableSpec, number: int) -> BlockRows:
    """All rows of a table of the test's model, sorted by id as uint64."""
    rng = np.random.default_rng(number)
    if spec.name == "empty":
        ids = np.empty(0, dtype=np.uint64)
    elif spec.is_static:
        ids = np.sort(rng.choice(spec.num_embeddings, size=spec.num_embeddings // 2, replace=False).astype(np.uint64))
    else:
        ids = rng.integers(0, 2**64, size=700, dtype=np.uint64)
        ids = np.unique(np.concatenate([ids, np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)]))
    return random_rows(spec, ids, number)


def owned_blocks(tables: tuple[TableSpec, ...], rank: int, world_size: int) -> dict[str, list[int]]:
    return {
        spec.name: [b for b in range(spec.num_blocks) if (b + i) % world_size == rank] for i, spec in enumerate(tables)
    }


def empty_stores(world_size: int, tables: tuple[TableSpec, ...] = TABLES) -> list[RowStore]:
    """One store per rank, each owner of its blocks."""
    stores = [RowStore(tables) for _ in range(world_size)]
    for rank, store in enumerate(stores):
        for number, spec in enumerate(tables):
            for block in owned_blocks(tables, rank, world_size)[spec.name]:
                store.add_block(number, block)
    return stores


def make_stores(world_size: int, tables: tuple[TableSpec, ...] = TABLES) -> list[RowStore]:
    """Stores that hold the rows of the test's model."""
    stores = empty_stores(world_size, tables)
    for number, spec in enumerate(tables):
        rows = table_rows(spec, number)
        blocks = torch.from_numpy(row_blocks(rows.ids.numpy(), spec.num_blocks).astype(np.int64))
        for store in stores:
            for block in store.owned_blocks(number):
                store.import_block(number, block, take(rows, torch.nonzero(blocks == block).view(-1)))
    return stores


def gathered(stores: list[RowStore], number: int) -> BlockRows:
    """All rows of a table, sorted by id as uint64."""
    whole = concatenate([s.export_block(number, block) for s in stores for block in s.owned_blocks(number)])
    return take(whole, torch.from_numpy(np.argsort(whole.ids.numpy().view(np.uint64), kind="stable")))


def assert_bit_equal(found: BlockRows, expected: BlockRows) -> None:
    for field in FIELDS:
        a, b = getattr(found, field), getattr(expected, field)
        assert a.dtype == b.dtype and a.shape == b.shape, field
        assert (
            a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()
            if a.dtype != torch.bfloat16
            else (a.contiguous().view(torch.int16).equal(b.contiguous().view(torch.int16)))
        ), field


def save(storage: Storage, stores: list[RowStore], step: int, epoch: int = 0, part_bytes: int = 4096) -> Manifest:
    """The whole protocol in one thread: workers write files, the controller writes the manifest."""
    name = checkpoint.next_name(storage, epoch, step)
    files: list[FileEntry] = []
    for rank, store in enumerate(stores):
        owned = owned_blocks(store.tables, rank, len(stores))
        with store.cut() as cut:
            files += write_snapshot(cut, owned, store.tables, storage, name.directory, rank, part_bytes=part_bytes)
    files.append(write_dense(storage, name.directory, {"model.w": torch.full((3,), float(step))}, {"lr": 0.1}))
    files.append(write_blob(storage, name.directory, "metrics.bin", b"bins"))
    manifest = Manifest(
        name=name,
        run="test",
        world_size=len(stores),
        tables=stores[0].tables,
        files=tuple(files),
        cursor={"epoch": 0, "step": step},
    )
    return checkpoint.write_manifest(storage, manifest)


def load(
    storage: Storage, manifest: Manifest, world_size: int, tables: tuple[TableSpec, ...] = TABLES
) -> list[RowStore]:
    stores = empty_stores(world_size, tables)
    for rank, store in enumerate(stores):
        owned = owned_blocks(tables, rank, world_size)
        parts = plan_load(manifest, tables, owned)
        load_rows(store, tables, owned, parts, storage)
    return stores


@pytest.mark.parametrize(("before", "after"), list(itertools.product([1, 2, 3, 4], repeat=2)))
def test_rows_are_bit_equal_after_loading_on_another_world_size(tmp_path: Path, before: int, after: int) -> None:
    storage = Storage(str(tmp_path))
    manifest = save(storage, make_stores(before), step=7)
    loaded = load(storage, checkpoint.read_manifest(storage, manifest.name.directory), after)
    for number, spec in enumerate(TABLES):
        assert_bit_equal(gathered(loaded, number), table_rows(spec, number))


def test_table_may_have_another_number_of_blocks_than_when_it_was_written(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    manifest = save(storage, make_stores(2), step=7)
    for factor in (4, 0.25):
        tables = tuple(dataclasses.replace(spec, num_blocks=max(1, int(spec.num_blocks * factor))) for spec in TABLES)
        loaded = load(storage, manifest, 3, tables)
        for number, spec in enumerate(tables):
            assert_bit_equal(gathered(loaded, number), table_rows(spec, number))


def test_worker_reads_only_files_that_hold_its_blocks(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    manifest = save(storage, make_stores(4), step=1, part_bytes=1000)
    owned = {"user": [3]}
    parts = plan_load(manifest, TABLES, owned)
    assert parts and all(entry.table == "user" and 3 in entry.blocks for entry in parts)


def test_loading_replaces_what_the_owned_blocks_held(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    manifest = save(storage, make_stores(1), step=1)
    owned = owned_blocks(TABLES, 0, 1)
    (store,) = empty_stores(1)
    for number, spec in enumerate(TABLES):
        ids = np.arange(spec.num_embeddings or 3000, dtype=np.uint64)
        blocks = row_blocks(ids, spec.num_blocks)
        for block in owned[spec.name]:
            store.import_block(number, block, random_rows(spec, ids[blocks == block], 9))
    for _ in range(2):
        load_rows(store, TABLES, owned, plan_load(manifest, TABLES, owned), storage)
    for number, spec in enumerate(TABLES):
        assert_bit_equal(gathered([store], number), table_rows(spec, number))


def test_dense_state_and_blobs_come_back(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    manifest = save(storage, make_stores(1), step=3)
    dense = manifest.find("dense")
    assert dense is not None and manifest.find("blob", "metrics.bin") is not None
    tensors, metadata = read_dense(storage, manifest.name.directory, dense)
    assert tensors["model.w"].tolist() == [3.0] * 3 and metadata == {"lr": 0.1}


# ---- crashes ------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process is gone: nothing catches it, nothing is cleaned up."""


@dataclasses.dataclass(frozen=True)
class CrashingStorage(Storage):
    """Dies at the n-th point among: before a file is opened, half way through it, after it, before each delete."""

    crash_at: int = -1
    points: list[str] = dataclasses.field(default_factory=list)

    def _point(self, what: str) -> None:
        if len(self.points) == self.crash_at:
            raise Crash(what)
        self.points.append(what)

    @contextmanager
    def _open_output(self, path: str) -> Iterator[IO[bytes]]:
        self._point(f"before {path}")
        with super()._open_output(path) as stream:
            yield HalfWriter(stream, lambda: self._point(f"within {path}"))  # type: ignore[misc]
        self._point(f"after {path}")

    def _remove_partial(self, path: str) -> None:
        if len(self.points) != self.crash_at:
            super()._remove_partial(path)

    def delete_file(self, path: str) -> None:
        self._point(f"before delete {path}")
        super().delete_file(path)

    def delete_dir(self, path: str) -> None:
        self._point(f"before delete {path}")
        super().delete_dir(path)


class HalfWriter:
    def __init__(self, stream: IO[bytes], point: Callable[[], None]) -> None:
        self._stream = stream
        self._point = point
        self._is_first = True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._is_first:
            self._is_first = False
            self._stream.write(bytes(view[: len(view) // 2]))
            self._point()
            self._stream.write(bytes(view[len(view) // 2 :]))
            return len(view)
        return self._stream.write(bytes(view))


def test_crash_at_every_point_of_a_save_leaves_the_previous_checkpoint_latest(tmp_path: Path) -> None:
    """K1, faults row 24: at every file boundary and within every file."""
    tables = (TABLES[0], TABLES[3])
    stores = make_stores(2, tables)
    probe = CrashingStorage(str(tmp_path / "probe"))
    save(probe, stores, step=2, part_bytes=16_384)
    assert len(probe.points) >= 3 * 5
    for crash_at in range(len(probe.points)):
        root = str(tmp_path / f"at{crash_at}")
        storage = Storage(root)
        first = save(storage, stores, step=1)
        with pytest.raises(Crash):
            save(CrashingStorage(root, crash_at=crash_at), stores, step=2, part_bytes=16_384)
        infos = list_checkpoints(storage)
        decision = decide_resume(infos, "auto")
        assert decision.manifest is not None
        is_whole = probe.points[crash_at].startswith("after") and "manifest" in probe.points[crash_at]
        assert decision.manifest.name.step == (2 if is_whole else 1), probe.points[crash_at]
        load(storage, decision.manifest, 3, tables)
        if not is_whole:
            # The next attempt uses names of its own; the leftovers go at the next collection.
            retry = save(storage, stores, step=2)
            assert retry.name.attempt == (1 if len(infos) > 1 else 0)
            checkpoint.collect(storage, keep=2)
            kept = [info.name for info in list_checkpoints(storage)]
            assert kept == [first.name, retry.name]


def test_crash_within_a_collection_never_shows_a_partial_checkpoint(tmp_path: Path) -> None:
    """K3: the manifest goes first."""
    tables = (TABLES[0],)
    stores = make_stores(1, tables)
    for crash_at in range(4):
        root = str(tmp_path / f"at{crash_at}")
        for step in (1, 2, 3):
            save(Storage(root), stores, step=step)
        with pytest.raises(Crash):
            checkpoint.collect(CrashingStorage(root, crash_at=crash_at), keep=1)
        complete = [i.name.step for i in list_checkpoints(Storage(root)) if i.state is CheckpointState.COMPLETE]
        assert complete == {0: [1, 2, 3], 1: [1, 3], 2: [1, 3], 3: [3]}[crash_at]
        for step in complete:
            assert verify_checkpoint(f"{root}/checkpoints/{CheckpointName(0, step)}").is_ok
        checkpoint.collect(Storage(root), keep=1)
        assert [i.name.step for i in list_checkpoints(Storage(root))] == [3]


# ---- damage -------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_every_file_is_detected(tmp_path: Path) -> None:
    """Faults row 25: a flip anywhere, in data, padding, footer or manifest."""
    tables = (TABLES[1],)
    storage = Storage(str(tmp_path))
    save(storage, make_stores(1, tables), step=1)
    older = save(storage, make_stores(1, tables), step=2)
    directory = tmp_path / older.name.directory
    rng = np.random.default_rng(0)
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        good = path.read_bytes()
        for position in {0, len(good) - 1, *rng.integers(0, len(good), size=20).tolist()}:
            bad = bytearray(good)
            bad[position] ^= 1 << int(rng.integers(0, 8))
            path.write_bytes(bytes(bad))
            if path.name == "manifest.json":
                decision = decide_resume(list_checkpoints(storage), "auto")
                assert decision.manifest is not None and decision.manifest.name.step == 1, position
                assert "step-00000002.e0 (" in decision.reason
            else:
                report = verify_checkpoint(str(directory))
                assert len(report.problems) == 1 and path.name in report.problems[0]
                if path.suffix == ".arrow":
                    with pytest.raises(CheckpointError, match=f"{path.name} .table 'item/odd name'.: damaged"):
                        load(storage, older, 1, tables)
        path.write_bytes(good)
    assert verify_checkpoint(str(directory)).is_ok


@pytest.mark.parametrize("damage", ["truncated", "zero bytes", "missing"])
@pytest.mark.parametrize("victim", ["tables/user/part-00001-00000.arrow", "dense.safetensors", "manifest.json"])
def test_torn_or_missing_file_is_one_line_and_auto_falls_back(tmp_path: Path, damage: str, victim: str) -> None:
    """Faults row 26."""
    storage = Storage(str(tmp_path))
    save(storage, make_stores(2), step=1)
    newest = save(storage, make_stores(2), step=2)
    path = tmp_path / newest.name.directory / victim
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5] if damage == "truncated" else b"")
    infos = list_checkpoints(storage)
    assert infos[-1].state in (CheckpointState.DAMAGED, CheckpointState.INCOMPLETE)
    decision = decide_resume(infos, "auto")
    assert decision.manifest is not None and decision.manifest.name.step == 1
    assert decision.reason.startswith("resuming from step-00000001.e0; passed over step-00000002.e0")
    assert victim in decision.reason or "manifest" in decision.reason
    with pytest.raises(CheckpointError, match="step 2 cannot be used") as caught:
        decide_resume(infos, "2")
    assert "\n" not in str(caught.value)
    if victim.startswith("tables"):
        with pytest.raises(CheckpointError, match=r"part-00001-00000.arrow .table 'user'") as caught:
            load(storage, newest, 1)
        assert "\n" not in str(caught.value)


def test_checkpoint_that_failed_to_load_can_be_excluded(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    save(storage, make_stores(1), step=1)
    newest = save(storage, make_stores(1), step=2)
    decision = decide_resume(list_checkpoints(storage), "auto", exclude=[newest.name])
    assert decision.manifest is not None and decision.manifest.name.step == 1
    assert "failed to load" in decision.reason


def test_pickle_is_never_loaded(tmp_path: Path) -> None:
    """Faults row 58: a pickle in the place of the dense state is refused as unreadable, not executed."""
    import pickle

    storage = Storage(str(tmp_path))

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "exploded",))

    entry = write_blob(storage, "checkpoints/x", "dense.safetensors", pickle.dumps(Bomb()), kind="dense")
    with pytest.raises(CheckpointError, match=r"dense\.safetensors: not a readable safetensors file"):
        read_dense(storage, "checkpoints/x", entry)
    torch.save({"w": torch.ones(2)}, tmp_path / "torch.pt")
    entry = write_blob(storage, "checkpoints/x", "d.safetensors", (tmp_path / "torch.pt").read_bytes(), kind="dense")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        read_dense(storage, "checkpoints/x", entry)
    assert not (tmp_path / "exploded").exists()
