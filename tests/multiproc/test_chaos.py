"""Runs under seeded faults: real workers and controllers in processes that are killed (PROTOCOLS F, V; no Ray).

CI runs two schedules of several faults each. ``SHOAL_CHAOS=1 pytest -k every_seed`` runs all seeds, which together meet
every fault point in every role.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import elastic_cases as cases
import parity

from shoal.kernels.faults import Action, Fault
from shoal.platform.chaos import NUM_SEEDS, ChaosPlan, Promise, plan_chaos
from shoal.platform.chaos_checks import TrainedState, compare_states

pytestmark = pytest.mark.timeout(400)


class Workloads:
    """The data of both workloads, and what a run without faults ends with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = {
            Promise.IDENTICAL: parity.write_data(folder / "identical"),
            Promise.EXACTLY_ONCE: cases.write_counted(folder / "counted"),
        }
        self._undisturbed: dict[int, TrainedState] = {}

    def run(self, plan: ChaosPlan, **options) -> cases.Outcome:
        return cases.run_case(plan, self.data[plan.promise], self.folder / "runs", **options)

    def undisturbed(self, num_workers: int) -> TrainedState:
        """The state that ``num_workers`` end with when nothing goes wrong."""
        if num_workers not in self._undisturbed:
            plan = ChaosPlan(seed=-1, promise=Promise.IDENTICAL, num_workers=num_workers, faults=())
            outcome = self.run(plan)
            assert outcome.state is not None and outcome.problems == [], outcome.story()
            self._undisturbed[num_workers] = outcome.state
        return self._undisturbed[num_workers]

    def check(self, outcome: cases.Outcome) -> None:
        """Every fault happened, the run ended well, and its promise held."""
        assert outcome.problems == [] and outcome.state is not None, _told(outcome, outcome.problems)
        if outcome.plan.promise is Promise.EXACTLY_ONCE:
            problems = cases.check_counts(outcome.state)
        else:
            problems = compare_states(self.undisturbed(outcome.plan.num_workers), outcome.state)
        assert problems == [], _told(outcome, problems)


def _told(outcome: cases.Outcome, problems: list[str]) -> str:
    return "\n".join([*problems, outcome.story()])


@pytest.fixture(scope="module")
def workloads(tmp_path_factory) -> Workloads:
    return Workloads(tmp_path_factory.mktemp("chaos"))


def test_run_with_deaths_equals_the_run_without_bit_for_bit(workloads):
    """F3, F4, F9, V4, F8: mid-step, holding copies, while joining, and the controller."""
    faults = (
        Fault(point="step.rows_applied", role="owner", action=Action.KILL, nth=8),
        Fault(point="snapshot.ack", role="buddy", action=Action.KILL, nth=4),
        Fault(point="cutover.flip", role="joiner", action=Action.KILL),
        Fault(point="controller.journalled", role="controller", action=Action.KILL, nth=2),
    )
    plan = ChaosPlan(seed=1001, promise=Promise.IDENTICAL, num_workers=2, faults=faults)
    workloads.check(workloads.run(plan, limit_s=240))


def test_every_sample_counts_once_under_resizes_and_deaths(workloads):
    """The weights say it: each row stands at minus the number of epochs (exactly once)."""
    faults = (
        Fault(point="step.gradients_done", role="rank0", action=Action.KILL, nth=6),
        Fault(point="cutover.meet", role="rank0", action=Action.KILL),
        Fault(point="recovery.rolled_back", role="buddy", action=Action.KILL),
    )
    plan = ChaosPlan(seed=1002, promise=Promise.EXACTLY_ONCE, num_workers=2, faults=faults)
    workloads.check(workloads.run(plan, limit_s=240))


@pytest.mark.skipif(not os.environ.get("SHOAL_CHAOS"), reason="half an hour: set SHOAL_CHAOS=1")
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_promises_hold_under_every_seed(workloads, seed):
    workloads.check(workloads.run(plan_chaos(seed), limit_s=240))
