"""What moves bytes between the ranks of a view: the Transport protocol, and the loopback for a world of one.

A transport knows nothing of frames, tables or steps. One exchange is one all-to-all of byte messages whose sizes both
sides already know (PROTOCOLS S1): ``send_buffers`` hands out writable memory, the caller fills it, ``exchange`` swaps.
Messages are padded to 64 bytes on the wire; a padded size is a pure function of the size, so both ends agree on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from shoal.kernels.errors import PeerError, ProtocolError

#: Every message begins at a multiple of this many bytes and occupies a multiple of it on the wire.
ALIGNMENT_BYTES = 64


@runtime_checkable
class Transport(Protocol):
    """One all-to-all of bytes among ``world_size`` ranks, called from one thread at a time (S11)."""

    rank: int
    world_size: int
    #: Ranks whose messages do not cross a host boundary, this rank included.
    local_ranks: frozenset[int]

    def send_buffers(self, sizes: np.ndarray) -> np.ndarray:
        """Addresses (int64 [W], 64-byte aligned, writable) of this rank's next messages of ``sizes`` (int64 [W]) bytes.

        Valid until the matching ``exchange`` returns. A size of 0 still gives an address. Raises CapacityError when
        memory cannot be had and PeerError after ``abort``.
        """
        ...

    def exchange(self, recv_sizes: np.ndarray, *, timeout_s: float, operation: str = "exchange") -> np.ndarray:
        """Swap messages; addresses (int64 [W]) of the received ones, valid until the second-next ``send_buffers``.

        ``recv_sizes`` (int64 [W]) must be what the peers send; the message to oneself is not copied. ``operation``
        names the exchange in errors. Raises ExchangeTimeoutError naming the ranks that are missing, PeerError when a
        peer died or aborted. After either the transport is broken and its peers are released (F1).
        """
        ...

    def abort(self, reason: str = "aborted") -> None:
        """Break the transport from any thread: a blocked ``exchange`` raises PeerError, peers are released."""
        ...

    def close(self) -> None:
        """Release memory, file descriptors and threads; idempotent. Not while another thread is in ``exchange``."""
        ...


def padded(sizes: np.ndarray) -> np.ndarray:
    """Sizes on the wire: rounded up to ALIGNMENT_BYTES."""
    return (sizes + (ALIGNMENT_BYTES - 1)) & ~(ALIGNMENT_BYTES - 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Packing:
    """Messages back to back in one buffer: the peers' in rank order, then the one to oneself, which never travels."""

    #: Bytes on the wire to or from each rank; 0 for oneself.
    splits: list[int]
    #: int64 [W]: where each message begins.
    offsets: np.ndarray
    #: Bytes that travel, and bytes of the whole buffer.
    num_wire: int
    num_total: int


def pack(sizes: np.ndarray, rank: int) -> Packing:
    """The packing of messages of ``sizes`` (int64 [W]). Plain integers: numpy costs more for the usual few ranks."""
    splits, offsets, at = [], [], 0
    for size in sizes.tolist():
        offsets.append(at)
        splits.append((size + (ALIGNMENT_BYTES - 1)) & -ALIGNMENT_BYTES)
        at += splits[-1]
    own = splits[rank]
    splits[rank] = 0
    for later in range(rank + 1, len(offsets)):
        offsets[later] -= own
    offsets[rank] = at - own
    return Packing(splits, np.array(offsets, np.int64), at - own, at)


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 2`` or ``ranks 2, 5``, for error messages; at most 16 are listed."""
    listed = sorted(ranks)
    shown = ", ".join(str(rank) for rank in listed[:16]) + (f" and {len(listed) - 16} more" if len(listed) > 16 else "")
    return f"rank{'s' if len(listed) != 1 else ''} {shown}"


class ByteBuffer:
    """Memory that grows by replacement and never shrinks; ``address`` is 64-byte aligned."""

    def __init__(self, *, is_pinned: bool = False) -> None:
        self._is_pinned = is_pinned
        self.tensor = torch.empty(0, dtype=torch.uint8)
        self.address = 0

    def reserve(self, num_bytes: int) -> int:
        """The address of at least ``num_bytes`` bytes; earlier contents are lost when it has to grow."""
        if num_bytes > self.tensor.numel() or self.address == 0:
            capacity = max(1 << 16, num_bytes + num_bytes // 2)
            raw = torch.empty(capacity + ALIGNMENT_BYTES, dtype=torch.uint8, pin_memory=self._is_pinned)
            skip = -raw.data_ptr() % ALIGNMENT_BYTES
            self.tensor = raw[skip : skip + capacity]
            self.address = self.tensor.data_ptr()
        return self.address


class LoopbackTransport:
    """The transport of a world of one: the message to oneself is received where it was written."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.local_ranks = frozenset({0})
        self._buffers = (ByteBuffer(), ByteBuffer())
        self._parity = 0
        self._sizes = np.zeros(1, np.int64)
        self._abort_reason: str | None = None

    def send_buffers(self, sizes: np.ndarray) -> np.ndarray:
        self._check_usable()
        self._parity ^= 1
        self._sizes = np.array(sizes, np.int64)
        return np.array([self._buffers[self._parity].reserve(int(sizes[0]))], np.int64)

    def exchange(self, recv_sizes: np.ndarray, *, timeout_s: float, operation: str = "exchange") -> np.ndarray:
        self._check_usable()
        check_self_size(self._sizes, recv_sizes, 0, operation)
        return np.array([self._buffers[self._parity].address], np.int64)

    def abort(self, reason: str = "aborted") -> None:
        self._abort_reason = reason

    def close(self) -> None:
        self._buffers = (ByteBuffer(), ByteBuffer())

    def _check_usable(self) -> None:
        if self._abort_reason is not None:
            raise PeerError(f"the transport was aborted by this rank: {self._abort_reason}")


def check_self_size(send_sizes: np.ndarray, recv_sizes: np.ndarray, rank: int, operation: str) -> None:
    """A rank's message to itself has one size: it is never copied. Raises ProtocolError."""
    if send_sizes[rank] != recv_sizes[rank]:
        raise ProtocolError(
            f"{operation}: rank {rank} sends itself {send_sizes[rank]} bytes but expects {recv_sizes[rank]}"
        )
