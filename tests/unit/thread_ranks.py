"""Ranks as threads of one process, with memory as the network: for tests of what runs over a Transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.kernels.transport import ByteBuffer, check_self_size, pack


class Switch:
    """What the transports of one world share."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=30)
        #: What each rank sends: (addresses, sizes).
        self.sent: list[tuple[np.ndarray, np.ndarray]] = [(np.zeros(0), np.zeros(0))] * world_size


class ThreadTransport:
    """See ``Transport``. What is too old to be read is overwritten, so that who reads it anyway is found out."""

    def __init__(self, switch: Switch, rank: int, world_size: int, local_ranks: frozenset[int] | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.local_ranks = frozenset({rank}) if local_ranks is None else local_ranks
        self._switch = switch
        self._send, self._recv = [ByteBuffer(), ByteBuffer()], [ByteBuffer(), ByteBuffer()]
        self._turn = 0

    def send_buffers(self, sizes: np.ndarray) -> np.ndarray:
        self._turn ^= 1
        self._recv[self._turn].tensor.fill_(0xCD)
        self._sizes = np.array(sizes, np.int64)
        packing = pack(self._sizes, self.rank)
        return packing.offsets + self._send[self._turn].reserve(packing.num_total)

    def exchange(self, recv_sizes: np.ndarray, *, timeout_s: float, operation: str = "exchange") -> np.ndarray:
        check_self_size(self._sizes, recv_sizes, self.rank, operation)
        base = pack(self._sizes, self.rank).offsets + self._send[self._turn].address
        self._switch.sent[self.rank] = (base, self._sizes)
        self._switch.barrier.wait()
        packing = pack(np.asarray(recv_sizes, np.int64), self.rank)
        memory = self._recv[self._turn]
        addresses = packing.offsets + memory.reserve(packing.num_total)
        for peer, (sent, sizes) in enumerate(self._switch.sent):
            assert sizes[self.rank] == recv_sizes[peer], f"{operation}: {peer} -> {self.rank}"
            if peer == self.rank:
                addresses[peer] = base[self.rank]
                continue
            source = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_ubyte * int(sizes[self.rank])).from_address(
                int(sent[self.rank])))
            at = int(addresses[peer] - memory.address)
            memory.tensor.numpy()[at : at + len(source)] = source
        self._switch.barrier.wait()
        return addresses

    def abort(self, reason: str = "aborted") -> None:
        self._switch.barrier.abort()

    def close(self) -> None:
        return


def run_ranks(world_size: int, body: Callable[[int], Any]) -> list[Any]:
    """``body(rank)`` in a thread per rank; their results in rank order. The first error is raised."""
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except threading.BrokenBarrierError:
            return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results
