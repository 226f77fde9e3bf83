"""When copies are good enough to cut over, and when they never will be (V2)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.actors.channel import ChannelCounters, Round
from shoal.actors.messages import Member, View
from shoal.actors.readiness import blocks_needed, copy_progress

TARGET = Member(rank=0, worker_id="t", host="h", share=1.0)


SETTLED = [(900, 5.0), (10, 0.1), (10, 0.1)]


@dataclasses.dataclass
class Fake:
    """What is asked of a channel."""

    rounds: list[tuple[int, float]]
    is_in_sync: bool = True
    error: str | None = None
    error_since_s: float = 0.0
    bytes_sent: int = 7
    target: Member = TARGET

    @property
    def counters(self) -> ChannelCounters:
        return ChannelCounters(rounds=len(self.rounds))

    @property
    def last_rounds(self) -> list[Round]:
        return [Round(step, rows, seconds) for step, (rows, seconds) in enumerate(self.rounds)]


def ask(*channels: Fake, others=(), rounds_max: int = 4, now_s: float = 100.0):
    return copy_progress(
        channels, others, rounds_max=rounds_max, pause_max_s=1.0, patience_s=30.0, now_s=now_s
    )  # fmt: skip


def test_ready_once_all_is_in_sync_and_the_last_round_was_short_v2():
    assert ask().is_ready, "nothing moves from here"
    assert not ask(Fake([])).is_ready, "a base without a round is not known to be current"
    assert ask(Fake(SETTLED)).is_ready
    assert not ask(Fake(SETTLED), Fake(SETTLED, is_in_sync=False)).is_ready
    assert not ask(Fake(SETTLED), others=[Fake([], is_in_sync=False)]).is_ready
    made = ask(Fake(SETTLED), Fake([(5, 0.3)]))
    assert (made.rows_last_round, made.predicted_pause_s, made.bytes_moved) == (15, 0.3, 14)


def test_not_ready_while_rounds_shrink_by_half_however_short_they_are_v2():
    """The rows that changed while the bases travelled are many: they are not the cutover's."""
    assert not ask(Fake([(900_000, 0.9)])).is_ready
    assert not ask(Fake([(900_000, 0.9), (40_000, 0.1)])).is_ready
    assert ask(Fake([(900_000, 0.9), (40_000, 0.1), (30_000, 0.1)])).is_ready
    assert ask(Fake([(80, 0.1), (39, 0.1), (19, 0.1), (9, 0.1)])).is_ready, "rounds_max"
    assert ask(Fake([(0, 0.1), (0, 0.1)])).is_ready
    assert not ask(Fake(SETTLED), Fake([(9, 0.1)])).is_ready, "every channel"


def test_hopeless_once_rounds_stop_shrinking_or_there_were_too_many_v2():
    assert ask(Fake([(100, 9.0)])).error is None
    assert ask(Fake([(100, 9.0), (40, 3.0)])).error is None, "it shrinks more than 2x: another round"
    assert "60 rows still change" in ask(Fake([(100, 9.0), (60, 5.0)])).error
    assert "after 4 rounds" in ask(Fake([(900, 9.0), (300, 7.0), (100, 5.0), (30, 3.0)])).error
    assert ask(Fake([(100, 0.5), (100, 9.0)])).error is None, "one slow round proves nothing"


def test_a_target_that_takes_nothing_is_named_after_a_while():
    broken = Fake([], is_in_sync=False, error="no route", error_since_s=80.0)
    assert ask(broken, now_s=100.0).error is None
    assert "worker t takes no copies: no route" in ask(broken, now_s=111.0).error


@given(st.lists(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 3)), max_size=6), max_size=4), st.booleans())
def test_never_ready_and_hopeless_at_once(channels, is_in_sync):
    made = ask(*[Fake(rounds, is_in_sync=is_in_sync) for rounds in channels])
    assert not (made.is_ready and made.error)
    assert made.predicted_pause_s <= 1.0 or not made.is_ready


def view_of(workers: str, owners, buddies) -> View:
    return View(
        run="r",
        epoch=2,
        members=tuple(Member(rank=r, worker_id=w, host=w, share=1 / len(workers)) for r, w in enumerate(workers)),
        placement={"t": tuple(owners)},
        transport="gloo",
        store_host="",
        store_port=0,
        buddies=tuple(buddies),
    )


@pytest.mark.parametrize("buddies", [(), (1, 2, 0)])
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.sets(st.integers(0, 7)), st.sampled_from("abcx"))
def test_every_holder_of_the_next_view_gets_what_is_owned_here_and_nobody_else(buddies, owners, owned, worker):
    view = view_of("abc", owners, buddies)
    keys = {(0, block) for block in owned if block < len(owners)}
    needs = blocks_needed(view, worker, keys, ["t"])
    for rank in range(3):
        expected = {(0, block) for _, block in view.held_by(rank) if (0, block) in keys}
        if view.members[rank].worker_id == worker:
            assert rank not in needs
        else:
            assert needs.get(rank, set()) == expected
    own = view.rank_of(worker)
    if buddies and own is not None:
        assert view.buddy(own) in needs, "the aux state goes there"
