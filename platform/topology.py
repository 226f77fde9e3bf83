"""What a planner knows of the machines: which host each worker is on, and how fast memory and links are. Pure.

A network has two speeds: within a host, where ranks exchange through shared memory, and between hosts. The defaults are
assumptions, not measurements of anybody's cluster; a plan depends on their ratios more than on their sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property

from shoal.kernels.errors import ConfigError

#: Rows gathered and updated at random by one worker: a fraction of what a server's memory streams per core.
MEMORY_BYTES_PER_S = 8_000_000_000
#: One worker's share of a host's shared memory: a copy in and a copy out.
LOCAL_BYTES_PER_S = 4_000_000_000
#: 10 Gbit/s.
NETWORK_BYTES_PER_S = 1_250_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """The workers of a plan; speeds are those of one worker, in bytes per second."""

    #: Host of every worker, in rank order; hosts may have different numbers of workers.
    hosts: tuple[str, ...]
    memory_bytes_per_s: float = MEMORY_BYTES_PER_S
    local_bytes_per_s: float = LOCAL_BYTES_PER_S
    network_bytes_per_s: float = NETWORK_BYTES_PER_S
    #: Bytes of tables that one worker may hold; None: not known, not checked. 0 means 0.
    memory_bytes_per_worker: int | None = None

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @cached_property
    def num_hosts(self) -> int:
        return len(set(self.hosts))

    @property
    def workers_per_host(self) -> float:
        """The mean."""
        return self.world_size / self.num_hosts

    def host_sizes(self) -> tuple[int, ...]:
        """For every worker the number of workers on its host, itself included."""
        sizes: dict[str, int] = {}
        for host in self.hosts:
            sizes[host] = sizes.get(host, 0) + 1
        return tuple(sizes[host] for host in self.hosts)

    def validate(self) -> None:
        """Raise ConfigError naming what is not positive."""
        if not self.hosts:
            raise ConfigError("a topology needs at least one worker")
        for name in ("memory_bytes_per_s", "local_bytes_per_s", "network_bytes_per_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} is {value}; it must be > 0")


def uniform_hosts(world_size: int, workers_per_host: int | None = None) -> tuple[str, ...]:
    """Hosts of ``world_size`` workers, filled one after the other; None: all on one. The last may have fewer."""
    size = workers_per_host or world_size
    return tuple(f"host-{rank // size}" for rank in range(world_size))


def ragged_hosts(sizes: Sequence[int]) -> tuple[str, ...]:
    """Hosts with so many workers each."""
    return tuple(f"host-{host}" for host, size in enumerate(sizes) for _ in range(size))
