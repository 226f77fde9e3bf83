"""Kills at every file boundary of a checkpoint, and controllers and workers that do not know they were replaced.

Never a wrong and never a lost latest (K1 to K3, F7; faults rows 23, 24). A kill is an exception before or after one
storage operation, after which nothing more is done; the last test uses real processes and SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_fleet import TABLES, Fleet, assert_bit_equal, gathered, load, newest, reload

from shoal.kernels.errors import CheckpointError, LockLostError
from shoal.platform import checkpoint
from shoal.platform.chain import CheckpointState
from shoal.platform.checkpoint import list_checkpoints, verify_checkpoint
from shoal.platform.epochs import claim_epoch, newest_epoch
from shoal.platform.manifest import CheckpointName
from shoal.platform.run_lock import LockOwner, RunLock
from shoal.platform.storage import Storage


class Kill(BaseException):
    """The process ends here."""


class KillingStorage(Storage):
    """Counts writes and deletions; before the one of number ``kill_at`` it kills, or after the last."""

    points: list[str]
    kill_at: int | None
    is_dead: bool

    def __init__(self, uri: str, kill_at: int | None = None) -> None:
        super().__init__(uri)
        object.__setattr__(self, "points", [])
        object.__setattr__(self, "kill_at", kill_at)
        object.__setattr__(self, "is_dead", False)

    def _pass(self, point: str) -> None:
        if self.is_dead:
            raise Kill(point)
        self.points.append(point)
        if self.kill_at == len(self.points) - 1:
            object.__setattr__(self, "is_dead", True)
            raise Kill(point)

    def write_object(self, path: str, produce: Callable[[Any], Any]) -> Any:
        self._pass(f"writing {path}")
        return super().write_object(path, produce)

    def delete_file(self, path: str) -> None:
        self._pass(f"deleting {path}")
        super().delete_file(path)

    def delete_dir(self, path: str) -> None:
        """File by file, for a folder of many files is not deleted at once."""
        for name in self.list_files(path):
            self.delete_file(f"{path}/{name}")
        self._pass(f"deleting {path}")
        super().delete_dir(path)


def use(fleet: Fleet, storage: Storage) -> None:
    """Let the fleet's controller and workers write through ``storage``."""
    fleet.storage = storage
    for worker in fleet.workers:
        worker.writer._storage = storage


def history(root: Path) -> Fleet:
    """Two links of a chain, the older full, and rows that changed since; the next save writes a third and collects."""
    fleet = Fleet(root, 1, seed=1, full_every=3)
    for _ in range(3):
        fleet.train(2, deletes=4)
        fleet.save(keep=2)
    fleet.train(2, deletes=4)
    return fleet


def survey(root: Path) -> list[str]:
    """The points at which the save of ``history`` can be killed."""
    fleet = history(root)
    probe = KillingStorage(str(root))
    use(fleet, probe)
    fleet.save(keep=2)
    return [*probe.points, "nothing"]


def test_kill_at_every_file_boundary_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """Faults row 24: writes of parts, tombstones, dense state, manifest, and each deletion of the collection."""
    points = survey(tmp_path / "probe")
    kinds = ("tables/", "deleted/", "dense", "manifest", "deleting")
    assert all(any(kind in point for point in points) for kind in kinds), points
    outcomes = set()
    for kill_at, point in enumerate(points):
        root = tmp_path / str(kill_at)
        fleet = history(root)
        old = newest(fleet.storage)
        before = [gathered(load(fleet.storage, old, 1), t) for t in range(len(TABLES))]
        use(fleet, KillingStorage(str(root), kill_at))
        with contextlib.suppress(Kill, AssertionError):  # a worker's kill reaches its controller as a failed part
            fleet.save(keep=2)
        storage = Storage(str(root))
        found = newest(storage)
        is_new = found.name != old.name
        outcomes.add(is_new)
        assert found.name.step == (8 if is_new else 6), point
        expected = [gathered(fleet.stores(), t) for t in range(len(TABLES))] if is_new else before
        loaded = load(storage, found, 3)
        for table in range(len(TABLES)):
            assert_bit_equal(gathered(loaded, table), expected[table])
        assert verify_checkpoint(str(root)).is_ok, point
        recover_and_go_on(fleet, storage, point)
    assert outcomes == {False, True}


def recover_and_go_on(fleet: Fleet, storage: Storage, point: str) -> None:
    """A new attempt from what is there: it saves, collects every leftover, and keeps what it needs."""
    use(fleet, storage)
    reload(fleet, newest(storage))
    fleet.workers[0].parts.clear()
    fleet.train(1)
    fleet.save(keep=1)
    infos = list_checkpoints(storage)
    assert all(info.state is CheckpointState.COMPLETE for info in infos), point
    kept = {str(m.name) for m in newest(storage).chain}
    assert {str(info.name) for info in infos} == kept, point
    folders = {entry.name for entry in storage.list_dir("checkpoints")}
    assert folders == kept, point
    loaded = load(storage, newest(storage), 2)
    for table in range(len(TABLES)):
        assert_bit_equal(gathered(loaded, table), gathered(fleet.stores(), table))


def test_torn_objects_are_never_a_checkpoint(tmp_path: Path) -> None:
    """Faults rows 24, 26: a writer that dies within a local file leaves a part of it."""
    fleet = history(tmp_path)
    old = newest(fleet.storage)
    made = fleet.save()
    folder = tmp_path / made.name.directory
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        good = path.read_bytes()
        for size in (0, 1, len(good) // 2, len(good) - 1):
            path.write_bytes(good[:size])
            assert newest(Storage(str(tmp_path))).name == old.name, (path, size)
        path.write_bytes(good)
    assert newest(Storage(str(tmp_path))).name == made.name


# ---- replaced, and not knowing it -----------------------------------------------------------------------------------


def test_partitioned_lineage_loses_and_its_files_are_collected(tmp_path: Path) -> None:
    """F7: a one-worker view is cut off, a replacement goes on, the partition heals: one lineage remains.

    The zombie's worker keeps writing data files of its epoch, its controller tries manifests and the journal.
    """
    old = Fleet(tmp_path, 1, seed=2)
    old.train(4)
    shared = old.save()
    old.train(2)
    healed_name, healed_parts = old.write_parts()  # written behind the partition's back, step 6 of epoch 0

    new = Fleet(tmp_path / "elsewhere", 1, seed=2)
    new.train(4)
    use(new, Storage(str(tmp_path)))
    new.epoch = 0
    new.roll_back(4)  # epoch 1 goes on from step 4
    new.rng = old.rng.spawn(1)[0]
    new.train(1)
    first = new.save()

    with pytest.raises(CheckpointError, match="abandoned: epoch 1 went on from step 4"):
        checkpoint.complete(old.storage, healed_name, healed_parts, TABLES, run="r", world_size=1)
    # Its view of the storage may be as old as it likes: writing the manifest without looking changes nothing.
    manifest = checkpoint.Manifest(name=healed_name, run="r", world_size=1, tables=TABLES, files=healed_parts[0].files)
    old.storage.write_bytes(f"{healed_name.directory}/manifest.json", checkpoint.encode(manifest))
    assert newest(new.storage).name == first.name
    states = {i.name: i.state for i in list_checkpoints(new.storage)}
    assert states == {
        shared.name: CheckpointState.COMPLETE,
        healed_name: CheckpointState.ABANDONED,
        first.name: CheckpointState.COMPLETE,
    }

    new.train(1)
    second = new.save(keep=1)
    old.train(3)
    straggler = old.write_parts()[0]  # and on it writes, after the collection too
    assert newest(new.storage).name == second.name
    new.train(1)
    third = new.save(keep=1)
    chain = {m.name for m in newest(new.storage).chain}
    assert {i.name for i in list_checkpoints(new.storage)} == chain and third.name in chain
    assert straggler not in chain and not new.storage.list_files(straggler.directory)
    loaded = load(new.storage, newest(new.storage), 2)
    for table in range(len(TABLES)):
        assert_bit_equal(gathered(loaded, table), gathered(new.stores(), table))


def test_replaced_controller_ends_at_its_next_renewal_or_claim(tmp_path: Path) -> None:
    """F7: a lower incarnation exits on seeing a higher; its epoch numbers are never those of the new one."""
    storage = Storage(str(tmp_path))
    now = [0.0]
    locks = []
    for host in ("a", "b"):
        owner = LockOwner(host=host, pid=1, user="u")
        lock = RunLock(storage, owner, 9.0, clock=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
        lock.acquire()  # the second takes over from the first, which is silent
        claim_epoch(storage, newest_epoch(storage) + 1, 10 * len(locks), lock.incarnation)
        locks.append(lock)
    with pytest.raises(LockLostError, match="controller 2 has taken this run over"):
        claim_epoch(storage, 2, 50, locks[0].incarnation)
    with pytest.raises(LockLostError, match="taken over by u@b"):
        locks[0].renew()
    locks[1].renew()
    claim_epoch(storage, 2, 20, locks[1].incarnation)


def test_cancelled_writer_removes_its_files_and_its_part_completes_nothing(tmp_path: Path) -> None:
    """A worker that rolls back gives up a snapshot of the epoch that is left."""
    fleet = Fleet(tmp_path, 1, seed=3)
    fleet.train(30)
    worker = fleet.workers[0]
    worker.writer._bytes_per_s = 1.0  # it will not be done by itself
    metrics: Any = type("Metrics", (), {"state_dict": dict, "compute": dict})
    worker.writer.start(fleet.step, fleet.epoch, 0, metrics, {}, 60)
    assert worker.writer.is_writing
    worker.writer.cancel(60)
    assert not worker.writer.is_writing and not fleet.storage.list_files("checkpoints")
    (part,) = worker.parts
    assert part.is_cancelled and part.error is not None and "cancelled" in part.error
    assert worker.store.version_bytes() == 0 or worker.store.cut().release() is None
    with pytest.raises(CheckpointError, match="cannot be completed by rank 0's part of step 30 of epoch 0: Snapshot"):
        checkpoint.complete(fleet.storage, CheckpointName(0, 30), [part], TABLES, run="r", world_size=1)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from checkpoint_fleet import Fleet
fleet = Fleet(Path(sys.argv[2]), 1, seed=5, full_every=3)
print("ready", flush=True)
while True:
    fleet.train(1, deletes=4)
    manifest = fleet.save(keep=2)
    print(manifest.name.step, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
@pytest.mark.parametrize("saves", [1, 3])
def test_sigkill_while_saving_leaves_a_sound_latest(tmp_path: Path, saves: int) -> None:
    """Faults row 24 with a real process: whatever it was doing when it died."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(1 + saves)]
        os.kill(process.pid, signal.SIGKILL)
        last = int(lines[-1])
        rest = process.stdout.read().split()
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()  # type: ignore[union-attr]
    storage = Storage(str(tmp_path))
    found = newest(storage)
    seen = max([last, *map(int, rest)])
    assert found.name.step in (seen, seen + 1)  # a manifest may be there that was not announced any more
    assert verify_checkpoint(str(tmp_path)).is_ok
    twin = Fleet(tmp_path / "twin", 1, seed=5, full_every=3)
    for _ in range(found.name.step):
        twin.train(1, deletes=4)
    loaded = load(storage, found, 2)
    for table in range(len(TABLES)):
        assert_bit_equal(gathered(loaded, table), gathered(twin.stores(), table))
