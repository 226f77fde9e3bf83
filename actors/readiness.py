"""What a view being prepared needs of this worker's row blocks, and when their copies are good enough (PROTOCOLS V2).

Pure but for reading the channels' figures.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

from shoal.actors.channel import ChannelCounters, Key, Round
from shoal.actors.messages import Member, PrepareProgress, View


class CopyChannel(Protocol):
    """The part of ``Channel`` that is asked here."""

    target: Member
    error: str | None
    error_since_s: float
    counters: ChannelCounters

    @property
    def is_in_sync(self) -> bool: ...

    @property
    def bytes_sent(self) -> int: ...

    @property
    def last_rounds(self) -> Sequence[Round]: ...


def blocks_needed(view: View, worker_id: str, owned: Set[Key], table_names: Sequence[str]) -> dict[int, set[Key]]:
    """Rank in ``view`` -> the blocks owned by this worker now that it has to hold; also, if with no blocks, the rank
    that keeps this worker's aux state."""
    needs: dict[int, set[Key]] = {}
    for table, name in enumerate(table_names):
        for block, owner in enumerate(view.placement[name]):
            if (table, block) not in owned:
                continue
            for rank in {owner, view.buddy(owner)}:
                if rank is not None and view.members[rank].worker_id != worker_id:
                    needs.setdefault(rank, set()).add((table, block))
    own_rank = view.rank_of(worker_id)
    buddy = None if own_rank is None else view.buddy(own_rank)
    if buddy is not None and buddy != own_rank:
        needs.setdefault(buddy, set())
    return needs


def copy_progress(
    channels: Sequence[CopyChannel],
    others: Sequence[CopyChannel],
    *,
    rounds_max: int,
    pause_max_s: float,
    patience_s: float,
    now_s: float,
) -> PrepareProgress:
    """How far the copies are, and the stop rule of V2.

    Ready once every block is in sync, rounds have stopped shrinking (by half or more) and the last one of each channel
    took at most ``pause_max_s``, which is what the last changes of the cutover are expected to take: the first round
    has all rows that changed while the bases travelled, so it grows with the tables, and what changes while it is sent
    would be the pause. An error once rounds stop shrinking above that, or a target has taken nothing for
    ``patience_s``.

    Args:
        channels: made for this view. others: of the present view, needed in the next one as well.
        now_s: monotonic seconds.
    """
    needed = [*channels, *others]
    for channel in needed:
        if channel.error is not None and now_s - channel.error_since_s > patience_s:
            reason = f"worker {channel.target.worker_id} takes no copies: {channel.error}"
            return PrepareProgress(is_ready=False, error=reason)
    rounds = [channel.counters.rounds for channel in channels]
    last = [channel.last_rounds[-1] for channel in channels if channel.last_rounds]
    pause_s = max((r.seconds for r in last), default=0.0)
    has_rounds = min(rounds, default=1) > 0
    is_settled = all(_is_settled(channel.last_rounds, rounds_max) for channel in channels)
    is_ready = all(channel.is_in_sync for channel in needed) and is_settled and pause_s <= pause_max_s
    hopeless = [_why_hopeless(channel.last_rounds, rounds_max, pause_max_s) for channel in channels]
    return PrepareProgress(
        is_ready=is_ready,
        rounds=max(rounds, default=0),
        bytes_moved=sum(channel.bytes_sent for channel in channels),
        rows_last_round=sum(r.rows for r in last),
        predicted_pause_s=pause_s,
        error=None if is_ready or not has_rounds else next((reason for reason in hopeless if reason), None),
    )


def _is_settled(rounds: Sequence[Round], rounds_max: int) -> bool:
    """Whether another round would not be much smaller."""
    if len(rounds) < 2:
        return len(rounds) >= rounds_max
    return len(rounds) >= rounds_max or rounds[-1].rows * 2 >= rounds[-2].rows


def _why_hopeless(rounds: Sequence[Round], rounds_max: int, pause_max_s: float) -> str | None:
    # One slow round may be the machine's mood.
    if len(rounds) < 2 or min(rounds[-1].seconds, rounds[-2].seconds) <= pause_max_s:
        return None
    if not _is_settled(rounds, rounds_max):
        return None
    return (
        f"after {len(rounds)} rounds {rounds[-1].rows} rows still change per round, which would stop training for "
        f"{rounds[-1].seconds:.2f} s; pause_max_s is {pause_max_s:g}"
    )
