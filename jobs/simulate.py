"""Run simulated histories from a seed and say what came of them; a failure is shrunk to the fewest faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from shoal.platform.sim import History, Report, simulate
from shoal.platform.sim_network import SimulationError
from shoal.platform.sim_scenario import PAIRS, Scenario


@dataclasses.dataclass(frozen=True)
class Failure:
    """A history in which a rule was broken, with as few faults as it takes."""

    seed: int
    num_faults: int
    text: str

    @property
    def command(self) -> str:
        """What replays it."""
        return f"shoal simulate --seed {self.seed} --faults {self.num_faults} --verbose"


def find_failure(seed: int, num_histories: int, progress: Callable[[int], None]) -> tuple[Report, Failure | None]:
    """Run histories ``seed``, ``seed + 1``, ... until one breaks a rule. ``progress`` is told every hundredth."""
    total = Report()
    for number in range(num_histories):
        try:
            total.add(simulate([seed + number]))
        except SimulationError as error:
            return total, _shrink(seed + number, error)
        if number % 100 == 99:
            progress(number + 1)
    return total, None


def replay(seed: int, num_faults: int | None, log: Callable[[str], None]) -> str | None:
    """Run one history, every event told to ``log``. Returns what rule was broken, or None."""
    scenario = Scenario.of(seed, num_faults)
    log(f"{scenario}")
    try:
        outcome = History(scenario, log=log).run()
    except Exception as error:  # also an assertion of the machines themselves
        return f"{type(error).__name__}: {error}"
    log(f"{outcome.phase.value} after {outcome.virtual_s:.1f} virtual seconds")
    return None


def summary(report: Report) -> str:
    """What was run, in a few lines."""
    counts = report.counts
    recoveries = (
        f"{counts['recovery from memory']} from memory, {counts['recovery from a checkpoint']} from a checkpoint"
    )
    return (
        f"{report.num_histories} histories in {report.seconds:.1f} s ({report.per_minute:.0f} a minute)\n"
        f"recoveries: {recoveries}; views: {counts['event view']}; preparations abandoned: {counts['event abort']}\n"
        f"pairs of causes and phase that met: {len(report.pairs & set(PAIRS))} of {len(PAIRS)}"
    )


def _shrink(seed: int, error: SimulationError) -> Failure:
    """The smallest number of the scenario's faults, in their order, with which it still fails."""
    num_all = len(Scenario.of(seed).faults)
    for num_faults in range(num_all):
        problem = replay(seed, num_faults, lambda text: None)
        if problem is not None:
            return Failure(seed, num_faults, problem)
    return Failure(seed, num_all, str(error))
