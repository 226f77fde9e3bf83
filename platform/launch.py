"""Launch: what the controller asks of the place its workers come from; free of Ray and torch.

``launch_local`` provides one worker of the calling process, ``launch_ray`` actors with a placement group each. Nothing
here blocks: a worker is asked for, and later polls say when it is placed, when it is ready, or that it failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shoal.actors.messages import Holdings, Order, SetBase, WorkerInfo, WorkerPoll
from shoal.kernels.errors import ClusterError

if TYPE_CHECKING:
    from shoal.actors.worker_spec import WorkerSpec


class WorkerGoneError(ClusterError):
    """A worker's process has ended."""


class WorkerHandle(Protocol):
    """One worker as the controller sees it. Every call has a deadline.

    A worker whose process has ended raises WorkerGoneError, one that does not answer in time ClusterError.
    """

    worker_id: str

    def describe(self, timeout_s: float) -> WorkerInfo: ...
    def order(self, order: Order | SetBase, timeout_s: float) -> None: ...
    def poll(self, timeout_s: float) -> WorkerPoll: ...
    def holdings(self, timeout_s: float) -> Holdings: ...
    def request(self, flags: int, timeout_s: float) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A worker that was asked for has room, on ``host``; its process starts."""

    worker_id: str
    host: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A worker has built its model and waits for an order."""

    worker_id: str
    info: WorkerInfo


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchFailed:
    """A worker that was asked for died, or could not build its model: ``error`` says why."""

    worker_id: str
    error: BaseException


LaunchEvent = Placed | Ready | LaunchFailed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """Room for workers in the cluster, as it stands now."""

    #: Host -> how many more workers would fit there; nodes that are being drained are left out.
    free: Mapping[str, int]
    #: Workers asked for that have no room yet.
    num_waiting: int
    #: What a worker needs and what the cluster has, for a message.
    text: str = ""


class WorkerLauncher(Protocol):
    """Where workers come from. Worker ids are chosen by the controller and never used twice in a run."""

    #: Address of the Ray cluster, for messages; empty where there is none.
    cluster_address: str
    #: Whether it provides one worker and never more.
    is_fixed: bool

    def start_feeder(self, start_step: int, num_workers: int) -> None:
        """Start the run's feeder, where it needs one and has none."""
        ...

    def forget_ranks(self) -> None:
        """Tell the feeder that the ranks it knows are of a view that is over."""
        ...

    def launch_worker(self, worker_id: str, spec: WorkerSpec) -> None:
        """Ask for a worker; returns at once. It waits for room as long as it takes."""
        ...

    def advance(self) -> Sequence[LaunchEvent]:
        """Go on with what was asked for, without waiting; what happened since the last call."""
        ...

    def handle(self, worker_id: str) -> WorkerHandle | None:
        """The worker, once it is ready and until it is released."""
        ...

    def release_worker(self, worker_id: str) -> None:
        """End a worker, or take back that it was asked for; its room is free soon after. Idempotent."""
        ...

    def kill_worker(self, worker_id: str, pid: int, host: str) -> bool:
        """End a worker that does not answer, by force; True once it is known to be dead. Ask again until it is."""
        ...

    def adopt(self) -> Mapping[str, WorkerHandle]:
        """Take over the workers of this run that live: those of a controller that died. Id -> worker."""
        ...

    def capacity(self) -> Capacity: ...

    def draining(self) -> Mapping[str, float | None]:
        """Workers whose node will go: worker id -> seconds from now, None where no deadline is known."""
        ...

    def open_store(self) -> tuple[str, int]:
        """Host the TCPStore of this controller, once for all epochs; its address."""
        ...

    def forget_epochs(self, run: str, before: int) -> None:
        """Delete the store's keys of the epochs that are over (V3)."""
        ...

    def release(self) -> None:
        """End everything of the run but the controller."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """What a run asks of a Ray cluster."""

    #: Resources of one worker's placement group: CPU, GPU, memory and custom ones.
    bundle: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"CPU": 1.0})
    #: Workers go to nodes with this label only; empty: to any.
    host_label: str = ""
    #: Starts the Feeder actor, given the first step and the number of workers.
    start_feeder: Callable[[int, int], Any]
    #: A worker that no controller has polled for this long ends itself.
    orphan_s: float = 120.0
    #: A run whose driver has not polled for this long takes a checkpoint and ends.
    driver_grace_s: float = 120.0
