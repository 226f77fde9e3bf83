"""How far checkpoints are behind, and when a run that cannot write them stops (faults rows 27, 28). Pure.

Training goes on beside a failing or slow storage, for it may come back; but a run that has not been saved for several
checkpoints is work that one more fault would lose.

1. Only checkpoints of the present history count: one that a recovery abandoned has not failed.
2. A checkpoint counts once, however many of its parts failed; one that succeeds clears the count.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CheckpointHealth:
    """The checkpoints that failed since the last one that was written: step -> why."""

    failed: tuple[tuple[int, str], ...] = ()

    def written(self, step: int) -> CheckpointHealth:
        """The checkpoint of ``step`` is visible."""
        return CheckpointHealth(tuple((s, why) for s, why in self.failed if s > step))

    def not_written(self, step: int, error: str) -> CheckpointHealth:
        """The checkpoint of ``step`` failed."""
        if any(step == known for known, _ in self.failed):
            return self
        return CheckpointHealth((*self.failed, (step, error)))

    def went_back(self, first_step: int) -> CheckpointHealth:
        """A recovery went on from ``first_step``: checkpoints beyond it are of a history that is left."""
        return CheckpointHealth(tuple((s, why) for s, why in self.failed if s <= first_step))

    def stop_reason(self, max_failed: int | None) -> str | None:
        """Why the run has to stop (``run.checkpoint.max_failed``), or None while it may go on."""
        if max_failed is None or len(self.failed) < max_failed:
            return None
        first, last = self.failed[0][0], self.failed[-1]
        return (
            f"{len(self.failed)} checkpoints in a row could not be written, of steps {first} to {last[0]}; the last: "
            f"{last[1]}. The run can be resumed from the last complete one; max_failed says how many are tolerated"
        )
