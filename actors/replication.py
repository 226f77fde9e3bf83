"""Replicator: keeps copies of this worker's rows on other workers and of theirs here (PROTOCOLS C, V, F3-F7).

One per worker process; it lives across views. Buddies, migration, growth and recovery are one mechanism: a copy of a
row block on another worker, kept current by snapshots.

Legend of steps: all count applied steps; *boundary* n lies after step n-1 and before step n.

A view change, seen by a worker's step loop:

    expect(view), prepare(view)     copies of what moves begin (V2)
    snapshot(n, aux) ...            every snapshot is a round
    cut_over(n, view, aux)          after the closing exchange: the last changes are acknowledged and staged (V4)
    -- an exchange of the old view: every rank has come this far, so ``n`` is held everywhere --
    flip(view, rank, n)             staged changes become rows; blocks change owner
    set_view(view, rank, n, aux)    the view is decided
    release(view, rank)             it is journalled: what it does not give to this worker is dropped (V5)

Nothing is folded before that exchange, so a failure up to it can go back to the last protected step, and after it to n.
A failure: park(), holdings(), expect(view), roll_back(t), ship / receive, flip, then set_view as above.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shoal.actors.blobs import send_blob
from shoal.actors.channel import Channel
from shoal.actors.copies import Key
from shoal.actors.groups import run_hash
from shoal.actors.inbound import KEPT, Inbound
from shoal.actors.messages import BlockSet, Copies, Member, PrepareProgress, View
from shoal.actors.readiness import blocks_needed, copy_progress
from shoal.actors.shelf import Shelf
from shoal.actors.shipping import Buffers, packed_block, ship_once
from shoal.actors.snapshot import RateLimiter
from shoal.actors.transfer import TransferClient
from shoal.actors.wire import RefusedError
from shoal.kernels.errors import ExchangeTimeoutError, PeerError, ProtocolError
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import TableSpec

logger = logging.getLogger(__name__)

#: A target that has not been reached for this many times ``timeout_s`` cannot be prepared.
PATIENCE = 3
#: Between two tries of a shipment that was refused.
RETRY_S = 0.05
NO_BLOCKS = BlockSet()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """What this worker can bring back: the pieces of ``messages.Holdings`` that the replicator knows."""

    snapshots: tuple[int, ...]
    owned: BlockSet
    copies: tuple[Copies, ...]
    aux: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Received:
    """What was shipped to this worker beside row blocks."""

    dense: bytes | None
    #: Worker id -> its aux state.
    aux: Mapping[str, bytes]


class Replicator:
    """Copies of this worker's rows elsewhere, and of others' rows here.

    Args:
        run: the run's name; messages of another run are refused (F7).
        tables: in the store's order.
        bytes_per_s: bound of all bases together; changes are never held back. 0: none.
        timeout_s: how long another worker may take for one answer.
        rounds_max, pause_max_s: the stop rule of V2.

    Unless they say otherwise, methods belong to the step loop's thread, at a step boundary.
    """

    def __init__(
        self,
        worker_id: str,
        run: str,
        store: RowStore,
        tables: Sequence[TableSpec],
        *,
        bind_address: str = "127.0.0.1",
        bytes_per_s: float = 0.0,
        timeout_s: float = 10.0,
        rounds_max: int = 8,
        pause_max_s: float = 1.0,
    ) -> None:
        self.worker_id = worker_id
        self.rounds_max, self.pause_max_s, self.timeout_s = rounds_max, pause_max_s, timeout_s
        self._run = run_hash(run)
        self._store, self._tables = store, tuple(tables)
        self._limiter = RateLimiter(bytes_per_s)
        self.shelf = Shelf(store)
        self._inbound = Inbound(store, tables, run=self._run, bind_address=bind_address, timeout_s=timeout_s)
        self.copies, self._blobs = self._inbound.copies, self._inbound.blobs
        #: Replaced, never changed: other threads read it.
        self._owned: frozenset[Key] = frozenset()
        #: Blocks owned since ``flip`` that are read from storage: without ``set_view`` nobody knows what they hold.
        self._unproven: set[Key] = set()
        #: The view that is decided, this worker's rank in it, and the ownership that ``flip`` has made beyond it.
        self._view: View | None = None
        self._rank: int | None = None
        self._flipped_at: int | None = None
        self._known: dict[Key, int] = {}
        self._buddy: Channel | None = None
        self._preparing: dict[str, Channel] = {}
        self._next_view: View | None = None
        self._keeps_snapshots = True
        self._changed = threading.Condition()
        self._is_aborted = False
        self._last_snapshot = -1
        #: "host:port" of this worker's server, for ``Member.address``.
        self.address = self._inbound.server.address

    # ---- views ----------------------------------------------------------------------------------------------------

    def expect(self, view: View, senders: Iterable[str] | None = None) -> None:
        """Accept messages of ``view``, which is being prepared or recovered, beside those of the decided one (F7).
        Any thread.

        ``senders``: who may send under it. None: whoever does, since only those a view concerns (its members, those
        that leave with it, suppliers of a recovery) are ever told its epoch.
        """
        self._inbound.expect(view.epoch, senders)

    def set_view(self, view: View, rank: int, step: int, aux: bytes = b"", *, keeps_snapshot: bool = True) -> None:
        """``view`` is decided and its first step is ``step``: own its blocks, open the snapshot of ``step``, keep the
        buddy's copies current from now on. Those it holds at ``step`` already are only asked after; others get a base
        in the background and count as ``unprotected_bytes`` meanwhile (F5).

        Args:
            aux: this worker's aux state at ``step``, for the buddy.
            keeps_snapshot: False where nobody would ever roll back: no snapshot is open until ``snapshot`` is called.
        """
        self._close_channels()
        self.flip(view, rank, step)
        self._keeps_snapshots = keeps_snapshot
        if keeps_snapshot:
            snapshot = self.shelf.open(step, self._owned, aux)
            snapshot.checksums.update((k, v) for k, v in self._known.items() if k in self._owned)
            self.shelf.retire(below=step, above=step)
        else:
            self.drop_snapshots()
        self._known, self._flipped_at, self._unproven = {}, None, set()
        self._view, self._rank, self._next_view = view, rank, None
        self._last_snapshot = step
        self._is_aborted = False
        self._inbound.decide(view.epoch, [member.worker_id for member in view.members])
        self.copies.settle(view.epoch)
        self.copies.protect(step)
        self._inbound.thaw()
        self._blobs.forget_below(step)
        self._blobs.forget("dense", step)
        buddy = view.buddy(rank)
        if buddy is not None and buddy != rank:
            self._buddy = self._channel(view.members[buddy], view.epoch, self._owned, has_aux=True)

    def flip(self, view: View, rank: int | None, step: int, *, from_storage: BlockSet = NO_BLOCKS) -> None:
        """Own exactly what ``view`` gives to ``rank`` (None: nothing), as of ``step``. O(blocks) beside folding what is
        staged for ``step``. Nothing is dropped: blocks lost stay as copies (V4, V5). Repeating it does nothing.

        ``from_storage``: blocks gained that are to begin empty, since they are read from a checkpoint or have their
        initial values. Raises ProtocolError where another one gained has no sound copy at ``step``.
        """
        wanted = frozenset() if rank is None else frozenset(self.copies.keys_of(view.owned_by(rank)))
        empty = set(self.copies.keys_of(from_storage))
        gained = [key for key in sorted(wanted - self._owned) if not self._store.owns(*key)]
        if lacking := [key for key in gained if key not in empty and not self.copies.can_reach(key, step)]:
            raise ProtocolError(f"{len(lacking)} row blocks have no copy here at step {step}: {self._shown(lacking)}")
        self._flipped_at = step
        self._demote(self._owned - wanted, step)
        for key in gained:
            self._promote(key, step, key in empty)
        self._owned = wanted

    def _demote(self, keys: frozenset[Key], step: int) -> None:
        snapshot = self.shelf.get(step)
        epoch = self._view.epoch if self._view is not None else -1
        self._owned = self._owned - keys
        for key in sorted(keys):
            if key in self._unproven:
                self._unproven.discard(key)
                self._store.drop_block(*key)
                continue
            known = self._known.pop(key, snapshot.checksums.get(key) if snapshot is not None else None)
            with self.copies.store_lock:
                self._store.set_replica(*key, True)
            self.copies.put(key, step, known, epoch)

    def _promote(self, key: Key, step: int, is_empty: bool) -> None:
        if is_empty:
            self.copies.forget([key])
            self._store.add_block(*key)
            self._unproven.add(key)
        else:
            is_there, checksum = self.copies.take(key, step)
            if not is_there:
                raise ProtocolError(f"row block {self._shown([key])} is damaged: its copy was dropped")
            with self.copies.store_lock:
                self._store.set_replica(*key, False)
            if checksum is not None:
                self._known[key] = checksum
        self._owned = self._owned | {key}

    def release(self, view: View, rank: int | None) -> None:
        """``view`` is journalled: drop what it does not give to this worker, but not what a later view needs (V5)."""
        kept = set() if rank is None else set(self.copies.keys_of(view.held_by(rank)))
        later = self.copies.keys_of_later(view.epoch)
        gone = [key for key in self._all_keys() if key not in kept and key not in later and key not in self._owned]
        self.copies.forget(key for key in gone if self._store.holds(*key))

    # ---- snapshots ------------------------------------------------------------------------------------------------

    def snapshot(self, step: int, aux: bytes) -> None:
        """Open the snapshot of ``step`` and have it sent in the background (F3). ``aux``: the metric bins, opaque."""
        self.shelf.open(step, self._owned, aux)
        self._last_snapshot = step
        for channel in self._channels():
            channel.poke()

    @property
    def acked(self) -> int:
        """Newest snapshot that the buddy has acknowledged; without a buddy the newest snapshot."""
        buddy = self._buddy
        if buddy is None:
            return self._last_snapshot
        # The view's first snapshot is complete by definition: the view was decided with it.
        return max(buddy.acked, self.shelf.steps[0] if self.shelf.steps else -1)

    @property
    def last_snapshot(self) -> int:
        """Step of the newest snapshot; -1: none yet."""
        return self._last_snapshot

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Steps this worker can roll its own rows back to, ascending."""
        return self.shelf.steps

    def drop_snapshots(self) -> None:
        """Let all snapshots go: nothing can be rolled back any more, and no versions are kept."""
        self.shelf.retire(above=-1)

    def aux_at(self, step: int) -> bytes | None:
        """This worker's own aux state at a snapshot; None where it is not open."""
        snapshot = self.shelf.get(step)
        return None if snapshot is None else snapshot.aux

    def protect(self, step: int) -> None:
        """Every rank has acknowledged ``step``: older snapshots go, as soon as no channel needs them, and the copies
        held here take in what is staged up to it, in the background (F3)."""
        self.shelf.retire(below=step)
        self.copies.protect(step)

    # ---- preparing a view -----------------------------------------------------------------------------------------

    def prepare(self, next_view: View) -> None:
        """Begin to copy, in the background, what ``next_view`` places on other workers than now (V2). Any thread.

        Without a snapshot to copy from, copying begins with the first.
        """
        targets: dict[str, tuple[Member, set[Key]]] = {}
        for member, keys in self._needs(next_view).items():
            found = next_view.members[member]
            buddy = self._buddy
            if buddy is not None and buddy.target.worker_id == found.worker_id:
                keys = keys - buddy.keys
                if not keys:
                    continue  # the channel to the buddy brings all of it
            targets[found.worker_id] = (found, keys)
        self.expect(next_view)
        self._next_view = next_view
        rank = next_view.rank_of(self.worker_id)
        new_buddy = None if rank is None else next_view.buddy(rank)
        for worker_id, (member, keys) in targets.items():
            if worker_id not in self._preparing:
                has_aux = member.rank == new_buddy
                self._preparing[worker_id] = self._channel(member, next_view.epoch, keys, has_aux=has_aux)

    def cancel_prepare(self, epoch: int) -> None:
        """View ``epoch`` will not be: its channels end, and what came here only for it is dropped."""
        if self._next_view is not None and self._next_view.epoch == epoch:
            for channel in self._preparing.values():
                channel.close()
            self._preparing, self._next_view = {}, None
            if not self._keeps_snapshots:
                self.drop_snapshots()
        self._inbound.refuse(epoch)
        if self._view is None or self._view.epoch < epoch:
            self.copies.forget(self.copies.forget_epoch(epoch))

    def progress(self) -> PrepareProgress:
        """How far the copies for the prepared view are, and the stop rule of V2: ready once every block is in sync
        and the last round took less than ``pause_max_s``; an error once rounds stop shrinking above that. Any thread.
        """
        view, buddy = self._next_view, self._buddy
        if view is None:
            return PrepareProgress(is_ready=False)
        others = []
        if buddy is not None:
            # What the buddy is to hold under ``view`` may come by the channel to it alone.
            rank = view.rank_of(buddy.target.worker_id)
            others = [buddy] if rank is not None and rank in self._needs(view) else []
        return copy_progress(
            list(self._preparing.values()),
            others,
            rounds_max=self.rounds_max,
            pause_max_s=self.pause_max_s,
            patience_s=PATIENCE * self.timeout_s,
            now_s=time.monotonic(),
        )

    @property
    def wants_haste(self) -> bool:
        """Whether a snapshot now would help the view being prepared: bases are there, or cannot begin without one."""
        channels = list(self._preparing.values())
        return any(channel.is_in_sync for channel in channels) or (bool(channels) and not self.shelf.steps)

    def _needs(self, view: View) -> dict[int, set[Key]]:
        return blocks_needed(view, self.worker_id, self._owned, [table.name for table in self._tables])

    # ---- cutover --------------------------------------------------------------------------------------------------

    def cut_over(self, step: int, next_view: View, aux: bytes, timeout_s: float) -> None:
        """At boundary ``step`` of the old view, after its closing exchange: send the last changes to all that hold this
        worker's blocks under ``next_view``, wait until they are acknowledged and until everything that ``next_view``
        gives to this worker has come (V4). Nothing is folded: exchange once more in the old view, then ``flip``.

        ``aux`` goes to the buddy under ``next_view``; a worker that leaves sends it to rank 0 instead, which finds it
        in ``aux_for_merge``. Raises PeerError or ExchangeTimeoutError; the old view can go on from ``step`` then.
        """
        deadline_s = time.monotonic() + timeout_s
        self.snapshot(step, aux)
        needs = self._needs(next_view)
        channels = {c.target.worker_id: c for c in self._preparing.values()}
        for rank, keys in needs.items():
            member = next_view.members[rank]
            found = [c for c in (channels.get(member.worker_id), self._buddy) if c is not None]
            found = [c for c in found if c.target.worker_id == member.worker_id]
            covered: set[Key] = set().union(*(c.keys for c in found))
            if not keys <= covered or not found:
                raise ProtocolError(f"{len(keys - covered)} row blocks were never copied to worker {member.worker_id}")
            for channel in found:
                self._await_current(channel, step, deadline_s)
        rank_here = next_view.rank_of(self.worker_id)
        if rank_here is None:
            with self._client(next_view.members[0].address) as client:
                send_blob(client, next_view.epoch, f"aux:{self.worker_id}", step, aux)
            return
        left_s = max(0.0, deadline_s - time.monotonic())
        self.copies.wait_for(next_view.held_by(rank_here), step, left_s)

    def _await_current(self, channel: Channel, step: int, deadline_s: float) -> None:
        with self._changed:
            while not channel.is_current(step):
                if self._is_aborted:
                    raise PeerError("the cutover was given up: this worker has parked")
                if channel.error is not None:
                    raise PeerError(f"worker {channel.target.worker_id} cannot take the last changes: {channel.error}")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise ExchangeTimeoutError(
                        f"worker {channel.target.worker_id} did not acknowledge the changes of step {step} in time; "
                        f"{len(channel.behind())} of its {len(channel.keys)} row blocks have no copy there"
                    )
                self._changed.wait(left_s)

    # ---- failure --------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Close all connections at once and end every wait (F1). Any thread. What is held stays."""
        self._is_aborted = True
        for channel in self._channels():
            channel.close()
        self._inbound.freeze()
        with self._changed:
            self._changed.notify_all()

    def park(self) -> None:
        """Stand still: nothing is sent, nothing is taken in, ownership is again that of the decided view. What
        ``holdings`` says stays true until ``roll_back``."""
        self.abort()
        self._inbound.refuse()
        self._close_channels()
        self._next_view = None
        if self._flipped_at is None:
            return
        step, self._flipped_at = self._flipped_at, None
        before = frozenset[Key]()
        if self._view is not None and self._rank is not None:
            before = frozenset(self.copies.keys_of(self._view.owned_by(self._rank)))
        self._demote(self._owned - before, step)
        for key in sorted(before - self._owned):
            # What was released, or read anew from storage, since then is no longer here to be given back.
            if self.copies.can_reach(key, step):
                self._promote(key, step, is_empty=False)

    def holdings(self) -> Held:
        """What this worker can bring back. After ``park``."""
        owned: dict[str, list[int]] = {}
        for table, block in self._owned:
            owned.setdefault(self._tables[table].name, []).append(block)
        return Held(
            snapshots=self.shelf.steps,
            owned=BlockSet.of(owned),
            copies=self.copies.versions(),
            aux=self.copies.aux_steps(),
        )

    def roll_back(self, step: int) -> None:
        """Bring own blocks and copies to ``step``; copies that cannot come there are forgotten. Repeating it does
        nothing. After ``park``, and ``expect`` of the view that is recovered: messages are taken again (F4).

        Raises ProtocolError where blocks are owned and no snapshot of ``step`` is open.
        """
        self.copies.roll_to(step)
        self.shelf.retire(above=step)
        if self._owned:
            snapshot = self.shelf.get(step)
            if snapshot is None:
                raise ProtocolError(f"no snapshot of step {step} is open; there are {self.shelf.steps}")
            self._store.rollback(snapshot.cut, step)
        else:  # no row goes back, but its steps are counted from there again
            self.count_from(step)
        self._last_snapshot = step
        self._open_again()

    def count_from(self, step: int) -> None:
        """Training goes on with the step after ``step``, whatever the store has counted before. Nothing is owned here:
        a worker may have come to a later step in a recovery that was given up, and join a run that went back further.
        """
        assert not self._owned, "owned rows go back to a snapshot"
        with self._store.cut() as cut:
            self._store.rollback(cut, step)

    def reset(self) -> None:
        """Forget snapshots, copies and blocks: everything comes from storage. After ``park`` (F4, from a checkpoint).
        ``flip`` then makes the blocks of a view, empty."""
        self.shelf.retire(above=-1)
        self.copies.forget(key for key in self._all_keys() if key not in self._owned and self._store.holds(*key))
        for key in sorted(self._owned):
            self._store.drop_block(*key)
        self._owned, self._known, self._flipped_at, self._last_snapshot = frozenset(), {}, None, -1
        self._unproven, self._view, self._rank = set(), None, None
        # Nothing is left to go back, but steps are to count from the checkpoint's again.
        with self._store.cut() as cut:
            self._store.rollback(cut, 0)
        self.copies.reset()
        self._blobs.forget_below(1 << 62)
        self._open_again()

    def _open_again(self) -> None:
        self._is_aborted = False
        self._inbound.thaw()

    # ---- shipping: recoveries and joiners -------------------------------------------------------------------------

    def ship(
        self,
        target: Member,
        epoch: int,
        step: int,
        blocks: BlockSet = NO_BLOCKS,
        *,
        dense: bytes | None = None,
        aux: Mapping[str, bytes] | None = None,
        announces_aux: Sequence[str] = (),
        is_kept: bool = False,
    ) -> None:
        """Send whole row blocks as they are now, owned or copies, and what else ``receive`` asks for; returns when all
        is acknowledged. While training stands still. A target that refuses because it is not as far yet is asked
        again until ``timeout_s`` has passed. Raises PeerError, ExchangeTimeoutError.

        ``announces_aux``: workers that send the target their aux state at ``step`` themselves, since they leave: who
        waits for ``dense`` waits for these too. ``is_kept``: the target only keeps ``aux``, as it keeps its wards'.
        """
        blobs = {f"{KEPT if is_kept else 'aux:'}{worker_id}": state for worker_id, state in (aux or {}).items()}
        if dense is not None:
            blobs["dense"] = dense
        keys = self.copies.keys_of(blocks)
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            try:
                with self._client(target.address) as client:
                    ship_once(client, epoch, step, keys, self._export, blobs, [f"aux:{w}" for w in announces_aux])
                return
            except RefusedError:
                if self._is_aborted or time.monotonic() > deadline_s:
                    raise
                with self._changed:
                    self._changed.wait(RETRY_S)

    def _export(self, key: Key) -> list[np.ndarray]:
        with self.copies.store_lock:
            return packed_block(self._store.pack_block(*key), Buffers(self._tables))

    def dense_step(self, timeout_s: float = 0.0) -> int:
        """Step of the newest dense state that has come: a joiner's first step. -1: none within ``timeout_s``. Any
        thread."""
        return self._blobs.newest_step("dense", timeout_s)

    def receive(
        self, blocks: BlockSet, step: int, *, wants_dense: bool, wants_aux: Sequence[str] = (), timeout_s: float
    ) -> Received:
        """Wait for what others ``ship`` to this worker. Raises ExchangeTimeoutError naming what is missing, PeerError
        after ``abort``."""
        names = [f"aux:{worker_id}" for worker_id in wants_aux] + (["dense"] if wants_dense else [])
        found = dict(self._inbound.receive(blocks, step, names, timeout_s))
        return Received(dense=found.pop("dense", None), aux={name[4:]: data for name, data in found.items()})

    def aux_for_merge(self, step: int) -> Mapping[str, bytes]:
        """Worker id -> aux state at ``step`` of workers that leave, or are dead, for this one to merge."""
        return {name[4:]: data for name, data in self._blobs.at(step).items() if name.startswith("aux:")}

    def held_aux(self, worker_id: str, step: int) -> bytes | None:
        """The aux state at ``step`` that this worker keeps for another."""
        return self.copies.aux(worker_id, step)

    # ---- figures --------------------------------------------------------------------------------------------------

    @property
    def unprotected_bytes(self) -> int:
        """Bytes of this rank's rows of which the buddy has no current copy (F5); 0 where the view has no buddies."""
        buddy = self._buddy
        if buddy is None:
            return 0
        return sum(self._tables[key[0]].row_bytes * self._store.num_rows(*key) for key in buddy.behind())

    def counters(self) -> dict[str, float]:
        """Totals since the start or, of channels, since the view began."""
        channels = self._channels()
        held = self.copies.counters
        return {
            "bytes_sent": sum(c.bytes_sent for c in channels),
            "bytes_received": self._inbound.server.bytes_received,
            "rounds": sum(c.counters.rounds for c in channels),
            "base_rows": sum(c.counters.base_rows for c in channels),
            "changed_rows": sum(c.counters.changed_rows for c in channels),
            "send_s": sum(c.counters.base_s + c.counters.round_s for c in channels),
            "rows_received": held.rows_received,
            "rows_folded": held.rows_folded,
            "fold_s": held.fold_s,
            "staged_bytes": self.copies.staged_bytes(),
            "refused": self._inbound.server.num_refused,
            "resent_blocks": sum(c.counters.resent for c in channels),
            "checksum_failures": held.checksum_failures,
        }

    def close(self) -> None:
        """End all threads and connections."""
        self.abort()
        self._close_channels()
        self._inbound.close()
        self.shelf.retire(above=-1)

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _channels(self) -> list[Channel]:
        return [*list(self._preparing.values()), *([self._buddy] if self._buddy is not None else [])]

    def _channel(self, target: Member, epoch: int, keys: Iterable[Key], *, has_aux: bool) -> Channel:
        return Channel(
            target,
            epoch,
            keys,
            shelf=self.shelf,
            tables=self._tables,
            connect=self._client,
            on_change=self._on_change,
            has_aux=has_aux,
        )

    def _client(self, address: str) -> TransferClient:
        return TransferClient(
            address, run=self._run, sender=self.worker_id, timeout_s=self.timeout_s, limiter=self._limiter
        )

    def _close_channels(self) -> None:
        channels = self._channels()
        self._preparing, self._buddy = {}, None
        for channel in channels:
            channel.close()
        for channel in channels:
            channel.join(self.timeout_s)

    def _on_change(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _shown(self, keys: Sequence[Key]) -> str:
        return ", ".join(f"{self._tables[table].name}/{block}" for table, block in keys[:5])

    def _all_keys(self) -> list[Key]:
        return [(t, b) for t, spec in enumerate(self._tables) for b in range(spec.num_blocks)]
