"""What a run does when workers are lost, and how it changes its workers while it trains: ``run.failure``.

Pure, as ``config`` is. The names are ray.train's where it has one (``max_failures``, ``controller_failure_limit``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from shoal.platform.config_fields import ByteSize, Config, Problem, bounded


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureConfig(Config):
    """What a run keeps against losses, how it goes on after one, and when it gives up."""

    max_failures: int = bounded(-1, low=-1)
    """Losses of workers that a run survives; one more ends it, resumable. -1: any number, for as long as it makes
    progress between them; 0: none. Workers lost on a node that had been announced to go do not count."""
    max_failures_without_progress: int = bounded(3, low=-1)
    """Losses in a row, without a step beyond all earlier ones in between, that a run survives: what stops a crash loop.
    -1: any number."""
    controller_failure_limit: int = bounded(-1, low=-1)
    """Restarts of the controller that a run survives. -1: any number."""
    recovery: Literal["auto", "replicated", "checkpoint", "partial"] = "auto"
    """Where lost rows come from. ``replicated``: every worker keeps copies of another's rows, at best of one on another
    host, and at most protect_every_steps steps are done again; ``checkpoint``: all workers go back to the newest
    checkpoint; ``partial``: lost rows go back to the newest checkpoint, all others at most protect_every_steps steps,
    and the loss is counted; ``auto``: replicated with two hosts or more, else checkpoint."""
    on_loss: Literal["auto", "shrink", "replace", "standby"] = "auto"
    """``shrink``: go on at once with the others; ``replace``: start a new worker in the lost one's place, with its
    rank, share and rows; ``standby``: keep num_standby idle workers ready for that; ``auto``: shrink where
    scaling.num_workers is a [min, max] pair, else replace. Below min a run pauses in any case."""
    replace_timeout_s: float = bounded(60.0, low=0, high=86_400)
    """How long a replacement is waited for, in seconds; then the run goes on with fewer workers, if min allows it."""
    num_standby: int = bounded(0, low=0, high=1024)
    """Idle workers kept ready, for on_loss standby."""
    capacity_timeout_s: float = bounded(3600.0, above=0)
    """How long a run with fewer workers than min pauses for room in the cluster, in seconds; then it ends and can be
    resumed."""
    protect_every_steps: int = bounded(50, low=1)
    """Steps between two snapshots: the most that is done again after a loss. Each sends the rows that changed to the
    worker that holds their copy."""
    version_bytes_max: ByteSize | None = bounded(None, low=1)  # noqa: RUF009
    """Most bytes of older row versions a worker keeps for snapshots and checkpoints in progress; beyond it a snapshot
    is taken early, then the step waits. null: no limit; ``shoal plan`` shows what to expect."""
    pause_max_s: float = bounded(1.0, above=0, high=600)
    """Longest predicted pause, in seconds, at which a view change is made; one that stays above it is abandoned."""
    copy_rounds_max: int = bounded(8, low=1, high=1000)
    """Most rounds in which rows changed meanwhile are sent again before a view change."""
    copy_rate_limit_bytes_per_s: ByteSize | None = bounded(None, low=1)  # noqa: RUF009
    """Upper bound on the bytes each worker sends per second to copy rows while training goes on, such as ``200MB``;
    null: none."""
    prepare_timeout_s: float = bounded(600.0, above=0, high=86_400)
    """Preparing one view change, from the order to the last copy, in seconds; then it is abandoned."""
    lease_s: float = bounded(5.0, above=0, high=3600)
    """A worker without contact to the controller for this long begins no checkpoint, in seconds. A worker that cannot
    be reached, and so cannot be ended, is given up after the same time."""
    controller_lease_s: float = bounded(60.0, above=0, high=86_400)
    """How long workers train on without a controller, in seconds; then all of them wait at one step."""
    orphan_s: float = bounded(120.0, above=0, high=86_400)
    """A worker without a controller for this long ends itself, in seconds."""
    driver_grace_s: float = bounded(120.0, above=0)
    """How long a run goes on after its driver has vanished without a word, in seconds; then it takes a checkpoint and
    ends."""

    def rules(self) -> Iterator[Problem]:
        if self.on_loss == "standby" and self.num_standby == 0:
            yield Problem("num_standby", "is 0 although on_loss is standby: keep at least one worker ready")
        if self.on_loss != "standby" and self.num_standby > 0:
            yield Problem("num_standby", f"is {self.num_standby}; it serves on_loss standby only: set that, or drop it")
        if not self.lease_s <= self.controller_lease_s <= self.orphan_s:
            found = f"{self.lease_s:g}, {self.controller_lease_s:g}, {self.orphan_s:g}"
            yield Problem("lease_s", f"<= controller_lease_s <= orphan_s must hold; they are {found}")

    def keeps_copies(self, num_hosts: int) -> bool:
        """Whether every worker has a buddy that holds copies of its rows."""
        return self.recovery == "replicated" or (self.recovery == "auto" and num_hosts > 1)

    def recovery_on(self, num_hosts: int) -> Literal["replicated", "checkpoint", "partial"]:
        """The recovery that ``auto`` stands for with this many hosts."""
        if self.recovery == "auto":
            return "replicated" if num_hosts > 1 else "checkpoint"
        return self.recovery

    def loss_policy(self, *, is_elastic: bool) -> Literal["shrink", "replace", "standby"]:
        """The reaction that ``auto`` stands for."""
        if self.on_loss == "auto":
            return "shrink" if is_elastic else "replace"
        return self.on_loss
