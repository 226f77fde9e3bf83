"""The run's Feeder as an actor, and how workers on a Ray cluster reach it: picklable makers of both ends."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from shoal.actors.feed import Assignment, BatchSource
from shoal.actors.worker_spec import Seat
from shoal.kernels import faults
from shoal.kernels.errors import ClusterError
from shoal.platform.feeder import Feeder
from shoal.platform.job import Source

#: A feeder that nobody has asked for blocks for this long looks whether its run's controller still lives.
IDLE_S = 600.0

_now = time.monotonic


class FeederActor(Feeder):
    """The Feeder in an actor of its own. It ends when nobody asks for blocks and the run's controller is gone.

    An evaluation or a checkpoint may take longer than any limit, so idleness alone does not end it.
    """

    def __init__(
        self, controller: str, idle_s: float, schedule: faults.Schedule | None, *args: Any, **options: Any
    ) -> None:
        from shoal.actors.runtime import start_watchdog

        if schedule is not None:
            faults.install(schedule, "feeder", {faults.FEEDER})
        super().__init__(*args, **options)
        self._controller = controller
        self._idle_s = idle_s
        self._last_asked = _now()
        # The margin: the watchdog must not fire before the look at the controller has moved the time on.
        start_watchdog(self._last_sign_of_life, idle_s + 5.0, f"feeder of {controller}")

    def get_blocks(self, *args: Any, **options: Any) -> Any:
        self._last_asked = _now()
        return super().get_blocks(*args, **options)

    def pid(self) -> int:
        """Number of this process, on its node."""
        return os.getpid()

    def _last_sign_of_life(self) -> float:
        """Monotonic time at which somebody asked, or the controller was last seen."""
        if _now() - self._last_asked >= self._idle_s and _is_alive(self._controller):
            self._last_asked = _now()
        return self._last_asked


def _is_alive(name: str) -> bool:
    """Whether the actor lives; true as long as the cluster does not answer."""
    from shoal.actors.runtime import find_actor

    try:
        return find_actor(name) is not None
    except Exception:  # the cluster's control service may be away for a while
        return True


@dataclasses.dataclass(frozen=True)
class FeederMaker:
    """Starts the Feeder actor for a run that begins at some step."""

    source: Source
    name: str
    #: Name of the run's controller actor.
    controller: str
    idle_s: float = IDLE_S
    #: What goes wrong in it on purpose (``shoal chaos``).
    schedule: faults.Schedule | None = None

    def __call__(self, start_step: int, num_workers: int) -> Any:
        from shoal.actors.runtime import create_actor

        options = {"start_step": start_step, "stop_step": self.source.num_steps}
        return create_actor(
            FeederActor,
            self.name,
            self.controller,
            self.idle_s,
            self.schedule,
            self.source.dataset,
            self.source.order,
            None,
            max_concurrency=num_workers + 4,  # every worker may wait in a call of its own
            is_here=True,  # with the controller, which starts it
            max_restarts=-1,  # it has no state that it cannot read again
            **options,
        )


@dataclasses.dataclass(frozen=True)
class RayFeedMaker:
    """Builds a worker's end of the feed."""

    source: Source
    feeder_name: str

    def __call__(self, seat: Seat) -> BatchSource:
        from shoal.actors.feed import RayFeed
        from shoal.actors.runtime import find_actor

        feeder = find_actor(self.feeder_name)
        if feeder is None:
            raise ClusterError(f"the feeder {self.feeder_name!r} is gone")
        source = self.source
        return RayFeed(
            feeder,
            source.dataset,
            source.order,
            source.schema,
            assignment=Assignment(seat.rank, seat.world_size, None if seat.world_size == 1 else seat.shares),
            start_step=seat.start_step,
            stop_step=source.num_steps,
            prefetch_batches=source.prefetch_batches,
            timeout_s=source.timeout_s,
        )
