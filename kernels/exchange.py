"""Exchanges of one epoch: headers that all ranks agree on first, then frames whose sizes the headers announced.

Invariants (PROTOCOLS S1, S2, S3, S6, S10, S11):

1. Nothing whose size varies is exchanged before W headers agreed; a disagreement raises the same ProtocolError on all
   ranks (it is judged on the W headers, which all ranks hold).
2. ``committed`` rises only when a completed exchange had every rank's ``applied`` at or above it.
3. Every rank sees every rank's flags and status of an exchange, and therefore acts alike.
4. The number of collectives is counted by kind; one ``header`` or one ``round`` is one collective.
"""

from __future__ import annotations

import dataclasses
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.kernels import _shm, faults  # type: ignore[attr-defined]
from shoal.kernels.errors import BadIdError, CapacityError, DataError, NonFiniteError, PeerError, ProtocolError
from shoal.kernels.frame import (
    FRAME_FIELDS,
    FRAME_MAGIC,
    HEADER_BYTES,
    HEADER_DTYPE,
    HEADER_MAGIC,
    NUMBERS_MAX,
    PREFIX_DTYPE,
    SECTION_BYTES_MAX,
    SECTIONS_MAX,
    SECTIONS_OFFSET,
    Flag,
    Identity,
    Kind,
    Status,
    describe_bad_sections,
    describe_disagreement,
    encode_detail,
)
from shoal.kernels.transport import Transport

#: Kinds whose bytes are rows or gradients: they take the payload transport (NCCL) where there is one.
PAYLOAD_KINDS = frozenset({Kind.VALUES, Kind.GRADIENTS, Kind.DENSE})

#: The varying fields from ``kind`` to ``denominator``, and the numbers.
_HEADER_FIXED = struct.Struct("<8qQ2qd")
_HEADER_FIXED_OFFSET = HEADER_DTYPE.fields["kind"][1]  # type: ignore[index]
_HEADER_NUMBERS = struct.Struct(f"<{NUMBERS_MAX}d")
_HEADER_NUMBERS_OFFSET = HEADER_DTYPE.fields["numbers"][1]  # type: ignore[index]
_PREFIX = struct.Struct("<HHIiqq")
_SEQUENCE = struct.Struct("<I")
_SEQUENCE_OFFSET = PREFIX_DTYPE.fields["sequence"][1]  # type: ignore[index]
_PREFIX_OFFSET = PREFIX_DTYPE.fields["kind"][1]  # type: ignore[index]

_STATUS_ERRORS = {
    Status.BAD_ID: BadIdError,
    Status.DATA: DataError,
    Status.CAPACITY: CapacityError,
    Status.NON_FINITE: NonFiniteError,
    Status.INTERNAL: PeerError,
}


@dataclasses.dataclass(slots=True)
class KindCount:
    """Totals of one kind of exchange on this rank. Bytes exclude the message to oneself; seconds include waiting."""

    num_collectives: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_sent_across_hosts: int = 0
    bytes_received_across_hosts: int = 0
    seconds: float = 0.0
    last_s: float = 0.0


@dataclasses.dataclass(slots=True, frozen=True)
class Headers:
    """The W headers of one exchange, agreed. Arrays are indexed by rank and equal on all ranks, but for sections."""

    raw: np.ndarray
    #: OR of all ranks' flags (S3).
    flags: Flag
    #: Sum of all ranks' loss denominators, in rank order: the same bits on every rank.
    denominator: float
    #: int64 [W]; all zero in a healthy exchange.
    statuses: np.ndarray
    #: int64 [S, W]: bytes that each rank announces to send to this one, by section.
    section_bytes: np.ndarray

    @property
    def applied(self) -> np.ndarray:
        return self.raw["applied"]

    @property
    def acked(self) -> np.ndarray:
        return self.raw["acked"]

    @property
    def control(self) -> np.ndarray:
        """int64 [W]: every rank's control word."""
        return self.raw["control"]

    @property
    def denominators(self) -> np.ndarray:
        return self.raw["denominator"]

    @property
    def numbers(self) -> np.ndarray:
        """float64 [NUMBERS_MAX]: the ranks' free numbers, summed in rank order."""
        total = self.raw["numbers"][0].copy()
        for values in self.raw["numbers"][1:]:
            total += values
        return total

    @property
    def details(self) -> list[str]:
        return [bytes(detail).decode(errors="replace") for detail in self.raw["detail"]]


class Round:
    """One variable-size exchange: write the sections at ``send_addresses``, then ``run`` once."""

    __slots__ = (
        "_exchange",
        "_in_offsets",
        "_in_sections",
        "_in_sizes",
        "_kind",
        "_out_sections",
        "_out_sizes",
        "_step",
        "_transport",
        "bases",
        "send_addresses",
        "statuses",
    )

    def __init__(self, exchange: Exchange, kind: Kind, step: int, out_SW: np.ndarray, in_SW: np.ndarray) -> None:
        self._exchange, self._kind, self._step = exchange, kind, step
        self._transport = exchange.transport_of(kind)
        self._out_sections = np.ascontiguousarray(out_SW, np.int64)
        self._in_sections = np.ascontiguousarray(in_SW, np.int64)
        world_size = exchange.identity.world_size
        out_offsets, self._in_offsets = np.empty_like(self._out_sections), np.empty_like(self._in_sections)
        self._out_sizes, self._in_sizes = np.empty(world_size, np.int64), np.empty(world_size, np.int64)
        _shm.frame_layout(self._out_sections, out_offsets, self._out_sizes)
        _shm.frame_layout(self._in_sections, self._in_offsets, self._in_sizes)
        self.bases = self._transport.send_buffers(self._out_sizes)
        #: int64 [S, W]: where to write each section, 64-byte aligned.
        self.send_addresses: np.ndarray = out_offsets + self.bases
        #: int64 [W] after ``run``.
        self.statuses: np.ndarray = np.zeros(world_size, np.int64)

    def run(self, status: int = Status.OK, timeout_s: float | None = None) -> np.ndarray:
        """Exchange; addresses (int64 [S, W]) of the received sections, 64-byte aligned, valid as in ``Transport``.

        Raises ProtocolError when a frame is not what the headers announced, else what the transport raises. A non-zero
        status of any rank is not an error here: see ``Exchange.settle``.
        """
        return self._exchange.run_round(self, status, timeout_s)


class Exchange:
    """All exchanges of one rank in one epoch. Used by one thread at a time (S11)."""

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        *,
        timeout_s: float = 10.0,
        payload_transport: Transport | None = None,
    ) -> None:
        assert (transport.rank, transport.world_size) == (identity.rank, identity.world_size)
        self.identity = identity
        #: Deadline of each exchange, in seconds.
        self.timeout_s = timeout_s
        #: Last step this rank has applied; the caller sets it right after applying (S2).
        self.applied = -1
        #: Last snapshot this rank has acknowledged (F3).
        self.acked = -1
        #: Highest step known to be applied by all ranks.
        self.committed = -1
        #: Highest snapshot known to be acknowledged by all ranks.
        self.protected = -1
        self.counts: dict[Kind, KindCount] = {}
        self._transport = transport
        self._payload_transport = payload_transport or transport
        self._sequence = 0
        self._busy = threading.Lock()
        self._header = np.zeros(1, HEADER_DTYPE)
        self._header_bytes: Any = self._header.view(np.uint8)
        self._prefix = np.zeros(1, PREFIX_DTYPE)
        self._prefix_bytes: Any = self._prefix.view(np.uint8)
        self._header_sizes = np.full(identity.world_size, HEADER_BYTES, np.int64)
        self._has_detail = False
        self._open_round: Round | None = None
        self._is_across = np.array([rank not in transport.local_ranks for rank in range(identity.world_size)])
        #: Whether ranks are on several hosts; equal on all ranks.
        self.crosses_hosts = bool(self._is_across.any())
        self._no_sections = np.zeros((0, identity.world_size), np.int64)
        self._applied_of = np.empty(identity.world_size, np.int64)
        self.rebind(identity)

    def rebind(self, identity: Identity) -> None:
        """Take another plan hash or table count into use, at a boundary; run, epoch and ranks stay."""
        old = self.identity
        assert (old.run, old.epoch, old.rank, old.world_size) == (
            identity.run,
            identity.epoch,
            identity.rank,
            identity.world_size,
        )
        self.identity = identity
        for name, value in (
            ("magic", HEADER_MAGIC),
            ("run", identity.run),
            ("epoch", identity.epoch),
            ("world_size", identity.world_size),
            ("plan_hash", identity.plan_hash),
            ("num_tables", identity.num_tables),
            ("rank", identity.rank),
        ):
            self._header[name] = value
        self._prefix["magic"] = FRAME_MAGIC
        self._prefix["epoch"] = identity.epoch & 0xFFFFFFFF
        self._prefix["plan_hash"] = identity.plan_hash
        self._prefix["sender"] = identity.rank

    def header(
        self,
        kind: Kind,
        step: int,
        *,
        micro_batch: int = 0,
        sections: np.ndarray | None = None,
        denominator: float = 0.0,
        numbers: Sequence[float] = (),
        flags: int = 0,
        control: int = 0,
        status: int = Status.OK,
        detail: str = "",
        timeout_s: float | None = None,
    ) -> Headers:
        """One fixed-size all-to-all of headers (S1).

        ``sections`` (int64 [S, W], S <= SECTIONS_MAX) announces the bytes this rank will send to each rank. ``flags``
        are wishes (``Flag``), ``control`` a free word, ``detail`` a sentence about a non-zero ``status``. Raises
        ProtocolError, the same on all ranks, when any field they must agree on differs.
        """
        sections = self._no_sections if sections is None else sections
        assert self._open_round is None, "a round is open: its send memory would be lost"
        self._sequence += 1
        bases = self._transport.send_buffers(self._header_sizes)
        self.write_header(
            bases,
            kind,
            step,
            sections,
            micro_batch=micro_batch,
            denominator=denominator,
            numbers=numbers,
            flags=flags,
            control=control,
            status=status,
            detail=detail,
        )
        addresses = self._swap(self._transport, kind, step, self._header_sizes, self._header_sizes, timeout_s)
        return self.read_header(addresses, kind, step, sections.shape[0])

    def write_header(
        self,
        addresses: np.ndarray,
        kind: Kind,
        step: int,
        sections: np.ndarray,
        *,
        micro_batch: int = 0,
        denominator: float = 0.0,
        numbers: Sequence[float] = (),
        flags: int = 0,
        control: int = 0,
        status: int = Status.OK,
        detail: str = "",
    ) -> None:
        """Write a header for each rank (int64 [W]); in a section of a round it is as good as in an exchange of its own.

        Arguments as of ``header``; the section has HEADER_BYTES for every rank, this one included.
        """
        sections = np.ascontiguousarray(sections, np.int64)
        assert sections.shape[0] <= SECTIONS_MAX and sections.shape[1] == self.identity.world_size
        assert len(numbers) <= NUMBERS_MAX
        # One packing of all varying fields: a numpy record costs a microsecond per field.
        _HEADER_FIXED.pack_into(
            self._header_bytes,
            _HEADER_FIXED_OFFSET,
            kind,
            step,
            micro_batch,
            sections.shape[0],
            self._sequence,
            self.identity.rank,
            self.applied,
            self.acked,
            flags,
            control,
            status,
            denominator,
        )
        _HEADER_NUMBERS.pack_into(
            self._header_bytes, _HEADER_NUMBERS_OFFSET, *numbers, *(0.0,) * (NUMBERS_MAX - len(numbers))
        )
        if detail or self._has_detail:
            self._header["detail"] = encode_detail(detail)
            self._has_detail = bool(detail)
        _shm.header_write(np.ascontiguousarray(addresses), self._header_bytes, SECTIONS_OFFSET, sections)

    def read_header(self, addresses: np.ndarray, kind: Kind, step: int, num_sections: int) -> Headers:
        """The W headers received at ``addresses`` (int64 [W]). Raises as ``header`` does."""
        world_size = self.identity.world_size
        raw = np.empty((world_size, HEADER_BYTES // 8), np.int64)
        section_bytes = np.empty((num_sections, world_size), np.int64)
        is_agreed, has_bad_sections, applied, acked, all_flags, total = _shm.header_read(
            np.ascontiguousarray(addresses), SECTION_BYTES_MAX, raw, section_bytes
        )
        records = raw.view(HEADER_DTYPE)[:, 0]
        if not is_agreed:
            raise ProtocolError(f"{_operation(kind, step)}: {describe_disagreement(records)}")
        if has_bad_sections:
            raise ProtocolError(f"{_operation(kind, step)}: {describe_bad_sections(section_bytes)}")
        self.committed = max(self.committed, applied)
        self.protected = max(self.protected, acked)
        return Headers(records, Flag(all_flags), total, records["status"], section_bytes)

    def round(self, kind: Kind, step: int, out_sections: np.ndarray, in_sections: np.ndarray) -> Round:
        """Open one variable-size exchange of frames (S10).

        ``out_sections`` and ``in_sections`` are int64 [S, W]: bytes sent to and expected from each rank. The column of
        this rank itself must agree in both; it is not copied. Sizes must come from headers that agreed.
        """
        assert self._open_round is None, "another round is open: its send memory would be lost"
        self._open_round = Round(self, kind, step, out_sections, in_sections)
        return self._open_round

    def close_step(self, step: int, *, flags: int = 0, control: int = 0, timeout_s: float | None = None) -> Headers:
        """Header-only closing exchange: afterwards ``step`` is committed if every rank had applied it (S2)."""
        return self.header(Kind.CLOSE, step, flags=flags, control=control, timeout_s=timeout_s)

    def settle(self, step: int, statuses: np.ndarray, status: int = Status.OK, detail: str = "") -> None:
        """Raise the same typed error on all ranks if any rank's status of an exchange is not OK; else do nothing.

        Every rank calls it with the statuses of the same exchange and its own status and detail; the details travel in
        one more header exchange, which takes place only when there is an error.
        """
        if not statuses.any():
            return
        headers = self.header(Kind.DETAILS, step, status=status, detail=detail)
        raise_for_status(statuses, headers.details, step)

    def transport_of(self, kind: Kind) -> Transport:
        return self._payload_transport if kind in PAYLOAD_KINDS else self._transport

    @property
    def has_payload_transport(self) -> bool:
        """Whether rows and gradients take another transport than ids."""
        return self._payload_transport is not self._transport

    def num_collectives(self) -> int:
        """Collectives of all kinds so far."""
        return sum(count.num_collectives for count in self.counts.values())

    def run_round(self, open_round: Round, status: int, timeout_s: float | None) -> np.ndarray:
        """The body of ``Round.run``."""
        r = open_round
        assert self._open_round is r, "a round runs once, before any other exchange is opened"
        self._open_round = None
        self._sequence += 1
        epoch = self.identity.epoch & 0xFFFFFFFF
        _PREFIX.pack_into(
            self._prefix_bytes,
            _PREFIX_OFFSET,
            r._kind,
            r._out_sections.shape[0],
            epoch,
            status,
            r._step,
            self.applied,
        )
        _SEQUENCE.pack_into(self._prefix_bytes, _SEQUENCE_OFFSET, self._sequence & 0xFFFFFFFF)
        _shm.frame_write(self._prefix_bytes, r.bases, r._out_sections, r._out_sizes)
        addresses = self._swap(r._transport, r._kind, r._step, r._out_sizes, r._in_sizes, timeout_s)
        rank, field, got, expected = _shm.frame_check(
            self._prefix_bytes, addresses, r._in_sections, r._in_sizes, r.statuses, self._applied_of
        )
        if rank >= 0:
            raise ProtocolError(
                f"{_operation(r._kind, r._step)}: the frame from rank {rank} has {FRAME_FIELDS[field]} {got}, "
                f"this rank ({self.identity.rank}) expects {expected}"
            )
        self.committed = max(self.committed, int(self._applied_of.min()))
        return r._in_offsets + addresses

    def _swap(
        self,
        transport: Transport,
        kind: Kind,
        step: int,
        send_sizes: np.ndarray,
        recv_sizes: np.ndarray,
        timeout_s: float | None,
    ) -> np.ndarray:
        assert self._busy.acquire(blocking=False), "two threads use one Exchange (S11)"
        try:
            faults.reach("wire.exchange")
            begin = time.perf_counter()
            deadline_s = self.timeout_s if timeout_s is None else timeout_s
            addresses = transport.exchange(recv_sizes, timeout_s=deadline_s, operation=_operation(kind, step))
            self._count(kind, send_sizes, recv_sizes, time.perf_counter() - begin)
            return addresses
        finally:
            self._busy.release()

    def _count(self, kind: Kind, send_sizes: np.ndarray, recv_sizes: np.ndarray, seconds: float) -> None:
        count = self.counts.get(kind)
        if count is None:
            count = self.counts[kind] = KindCount()
        count.num_collectives += 1
        count.bytes_sent += int(send_sizes.sum() - send_sizes[self.identity.rank])
        count.bytes_received += int(recv_sizes.sum() - recv_sizes[self.identity.rank])
        if self.crosses_hosts:
            count.bytes_sent_across_hosts += int(send_sizes[self._is_across].sum())
            count.bytes_received_across_hosts += int(recv_sizes[self._is_across].sum())
        count.seconds += seconds
        count.last_s = seconds


def raise_for_status(statuses: np.ndarray, details: Sequence[str], step: int) -> None:
    """Raise the typed error of the lowest failing rank, listing all of them; the same on every rank."""
    failed = [int(rank) for rank in np.nonzero(statuses)[0]]
    if not failed:
        return
    first = int(statuses[failed[0]])
    error = _STATUS_ERRORS.get(Status(first), PeerError) if first in Status.__members__.values() else PeerError
    lines = [f"rank {rank}: {details[rank] or _status_name(int(statuses[rank]))}" for rank in failed[:8]]
    more = f" (and {len(failed) - 8} more ranks)" if len(failed) > 8 else ""
    raise error(f"step {step} was not applied on any rank. {'; '.join(lines)}{more}")


def _status_name(status: int) -> str:
    return Status(status).name if status in Status.__members__.values() else f"status {status}"


def _operation(kind: Kind, step: int) -> str:
    return f"exchange {Kind(kind).name} of step {step}"
