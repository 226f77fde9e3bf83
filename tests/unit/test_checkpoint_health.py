"""When a run that cannot write checkpoints stops (faults rows 27, 28)."""

from __future__ import annotations

from shoal.actors.messages import Member, SnapshotPart, View
from shoal.platform.checkpoint_health import CheckpointHealth
from shoal.platform.config import ScalingConfig
from shoal.platform.config_failure import FailureConfig
from shoal.platform.incident import Limits
from shoal.platform.ledger import CheckpointLedger
from shoal.platform.membership import ViewSpec
from shoal.platform.state import ControllerSpec, ControllerState
from shoal.platform.state_messages import EndRun, ManifestWritten


def test_run_stops_after_max_failed_checkpoints_in_a_row() -> None:
    """checkpoint_health invariant 2."""
    health = CheckpointHealth().not_written(100, "rank 1: 503").not_written(100, "rank 2: 503")
    assert health.stop_reason(2) is None
    health = health.not_written(200, "disk full")
    reason = health.stop_reason(2)
    assert (
        reason is not None and "2 checkpoints in a row" in reason and "100 to 200" in reason and "disk full" in reason
    )
    assert health.stop_reason(None) is None and health.stop_reason(3) is None
    assert health.written(200) == CheckpointHealth()
    assert health.written(100).not_written(300, "x").stop_reason(2) is not None  # 200 and 300


def test_abandoned_checkpoint_has_not_failed() -> None:
    """checkpoint_health invariant 1."""
    health = CheckpointHealth().not_written(100, "a").not_written(200, "b").went_back(150)
    assert health.failed == ((100, "a"),)


def part(step: int, *, epoch: int = 0, error: str | None = None, is_cancelled: bool = False) -> SnapshotPart:
    return SnapshotPart(epoch=epoch, step=step, rank=0, files=(), error=error, is_cancelled=is_cancelled)


def test_ledger_counts_what_storage_refused_not_what_a_loss_cost() -> None:
    """checkpoint_health invariants 1 and 2; F3: a worker's death cancels the others' parts."""
    view = View(
        run="r",
        epoch=0,
        members=(Member(rank=0, worker_id="w", host="h", share=1.0),),
        placement={},
        transport="auto",
        store_host="",
        store_port=0,
    )
    ledger = CheckpointLedger(None)
    ledger.add(part(10, error="cancelled", is_cancelled=True), view)
    assert ledger.health == CheckpointHealth() and 10 in ledger.not_written
    ledger.add(part(20, error="503"), view)
    assert ledger.add(part(30), view) is not None
    ledger.written(0, 30, "503")
    assert [step for step, _ in ledger.health.failed] == [20, 30]
    ledger.close(0, 25)
    ledger.add(part(40, error="of an epoch that is over"), view)
    assert [step for step, _ in ledger.health.failed] == [20]
    ledger.written(0, 25, None)
    assert ledger.health == CheckpointHealth()


def test_run_ends_when_its_last_checkpoints_all_failed() -> None:
    """state invariant 14."""
    spec = ControllerSpec(
        scaling=ScalingConfig(num_workers=1),
        failure=FailureConfig(),
        view_spec=ViewSpec(run="r", replicate=False),
        limits=Limits(failed_checkpoints_max=2),
    )
    state = ControllerState(spec)
    outcomes = []
    for step in (10, 20, 30):
        instructions = state.handle(ManifestWritten(now_s=float(step), epoch=0, step=step, error="quota"))
        outcomes.append([i.reason for i in instructions if isinstance(i, EndRun)])
    assert outcomes[0] == [] and outcomes[2] == []
    assert len(outcomes[1]) == 1 and "of steps 10 to 20; the last: quota" in outcomes[1][0]
