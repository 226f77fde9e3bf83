"""Whole runs under the simulator: fixed seeds, one random seed that prints itself, broken rules that it must find."""

from __future__ import annotations

import os

import pytest

from shoal.actors.messages import WorkerPhase
from shoal.actors.protocol import WorkerState
from shoal.platform.sim import History, HistoryFailed, Parts, simulate
from shoal.platform.sim_network import SimulationError
from shoal.platform.sim_rows import Copy, RowState
from shoal.platform.sim_scenario import PAIRS, Scenario
from shoal.platform.state import ControllerState

#: Seeds per part: PAIRS in turn, so that each part meets every pair of causes.
SEEDS_PER_PART = len(PAIRS)


@pytest.mark.parametrize("part", range(2))
def test_fixed_seeds_keep_every_rule_and_end(part):
    report = simulate(range(part * SEEDS_PER_PART, (part + 1) * SEEDS_PER_PART))
    assert report.num_histories == SEEDS_PER_PART
    assert report.counts["recovery from memory"] and report.counts["recovery from a checkpoint"]


def test_every_pair_of_causes_meets_in_every_phase():
    """V6: whatever is in flight, whatever comes, while it is prepared, cut over, collected or restored."""
    missing, seed = set(PAIRS), 0
    while missing and seed < 40 * len(PAIRS):
        pair = PAIRS[seed % len(PAIRS)]
        if pair in missing:
            missing -= History(Scenario.of(seed)).run().pairs
        seed += 1
    assert not missing


def test_a_random_seed():
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"shoal simulate --seed {seed}")
    simulate([seed])


def test_parts_that_went_to_a_dead_controller_do_not_hold_up_the_end():
    simulate([50481])


def test_the_same_seed_gives_the_same_history():
    logs: list[list[str]] = [[], []]
    for log in logs:
        History(Scenario.of(77), log=log.append).run()
    assert logs[0] == logs[1] and len(logs[0]) > 30


# ---- broken rules -------------------------------------------------------------------------------------------------


class VersionsReleasedEarly(RowState):
    """C2, F3: older cuts go when the next one is taken, not when it is protected."""

    def cut(self, step):
        self.snapshots = {}
        super().cut(step)


class CursorOffByOne(RowState):
    """The feed is not taken back far enough: a step is left out after a recovery or cutover."""

    offset = 0

    def flip(self, contents, step, **state):
        self.offset = int(step > 0)
        super().flip(contents, step, **state)

    def cursor_after_rollback(self, step):
        return step + self.offset


class KeepsCounting(RowState):
    """A worker that owns nothing takes no part in a roll-back, and goes on counting steps from where it was."""

    def count_from(self, step):
        if self.owned:
            super().count_from(step)


class BaseOverwritten(RowState):
    """A change is applied to whatever base there is."""

    def stage(self, key, step, start, change):
        copy = self.copies.get(key)
        if start is not None and copy is not None:
            self.copies[key] = Copy(start, copy.base)
        return super().stage(key, step, start, change)


class ReleaseBeforeAllAreIn(ControllerState):
    """V5: others are told to drop rows as soon as anybody is in the new view."""

    def _settle(self):
        from shoal.platform import state

        whole, state.are_all_in = state.are_all_in, lambda view, roster: True
        try:
            super()._settle()
        finally:
            state.are_all_in = whole


class ParkedIsEnough(WorkerState):
    """F1: parks without destroying its groups."""

    def _destroy(self, reason):
        return []


class StopsAlone(WorkerState):
    """S3: acts on a cutover that it was ordered to, without waiting for the header."""

    def _step_done(self, event):
        if self._cutover_epoch is not None and self.is_prepared and self.phase is WorkerPhase.TRAINING:
            self.step = event.step
            return self._block([], self._cut_over(event.step))
        return super()._step_done(event)


#: Name -> (what breaks the rule, a seed that is known to show it).
MUTANTS = {
    "versions released early": (Parts(rows=VersionsReleasedEarly), 135),
    "cursor off by one": (Parts(rows=CursorOffByOne), 2),
    "steps counted on": (Parts(rows=KeepsCounting), 1163),
    "base overwritten": (Parts(rows=BaseOverwritten), 2),
    "release before all are in": (Parts(controller_state=ReleaseBeforeAllAreIn), 0),
    "parks with its groups": (Parts(worker_state=ParkedIsEnough), 2),
    "stops alone": (Parts(worker_state=StopsAlone), 2),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_found(name):
    parts, seed = MUTANTS[name]
    with pytest.raises(HistoryFailed) as found:
        simulate([seed, *range(400)], parts)
    assert isinstance(found.value.__cause__, (SimulationError, AssertionError))
