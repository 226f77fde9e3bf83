"""The controller's state machine, invariants by number."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.actors.messages import SnapshotPart
from shoal.platform.state_fixed import (
    AskStop,
    ControllerState,
    EndRun,
    FormView,
    ManifestWritten,
    PartWritten,
    RunPhase,
    StopOverdue,
    StopRequested,
    WorkerFailed,
    WorkerFinished,
    WorkerReady,
    WriteManifest,
)


def _part(step: int, rank: int, error: str | None = None) -> PartWritten:
    return PartWritten(SnapshotPart(epoch=0, step=step, rank=rank, files=(), error=error))


def _kinds(instructions) -> list[type]:
    return [type(i) for i in instructions]


def test_view_is_formed_once_all_are_ready():
    state = ControllerState(3)
    assert not state.handle(WorkerReady(0)) and not state.handle(WorkerReady(2)) and not state.handle(WorkerReady(0))
    assert FormView in _kinds(state.handle(WorkerReady(1)))  # invariant 1
    assert state.phase is RunPhase.RUNNING


def test_manifest_waits_for_every_part_and_end_waits_for_the_manifest():
    state = ControllerState(2)
    [state.handle(WorkerReady(r)) for r in range(2)]
    assert WriteManifest not in _kinds(state.handle(_part(10, 1)))
    assert state.handle(WorkerFinished(0)) == () and state.handle(WorkerFinished(1)) == ()  # invariant 5
    written = state.handle(_part(10, 0))
    assert [p.rank for i in written if isinstance(i, WriteManifest) for p in i.parts] == [0, 1]
    assert WriteManifest not in _kinds(state.handle(_part(10, 0)))  # invariant 2
    ended = state.handle(ManifestWritten(10))
    assert EndRun(RunPhase.FINISHED, "all steps done") in ended and state.durable_step == 10


def test_failed_part_never_becomes_a_checkpoint_but_does_not_block_the_end():
    state = ControllerState(2)
    [state.handle(WorkerReady(r)) for r in range(2)]
    state.handle(_part(10, 0, "disk full"))
    assert WriteManifest not in _kinds(state.handle(_part(10, 1)))  # invariant 2
    state.handle(WorkerFinished(0))
    assert EndRun in _kinds(state.handle(WorkerFinished(1)))


def test_stop_is_asked_of_one_rank_and_ends_as_stopped():
    state = ControllerState(1)
    state.handle(WorkerReady(0))
    assert AskStop in _kinds(state.handle(StopRequested("SIGTERM"))) and not state.handle(StopRequested("again"))
    assert EndRun(RunPhase.STOPPED, "SIGTERM") in state.handle(WorkerFinished(0))


def test_failed_last_checkpoint_fails_the_run_and_names_the_step():
    for events in (
        [_part(10, 0), _part(10, 1, "disk full")],
        [_part(10, 0), _part(10, 1), ManifestWritten(10, "disk full")],
    ):
        state = ControllerState(2)
        [state.handle(WorkerReady(r)) for r in range(2)]
        state.handle(_part(5, 0, "an earlier one"))
        state.handle(StopRequested("SIGINT"))
        [state.handle(event) for event in events]
        state.handle(WorkerFinished(1))
        (end,) = [i for i in state.handle(WorkerFinished(0, {"step": 10})) if isinstance(i, EndRun)]
        assert end.phase is RunPhase.FAILED  # invariant 6
        assert "of step 10, was not written" in end.reason and "disk full" in end.reason


def test_failed_earlier_checkpoint_does_not_fail_the_run():
    state = ControllerState(1)
    state.handle(WorkerReady(0))
    [state.handle(event) for event in (_part(5, 0, "disk full"), _part(10, 0), ManifestWritten(10))]
    assert EndRun(RunPhase.FINISHED, "all steps done") in state.handle(WorkerFinished(0, {"step": 10}))


def test_overdue_stop_ends_the_run_though_a_worker_goes_on():
    state = ControllerState(2)
    [state.handle(WorkerReady(r)) for r in range(2)]
    assert not state.handle(StopOverdue(9.0))  # nobody asked for it
    state.handle(StopRequested("SIGTERM"))
    state.handle(WorkerFinished(0, {"step": 3}))
    (end,) = [i for i in state.handle(StopOverdue(9.0)) if isinstance(i, EndRun)]
    assert end.phase is RunPhase.STOPPED and "did not end within 9 s" in end.reason  # invariant 7


EVENTS = st.one_of(
    st.builds(WorkerReady, st.integers(0, 2)),
    st.builds(WorkerFinished, st.integers(0, 2), st.sampled_from([None, {"step": 2}])),
    st.builds(WorkerFailed, st.integers(0, 2), st.just("boom")),
    st.builds(_part, st.integers(1, 2), st.integers(0, 2), st.sampled_from([None, None, "x"])),
    st.builds(ManifestWritten, st.integers(1, 2), st.sampled_from([None, "full"])),
    st.builds(StopRequested, st.just("ctrl-c")),
    st.builds(StopOverdue, st.just(1.0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_end_is_issued_at_most_once_and_nothing_follows(events):
    state = ControllerState(3)
    ended = 0
    for event in events:
        instructions = state.handle(event)
        assert not (ended and instructions)  # invariant 3
        ended += _kinds(instructions).count(EndRun)
        if isinstance(event, WorkerFailed) and instructions:
            assert state.phase is RunPhase.FAILED  # invariant 4
    assert ended <= 1 and bool(ended) == state.phase.is_over
