"""Channel: keeps one other worker's copies of some of this worker's row blocks current (PROTOCOLS F3, V2).

A thread of its own sends, for every snapshot, what changed in the blocks that are *in sync*, and meanwhile, in pieces,
the bases of the others, taken from the newest snapshot; a block whose base is sent is in sync. Whatever breaks the
connection, the next one begins by asking what the other side holds.

Invariant: a block in sync at snapshot s is held by the target at s once all messages so far are answered, and the
snapshot stays open until the block is in sync at a later one.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from shoal.actors.messages import Member
from shoal.actors.partfile import narrow
from shoal.actors.shelf import Shelf, Snapshot
from shoal.actors.transfer import TransferClient
from shoal.actors.wire import NO_IDS, Kind, Reply, Section, encode_sections, signed, unsigned
from shoal.kernels import cut as cuts
from shoal.kernels import faults
from shoal.kernels.cut import BlockRows
from shoal.kernels.errors import PeerError
from shoal.kernels.spec import TableSpec

logger = logging.getLogger(__name__)

#: Rows of one message are cut at about this many bytes.
PIECE_BYTES = 16 * 2**20
#: A block that is found wrong after this many bases is left alone until the next view.
TRIES_MAX = 5
ROUNDS_KEPT = 64
RETRY_S = 0.05
RETRY_S_MAX = 2.0

Key = tuple[int, int]


@dataclasses.dataclass
class ChannelCounters:
    """Totals of a channel."""

    bytes_sent: int = 0
    base_rows: int = 0
    base_s: float = 0.0
    #: Rounds: snapshots sent while every block was in sync.
    rounds: int = 0
    changed_rows: int = 0
    round_s: float = 0.0
    #: Blocks whose base was sent again because the copy was wrong.
    resent: int = 0


@dataclasses.dataclass(frozen=True)
class Round:
    """One snapshot sent: rows changed or deleted, and the time from first export to last answer."""

    step: int
    rows: int
    seconds: float


class Channel:
    """Sends row blocks ``keys`` to ``target`` under ``epoch``.

    Args:
        connect: makes a client for an address.
        on_change: called, from the channel's thread, when anything that can be asked has changed.
        has_aux: the target also keeps this worker's aux state.
    """

    def __init__(
        self,
        target: Member,
        epoch: int,
        keys: Iterable[Key],
        *,
        shelf: Shelf,
        tables: Sequence[TableSpec],
        connect: Callable[[str], TransferClient],
        on_change: Callable[[], None],
        has_aux: bool = False,
    ) -> None:
        self.target, self.epoch, self.has_aux = target, epoch, has_aux
        self.keys = frozenset(keys)
        self.counters = ChannelCounters()
        #: Newest snapshot that the target has acknowledged for all blocks in sync; -1: none.
        self.acked = -1
        self.last_rounds: deque[Round] = deque(maxlen=ROUNDS_KEPT)
        #: Why the channel cannot go on at present, and since when (monotonic seconds).
        self.error: str | None = None
        self.error_since_s = 0.0
        self._shelf, self._tables, self._connect, self._on_change = shelf, tables, connect, on_change
        # Of a row in a message: with its id, step and count.
        self._row_bytes = [table.row_bytes + 24 for table in tables]
        self._at: dict[Key, Snapshot] = {}
        #: Blocks whose base is sent and not yet acknowledged. Other threads only look.
        self._unconfirmed: set[Key] = set()
        self._todo: dict[Key, None] = dict.fromkeys(sorted(self.keys))
        self._tries: dict[Key, int] = {}
        self._part: _Part | None = None
        self._held: set[Snapshot] = set()
        self._hold_lock = threading.Lock()
        self._has_asked = False
        self._wake = threading.Condition()
        self._is_closed = False
        self._client: TransferClient | None = None
        self._thread = threading.Thread(target=self._run, name=f"channel-{target.worker_id}", daemon=True)
        self._thread.start()

    # ---- asked by other threads -----------------------------------------------------------------------------------

    @property
    def is_in_sync(self) -> bool:
        """Whether the target has a copy of every block."""
        return self._has_asked and len(self._at) == len(self.keys) and not self._unconfirmed

    def is_current(self, step: int) -> bool:
        """Whether the target holds every block at ``step``."""
        return self.is_in_sync and self.acked >= step

    @property
    def bytes_sent(self) -> int:
        """Bytes sent so far."""
        client = self._client
        return self.counters.bytes_sent + (client.bytes_sent if client is not None else 0)

    def behind(self) -> list[Key]:
        """Blocks of which the target has no current copy."""
        at, unconfirmed = self._at, self._unconfirmed
        return [key for key in self.keys if key not in at or key in unconfirmed]

    def poke(self) -> None:
        """There is a new snapshot."""
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        """End at once, whatever it is doing; the snapshots it holds are let go."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        client = self._client
        if client is not None:
            client.abort()
        with self._hold_lock:
            for snapshot in self._held:
                snapshot.drop()
            self._held = set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread of a closed channel."""
        self._thread.join(timeout_s)

    # ---- the channel's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        retry_s = RETRY_S
        while not self._is_closed:
            try:
                self._serve()
            except Exception as error:  # the thread's edge: shown to who asks, and tried again
                if self._is_closed:
                    break
                if not isinstance(error, PeerError):
                    logger.exception("channel=%s failed", self.target.worker_id)
                if self.error is None:
                    self.error_since_s, retry_s = time.monotonic(), RETRY_S
                self.error = str(error)
                self._on_change()
                with self._wake:
                    if not self._is_closed:
                        self._wake.wait(retry_s)
                retry_s = min(2 * retry_s, RETRY_S_MAX)
        self._on_change()

    def _adjust_holds(self) -> None:
        """Hold exactly the snapshots that blocks in sync, or the base under way, are relative to."""
        needed = set(self._at.values()) | ({self._part.snapshot} if self._part is not None else set())
        with self._hold_lock:
            if self._is_closed:
                return  # ``close`` has let go of all of them.
            for snapshot in needed - self._held:
                snapshot.hold()
            for snapshot in self._held - needed:
                snapshot.drop()
            self._held = needed

    def _serve(self) -> None:
        """Ask what the target holds, then send snapshots and bases until closed or something breaks."""
        self._client = client = self._connect(self.target.address)
        if self._is_closed:
            return
        try:
            self._ask(client)
            done: Snapshot | None = None
            while True:
                snapshot = self._next(done)
                if snapshot is None:
                    return
                try:
                    if snapshot is not done:
                        self._send_changes(client, snapshot)
                        done = snapshot
                    else:
                        self._send_bases(client, snapshot)
                finally:
                    snapshot.drop()
                self.error = None
                self._on_change()
        finally:
            self._client = None
            self.counters.bytes_sent += client.bytes_sent
            client.close()

    def _next(self, done: Snapshot | None) -> Snapshot | None:
        """The newest snapshot, held, once it is not ``done`` or a base is to be sent; None when the channel closes."""
        with self._wake:
            while not self._is_closed:
                newest = self._shelf.newest()
                if newest is not None:
                    if newest is not done or self._todo:
                        return newest
                    newest.drop()
                self._wake.wait()
            return None

    def _ask(self, client: TransferClient) -> None:
        """Learn which blocks the target holds as they are in an open snapshot; the others need a base."""
        keys = sorted(self.keys)
        wanted = np.array(keys, np.int64).reshape(len(keys), 2)
        reply = client.call(Kind.STATE, self.epoch, {}, [wanted])
        at: dict[Key, Snapshot] = {}
        # Those that are off the shelf by now but held from before serve as well.
        open_: dict[int, Snapshot | None] = {snapshot.step: snapshot for snapshot in self._held}
        taken: list[Snapshot] = []
        for table, block, step, checksum in reply.payload.view(np.int64).reshape(-1, 4).tolist():
            key = (table, block)
            if step not in open_:
                open_[step] = found = self._shelf.held(step)
                if found is not None:
                    taken.append(found)
            snapshot = open_[step]
            # A checksum that is not known here proves nothing about the copy.
            if key in self.keys and snapshot is not None and snapshot.checksums.get(key) == unsigned(checksum):
                at[key] = snapshot
        self._at, self._part, self._unconfirmed = at, None, set()
        self._todo = dict.fromkeys(key for key in keys if key not in at)
        self._adjust_holds()
        for snapshot in taken:
            snapshot.drop()
        self._has_asked = True

    def _send_bases(self, client: TransferClient, newest: Snapshot) -> None:
        """Send one message of base rows; with the last, wait for the answers."""
        began_s = time.monotonic()
        sections: list[Section] = []
        num_bytes = 0
        snapshot = self._part.snapshot if self._part is not None else newest
        while num_bytes < PIECE_BYTES and self._todo:
            if self._part is None:
                if snapshot is not newest:
                    break
                self._part = _Part.of(next(iter(self._todo)), newest)
            section = self._part.take(PIECE_BYTES - num_bytes)
            sections.append(section)
            num_bytes += section.nbytes
            self.counters.base_rows += len(section.rows)
            if self._part.is_done:
                key, self._part = self._part.key, None
                self._unconfirmed.add(key)
                del self._todo[key]
                self._at[key] = snapshot
        # The caller holds ``newest`` until here.
        self._adjust_holds()
        faults.reach("prepare.base")
        meta = {"step": snapshot.step, "sections": len(sections)}
        self._heed(client.post(Kind.BASE, self.epoch, meta, encode_sections(sections), is_paced=True))
        if not self._todo:
            self._heed(client.drain())
            self._unconfirmed = set()
        self.counters.base_s += time.monotonic() - began_s

    def _send_changes(self, client: TransferClient, snapshot: Snapshot) -> None:
        """Bring every block in sync to ``snapshot``, and the aux state with them; returns when all is acknowledged."""
        began_s = time.monotonic()
        is_round = not self._todo
        ends = np.empty((len(self._at), 4), np.int64)
        sections: list[Section] = []
        num_rows = num_bytes = 0

        def flush() -> None:
            faults.reach("snapshot.send")
            meta = {"step": snapshot.step, "sections": len(sections)}
            self._heed(client.post(Kind.CHANGES, self.epoch, meta, encode_sections(sections)))
            sections.clear()

        # By snapshot: the list of what changed between two cuts is made once for all blocks.
        sent = dict(sorted(self._at.items(), key=lambda item: item[1].step))
        for i, (key, old) in enumerate(sent.items()):
            if old is not snapshot:
                changes = snapshot.cut.export_changes(old.cut, *key)
                snapshot.checksums[key] = unsigned(old.checksums[key] + changes.checksum_delta)
                num_rows += len(changes)
                for section in _sections(key, changes, old.step, self._row_bytes[key[0]]):
                    sections.append(section)
                    num_bytes += len(section.rows) * self._row_bytes[key[0]] + 8 * section.deleted.numel()
                    if num_bytes >= PIECE_BYTES:
                        flush()
                        num_bytes = 0
            ends[i] = (*key, signed(snapshot.checksums[key]), old.step)
        if sections:
            flush()
        meta = {"step": snapshot.step, "blocks": len(sent), "has_aux": self.has_aux}
        aux = [snapshot.aux] if self.has_aux and snapshot.aux else []
        replies = client.post(Kind.END, self.epoch, meta, [ends, *aux]) + client.drain()
        self._at = dict.fromkeys(sent, snapshot)
        self._heed(replies)
        self._unconfirmed = set()
        self._adjust_holds()
        self.acked = snapshot.step
        seconds = time.monotonic() - began_s
        self.counters.changed_rows += num_rows
        self.counters.round_s += seconds
        if is_round:
            self.counters.rounds += 1
            self.last_rounds.append(Round(snapshot.step, num_rows, seconds))

    def _heed(self, replies: Iterable[Reply]) -> None:
        """Blocks that the target found wrong or has lost get a base again."""
        for reply in replies:
            for table, block in reply.meta.get("wrong", ()):
                key = (table, block)
                if self._part is not None and self._part.key == key:
                    continue  # Its last piece is still to be answered.
                self._at.pop(key, None)
                tries = self._tries[key] = self._tries.get(key, 0) + 1
                self.counters.resent += 1
                logger.warning(
                    "channel=%s table=%s block=%d tries=%d reason='the copy is wrong or lost'",
                    self.target.worker_id,
                    self._tables[table].name,
                    block,
                    tries,
                )
                if tries >= TRIES_MAX:
                    raise PeerError(
                        f"row block {block} of table {self._tables[table].name!r} arrived damaged at worker "
                        f"{self.target.worker_id} {tries} times"
                    )
                self._todo[key] = None


class _Part:
    """A block's base on its way."""

    def __init__(self, key: Key, snapshot: Snapshot, rows: BlockRows, checksum: int) -> None:
        self.key, self.snapshot, self._rows, self._checksum, self._at = key, snapshot, rows, checksum, 0

    @staticmethod
    def of(key: Key, snapshot: Snapshot) -> _Part:
        rows = snapshot.cut.export_block(*key)
        checksum = unsigned(cuts.rows_checksum(rows))
        snapshot.checksums[key] = checksum
        return _Part(key, snapshot, rows, checksum)

    @property
    def is_done(self) -> bool:
        return self._at >= len(self._rows)

    def take(self, bytes_max: int) -> Section:
        """The next rows, of about ``bytes_max`` bytes and at least one."""
        total = len(self._rows)
        start = self._at
        self._at = min(total, start + max(1, bytes_max * total // max(1, self._rows.nbytes)))
        return Section(
            *self.key, narrow(self._rows, start, self._at), NO_IDS, origin=start, total=total, checksum=self._checksum
        )


def base_sections(key: Key, rows: BlockRows) -> Iterator[Section]:
    """All rows of a block as sections of one message each."""
    checksum, total = unsigned(cuts.rows_checksum(rows)), len(rows)
    size = max(1, PIECE_BYTES * total // max(1, rows.nbytes))
    for start in range(0, max(1, total), size):
        yield Section(*key, narrow(rows, start, min(total, start + size)), NO_IDS, start, total, checksum)


def _sections(key: Key, changes: cuts.BlockChanges, since: int, row_bytes: int) -> Iterator[Section]:
    """Changes in pieces that fit a message; the deleted ids travel with the first."""
    rows, deleted = changes.rows, changes.deleted
    num_rows, num_deleted = len(rows), deleted.numel()
    size, ids_max = max(1, PIECE_BYTES // row_bytes), PIECE_BYTES // 8
    if num_rows <= size and num_deleted <= ids_max:  # Nearly always; slicing costs as much as the export.
        if num_rows or num_deleted:
            yield Section(*key, rows, deleted, since)
        return
    for start in range(0, max(num_rows, 1), size):
        yield Section(*key, narrow(rows, start, start + size), deleted[:ids_max] if start == 0 else NO_IDS, since)
    for start in range(ids_max, num_deleted, ids_max):
        yield Section(*key, narrow(rows, 0, 0), deleted[start : start + ids_max], since)
