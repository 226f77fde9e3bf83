"""Which worker's failure ends a run: the cause, not a victim whose peers were gone. Pure: polls in, a rank out."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.actors.messages import WorkerPoll

#: How long after a victim's failure the failure that caused it is waited for.
CAUSE_TIMEOUT_S = 5.0


def find_cause(answers: Sequence[WorkerPoll | BaseException]) -> int | None:
    """The rank whose failure explains the others': a dead worker, else one that failed by itself, else any."""
    weights = {}
    for rank, answer in enumerate(answers):
        if isinstance(answer, BaseException):
            weights[rank] = 0
        elif answer.failure is not None:
            weights[rank] = 1 if answer.is_origin else 2
    return min(weights, key=lambda rank: (weights[rank], rank), default=None)


def decide_cause(
    answers: Sequence[WorkerPoll | BaseException], waited_s: float, *, saving_timeout_s: float
) -> int | None:
    """The rank to blame now, or None: another round of polls may show the cause, or complete a checkpoint.

    Args:
        waited_s: since the first failure was seen.
        saving_timeout_s: how long a checkpoint in progress may hold back the failure of a run without dead workers.
    """
    cause = find_cause(answers)
    if cause is None:
        return None
    polls = [answer for answer in answers if not isinstance(answer, BaseException)]
    if len(polls) < len(answers):
        return cause
    if any(poll.is_saving for poll in polls) and waited_s < saving_timeout_s:
        return None
    has_all = all(poll.failure is not None or poll.summary is not None for poll in polls)
    return cause if polls[cause].is_origin or has_all or waited_s >= CAUSE_TIMEOUT_S else None
