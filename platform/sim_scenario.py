"""What happens in a simulated history: the job, the cluster, and the faults, all drawn from a seed."""

from __future__ import annotations

import dataclasses
import random

from shoal.platform.state_messages import Cause

#: Phases of the controller in which something else may happen; the names are those of ``sim.phase_name``.
PHASES = ("running", "preparing", "cutting over", "collecting", "restoring", "waiting")
#: Faults that make a view fail.
FAILURES = ("kill worker", "kill host", "stop worker", "partition", "cut worker links", "kill controller", "kill both")
#: What brings about a planned change of each cause.
ORDERS = {
    Cause.DRAIN: "drain",
    Cause.REPLACE: "replace",
    Cause.SCALE: "scale",
    Cause.CAPACITY: "capacity",
    Cause.REBALANCE: "rebalance",
}

#: (cause of what is in flight, phase, cause of what comes): V6.
PAIRS: tuple[tuple[Cause, str, Cause], ...] = tuple(
    (first, phase, second)
    for first in Cause
    for phase in (("collecting", "restoring") if first is Cause.FAILURE else ("preparing", "cutting over"))
    for second in Cause
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that happens: ``kind`` at ``after_s`` after the controller's phase is ``phase`` for the first time
    since the fault before it."""

    kind: str
    phase: str
    after_s: float
    #: Picks the worker, host or number: a share of whatever there is to choose from.
    choice: float
    #: Of a stop or a partition: how long it lasts.
    lasts_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {self.after_s:.2f} s into {self.phase!r} ({self.choice:.2f}, {self.lasts_s:.1f} s)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A history before it is run."""

    seed: int
    total_steps: int
    snapshot_every_steps: int
    checkpoint_every_steps: int | None
    num_hosts: int
    slots_per_host: int
    #: Slots that exist from the beginning; the others come with "capacity", or when the history is healed.
    num_slots: int
    workers_min: int
    workers_max: int
    recovery: str
    on_loss: str
    num_standby: int
    drop: float
    duplicate: float
    pair: tuple[Cause, str, Cause] | None
    faults: tuple[Fault, ...]

    @staticmethod
    def of(seed: int, num_faults: int | None = None) -> Scenario:
        """The scenario of ``seed``: every pair of causes in turn, and what else chance adds."""
        rng = random.Random(seed * 7919 + 17)
        pair = PAIRS[seed % len(PAIRS)]
        on_loss = rng.choice(("shrink", "shrink", "replace", "standby"))
        recovery = rng.choice(("replicated", "replicated", "replicated", "checkpoint", "partial"))
        num_hosts = rng.randint(2, 4)
        workers_max = rng.randint(2, 4)
        workers_min = rng.randint(1, workers_max)
        if pair[0] is Cause.CAPACITY or pair[2] is Cause.CAPACITY:
            workers_min, workers_max = rng.randint(1, 2), rng.randint(3, 4)
        num_standby = 1 if on_loss == "standby" else 0
        slots_per_host = -(-(workers_max + 2 + num_standby) // num_hosts)
        num_slots = num_hosts * slots_per_host
        if Cause.CAPACITY in (pair[0], pair[2]) and pair[0] is not Cause.REPLACE:  # which needs room for a new worker
            num_slots = rng.randint(workers_min, workers_max - 1)
        faults = _faults(rng, pair)
        return Scenario(
            seed=seed,
            total_steps=rng.randint(25, 45),
            snapshot_every_steps=rng.randint(2, 7),
            checkpoint_every_steps=rng.choice((None, 9, 13)),
            num_hosts=num_hosts,
            slots_per_host=slots_per_host,
            num_slots=num_slots,
            workers_min=workers_min,
            workers_max=workers_max,
            recovery=recovery,
            on_loss=on_loss,
            num_standby=num_standby,
            drop=rng.choice((0.0, 0.01, 0.05)),
            duplicate=rng.choice((0.0, 0.05)),
            pair=pair,
            faults=faults if num_faults is None else faults[:num_faults],
        )


def _faults(rng: random.Random, pair: tuple[Cause, str, Cause]) -> tuple[Fault, ...]:
    first, phase, second = pair
    faults = [_fault(rng, first, "running", rng.uniform(0.2, 1.5))]
    spread_s = 0.05 if phase in ("cutting over", "restoring") else 0.4
    faults.append(_fault(rng, second, phase, rng.uniform(0.0, spread_s)))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        faults.append(_fault(rng, rng.choice(list(Cause)), rng.choice(PHASES), rng.uniform(0.0, 0.6)))
    return tuple(faults)


def _fault(rng: random.Random, cause: Cause, phase: str, after_s: float) -> Fault:
    kind = ORDERS.get(cause) or rng.choice(FAILURES)
    return Fault(kind=kind, phase=phase, after_s=after_s, choice=rng.random(), lasts_s=rng.uniform(0.3, 9.0))
