"""Transport of a view with several hosts: shared memory among the ranks of a host, Gloo across hosts.

Both run at once: the messages to other hosts are under way while those within the host are swapped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.kernels.transport import Transport
from shoal.kernels.transport_gloo import GlooTransport


class CompositeTransport:
    """See ``Transport``. ``local`` are the global ranks that share memory, in the local transport's order; with
    ``local_ranks`` a host may have more."""

    def __init__(
        self,
        remote: GlooTransport,
        local_transport: Transport,
        local: Sequence[int],
        *,
        local_ranks: frozenset[int] | None = None,
    ) -> None:
        self.rank, self.world_size = remote.rank, remote.world_size
        self.local_ranks = frozenset(local) if local_ranks is None else local_ranks
        #: Ranks that share memory with this one, itself included.
        self.num_near = len(local)
        self._remote = remote
        #: Among the ranks of this host; usable by itself between exchanges of this one.
        self.local_transport = local_transport
        self._local = np.array(list(local))
        self._is_local = np.isin(np.arange(self.world_size), self._local)

    def send_buffers(self, sizes: np.ndarray) -> np.ndarray:
        addresses = self._remote.send_buffers(np.where(self._is_local, 0, sizes))
        addresses[self._local] = self.local_transport.send_buffers(np.asarray(sizes, np.int64)[self._local])
        return addresses

    def exchange(self, recv_sizes: np.ndarray, *, timeout_s: float, operation: str = "exchange") -> np.ndarray:
        self._remote.start(np.where(self._is_local, 0, recv_sizes), timeout_s=timeout_s, operation=operation)
        try:
            near = self.local_transport.exchange(
                np.asarray(recv_sizes, np.int64)[self._local], timeout_s=timeout_s, operation=operation
            )
        except BaseException as error:
            # What broke within the host must release the peers on other hosts as well (F1).
            self._remote.abandon(error)
            raise
        try:
            addresses = self._remote.finish()
        except BaseException as error:
            self.local_transport.abort(str(error))
            raise
        addresses[self._local] = near
        return addresses

    def abort(self, reason: str = "aborted") -> None:
        self.local_transport.abort(reason)
        self._remote.abort(reason)

    def close(self) -> None:
        self.local_transport.close()
        self._remote.close()
