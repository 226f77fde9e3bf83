"""Transport over a torch.distributed Gloo group of its own (never the default group).

One exchange is one ``alltoall_base`` on uint8 with split sizes. What a pair of ranks sends each other beyond
``message_bytes_max`` goes point to point afterwards: only the two of them know the size, so no other rank takes part.

Gloo cannot be interrupted: ``ProcessGroupGloo.abort`` does not wake a thread that waits (torch 2.13). Shutting down the
group's sockets does, on both ends, and that is what ``abort`` does with the sockets that ``mesh_sockets`` found.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shoal.kernels.errors import ExchangeTimeoutError, PeerError
from shoal.kernels.rollcall import CLOSED, LEFT, TIMEOUT, RollCall
from shoal.kernels.transport import ByteBuffer, check_self_size, pack, padded

#: Longest single message; Gloo's and the kernel's counters are 32 bits wide in places.
MESSAGE_BYTES_MAX = 1 << 30


class GlooTransport:
    """See ``Transport``. ``group`` is used by nothing else (S11); ``sockets`` are duplicates of its connections."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        world_size: int,
        *,
        roll_call: RollCall | None = None,
        sockets: Sequence[socket.socket] = (),
        local_ranks: frozenset[int] | None = None,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.local_ranks = frozenset({rank}) if local_ranks is None else local_ranks
        self._group: dist.ProcessGroup | None = group
        self._roll_call = roll_call
        self._sockets = list(sockets)
        self._message_bytes_max = int(padded(np.int64(message_bytes_max)))
        self._send = (ByteBuffer(), ByteBuffer())
        self._recv = (ByteBuffer(), ByteBuffer())
        self._parity = 0
        self._sizes = np.zeros(world_size, np.int64)
        self._packing = pack(self._sizes, rank)
        self._works: list[Any] = []
        self._options: dict[float, dist.AllToAllOptions] = {}
        self._broken: str | None = None
        self._lock = threading.Lock()

    def send_buffers(self, sizes: np.ndarray) -> np.ndarray:
        self._check_usable("send_buffers")
        self._parity ^= 1
        self._sizes = np.array(sizes, np.int64)
        self._packing = pack(self._sizes, self.rank)
        base = self._send[self._parity].reserve(self._packing.num_total)
        return self._packing.offsets + base

    def exchange(self, recv_sizes: np.ndarray, *, timeout_s: float, operation: str = "exchange") -> np.ndarray:
        self.start(recv_sizes, timeout_s=timeout_s, operation=operation)
        return self.finish()

    def start(self, recv_sizes: np.ndarray, *, timeout_s: float, operation: str) -> None:
        """First half of ``exchange``: messages are under way when it returns."""
        self._check_usable(operation)
        check_self_size(self._sizes, recv_sizes, self.rank, operation)
        sent, received = self._packing, pack(np.asarray(recv_sizes, np.int64), self.rank)
        self._recv[self._parity].reserve(received.num_wire)
        self._pending = (received.offsets, timeout_s, operation)
        self._works = []
        out = self._recv[self._parity].tensor[: received.num_wire]
        src = self._send[self._parity].tensor[: sent.num_wire]
        try:
            if max(received.num_wire, sent.num_wire) <= self._message_bytes_max:
                self._all_to_all(out, src, received.splits, sent.splits, timeout_s)
            else:
                self._all_to_all_cut(out, src, np.array(received.splits), np.array(sent.splits), timeout_s)
        except RuntimeError as error:
            raise self._failure(error, operation, timeout_s) from error

    def finish(self) -> np.ndarray:
        """Second half of ``exchange``: wait; addresses of what was received."""
        offsets, timeout_s, operation = self._pending
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._failure(error, operation, timeout_s) from error
        finally:
            self._works = []
        addresses = offsets + self._recv[self._parity].address
        addresses[self.rank] = self._packing.offsets[self.rank] + self._send[self._parity].address
        return addresses

    def abandon(self, error: BaseException) -> None:
        """Give up an exchange that was started, because of ``error`` elsewhere: tell why, abort, await its end."""
        if self._roll_call is not None:
            reason = str(error.args[0]) if error.args else str(error)
            self._roll_call.sign(TIMEOUT if isinstance(error, ExchangeTimeoutError) else LEFT, reason)
        self.abort(str(error))
        for work in self._works:
            with contextlib.suppress(RuntimeError):
                work.wait()
        self._works = []

    def abort(self, reason: str = "aborted") -> None:
        with self._lock:
            self._broken = self._broken or reason
            for connection in self._sockets:
                _shut(connection)

    def close(self) -> None:
        self.abort("closed")
        with self._lock:
            for connection in self._sockets:
                connection.close()
            self._sockets = []
            self._group = None
        self._send = (ByteBuffer(), ByteBuffer())
        self._recv = (ByteBuffer(), ByteBuffer())

    def _all_to_all(
        self, out: torch.Tensor, src: torch.Tensor, out_splits: list[int], in_splits: list[int], timeout_s: float
    ) -> None:
        options = self._options.get(timeout_s)
        if options is None:
            options = self._options[timeout_s] = dist.AllToAllOptions()
            options.timeout = timedelta(seconds=timeout_s)
        assert self._group is not None
        self._works.append(self._group.alltoall_base(out, src, out_splits, in_splits, options))

    def _all_to_all_cut(
        self, out: torch.Tensor, src: torch.Tensor, wire: np.ndarray, sent: np.ndarray, timeout_s: float
    ) -> None:
        """The first ``message_bytes_max`` of each message in the collective, the rest in pieces between its ends."""
        limit = self._message_bytes_max
        starts_out, starts_in = np.cumsum(wire) - wire, np.cumsum(sent) - sent
        first_out, first_in = np.minimum(wire, limit), np.minimum(sent, limit)
        heads = [src[int(s) : int(s + n)] for s, n in zip(starts_in, first_in)]
        packed = torch.empty(int(first_out.sum()), dtype=torch.uint8)
        self._all_to_all(packed, torch.cat(heads), first_out.tolist(), first_in.tolist(), timeout_s)
        self._works.pop().wait()
        at = 0
        for start, size in zip(starts_out.tolist(), first_out.tolist()):
            out[start : start + size] = packed[at : at + size]
            at += size
        assert self._group is not None
        for peer in range(self.world_size):
            for piece, begin in enumerate(range(limit, int(wire[peer]), limit)):
                start, end = int(starts_out[peer]) + begin, int(starts_out[peer]) + min(begin + limit, int(wire[peer]))
                self._works.append(self._group.recv([out[start:end]], peer, piece))
            for piece, begin in enumerate(range(limit, int(sent[peer]), limit)):
                start, end = int(starts_in[peer]) + begin, int(starts_in[peer]) + min(begin + limit, int(sent[peer]))
                self._works.append(self._group.send([src[start:end]], peer, piece))

    def _failure(self, error: RuntimeError, operation: str, timeout_s: float) -> PeerError:
        """Release the peers first (F1), then find out who is missing."""
        aborted = self._broken
        is_timeout = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        self.abort(f"an earlier exchange failed ({operation})")
        if aborted is not None:
            return PeerError(f"{operation} failed on rank {self.rank}: the transport was aborted here: {aborted}")
        if self._roll_call is not None:
            return self._roll_call.explain(operation, TIMEOUT if is_timeout else CLOSED, timeout_s, str(error))
        return RollCall(None, self.rank, self.world_size).explain(
            operation, TIMEOUT if is_timeout else CLOSED, timeout_s, str(error)
        )

    def _check_usable(self, operation: str) -> None:
        if self._broken is not None or self._group is None:
            raise PeerError(f"{operation} on rank {self.rank}: the transport was aborted here: {self._broken}")


def socket_inodes() -> dict[int, int]:
    """File descriptor -> inode of every socket this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.stat(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[int(name)] = status.st_ino
    return found


def mesh_sockets(store: Any, rank: int, world_size: int, before: dict[int, int]) -> list[socket.socket]:
    """Duplicates of the connections that a Gloo group, formed since ``before`` was taken, holds to its peers.

    Torch does not show them. A connection is the group's if a peer lists the same one from its end (through ``store``),
    so a socket that another thread opened meanwhile is not taken for one. Behind address translation none is found,
    and ``abort`` then only takes effect when an operation times out.
    """
    mine: dict[tuple[str, str], socket.socket] = {}
    for descriptor, inode in socket_inodes().items():
        if before.get(descriptor) == inode:
            continue
        try:
            duplicate = socket.socket(fileno=os.dup(descriptor))
        except OSError:
            continue
        if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
            duplicate.close()  # the address of a Unix socket is a path
            continue
        try:
            mine[_label(duplicate.getsockname()), _label(duplicate.getpeername())] = duplicate
        except (OSError, TypeError, IndexError):
            duplicate.close()
    store.set(f"sockets/{rank}", json.dumps(list(mine)))
    theirs: set[tuple[str, str]] = set()
    for peer in range(world_size):
        if peer != rank:
            theirs.update((there, here) for here, there in json.loads(store.get(f"sockets/{peer}")))
    for ends in [ends for ends in mine if ends not in theirs]:
        mine.pop(ends).close()
    return list(mine.values())


def _label(address: Any) -> str:
    return f"{address[0]}|{int(address[1])}"


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
