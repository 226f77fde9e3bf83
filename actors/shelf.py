"""Shelf: the snapshots a worker keeps open, each a cut of its store at a step boundary and what belongs to it.

A snapshot is needed by the worker, until a later one is protected (C2, F3), and by the channels that still have to send
changes relative to it. Its cut is released when nobody needs it any more.
"""

from __future__ import annotations

import threading

from shoal.kernels.cut import Cut
from shoal.kernels.rowstore import RowStore


class Snapshot:
    """The store at ``step`` (steps applied). ``owned``: the blocks in it. ``checksums`` of blocks are added as they
    become known; several threads may add, always the same values. ``aux`` is opaque: the metric bins."""

    def __init__(self, step: int, cut: Cut, owned: frozenset[tuple[int, int]], aux: bytes) -> None:
        self.step, self.cut, self.owned, self.aux = step, cut, owned, aux
        self.checksums: dict[tuple[int, int], int] = {}
        self._holds = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Keep the cut open until ``drop`` is called as often."""
        with self._lock:
            assert self._holds > 0, "a released snapshot cannot be held"
            self._holds += 1

    def drop(self) -> None:
        """Undo one ``hold``; releases the cut with the last."""
        with self._lock:
            self._holds -= 1
            is_last = self._holds == 0
        if is_last:
            self.cut.release()


class Shelf:
    """The open snapshots of one worker, by step. Any thread may read; the step loop's thread opens and retires."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._snapshots: dict[int, Snapshot] = {}

    def open(self, step: int, owned: frozenset[tuple[int, int]], aux: bytes) -> Snapshot:
        """Cut the store at a boundary; replaces a snapshot of the same step. O(number of blocks).

        The bound on versions does not stop it: a snapshot is what lets older versions go (C3).
        """
        made = Snapshot(step, Cut(self._store.native, self._store.tables), owned, aux)
        with self._lock:
            old = self._snapshots.pop(step, None)
            self._snapshots[step] = made
        if old is not None:
            made.checksums.update((k, v) for k, v in old.checksums.items() if k in owned)
            old.drop()
        return made

    def newest(self) -> Snapshot | None:
        """The newest snapshot, held for the caller, who has to drop it; None without any."""
        with self._lock:
            if not self._snapshots:
                return None
            found = self._snapshots[max(self._snapshots)]
            found.hold()
            return found

    def newest_step(self) -> int:
        """Step of the newest snapshot; -1 without any."""
        with self._lock:
            return max(self._snapshots, default=-1)

    def held(self, step: int) -> Snapshot | None:
        """The snapshot of ``step``, held for the caller, who has to drop it; None where it is not open."""
        with self._lock:
            found = self._snapshots.get(step)
            if found is not None:
                found.hold()
            return found

    def get(self, step: int) -> Snapshot | None:
        """The snapshot of ``step`` for the step loop's thread, which alone retires it."""
        with self._lock:
            return self._snapshots.get(step)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps with an open snapshot, ascending."""
        with self._lock:
            return tuple(sorted(self._snapshots))

    def retire(self, *, below: int = 0, above: int | None = None) -> None:
        """Let go of the snapshots of steps < ``below`` and > ``above``."""
        with self._lock:
            gone = [s for s in self._snapshots if s < below or (above is not None and s > above)]
            snapshots = [self._snapshots.pop(step) for step in gone]
        for snapshot in snapshots:
            snapshot.drop()
