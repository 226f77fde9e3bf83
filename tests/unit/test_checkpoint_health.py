"""When a run that cannot write checkpoints stops (faults rows 27, 28)."""

from __future__ import annotations

from shoal.platform.checkpoint_health import CheckpointHealth


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
