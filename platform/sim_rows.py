"""Rows of a simulated worker: owned blocks, cuts, copies with staged changes; and the sequential reference.

Pure. A block's content is a tuple of (value, times updated) per id, so that a cut is a reference. A step maps every
value by a function that does not commute with itself: a step that is lost, repeated or reordered changes the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from shoal.actors.messages import BlockSet, Copies, Holdings, View
from shoal.kernels.spec import TableSpec

Key = tuple[str, int]
Content = tuple[tuple[int, int], ...]
Delta = tuple[tuple[int, tuple[int, int]], ...]

IDS_PER_BLOCK = 3
#: Slices of every batch; a rank counts those it was given.
LANES = 12
_MASK = (1 << 61) - 1

TABLES = (
    TableSpec(name="items", num_embeddings=4 * IDS_PER_BLOCK, embedding_dim=1, num_blocks=4),
    TableSpec(name="users", num_embeddings=2 * IDS_PER_BLOCK, embedding_dim=1, num_blocks=2),
)
KEYS: tuple[Key, ...] = tuple((table.name, block) for table in TABLES for block in range(table.num_blocks))
_SALT = {key: 100 * number + 1 for number, key in enumerate(KEYS)}


def initial_content(key: Key) -> Content:
    """What a block's rows are before the first step."""
    return tuple((_SALT[key] + i, 0) for i in range(IDS_PER_BLOCK))


def step_content(key: Key, content: Content, step: int) -> Content:
    """``content`` after step number ``step``, which touches two rows of three."""
    salt = _SALT[key]
    return tuple(
        row if (step + i) % 3 == 0 else ((row[0] * 1_000_003 + step * 7919 + salt + i) & _MASK, row[1] + 1)
        for i, row in enumerate(content)
    )


def step_dense(dense: int, step: int) -> int:
    return (dense * 31 + step + 7) & _MASK


def step_bins(step: int, rank: int, world_size: int) -> int:
    """What a rank counts in a step: over all ranks of any world size the same sum."""
    low, high = LANES * rank // world_size, LANES * (rank + 1) // world_size
    return sum((step + 1) * (lane + 1) for lane in range(low, high))


class Reference:
    """The unsharded run: contents, dense state and counts after every number of steps."""

    def __init__(self, total_steps: int) -> None:
        self.rows: list[dict[Key, Content]] = [{key: initial_content(key) for key in KEYS}]
        self.dense, self.bins = [1], [0]
        for step in range(total_steps):
            self.rows.append({key: step_content(key, content, step) for key, content in self.rows[-1].items()})
            self.dense.append(step_dense(self.dense[-1], step))
            self.bins.append(self.bins[-1] + step_bins(step, 0, 1))


@dataclasses.dataclass
class Snapshot:
    """A cut: what a worker owned after some number of steps."""

    rows: dict[Key, Content]
    dense: int
    bins: int


@dataclasses.dataclass
class Copy:
    """A block held for its owner: a base, and changes beside it that may still be dropped."""

    base_step: int
    base: Content
    #: Step -> (step the changes start from, changes).
    staged: dict[int, tuple[int, Delta]] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps it can be brought to, ascending."""
        return (self.base_step, *sorted(s for s in self.staged if self.at(s) is not None))

    def at(self, step: int) -> Content | None:
        """The block after ``step`` steps; None where that cannot be told."""
        if step == self.base_step:
            return self.base
        if step not in self.staged or step < self.base_step:
            return None
        start, delta = self.staged[step]
        content = self.at(start)
        return None if content is None else apply_delta(content, delta)

    def fold(self, step: int) -> None:
        """Make what is staged up to ``step`` part of the base."""
        for staged in sorted(s for s in self.staged if s <= step):
            content = self.at(staged)
            if content is not None:
                self.base_step, self.base = staged, content
        self.staged = {s: change for s, change in self.staged.items() if s > self.base_step}


def apply_delta(content: Content, delta: Delta) -> Content:
    rows = list(content)
    for index, row in delta:
        rows[index] = row
    return tuple(rows)


class RowState:
    """All data of one simulated worker. Mutants override what they break."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        #: Steps the store has counted: it takes no step twice unless it was told to count from an earlier one.
        self.counted = 0
        #: Live rows of the blocks it owns.
        self.owned: dict[Key, Content] = {}
        self.dense = 1
        self.bins = 0
        self.snapshots: dict[int, Snapshot] = {}
        self.copies: dict[Key, Copy] = {}
        #: Worker id -> step -> what that worker had counted.
        self.aux: dict[str, dict[int, int]] = {}
        #: What others handed to this worker when its view began, and at which step.
        self.handed: dict[str, int] = {}
        self.handed_step = -1
        #: What a recovery or cutover has brought, not in force before its view is decided.
        self.pending: tuple[int, Snapshot] | None = None

    # ---- a step ---------------------------------------------------------------------------------------------------

    def apply(self, step: int, rank: int, world_size: int) -> None:
        assert step + 1 > self.counted, f"steps count from 1 and grow: step {step + 1} after {self.counted}"
        self.counted = step + 1
        self.owned = {key: step_content(key, content, step) for key, content in self.owned.items()}
        self.dense = step_dense(self.dense, step)
        self.bins += step_bins(step, rank, world_size)

    def count_from(self, step: int) -> None:
        """The next step to be applied is the one after ``step``."""
        self.counted = step

    def cursor_after_rollback(self, step: int) -> int:
        """The step with which training goes on after a roll-back to ``step`` applied steps."""
        return step

    # ---- snapshots and copies -------------------------------------------------------------------------------------

    def cut(self, step: int) -> None:
        self.snapshots[step] = Snapshot(dict(self.owned), self.dense, self.bins)

    def protect(self, step: int) -> None:
        """The snapshot of ``step`` is complete everywhere."""
        self.snapshots = {s: cut for s, cut in self.snapshots.items() if s >= step}
        for copy in self.copies.values():
            copy.fold(step)
        self._keep_aux(lambda s: s >= step)

    def _keep_aux(self, is_kept: Callable[[int], bool]) -> None:
        kept = {w: {s: bins for s, bins in held.items() if is_kept(s)} for w, held in self.aux.items()}
        self.aux = {w: held for w, held in kept.items() if held}

    def stage(self, key: Key, step: int, start: int | None, change: Content | Delta) -> bool:
        """Take in a base (``start`` None) or the changes since ``start``. False: the start is not here."""
        if start is None:
            self.copies[key] = Copy(step, change)  # type: ignore[arg-type]
            return True
        copy = self.copies.get(key)
        if copy is None or copy.at(start) is None:
            return False
        copy.staged[step] = (start, change)  # type: ignore[assignment]
        return True

    def park(self) -> None:
        """Nothing is dropped before a recovery has chosen."""

    def content_at(self, key: Key, step: int) -> Content | None:
        """A block after ``step`` steps, from whatever there is."""
        cut = self.snapshots.get(step)
        if cut is not None and key in cut.rows:
            return cut.rows[key]
        if self.pending is not None and self.pending[0] == step and key in self.pending[1].rows:
            return self.pending[1].rows[key]
        copy = self.copies.get(key)
        return None if copy is None else copy.at(step)

    def bins_at(self, origin: str, step: int) -> int | None:
        if origin == self.worker_id and step in self.snapshots:
            return self.snapshots[step].bins
        return self.aux.get(origin, {}).get(step)

    def handed_at(self, step: int) -> dict[str, int]:
        """Counts of others that became this worker's with the view that began at ``step``; its buddy keeps them too."""
        return dict(self.handed) if step == self.handed_step else {}

    def holdings(self, view: View | None, applied: int, protected: int, fence: int) -> Holdings:
        """What it can bring into a recovery (F4)."""
        owned = frozenset(self.owned)
        snapshots = tuple(sorted(s for s, cut in self.snapshots.items() if owned <= cut.rows.keys()))
        by_steps: dict[tuple[int, ...], list[Key]] = {}
        held = set(self.copies) | set(self.pending[1].rows if self.pending is not None else ())
        for cut in self.snapshots.values():
            held |= cut.rows.keys()
        for key in sorted(held - owned):
            steps = set(self.copies[key].steps if key in self.copies else ())
            steps |= {s for s, cut in self.snapshots.items() if key in cut.rows}
            if self.pending is not None and key in self.pending[1].rows:
                steps.add(self.pending[0])
            by_steps.setdefault(tuple(sorted(steps)), []).append(key)
        return Holdings(
            worker_id=self.worker_id,
            view=view,
            applied=applied,
            snapshots=snapshots if view is not None else (),
            owned=block_set(owned),
            copies=tuple(Copies(blocks=block_set(keys), steps=steps) for steps, keys in sorted(by_steps.items())),
            aux={w: tuple(sorted(held)) for w, held in self.aux.items() if held},
            protected=protected,
            fence=fence,
        )

    # ---- ownership ------------------------------------------------------------------------------------------------

    def flip(
        self, contents: Mapping[Key, Content], step: int, *, dense: int, bins: int, handed: Mapping[str, int]
    ) -> None:
        """``contents`` is what this worker owns from ``step`` on; what else it has stays as copies until dropped.

        ``bins`` is what it has counted itself; what others have ``handed`` to it joins that only for later snapshots,
        so that a recovery to this very step finds each origin's once.
        """
        for key in self.owned.keys() - contents.keys():
            old = self.content_at(key, step)
            if old is not None and key not in self.copies:
                self.copies[key] = Copy(step, old)
        for key, copy in list(self.copies.items()):
            copy.staged = {s: change for s, change in copy.staged.items() if s <= step}
            copy.fold(step)
            if copy.base_step > step or key in contents:
                del self.copies[key]
        self._keep_aux(lambda s: s <= step)
        self.owned, self.dense, self.bins, self.pending = dict(contents), dense, bins, None
        self.snapshots = {}
        self.cut_moved(step)
        self.handed, self.handed_step = dict(handed), step
        for origin, counted in handed.items():
            self.aux.setdefault(origin, {})[step] = counted
        self.bins += sum(handed.values())

    def cut_moved(self, step: int) -> None:
        """The snapshot with which a view begins, blocks that came from others included."""
        self.cut(step)

    def drop_others(self, views: Iterable[tuple[View, int | None]]) -> None:
        """Drop copies that none of ``views`` (and the rank in each) gives to this worker. Counts of workers that have
        left stay until a later snapshot is protected."""
        kept: set[Key] = set()
        for view, rank in views:
            if rank is not None:
                kept |= set(view.held_by(rank))
        self.copies = {key: copy for key, copy in self.copies.items() if key in kept}


def block_set(keys: Iterable[Key]) -> BlockSet:
    by_table: dict[str, list[int]] = {}
    for table, block in keys:
        by_table.setdefault(table, []).append(block)
    return BlockSet.of(by_table)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint: everything after ``step`` steps."""

    epoch: int
    step: int
    rows: Mapping[Key, Content]
    dense: int
    bins: int
