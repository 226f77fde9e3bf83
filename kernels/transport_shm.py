"""Transport among the ranks of one host through shared memory: messages are written once and read in place.

The native part (csrc/shm/boxes.h) explains the protocol. Nothing is left in /dev/shm: a segment's name exists only
until its last reader has attached, its memory until its last process ends, however that happens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence

import numpy as np

from shoal.kernels import _shm  # type: ignore[attr-defined]
from shoal.kernels.errors import CapacityError, ExchangeTimeoutError, PeerError, ProtocolError
from shoal.kernels.transport import check_self_size, name_ranks, padded

#: Values of shoal::BoxFault.
_TIMEOUT, _DIED, _ABORTED, _SIZE, _ATTACH = 1, 2, 3, 4, 5
#: How long a rank spins before it sleeps, where every rank of the host has a core of its own; else it sleeps at once.
SPIN_US = 50.0
#: Leftovers of killed processes are removed once they are this old, in seconds.
SWEEP_AGE_S = 60
#: What one rank's first segment takes at least.
SEGMENT_BYTES_MIN = 1 << 18


def shm_available(num_local: int) -> str:
    """Why shared memory cannot be used among ``num_local`` ranks of this host; empty when it can."""
    if not os.path.isdir("/dev/shm"):
        return "there is no /dev/shm"
    if not os.access("/dev/shm", os.W_OK):
        return "/dev/shm is not writable"
    free, needed = _shm.shm_free_bytes(), num_local * SEGMENT_BYTES_MIN * 4
    return f"/dev/shm has {free} bytes free, {needed} are needed to begin with" if free < needed else ""


def memory_name() -> str:
    """Name of the memory that this process can share: equal in two processes that see the same /dev/shm."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = file.read().strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine}:{os.stat('/dev/shm').st_dev}"


class ShmTransport:
    """See ``Transport``. ``ranks`` are the global numbers of the host's ranks, in local order, for error messages."""

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        ranks: Sequence[int],
        attach_timeout_s: float = 10.0,
        spin_us: float | None = None,
    ) -> None:
        self.rank, self.world_size = rank, len(ranks)
        self.local_ranks = frozenset(range(self.world_size))
        self._ranks = list(ranks)
        self._sizes = np.zeros(self.world_size, np.int64)
        self._abort_lock = threading.Lock()
        self._closed = False
        _shm.sweep_segments("shoal-", SWEEP_AGE_S)
        if spin_us is None:
            spin_us = SPIN_US if self.world_size <= len(os.sched_getaffinity(0)) else 0.0
        try:
            self._boxes = _shm.Boxes(name, rank, self.world_size, attach_timeout_s, spin_us)
        except _shm.ShmCapacityError as error:
            raise _capacity_error(error) from None
        except RuntimeError as error:
            raise ExchangeTimeoutError(f"forming shared memory on rank {ranks[rank]}: {error}") from None

    @property
    def segment_bytes(self) -> int:
        """Bytes of shared memory that this rank's messages occupy."""
        return 0 if self._closed else self._boxes.segment_bytes

    def send_buffers(self, sizes: np.ndarray) -> np.ndarray:
        self._check_open()
        self._sizes = np.array(sizes, np.int64)
        addresses = np.empty(self.world_size, np.int64)
        try:
            self._boxes.send_buffers(padded(self._sizes), addresses)
        except _shm.ShmCapacityError as error:
            raise _capacity_error(error) from None
        return addresses

    def exchange(self, recv_sizes: np.ndarray, *, timeout_s: float, operation: str = "exchange") -> np.ndarray:
        self._check_open()
        check_self_size(self._sizes, recv_sizes, self.rank, operation)
        addresses = np.empty(self.world_size, np.int64)
        try:
            outcome = self._boxes.exchange(padded(np.asarray(recv_sizes, np.int64)), timeout_s, addresses)
        except RuntimeError as error:
            self.abort(str(error))
            raise PeerError(f"{operation} failed on rank {self._ranks[self.rank]}: {error}") from None
        if outcome is not None:
            raise self._error(outcome, operation, timeout_s)
        return addresses

    def abort(self, reason: str = "aborted") -> None:
        with self._abort_lock:
            if not self._closed:
                self._boxes.abort(_ABORTED, f"rank {self._ranks[self.rank]} left: {reason}")

    def close(self) -> None:
        self.abort("closed")
        with self._abort_lock:
            self._closed = True
            with contextlib.suppress(AttributeError):
                del self._boxes

    def _error(
        self, outcome: tuple[int, int, int, list[int], str], operation: str, timeout_s: float
    ) -> PeerError | ProtocolError:
        """The typed error; the first rank that fails leaves its reason in the control block for the others."""
        fault, cause, rank, missing, text = outcome
        if fault == _ABORTED:
            kind = ExchangeTimeoutError if cause == _TIMEOUT else ProtocolError if cause == _SIZE else PeerError
            return kind(f"{operation} failed on rank {self._ranks[self.rank]} of {self.world_size}: {text}")
        who = name_ranks(self._ranks[local] for local in missing)
        if fault == _TIMEOUT:
            reason, kind = f"{who} did not arrive within {timeout_s:g} s", ExchangeTimeoutError
        elif fault == _DIED:
            reason, kind = f"{who} died", PeerError
        elif fault == _SIZE:
            reason, kind = f"rank {self._ranks[rank]} {text}", ProtocolError
        else:
            reason, kind = f"rank {self._ranks[rank]}: {text}", PeerError
        self._boxes.abort(fault, reason)
        return kind(f"{operation} failed on rank {self._ranks[self.rank]} of {self.world_size}: {reason}")

    def _check_open(self) -> None:
        if self._closed:
            raise PeerError(f"the shared-memory transport of rank {self._ranks[self.rank]} is closed")


def _capacity_error(error: Exception) -> CapacityError:
    name, needed, free = str(error).rsplit("|", 2)
    return CapacityError(
        f"/dev/shm is full: segment {name} needs {needed} bytes, {free} are free. Give the container a larger /dev/shm "
        "(docker run --shm-size, or a Kubernetes emptyDir with medium Memory), lower the batch size, or set "
        "transport to 'gloo'"
    )
