"""How workers on a Ray cluster reach the run's Feeder: picklable makers of both ends."""

from __future__ import annotations

import dataclasses
from typing import Any

from shoal.actors.feed import Assignment, BatchSource
from shoal.actors.worker import Seat
from shoal.kernels.errors import ClusterError
from shoal.platform.job import Source


@dataclasses.dataclass(frozen=True)
class FeederMaker:
    """Starts the Feeder actor for a run that begins at some step."""

    source: Source
    name: str

    def __call__(self, start_step: int, num_workers: int) -> Any:
        from shoal.actors.runtime import create_actor
        from shoal.platform.feeder import Feeder

        options = {"start_step": start_step, "stop_step": self.source.num_steps}
        # Every worker may wait in a call of its own.
        return create_actor(
            Feeder, self.name, self.source.dataset, self.source.order, None, max_concurrency=num_workers + 4, **options
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
            source.order,
            source.schema,
            source.dataset.arrow_schema,
            assignment=Assignment(seat.rank, seat.world_size, None if seat.world_size == 1 else seat.shares),
            start_step=seat.start_step,
            stop_step=source.num_steps,
            prefetch_batches=source.prefetch_batches,
            timeout_s=source.timeout_s,
        )
