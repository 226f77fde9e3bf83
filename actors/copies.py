"""CopyHolder: the row blocks a worker holds for others, kept current by snapshots (PROTOCOLS F3, V2).

A copy is a base, which lives in the row store as a replica block, and staged changes, one set per later snapshot. A
step is *held* once all changes up to it are here; staged changes become part of the base (*folded*) when their step is
protected, so that until then the copy can still be brought to the older step (F4).

Invariants:

1. A copy's steps grow: base < staged steps; each staged step says which step its changes are relative to.
2. After a fold the checksum, a sum over the hashes of all rows, is what the owner said it is; a copy for which it is
   not is dropped, counted and reported to its owner, who sends it again (V4). Row counts say nothing beyond it.
3. Blocks that this worker owns are never written.
4. One thread at a time writes rows of copies (``_store_lock``); the training thread goes on meanwhile.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from shoal.actors.background import yield_to_training
from shoal.actors.messages import BlockSet, Copies
from shoal.actors.wire import Section, signed, unsigned
from shoal.kernels import faults
from shoal.kernels.errors import ExchangeTimeoutError, PeerError
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import TableSpec

logger = logging.getLogger(__name__)

#: (table number, block).
Key = tuple[int, int]
#: Staged changes are folded about this many bytes at a time: a freeze waits no longer.
FOLD_BYTES = 4 * 2**20


@dataclasses.dataclass
class _Staged:
    """Changes that bring a copy to ``step``."""

    step: int
    #: The step they are relative to.
    since: int
    sections: list[Section] = dataclasses.field(default_factory=list)
    #: Set by the end of the snapshot: the block's checksum at ``step``.
    checksum: int = 0
    is_complete: bool = False


@dataclasses.dataclass
class _Copy:
    source: str
    #: Epoch that made this copy necessary.
    epoch: int
    #: Step of the base; -1 while the base arrives.
    base: int
    #: Of the base; None: not known, since the block was owned here and never sent to anybody.
    checksum: int | None
    staged: list[_Staged] = dataclasses.field(default_factory=list)
    arrived: int = 0
    arrived_checksum: int = 0

    @property
    def last(self) -> int:
        """Newest step held; -1: none."""
        complete = [s.step for s in self.staged if s.is_complete]
        return complete[-1] if complete else self.base

    @property
    def steps(self) -> tuple[int, ...]:
        return () if self.base < 0 else (self.base, *(s.step for s in self.staged if s.is_complete))

    def checksum_at_last(self) -> int | None:
        """Checksum at ``last``."""
        complete = [s for s in self.staged if s.is_complete]
        return complete[-1].checksum if complete else self.checksum


#: A block, its copy, and the step it is to be folded to.
Due = tuple[Key, _Copy, int]


@dataclasses.dataclass
class CopyCounters:
    """Totals since the start."""

    rows_received: int = 0
    rows_folded: int = 0
    fold_s: float = 0.0
    checksum_failures: int = 0


class CopyHolder:
    """What this worker holds for others. Methods may be called from any thread unless they say otherwise."""

    def __init__(self, store: RowStore, tables: Sequence[TableSpec]) -> None:
        self.store = store
        self.tables = tuple(tables)
        self.counters = CopyCounters()
        self._copies: dict[Key, _Copy] = {}
        self._aux: dict[str, dict[int, bytes]] = {}
        self._changed = threading.Condition()
        #: Held while rows of copies are written or read in bulk.
        self.store_lock = threading.Lock()
        self._is_frozen = False
        self._is_closed = False
        #: Copies of this epoch and older fold when a step is protected; of a view still to come, at once.
        self.epoch = -1
        self._protected = -1
        self._fold_due = False
        self._fold_busy = False
        threading.Thread(target=self._fold_loop, name="copies-fold", daemon=True).start()

    # ---- what owners send -----------------------------------------------------------------------------------------

    def state(self, source: str, keys: Iterable[Key]) -> np.ndarray:
        """int64 [n, 4]: table, block, newest step held, checksum there; only blocks that are held. Changes that are not
        complete are forgotten: ``source`` begins anew."""
        found = []
        with self._changed:
            self._check_open()
            for key in keys:
                copy = self._copies.get(key)
                if copy is None or copy.base < 0:
                    continue
                copy.source = source
                copy.staged = [s for s in copy.staged if s.is_complete]
                checksum = copy.checksum_at_last()
                if checksum is not None:
                    found.append((*key, copy.last, signed(checksum)))
        return np.array(found, np.int64).reshape(len(found), 4)

    def add_base(self, source: str, epoch: int, step: int, sections: Iterable[Section]) -> list[Key]:
        """Store pieces of bases; returns the blocks whose pieces do not fit, which are to be sent anew."""
        wrong = []
        for section in sections:
            key = (section.table, section.block)
            if not self._add_piece(key, source, epoch, step, section):
                wrong.append(key)
        with self._changed:
            self._changed.notify_all()
        return wrong

    def _add_piece(self, key: Key, source: str, epoch: int, step: int, section: Section) -> bool:
        is_first = section.origin == 0
        with self.store_lock:
            with self._changed:
                self._check_open()
                if self.store.owns(*key):
                    raise PeerError(f"block {key[1]} of table {self._name(key)!r} is owned here")
                if is_first:
                    self._copies[key] = _Copy(source, epoch, -1, None)
                copy = self._copies.get(key)
                if copy is None or copy.base >= 0 or copy.arrived != section.origin:
                    return False
            self.store.add_block(*key, is_replica=True)
            delta = self.store.import_packed(
                *key, section.address, section.num_rows, replace=is_first, expected=section.total
            )
        copy.arrived += section.num_rows
        copy.arrived_checksum = unsigned(copy.arrived_checksum + delta)
        self.counters.rows_received += section.num_rows
        if not section.is_last:
            return True
        with self._changed:
            if (copy.arrived, copy.arrived_checksum) != (section.total, section.checksum):
                self._found_wrong(key, copy, step, "base")
                return False
            copy.checksum, copy.base = section.checksum, step
        return True

    def stage(self, step: int, sections: Iterable[Section]) -> None:
        """Keep changes for ``step``; they count once ``finish`` has said that all are here."""
        with self._changed:
            self._check_open()
            for section in sections:
                copy = self._copies.get(section.key)
                if copy is None or copy.base < 0 or copy.last != section.origin:
                    continue  # ``finish`` finds it missing and says so.
                if copy.staged and not copy.staged[-1].is_complete and copy.staged[-1].step != step:
                    copy.staged.pop()
                if not copy.staged or copy.staged[-1].is_complete:
                    copy.staged.append(_Staged(step, section.origin))
                copy.staged[-1].sections.append(section)
                self.counters.rows_received += section.num_rows

    def finish(self, source: str, step: int, table: np.ndarray, aux: bytes | None) -> list[Key]:
        """All changes of ``step`` are sent. ``table`` int64 [n, 4]: table, block, checksum, and the step the changes
        were relative to. Returns the blocks that are not held at ``step``: they are to be sent anew."""
        wrong = []
        with self._changed:
            self._check_open()
            for number, block, checksum, since in table.tolist():
                key = (number, block)
                copy = self._copies.get(key)
                if copy is None or copy.last not in (since, step) or copy.base < 0:
                    wrong.append(key)
                    continue
                if copy.last == step:
                    continue
                if not copy.staged or copy.staged[-1].is_complete:
                    copy.staged.append(_Staged(step, since))
                staged = copy.staged[-1]
                staged.step, staged.checksum, staged.is_complete = step, unsigned(checksum), True
            if aux is not None:
                self._aux.setdefault(source, {})[step] = aux
            self._fold_due = self._fold_due or any(c.epoch > self.epoch for c in self._copies.values())
            self._changed.notify_all()
        return wrong

    # ---- what the worker asks -------------------------------------------------------------------------------------

    def keep_aux(self, worker_id: str, step: int, aux: bytes) -> None:
        """Keep the aux state of a worker that is no member any more, for who has added it to its own."""
        with self._changed:
            self._check_open()
            self._aux.setdefault(worker_id, {})[step] = aux

    def protect(self, step: int) -> None:
        """Every rank holds ``step``: fold what is staged up to it, in the background, and forget older aux (F3)."""
        with self._changed:
            self._protected = max(self._protected, step)
            self._fold_due = True
            for steps in self._aux.values():
                for old in [s for s in steps if s < step]:
                    del steps[old]
            self._changed.notify_all()

    def versions(self) -> tuple[Copies, ...]:
        """The copies, grouped by the steps they can be brought to."""
        groups: dict[tuple[int, ...], dict[str, list[int]]] = {}
        with self._changed:
            for (table, block), copy in self._copies.items():
                if copy.base >= 0:
                    groups.setdefault(copy.steps, {}).setdefault(self.tables[table].name, []).append(block)
        return tuple(Copies(blocks=BlockSet.of(blocks), steps=steps) for steps, blocks in sorted(groups.items()))

    def aux_steps(self) -> Mapping[str, tuple[int, ...]]:
        """Worker id -> steps for which its aux state is held."""
        with self._changed:
            return {worker: tuple(sorted(steps)) for worker, steps in self._aux.items() if steps}

    def aux(self, worker_id: str, step: int) -> bytes | None:
        """The worker's aux state at ``step``."""
        with self._changed:
            return self._aux.get(worker_id, {}).get(step)

    def wait_for(self, blocks: BlockSet, step: int, timeout_s: float) -> None:
        """Wait until every block is held at ``step``; blocks owned here are not asked for.

        Raises ExchangeTimeoutError naming what is missing, and PeerError once the holder is frozen.
        """
        keys = [key for key in self.keys_of(blocks) if not self.store.owns(*key)]
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while missing := [key for key in keys if key not in self._copies or step not in self._copies[key].steps]:
                self._check_open()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    shown = ", ".join(f"{self._name(key)}/{key[1]}" for key in missing[:5])
                    raise ExchangeTimeoutError(
                        f"{len(missing)} row blocks did not reach step {step} within {timeout_s:g} s: {shown}"
                    )
                self._changed.wait(left_s)

    def roll_to(self, step: int) -> None:
        """Bring every copy to ``step``: later changes are dropped, earlier ones folded; a copy that cannot be brought
        there is forgotten. Idempotent. Training must not go on."""
        with self._changed:
            for copy in self._copies.values():
                copy.staged = [s for s in copy.staged if s.is_complete and s.step <= step]
            for steps in self._aux.values():
                for later in [s for s in steps if s > step]:
                    del steps[later]
        self.fold(step)
        with self._changed:
            for key in [k for k, c in self._copies.items() if c.base != step]:
                del self._copies[key]

    def fold(self, step: int, keys: Iterable[Key] | None = None) -> None:
        """Make staged changes up to ``step`` part of the bases, in this thread; of all copies, or of ``keys``."""
        with self._changed:
            chosen = list(self._copies) if keys is None else list(keys)
            due = [(key, self._copies[key], step) for key in chosen if key in self._copies]
        self._fold_copies(due)

    def take(self, key: Key, step: int) -> tuple[bool, int | None]:
        """Fold a copy to ``step`` and let go of it: its block is about to be owned. (whether there was one, its
        checksum where it is known)."""
        self.fold(step, [key])
        with self._changed:
            copy = self._copies.get(key)
            if copy is None or copy.base != step:
                return False, None
            del self._copies[key]
            return True, copy.checksum

    def put(self, key: Key, step: int, checksum: int | None, epoch: int) -> None:
        """A block that was owned is a copy from now on, as of ``step``. ``checksum`` None: not known."""
        with self._changed:
            self._copies[key] = _Copy("", epoch, step, checksum)
            self._changed.notify_all()

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop copies and their rows. At a step boundary."""
        for key in keys:
            with self.store_lock:
                with self._changed:
                    self._copies.pop(key, None)
                if not self.store.owns(*key):
                    self.store.drop_block(*key)

    def forget_epoch(self, epoch: int) -> list[Key]:
        """Forget the copies that only view ``epoch``, which will not be, made necessary; returns their blocks, whose
        rows are still to be dropped."""
        with self._changed:
            keys = [key for key, copy in self._copies.items() if copy.epoch == epoch]
            for key in keys:
                del self._copies[key]
        return keys

    def reset(self) -> None:
        """Forget everything; the rows are still to be dropped."""
        with self._changed:
            self._copies, self._aux, self._protected = {}, {}, -1

    def can_reach(self, key: Key, step: int) -> bool:
        """Whether there is a copy that can be brought to ``step``."""
        with self._changed:
            copy = self._copies.get(key)
            return copy is not None and step in copy.steps

    def keys_of_later(self, epoch: int) -> set[Key]:
        """Blocks held because of a view after ``epoch``."""
        with self._changed:
            return {key for key, copy in self._copies.items() if copy.epoch > epoch}

    def settle(self, epoch: int) -> None:
        """``epoch`` is decided: its copies fold when a step is protected from now on."""
        with self._changed:
            self.epoch = epoch

    def held(self) -> list[Key]:
        """Blocks of which there is a copy, complete or not."""
        with self._changed:
            return list(self._copies)

    def freeze(self) -> None:
        """Accept nothing more from owners, so that what is held stays as it is reported (F4); ends waits."""
        with self._changed:
            self._is_frozen = True
            self._fold_due = False
            while self._fold_busy:
                self._changed.wait()
            self._changed.notify_all()

    def thaw(self) -> None:
        """Accept again."""
        with self._changed:
            self._is_frozen = False

    def close(self) -> None:
        """End the fold thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def keys_of(self, blocks: BlockSet) -> list[Key]:
        """(table number, block) of each block."""
        numbers = {table.name: i for i, table in enumerate(self.tables)}
        return [(numbers[table], block) for table, block in blocks]

    def staged_bytes(self) -> int:
        """Bytes of changes that are not part of a base yet."""
        with self._changed:
            return sum(x.nbytes for c in self._copies.values() for s in c.staged for x in s.sections)

    # ---- folding --------------------------------------------------------------------------------------------------

    def _fold_loop(self) -> None:
        yield_to_training()
        while True:
            with self._changed:
                self._fold_busy = False
                self._changed.notify_all()
                while not self._fold_due and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                self._fold_due, self._fold_busy = False, True
                protected, epoch = self._protected, self.epoch
                due = [
                    (key, copy, copy.last if copy.epoch > epoch else protected)
                    for key, copy in self._copies.items()
                    if copy.staged
                ]
            self._fold_copies(due, lambda: self._is_frozen)

    def _fold_copies(self, due: Iterable[Due], should_stop: Callable[[], bool] = lambda: False) -> None:
        """Fold copies, each up to its step, some megabytes at a time."""
        left = deque(due)
        while left and not should_stop():
            with self.store_lock:
                batch = self._next_batch(left)
                try:
                    self._fold_batch(batch)
                except Exception:  # nobody knows what these copies are now; the others go on
                    logger.exception("copies num_blocks=%d action=fold", len(batch))
                    with self._changed:
                        for key, copy, _ in batch:
                            if self._copies.get(key) is copy:
                                del self._copies[key]

    def _next_batch(self, left: deque[Due]) -> list[tuple[Key, _Copy, _Staged]]:
        """Take from ``left`` the next staged changes that can be folded, of each copy those of one step."""
        batch: list[tuple[Key, _Copy, _Staged]] = []
        again: list[Due] = []
        num_bytes = 0
        with self._changed:
            while left and num_bytes < FOLD_BYTES:
                key, copy, step = left.popleft()
                if self._copies.get(key) is not copy or not copy.staged or copy.base < 0:
                    continue
                staged = copy.staged[0]
                if staged.is_complete and staged.step <= step:
                    batch.append((key, copy, staged))
                    num_bytes += sum(section.nbytes for section in staged.sections)
                    again.append((key, copy, step))
        left.extend(again)
        return batch

    def _fold_batch(self, batch: Sequence[tuple[Key, _Copy, _Staged]]) -> None:
        """Under the store's lock: make staged changes part of their bases."""
        began_s = time.monotonic()
        rows = [(*s.key, s.num_rows, s.num_deleted, s.address, 0) for _, _, staged in batch for s in staged.sections]
        table = np.array(rows, np.int64).reshape(len(rows), 6)
        failed = dict(self.store.apply_sections(table))
        faults.reach("snapshot.fold")
        self.counters.rows_folded += int(table[:, 2:4].sum())
        self.counters.fold_s += time.monotonic() - began_s
        deltas = table[:, 5].tolist()
        at = 0
        with self._changed:
            for key, copy, staged in batch:
                end = at + len(staged.sections)
                copy.checksum = unsigned((copy.checksum or 0) + sum(deltas[at:end]))
                reason = next((failed[i] for i in range(at, end) if i in failed), None) if failed else None
                at = end
                if reason is not None:
                    logger.error("copies table=%s block=%d action=fold reason=%r", self._name(key), key[1], reason)
                if reason is not None or copy.checksum != staged.checksum:
                    self._found_wrong(key, copy, staged.step, "changes")
                    continue
                copy.staged.pop(0)
                copy.base = staged.step

    def _found_wrong(self, key: Key, copy: _Copy, step: int, what: str) -> None:
        """Under ``_changed``: a copy is not what its owner said (invariant 2)."""
        self.counters.checksum_failures += 1
        logger.error(
            "copies table=%s block=%d step=%d source=%s reason='the checksum of its %s is wrong: sent again'",
            self._name(key),
            key[1],
            step,
            copy.source,
            what,
        )
        if self._copies.get(key) is copy:
            del self._copies[key]

    def _check_open(self) -> None:
        if self._is_frozen:
            raise PeerError("this worker has parked and takes no copies")

    def _name(self, key: Key) -> str:
        return self.tables[key[0]].name
