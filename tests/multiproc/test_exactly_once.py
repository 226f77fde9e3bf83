"""Every sample counts exactly once, read from the weights, and wrong code does not pass for right code.

Each mutant runs in real workers, over the workload whose rows must end at minus the number of epochs, and is caught by
the check that its test names. The one without an epoch check is caught by the replicator's own tests.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import elastic_cases as cases
import mutants

from shoal.kernels.faults import Action, Fault
from shoal.platform.chaos import ChaosPlan, Promise

pytestmark = pytest.mark.timeout(300)

LOSS = Fault(point="step.begin", role="owner", action=Action.KILL, nth=13)
LOSS_WHILE_SENDING = Fault(point="snapshot.send", role="owner", action=Action.KILL, nth=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return cases.write_counted(tmp_path_factory.mktemp("counted"))


def run(data: Path, folder: Path, fault: Fault, patch=None) -> cases.Outcome:
    plan = ChaosPlan(seed=2000, promise=Promise.EXACTLY_ONCE, num_workers=2, faults=(fault,))
    outcome = cases.run_case(plan, data, folder, patch=patch, limit_s=200)
    assert outcome.problems == [] and outcome.state is not None, outcome.story()
    return outcome


def targets(outcome: cases.Outcome) -> list[str]:
    """Where recoveries went back to."""
    return [event["reason"] for event in outcome.events if event["kind"] == "recovered"]


def test_a_loss_while_a_snapshot_is_sent_costs_no_protected_step(data, tmp_path):
    """Promise 5; what the first mutant breaks."""
    outcome = run(data, tmp_path, LOSS_WHILE_SENDING)
    assert cases.check_counts(outcome.state) == []
    assert all(reason.startswith("back to the snapshot") for reason in targets(outcome)), outcome.story()


def test_mutant_that_releases_versions_early_loses_protected_steps(data, tmp_path):
    outcome = run(data, tmp_path, LOSS_WHILE_SENDING, mutants.versions_released_early)
    assert not all(reason.startswith("back to the snapshot") for reason in targets(outcome)), outcome.story()


@pytest.mark.parametrize(
    ("patch", "told"),
    [
        (mutants.versions_not_transferred, "rows were not applied"),
        (mutants.staging_dropped_early, "rows do not stand at"),
        (mutants.cursor_off_by_one, "rows do not stand at"),
    ],
)
def test_mutant_is_seen_in_the_weights(data, tmp_path, patch, told):
    outcome = run(data, tmp_path, LOSS, patch)
    problems = cases.check_counts(outcome.state)
    assert any(told in problem for problem in problems), (problems, outcome.story())


def test_mutant_without_epoch_check_is_caught_by_the_replicators_tests(monkeypatch):
    """F7: messages of other epochs and of non-members."""
    from shoal.actors.inbound import Inbound

    path = Path(__file__).parents[1] / "unit" / "test_replication.py"
    spec = importlib.util.spec_from_file_location("replication_tests", path)
    assert spec is not None and spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    monkeypatch.setattr(Inbound, "_fence", lambda self, epoch, sender: None)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        tests.test_messages_of_other_epochs_and_of_non_members_are_refused_f7()
