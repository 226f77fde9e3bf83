"""Transport of rows and gradients over NCCL: payload staged through pinned host memory to a CUDA all-to-all.

Headers and ids stay on Gloo or shared memory, where the host prepares them a step ahead (DESIGN section 5), so the
sizes are always known here and nothing waits on the device but the copy back. Chosen by configuration only.
NCCL does not notice a dead peer: an exchange that passes its deadline aborts the communicator, which releases this
rank; the other ranks have deadlines of their own.
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shoal.kernels.errors import ExchangeTimeoutError, PeerError
from shoal.kernels.transport import ByteBuffer, Packing, check_self_size, pack


class NcclTransport:
    """See ``Transport``. One CUDA device per rank; ``group`` is a NCCL group of its own.

    On ``device`` cpu and a Gloo group the same staging runs without a GPU, which is how it is tested.
    """

    def __init__(self, group: Any, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size = rank, world_size
        self.local_ranks: frozenset[int] = frozenset({rank})
        self._group, self._device = group, device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._send = (ByteBuffer(is_pinned=is_cuda), ByteBuffer(is_pinned=is_cuda))
        self._recv = (ByteBuffer(is_pinned=is_cuda), ByteBuffer(is_pinned=is_cuda))
        self._parity = 0
        self._sizes = np.zeros(world_size, np.int64)
        self._packing = pack(self._sizes, rank)
        self._broken: str | None = None

    @classmethod
    def form(cls, store: Any, rank: int, world_size: int, *, timeout_s: float) -> NcclTransport:
        """A NCCL group over all ranks on each process's current device."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        return cls(group, rank, world_size, torch.device("cuda", torch.cuda.current_device()))

    def send_buffers(self, sizes: np.ndarray) -> np.ndarray:
        self._check_usable("send_buffers")
        self._parity ^= 1
        self._sizes = np.array(sizes, np.int64)
        self._packing = pack(self._sizes, self.rank)
        return self._packing.offsets + self._send[self._parity].reserve(self._packing.num_total)

    def exchange(self, recv_sizes: np.ndarray, *, timeout_s: float, operation: str = "exchange") -> np.ndarray:
        self._check_usable(operation)
        check_self_size(self._sizes, recv_sizes, self.rank, operation)
        received = pack(np.asarray(recv_sizes, np.int64), self.rank)
        base = self._recv[self._parity].reserve(received.num_wire)
        try:
            self._swap(received, self._packing, operation, timeout_s)
        except RuntimeError as error:
            if isinstance(error, PeerError):
                raise
            self.abort(str(error))
            raise PeerError(f"{operation} failed on rank {self.rank} of {self.world_size}: {error}") from error
        addresses = received.offsets + base
        addresses[self.rank] = self._packing.offsets[self.rank] + self._send[self._parity].address
        return addresses

    def abort(self, reason: str = "aborted") -> None:
        if self._broken is None:
            self._broken = reason
            self._group.abort()

    def close(self) -> None:
        if self._group is not None:
            self.abort("closed")
            self._group = None
            self._send = self._recv = (ByteBuffer(), ByteBuffer())

    def _swap(self, received: Packing, sent: Packing, operation: str, timeout_s: float) -> None:
        host_in = self._send[self._parity].tensor[: sent.num_wire]
        host_out = self._recv[self._parity].tensor[: received.num_wire]
        with contextlib.ExitStack() as scope:
            if self._stream is not None:
                scope.enter_context(torch.cuda.device(self._device))
                scope.enter_context(torch.cuda.stream(self._stream))
            src = host_in.to(self._device, non_blocking=True)
            out = torch.empty(received.num_wire, dtype=torch.uint8, device=self._device)
            # On CUDA this only makes the stream wait; the host goes on and watches the clock.
            self._group.alltoall_base(out, src, received.splits, sent.splits).wait()
            host_out.copy_(out, non_blocking=True)
            if self._stream is None:
                return
            done = torch.cuda.Event()
            done.record()
        deadline = time.monotonic() + timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                self.abort(f"{operation} passed its deadline")
                raise ExchangeTimeoutError(
                    f"{operation} on rank {self.rank} of {self.world_size}: NCCL did not finish within {timeout_s:g} s"
                )
            time.sleep(2e-5)

    def _check_usable(self, operation: str) -> None:
        if self._broken is not None:
            raise PeerError(f"{operation} on rank {self.rank}: the transport was aborted here: {self._broken}")
