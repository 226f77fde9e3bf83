"""The worker's protocol, invariants by number."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.actors.messages import (
    Abort,
    CutOver,
    Leave,
    Member,
    Park,
    Prepare,
    Recover,
    RecoveryPlan,
    Release,
    Shipment,
    Start,
    View,
    WorkerPhase,
)
from shoal.actors.protocol import WorkerRules, WorkerState
from shoal.actors.protocol_messages import (
    BeginPreparing,
    CancelPreparing,
    ControllerBack,
    ControllerSilent,
    CutOverCalled,
    CutOverDone,
    CutOverFailed,
    DestroyGroups,
    DropOthers,
    Exit,
    FinishLoop,
    Joined,
    JoinView,
    LoopEnded,
    LoopFailed,
    OrderArrived,
    PerformCutOver,
    PerformRecover,
    PrepareFailed,
    PrepareReady,
    Protect,
    RaiseFlag,
    Recovered,
    RecoverFailed,
    RunStep,
    StepDone,
    StepFailed,
    TakeSnapshot,
    WaitForOrder,
)
from shoal.kernels.frame import Flag

RULES = WorkerRules(total_steps=100, snapshot_every_steps=5, lease_s=10.0, orphan_s=30.0)


def view(epoch: int, *workers: str, buddies: tuple[int, ...] | None = None) -> View:
    size = len(workers)
    return View(
        run="r",
        epoch=epoch,
        members=tuple(Member(rank=i, worker_id=w, host=w, share=1.0 / size) for i, w in enumerate(workers)),
        placement={"t": tuple(i % size for i in range(4))},
        transport="auto",
        store_host="",
        store_port=0,
        buddies=tuple((i + 1) % size for i in range(size)) if buddies is None else buddies,
    )


def training(name: str = "a", *others: str, rules: WorkerRules = RULES) -> WorkerState:
    state = WorkerState(name, rules)
    state.handle(OrderArrived(Start(view=view(0, *(others or ("a", "b"))))))
    state.handle(Joined(0, 0))
    return state


def preparing(name: str = "a", *next_members: str) -> WorkerState:
    state = training(name)
    state.handle(OrderArrived(Prepare(view=view(1, *(next_members or ("a", "b", "c"))))))
    state.handle(PrepareReady(1))
    return state


def kinds(instructions) -> list[type]:
    return [type(i) for i in instructions]


def recover(epoch: int, *workers: str, step: int = 5) -> OrderArrived:
    return OrderArrived(Recover(view=view(epoch, *workers), plan=RecoveryPlan(step=step, from_checkpoint=False)))


def test_first_view_then_steps():  # 1
    state = WorkerState("a", RULES)
    assert kinds(state.handle(OrderArrived(Start(view=view(0, "a", "b"))))) == [JoinView]
    assert not state.handle(OrderArrived(Start(view=view(0, "a", "b"))))  # news while something is under way
    assert kinds(state.handle(Joined(0, 0))) == [RunStep]
    assert (state.epoch, state.rank, state.phase) == (0, 0, WorkerPhase.TRAINING)
    assert kinds(state.handle(StepDone(1))) == [RunStep]


def test_a_start_that_is_not_for_this_worker_is_ignored():
    state = WorkerState("z", RULES)
    assert kinds(state.handle(OrderArrived(Start(view=view(0, "a", "b"))))) == [WaitForOrder]


def test_snapshots_follow_the_cadence_and_wait_for_the_one_before():  # 5
    state = training()
    state.handle(StepDone(1, protected=0))
    for step in range(2, 5):
        assert TakeSnapshot not in kinds(state.handle(StepDone(step, protected=0)))
    assert TakeSnapshot(5) in state.handle(StepDone(5, protected=0))
    for step in range(6, 11):
        assert TakeSnapshot not in kinds(state.handle(StepDone(step, protected=0)))
    assert state.skipped_snapshots == 1
    assert kinds(state.handle(StepDone(11, protected=5))) == [Protect, RunStep]
    assert TakeSnapshot(12) in state.handle(StepDone(12, flags=Flag.HASTE, protected=5))


def test_without_buddies_snapshots_are_taken_in_haste_only():  # 5
    alone = WorkerState("a", RULES)
    alone.handle(OrderArrived(Start(view=view(0, "a", "b", buddies=()))))
    alone.handle(Joined(0, 0))
    assert TakeSnapshot not in kinds(alone.handle(StepDone(5, protected=0)))
    assert TakeSnapshot in kinds(alone.handle(StepDone(6, flags=Flag.HASTE, protected=0)))
    partial = training(rules=dataclasses.replace(RULES, has_local_snapshots=True))
    assert TakeSnapshot in kinds(partial.handle(StepDone(5, protected=0)))


def test_preparing_raises_haste_and_rank_0_the_cutover():  # 3
    state = training()
    assert kinds(state.handle(OrderArrived(Prepare(view=view(1, "a", "b", "c"))))) == [BeginPreparing]
    assert state.handle(OrderArrived(CutOver(epoch=1))) == []
    assert RaiseFlag(Flag.CUTOVER, 1) not in state.handle(StepDone(1))  # not prepared yet
    state.handle(PrepareReady(1))
    state.handle(OrderArrived(CutOver(epoch=1)))
    raised = state.handle(StepDone(2))
    assert RaiseFlag(Flag.HASTE) in raised and RaiseFlag(Flag.CUTOVER, 1) in raised
    assert RaiseFlag(Flag.CUTOVER, 1) not in state.handle(StepDone(3))  # for one step, or not at all


def test_only_rank_0_raises_the_cutover():
    state = preparing("b")
    state.handle(OrderArrived(CutOver(epoch=1)))
    assert RaiseFlag(Flag.CUTOVER, 1) not in state.handle(StepDone(1))


def test_cutover_at_the_named_step_and_into_the_new_view():  # 2, 3
    state = preparing()
    answer = state.handle(StepDone(7, flags=Flag.CUTOVER, control=1))
    assert isinstance(answer[-1], PerformCutOver) and answer[-1].step == 7 and answer[-1].old.epoch == 0
    assert kinds(state.handle(CutOverDone(1, 7))) == [RunStep]
    assert (state.epoch, state.protected, state.preparing) == (1, 7, None)
    state.handle(OrderArrived(Prepare(view=view(1, "a", "b"))))
    assert state.preparing is None  # epochs rise


@pytest.mark.parametrize("control", [1, 2])
def test_a_cutover_that_is_not_prepared_here_parks(control):  # 3, 4
    state = training() if control == 1 else preparing()
    answer = state.handle(StepDone(7, flags=Flag.CUTOVER, control=control))
    assert kinds(answer)[-1] is WaitForOrder and DestroyGroups in kinds(answer)
    assert state.phase is WorkerPhase.PARKED and "not prepared" in state.reason


def test_a_leaver_keeps_its_rows_until_it_is_told():  # 6
    state = preparing("b", "a", "c")
    state.handle(StepDone(7, flags=Flag.CUTOVER, control=1))
    assert kinds(state.handle(CutOverDone(1, 7))) == [WaitForOrder]
    assert state.phase is WorkerPhase.LEFT and state.epoch == 0
    assert kinds(state.handle(OrderArrived(Release(epoch=1)))) == [WaitForOrder]
    assert kinds(state.handle(OrderArrived(Leave(reason="done")))) == [DestroyGroups, Exit]
    assert not state.handle(OrderArrived(Leave(reason="again")))


def test_a_joiner_prepares_waits_and_is_called():  # 3
    state = WorkerState("c", RULES)
    assert kinds(state.handle(OrderArrived(Prepare(view=view(1, "a", "b", "c"))))) == [BeginPreparing, WaitForOrder]
    assert kinds(state.handle(CutOverCalled(1, 7))) == [WaitForOrder]  # not ready
    state.handle(PrepareReady(1))
    (called,) = state.handle(CutOverCalled(1, 7))
    assert called == PerformCutOver(view(1, "a", "b", "c"), None, 7)
    assert kinds(state.handle(CutOverDone(1, 7))) == [RunStep]


def test_an_aborted_epoch_is_void():  # 2, 6
    state = preparing()
    answer = state.handle(OrderArrived(Abort(epoch=1, reason="no")))
    assert kinds(answer) == [CancelPreparing, DropOthers] and state.fence == 2
    assert state.handle(OrderArrived(Prepare(view=view(1, "a", "b", "c")))) == [] and state.preparing is None
    assert BeginPreparing in kinds(state.handle(OrderArrived(Prepare(view=view(2, "a", "b", "c")))))


def test_a_failed_preparation_raises_no_flags_and_is_reported():
    state = preparing()
    state.handle(PrepareFailed(1, "no groups"))
    assert state.prepare_error == "no groups" and kinds(state.handle(StepDone(1))) == [RunStep]


def test_a_failed_step_destroys_groups_then_parks_and_a_recovery_follows():  # 2, 4
    state = training()
    assert kinds(state.handle(StepFailed("gone", (1,)))) == [DestroyGroups, WaitForOrder]
    assert state.unreachable == ("b",) and state.is_resting
    state.handle(OrderArrived(Park(epoch=3, reason="b is lost")))
    assert state.fence == 3
    assert kinds(state.handle(recover(2, "a"))) == [WaitForOrder]  # below the fence
    assert kinds(state.handle(recover(3, "a"))) == [PerformRecover]
    assert not state.handle(recover(3, "a"))  # the same again
    assert kinds(state.handle(Recovered(3, 5))) == [RunStep]
    assert (state.epoch, state.step, state.protected) == (3, 5, -1)


def test_a_second_recovery_replaces_the_first():
    state = training()
    state.handle(StepFailed("gone"))
    state.handle(recover(3, "a"))
    assert state.is_urgent(recover(4, "a").order) and not state.is_urgent(recover(3, "a").order)
    assert not state.handle(recover(4, "a"))
    answer = state.handle(RecoverFailed(3, "another one is gone"))
    assert isinstance(answer[-1], PerformRecover) and answer[-1].view.epoch == 4 and DestroyGroups in kinds(answer)


def test_parking_for_an_attempt_waits_for_the_step_and_voids_older_orders():  # 2
    state = preparing()
    assert state.is_urgent(Park(epoch=2, reason="lost")) and not state.is_urgent(Park(epoch=0, reason="old"))
    assert not state.handle(OrderArrived(Park(epoch=2, reason="lost")))
    assert kinds(state.handle(StepDone(3)))[-1] is WaitForOrder and state.phase is WorkerPhase.PARKED
    assert kinds(state.handle(OrderArrived(Prepare(view=view(1, "a", "b", "c"))))) == [WaitForOrder]


def test_a_failed_cutover_keeps_the_old_view():
    state = preparing()
    state.handle(StepDone(7, flags=Flag.CUTOVER, control=1))
    answer = state.handle(CutOverFailed(1, "timed out", (9,)))
    assert kinds(answer) == [CancelPreparing, DestroyGroups, WaitForOrder]
    assert state.epoch == 0 and state.phase is WorkerPhase.PARKED


def test_release_counts_only_in_its_own_view_at_work():  # 6
    state = training()
    assert state.handle(OrderArrived(Release(epoch=1))) == []
    assert kinds(state.handle(OrderArrived(Release(epoch=0)))) == [DropOthers]
    state.handle(StepFailed("gone"))
    assert kinds(state.handle(OrderArrived(Release(epoch=0)))) == [WaitForOrder]


def test_stop_goes_before_loss_of_the_controller_before_cutover():  # 7
    every = Flag.STOP | Flag.CONTROLLER_LOST | Flag.CUTOVER
    answer = preparing().handle(StepDone(3, flags=every, control=1))
    assert kinds(answer) == [CancelPreparing, FinishLoop] and answer[-1].is_stopped
    state = preparing()
    answer = state.handle(StepDone(3, flags=every & ~Flag.STOP, control=1, protected=0))
    assert TakeSnapshot in kinds(answer) and kinds(answer)[-1] is WaitForOrder and state.phase is WorkerPhase.PARKED


def test_the_end_and_a_recovery_after_it():
    state = training()
    assert state.handle(StepDone(100)) == (FinishLoop(False),)
    assert kinds(state.handle(LoopEnded(100))) == [WaitForOrder] and state.phase is WorkerPhase.FINISHED
    assert kinds(state.handle(recover(1, "a"))) == [DestroyGroups, PerformRecover]


def test_a_failure_of_the_users_code_is_final():  # 4
    state = training()
    assert kinds(state.handle(LoopFailed("bad id"))) == [DestroyGroups, WaitForOrder]
    assert kinds(state.handle(recover(1, "a"))) == [WaitForOrder] and state.phase is WorkerPhase.FAILED


def test_a_silent_controller_parks_all_and_ends_orphans():  # 8
    state = training()
    state.handle(ControllerSilent(11.0))
    assert not state.may_write and RaiseFlag(Flag.CONTROLLER_LOST) in state.handle(StepDone(1))
    state.handle(ControllerBack())
    assert state.may_write and kinds(state.handle(StepDone(2))) == [RunStep]
    state.handle(ControllerSilent(11.0))
    state.handle(StepDone(3, flags=Flag.CONTROLLER_LOST))
    assert kinds(state.handle(ControllerSilent(20.0))) == [WaitForOrder]
    assert kinds(state.handle(ControllerSilent(31.0)))[-1] is Exit


def test_who_only_supplies_rows_goes_on_waiting():
    state = preparing("b", "a", "c")
    state.handle(StepDone(7, flags=Flag.CUTOVER, control=1))
    state.handle(CutOverDone(1, 7))
    plan = RecoveryPlan(step=7, from_checkpoint=False, shipments=(Shipment(source="b", target="a"),))
    assert kinds(state.handle(OrderArrived(Recover(view=view(2, "a"), plan=plan))))[-1] is PerformRecover
    assert kinds(state.handle(Recovered(2, 7))) == [WaitForOrder]
    assert state.phase is WorkerPhase.LEFT and state.epoch == 0
