"""Suspects, budgets and the reaction to a loss (F2, F9): invariants by number."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.messages import WorkerPhase, WorkerStatus
from shoal.platform.config_failure import FailureConfig
from shoal.platform.failure import (
    Go,
    Loss,
    LossState,
    Resume,
    Seen,
    Stop,
    SuspectDecision,
    Wait,
    decide_budget,
    decide_loss,
    decide_suspects,
)

PARK_TIMEOUT_S = 12.0


def seen(name: str, phase: WorkerPhase = WorkerPhase.PARKED, *, step: int = 7, silent_s: float = 0.1, **fields) -> Seen:
    status = WorkerStatus(
        worker_id=name,
        rank=0,
        epoch=1,
        step=step,
        phase=phase,
        since_s=3.0,
        pid=1,
        host="h",
        error=fields.pop("error", None),
    )
    return Seen(worker_id=name, status=status, silent_s=silent_s, **fields)


def suspects(*workers: Seen, since_report_s: float = 0.5, complaints=None) -> SuspectDecision:
    return decide_suspects(
        workers,
        since_report_s=since_report_s,
        answer_timeout_s=2.0,
        park_timeout_s=PARK_TIMEOUT_S,
        complaints=complaints,
    )


def test_a_dead_worker_is_named_at_once_and_waited_for_no_longer_than_the_others_need_to_park():
    dead = seen("b", WorkerPhase.TRAINING, is_dead=True)
    early = suspects(seen("a", WorkerPhase.TRAINING), dead)
    assert early.suspects == ("b",) and not early.is_final and "waiting for a" in early.reason
    assert suspects(seen("a"), dead) == SuspectDecision(suspects=("b",), is_final=True, reason="b is dead")


def test_a_stopped_process_is_suspect_for_its_silence():
    """SIGSTOP: Ray notices nothing, the peers' exchange times out, and this one answers no poll."""
    decision = suspects(seen("a"), seen("b", WorkerPhase.TRAINING, silent_s=2.5))
    assert decision.suspects == ("b",) and decision.is_final and "not answered for 2.5 s" in decision.reason


def test_a_worker_that_answers_but_hangs_is_suspect_when_it_is_furthest_behind_after_the_deadline():
    hung = seen("b", WorkerPhase.TRAINING, step=6)
    slow = seen("c", WorkerPhase.TRAINING, step=7)
    assert suspects(seen("a"), hung, slow).suspects == ()  # 2
    late = suspects(seen("a"), hung, slow, since_report_s=PARK_TIMEOUT_S)
    assert late.suspects == ("b",) and not late.is_final and "furthest behind, at step 6" in late.reason
    assert suspects(seen("a"), seen("c"), since_report_s=PARK_TIMEOUT_S + 1).is_final


def test_a_failed_worker_is_lost_with_its_reason():
    decision = suspects(seen("a"), seen("b", WorkerPhase.FAILED, error="out of memory"))
    assert decision.suspects == ("b",) and "out of memory" in decision.reason


def test_all_parked_means_nobody_is_lost():
    assert suspects(seen("a"), seen("b")) == SuspectDecision(
        suspects=(), is_final=True, reason="all workers are parked, none is lost"
    )


def test_a_silent_partition_takes_whom_most_cannot_reach():
    """All answer the controller and park, and yet no group can be formed: c is cut off from a and b."""
    complaints = {"a": ["c"], "b": ["c"], "c": ["a", "b"]}
    decision = suspects(seen("a"), seen("b"), seen("c"), complaints=complaints)
    assert decision.suspects == ("c",) and "2 of 2" in decision.reason
    pair = suspects(seen("a"), seen("b"), complaints={"a": ["b"], "b": ["a"]})
    assert len(pair.suspects) == 1
    assert suspects(seen("a"), seen("b"), complaints={"a": []}).suspects == ()


WORKERS = st.lists(
    st.builds(
        seen,
        st.sampled_from("abcdef"),
        st.sampled_from(WorkerPhase),
        step=st.integers(0, 3),
        silent_s=st.sampled_from([0.0, 1.0, 5.0]),
        is_dead=st.booleans(),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda one: one.worker_id,
)


@settings(max_examples=300, deadline=None)
@given(workers=WORKERS, since_s=st.sampled_from([0.0, 5.0, 11.9, 12.0, 60.0]))
def test_suspects_hold_their_invariants(workers, since_s):
    decision = suspects(*workers, since_report_s=since_s)
    resting = (WorkerPhase.PARKED, WorkerPhase.LEFT, WorkerPhase.FINISHED)
    for one in workers:
        is_parked = one.status is not None and one.status.phase in resting
        is_sound = not one.is_dead and one.silent_s <= 2.0
        if is_parked and is_sound:
            assert one.worker_id not in decision.suspects  # 1
        if since_s < PARK_TIMEOUT_S and is_sound and one.status.phase is not WorkerPhase.FAILED:
            assert one.worker_id not in decision.suspects  # 2
    if since_s >= PARK_TIMEOUT_S:
        left = [one for one in workers if one.worker_id not in decision.suspects]
        assert decision.suspects or all(one.status.phase in resting for one in left)  # 3
        assert decision.is_final == all(one.status.phase in resting for one in left)  # 3
    assert decision.reason


# ---- budgets ------------------------------------------------------------------------------------------------------


def test_losses_beyond_the_budget_stop_the_run():
    config = FailureConfig(max_failures=2)
    losses = [Loss(step=step, workers=("a", "b")) for step in (10, 20, 30)]
    assert isinstance(decide_budget(losses[:2], 0, config), Go)  # 4: losses, not workers
    assert decide_budget(losses, 0, config) == Stop(reason="3 losses of workers: run.failure.max_failures is 2")
    assert isinstance(decide_budget(losses[:1], 0, FailureConfig(max_failures=0)), Stop)


def test_announced_losses_are_not_counted_but_must_make_progress():
    announced = [Loss(step=step, is_announced=True) for step in (10, 20, 30)]
    assert isinstance(decide_budget(announced, 0, FailureConfig(max_failures=0)), Go)
    stuck = [Loss(step=10, is_announced=True)] * 5
    assert "without" in decide_budget(stuck, 0, FailureConfig()).reason


def test_a_crash_loop_ends_and_progress_forgives():
    config = FailureConfig()
    loop = [Loss(step=10)] * 4
    assert isinstance(decide_budget(loop, 0, config), Go)  # the first was after progress, three came without
    stopped = decide_budget([*loop, Loss(step=9)], 0, config)
    assert isinstance(stopped, Stop) and "max_failures_without_progress is 3" in stopped.reason
    assert isinstance(decide_budget([*loop, Loss(step=11), *[Loss(step=11)] * 3], 0, config), Go)
    assert isinstance(decide_budget([Loss(step=0)] * 99, 0, FailureConfig(max_failures_without_progress=-1)), Go)


def test_controller_restarts_have_a_budget_of_their_own():
    config = FailureConfig(controller_failure_limit=1)
    assert isinstance(decide_budget([], 1, config), Go)
    assert "controller_failure_limit is 1" in decide_budget([], 2, config).reason  # 4
    assert isinstance(decide_budget([], 10**6, FailureConfig()), Go)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(st.integers(0, 5), max_size=12),
    limit=st.integers(-1, 4),
    in_a_row=st.integers(-1, 4),
)
def test_budgets_match_a_count_by_hand(steps, limit, in_a_row):
    config = FailureConfig(max_failures=limit, max_failures_without_progress=in_a_row)
    stuck = 0
    for index, step in enumerate(steps):
        stuck = 0 if index == 0 or step > max(steps[:index]) else stuck + 1
    is_over = (0 <= limit < len(steps)) or (0 <= in_a_row < stuck)
    assert isinstance(decide_budget([Loss(step=step) for step in steps], 0, config), Stop) == is_over


# ---- reactions ----------------------------------------------------------------------------------------------------


def react(policy: str, *, left: str = "ab", lost: str = "c", ready: str = "", waited_s: float = 0.0, least: int = 1):
    fields = {"num_standby": 1} if policy == "standby" else {}
    config = FailureConfig(on_loss=policy, replace_timeout_s=60, capacity_timeout_s=600, **fields)
    state = LossState(survivors=tuple(left), lost=tuple(lost), ready=tuple(ready), waited_s=waited_s)
    return decide_loss(state, config, min_workers=least, is_elastic=True)


def test_shrink_goes_on_at_once_with_the_survivors_alone():
    decision = react("shrink", ready="x")
    assert isinstance(decision, Resume) and decision.members == ("a", "b") and not decision.replaced


def test_replace_waits_for_a_new_worker_and_gives_it_the_lost_place():
    waiting = react("replace", least=2)
    assert isinstance(waiting, Wait) and (waiting.num_missing, waiting.until_s) == (1, 60)
    assert not waiting.is_below_min and "replace" in waiting.reason
    done = react("replace", ready="xy", waited_s=5)
    assert isinstance(done, Resume) and done.members == ("a", "b", "x") and done.replaced == {"x": "c"}  # 6


def test_replace_waits_for_nobody_beyond_the_operators_target():
    state = LossState(survivors=("a", "b"), lost=("c",))
    config = FailureConfig(on_loss="replace")
    decision = decide_loss(state, config, min_workers=1, max_workers=2, is_elastic=True)
    assert isinstance(decision, Resume) and decision.members == ("a", "b")
    assert isinstance(decide_loss(state, config, min_workers=1, max_workers=3, is_elastic=True), Wait)


def test_replace_shrinks_after_its_timeout_if_the_minimum_allows():
    shrunk = react("replace", waited_s=60)
    assert isinstance(shrunk, Resume) and shrunk.members == ("a", "b") and "within 60 s" in shrunk.reason
    paused = react("replace", waited_s=60, least=3)
    assert isinstance(paused, Wait) and paused.is_below_min and paused.until_s == 600  # 5


def test_standbys_take_over_at_once_as_far_as_there_are_any():
    full = react("standby", ready="s")
    assert isinstance(full, Resume) and full.replaced == {"s": "c"}
    partly = react("standby", lost="cd", ready="s")
    assert isinstance(partly, Resume) and partly.members == ("a", "b", "s") and partly.replaced == {"s": "c"}


def test_below_the_minimum_the_run_pauses_then_stops():
    """Row 28 of the list of faults: a reason, no crash loop, and it goes on when workers come."""
    paused = react("shrink", least=4)
    assert isinstance(paused, Wait) and paused.is_below_min and paused.num_missing == 2
    assert "at least 4" in paused.reason
    assert isinstance(react("shrink", least=4, ready="xy"), Resume)
    assert isinstance(react("shrink", least=4, waited_s=600), Stop)


def test_nobody_left_waits_for_somebody_whatever_the_minimum():
    assert isinstance(react("shrink", left="", lost="ab"), Wait)
    back = react("shrink", left="", lost="ab", ready="xy")
    assert isinstance(back, Resume) and back.members == ("x",)


def test_auto_shrinks_elastic_runs_and_replaces_in_fixed_ones():
    state = LossState(survivors=("a",), lost=("b",))
    assert isinstance(decide_loss(state, FailureConfig(), min_workers=1, is_elastic=True), Resume)
    assert isinstance(decide_loss(state, FailureConfig(), min_workers=2, is_elastic=False), Wait)


def test_a_failure_that_took_nobody_goes_on_with_all():
    for policy in ("shrink", "replace", "standby"):
        decision = react(policy, lost="", ready="x")
        assert isinstance(decision, Resume) and decision.members == ("a", "b")


@settings(max_examples=300, deadline=None)
@given(
    policy=st.sampled_from(["shrink", "replace", "standby"]),
    sizes=st.tuples(*[st.integers(0, 4)] * 3),
    waited_s=st.sampled_from([0.0, 59.0, 60.0, 600.0]),
    least=st.integers(1, 6),
)
def test_reactions_hold_their_invariants(policy, sizes, waited_s, least):
    left, lost, ready = ("".join(f"{kind}{i}" for i in range(n)) for kind, n in zip("abc", sizes))
    names = [tuple(text[i : i + 2] for i in range(0, len(text), 2)) for text in (left, lost, ready)]
    config = dataclasses.replace(FailureConfig(), on_loss=policy, num_standby=int(policy == "standby"))
    config = config.replace(replace_timeout_s=60.0, capacity_timeout_s=600.0)
    state = LossState(survivors=names[0], lost=names[1], ready=names[2], waited_s=waited_s)
    decision = decide_loss(state, config, min_workers=least, is_elastic=False)
    assert decision.reason
    if isinstance(decision, Resume):
        assert len(decision.members) >= least  # 5
        assert decision.members[: len(names[0])] == names[0]
        taken = decision.members[len(names[0]) :]
        assert taken == names[2][: len(taken)]
        assert list(decision.replaced) == list(taken[: len(names[1])])  # 6
        if policy != "shrink" and len(names[2]) >= len(names[1]) and sizes[0] + sizes[1] >= least:
            assert len(decision.members) == max(1, sizes[0] + sizes[1])  # 6
    elif isinstance(decision, Wait):
        assert decision.until_s > waited_s and decision.num_missing > 0  # always ends
    else:
        assert waited_s >= 600


@pytest.mark.parametrize(("num_hosts", "expected"), [(1, "checkpoint"), (2, "replicated")])
def test_auto_recovery_keeps_copies_where_there_is_a_second_host(num_hosts, expected):
    config = FailureConfig()
    assert config.recovery_on(num_hosts) == expected
    assert config.keeps_copies(num_hosts) == (expected == "replicated")
    assert FailureConfig(recovery="replicated").keeps_copies(1)
    assert not FailureConfig(recovery="partial").keeps_copies(3)
