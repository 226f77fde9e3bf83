"""View changes and recoveries of tables cut into column blocks that share row-wise state: no trace in the numbers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import parity
from cut_tables import blocks_of, cut, whole_rows
from test_views import STEPS, Cast, assert_equal, close_to, fixed_run, make_spec, source  # noqa: F401 (fixtures)

from shoal.actors.worker_spec import WorkerSpec
from shoal.kernels.spec import OptimizerKind, OptimizerSpec

ROWWISE = OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.1)


@pytest.fixture
def spec(make_spec, request) -> WorkerSpec:  # noqa: F811
    """A job over cut tables with row-wise Adagrad."""
    made = make_spec(request.node.name)
    assert isinstance(made.make_table, parity.MakeTable)
    return cut(dataclasses.replace(made, make_table=parity.MakeTable(ROWWISE, made.make_table.seed)))


def test_moving_column_blocks_leaves_no_trace_in_the_numbers(spec):
    """S5, promise 2: every column block of every row block moves on its own."""
    expected = fixed_run(spec, 2)
    cast = Cast(spec, replicate=True)
    try:
        cast.launch("w0", "w1")
        cast.start("w0", "w1")
        cast.migrate_at_random("w0", "w1", seed=7)
        assert cast.status("w0").step < STEPS
        ending = cast.finish()
        assert_equal(ending, expected)
        whole_rows(ending.rows, blocks_of(spec))  # all column blocks of a row agree on its state
    finally:
        cast.close()


def test_a_lost_worker_and_a_joiner_leave_column_blocks_as_they_were(spec):
    """F4, F9: rolled back to one step, the blocks of a row stay one row; a world that grows stays close (promise 1)."""
    expected = fixed_run(spec, 2)
    cast = Cast(spec, replicate=True)
    try:
        cast.launch("w0", "w1", "w2", "w3")
        cast.start("w0", "w1")
        cast.reach(33, ["w0", "w1"])
        cast.workers["w1"].kill()
        decision = cast.recover("w1", "w2")
        assert not decision.plan.from_checkpoint and decision.plan.step > 0
        cast.reach(70, ["w0", "w2"])
        cast.change("w0", "w2", "w3")
        ending = cast.finish()
        close_to(ending, expected)
        whole_rows(ending.rows, blocks_of(spec))
    finally:
        cast.close()
