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
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from shoal.actors.background import yield_to_training
from shoal.actors.messages import Member
from shoal.actors.shelf import Shelf, Snapshot
from shoal.actors.shipping import Buffers
from shoal.actors.transfer import TransferClient
from shoal.actors.wire import Kind, Reply, signed, unsigned
from shoal.kernels import faults
from shoal.kernels.errors import PeerError
from shoal.kernels.packed import BlockPack
from shoal.kernels.spec import TableSpec

logger = logging.getLogger(__name__)

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
        self._buffers = Buffers(tables)
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
        yield_to_training()
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
        buffer, used, num_sections = self._buffers.next(), 0, 0
        snapshot = self._part.snapshot if self._part is not None else newest
        while self._todo:
            if self._part is None:
                if snapshot is not newest:
                    break
                key = next(iter(self._todo))
                self._part = _Part(key, newest, newest.cut.pack_block(*key))
            rows = self._part.rows
            num_bytes = rows.fill(buffer.ctypes.data + used, buffer.size - used)
            if num_bytes == 0:
                break
            used += num_bytes
            num_sections += 1
            if rows.is_done:
                key, self._part = self._part.key, None
                self.counters.base_rows += rows.num_rows
                snapshot.checksums[key] = rows.checksum
                self._unconfirmed.add(key)
                del self._todo[key]
                self._at[key] = snapshot
        # The caller holds ``newest`` until here.
        self._adjust_holds()
        faults.reach("prepare.base")
        meta = {"step": snapshot.step, "sections": num_sections}
        self._heed(client.post(Kind.BASE, self.epoch, meta, [buffer[:used]], is_paced=True))
        if not self._todo:
            self._heed(client.drain())
            self._unconfirmed = set()
        self.counters.base_s += time.monotonic() - began_s

    def _send_changes(self, client: TransferClient, snapshot: Snapshot) -> None:
        """Bring every block in sync to ``snapshot``, and the aux state with them; returns when all is acknowledged."""
        began_s = time.monotonic()
        is_round = not self._todo
        # What changed between two cuts is listed once for all blocks.
        groups: dict[Snapshot, list[Key]] = {}
        for key, old in self._at.items():
            groups.setdefault(old, []).append(key)
        num_rows = sum(self._send_group(client, old, snapshot, keys) for old, keys in groups.items())
        sent = [(*key, signed(snapshot.checksums[key]), old.step) for old, keys in groups.items() for key in keys]
        ends = np.array(sent, np.int64).reshape(len(sent), 4)
        meta = {"step": snapshot.step, "blocks": len(sent), "has_aux": self.has_aux}
        aux = [snapshot.aux] if self.has_aux and snapshot.aux else []
        replies = client.post(Kind.END, self.epoch, meta, [ends, *aux]) + client.drain()
        self._at = dict.fromkeys(self._at, snapshot)
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

    def _send_group(self, client: TransferClient, old: Snapshot, snapshot: Snapshot, keys: Sequence[Key]) -> int:
        """Send what changed in blocks since ``old``; returns how many rows and deleted ids."""
        if old is snapshot:
            return 0
        changes = snapshot.cut.pack_changes(old.cut, keys, old.step)
        while not changes.is_done:
            buffer = self._buffers.next()
            used = changes.fill(buffer.ctypes.data, buffer.size)
            if used:
                faults.reach("snapshot.send")
                meta = {"step": snapshot.step, "sections": changes.num_sections}
                self._heed(client.post(Kind.CHANGES, self.epoch, meta, [buffer[:used]]))
        for key, delta in zip(keys, changes.checksum_deltas):
            snapshot.checksums[key] = unsigned(old.checksums[key] + delta)
        return changes.num_changes

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


@dataclasses.dataclass(frozen=True)
class _Part:
    """A block's base on its way."""

    key: Key
    snapshot: Snapshot
    rows: BlockPack
