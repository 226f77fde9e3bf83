"""A job under a schedule of faults, on a Ray cluster of this machine: what ``shoal chaos`` does.

The job is trained twice in a folder of its own: undisturbed, and while the schedule kills, stalls and cuts off its
processes and an operator, here, brings about what does not come by itself. Afterwards both are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.jobs.progress import Progress
from shoal.jobs.result import Result
from shoal.jobs.train import ElasticTrainer
from shoal.kernels import faults
from shoal.kernels.errors import ConfigError
from shoal.kernels.faults import LEAVER, ROLES, Fault, Fired, Schedule, read_fired, read_processes
from shoal.platform.chaos import ChaosPlan, Promise, Provocation, next_provocation, plan_chaos
from shoal.platform.chaos_checks import check_events, check_fired, check_lineage, compare_states, read_state
from shoal.platform.config import JobConfig
from shoal.platform.storage import Storage
from shoal.platform.telemetry import read_events

#: What each step lasts longer until all faults have happened. Seconds.
BRAKE_S = 0.25
#: A view is left alone for this long before the operator does something. Seconds.
SETTLED_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A promise, and where it was broken."""

    promise: str
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChaosReport:
    """How a job under a schedule came out."""

    plan: ChaosPlan
    fired: tuple[Fired, ...]
    provocations: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def is_good(self) -> bool:
        return not any(verdict.problems for verdict in self.verdicts)


def plan_for(config: JobConfig, seed: int) -> ChaosPlan:
    """The schedule of ``seed`` for a job. Raises ConfigError for a job that has nothing to lose."""
    if config.scaling.max_workers < 2:
        raise ConfigError(f"scaling.num_workers is {config.scaling.num_workers}: chaos needs 2 workers or more")
    promise = Promise.EXACTLY_ONCE if config.scaling.is_elastic else Promise.IDENTICAL
    return dataclasses.replace(
        plan_chaos(seed, roles=ROLES), promise=promise, num_workers=max(2, config.scaling.min_workers)
    )


def run_chaos(config: JobConfig, plan: ChaosPlan, folder: Path, say: Callable[[str], None]) -> ChaosReport:
    """Train the job of ``config`` twice below ``folder`` and judge; ``say`` is told what happens meanwhile."""
    calm = _job(config, folder, "calm", plan)
    say(f"training undisturbed in {calm.run.run_dir}")
    expected = ElasticTrainer.from_config(calm).fit(progress=_silent())
    job = _job(config, folder, "chaos", plan)
    schedule = Schedule(faults=plan.faults, folder=str(folder / "faults"), brake_s=BRAKE_S)
    Path(schedule.folder).mkdir(parents=True)
    say(f"training under the faults of seed {plan.seed} in {job.run.run_dir}")
    operator = _Operator(job, plan, schedule, say)
    failure = ""
    result: Result | None = None
    with operator:
        try:
            result = ElasticTrainer.from_config(job).fit(progress=_silent(), on_record=operator.note, schedule=schedule)
        except Exception as error:  # the verdict of a run that has failed
            failure = f"{type(error).__name__}: {error}"
    verdicts = _judge(plan, schedule, calm, job, expected, result, failure)
    return ChaosReport(
        plan=plan, fired=read_fired(schedule), provocations=tuple(operator.provocations), verdicts=tuple(verdicts)
    )


def _job(config: JobConfig, folder: Path, kind: str, plan: ChaosPlan) -> JobConfig:
    """The job, in a run folder of its own, surviving any number of losses."""
    failure = config.run.failure
    changed = failure.replace(
        recovery="replicated" if failure.recovery == "auto" else failure.recovery,
        on_loss="replace" if failure.on_loss == "auto" else failure.on_loss,
        max_failures=-1,
        max_failures_without_progress=-1,
        controller_failure_limit=-1,
    )
    run = config.run.replace(
        name=f"{config.run.name}-{kind}-{plan.seed}", storage_path=str(folder), failure=changed, resume="auto"
    )
    return config.replace(run=run, scaling=config.scaling.replace(address="local"))


def _judge(
    plan: ChaosPlan,
    schedule: Schedule,
    calm: JobConfig,
    job: JobConfig,
    expected: Result,
    result: Result | None,
    failure: str,
) -> list[Verdict]:
    def verdict(promise: str, problems: Sequence[str]) -> Verdict:
        return Verdict(promise=promise, problems=tuple(problems))

    ended = [failure] if result is None else []
    if result is not None and result.steps != expected.steps:
        ended.append(f"it ended at step {result.steps} instead of {expected.steps}")
    events = list(read_events(Storage(job.run.run_dir)))
    verdicts = [
        verdict("every fault of the schedule happened", check_fired(schedule)),
        verdict("the run reached its last step", ended),
        verdict("epochs rise", check_events(events)),
        verdict("storage holds one history", check_lineage(job.run.run_dir)),
    ]
    if result is None:
        return verdicts
    before, after = read_state(calm.run.run_dir), read_state(job.run.run_dir)
    if plan.promise is Promise.IDENTICAL:
        promise = "weights, optimizer state, dense state and metrics equal the undisturbed run's, bit for bit"
        sizes = {int(event["workers"]) for event in events if event.get("kind") in ("view", "recovered")}
        if others := sorted(sizes - {plan.num_workers}):
            reason = f"the run went on with {others} workers for a while: its numbers cannot be the same"
            return [*verdicts, verdict(promise, [reason])]
        return [*verdicts, verdict(promise, compare_states(before, after))]
    counts = {name: (before.metadata.get(name), after.metadata.get(name)) for name in ("samples", "skipped_steps")}
    problems = [f"{name}: {b} instead of {a}" for name, (a, b) in counts.items() if a != b]
    for table, rows in before.rows.items():
        if int(rows.count.sum()) != int(after.rows[table].count.sum()) or len(rows) != len(after.rows[table]):
            problems.append(f"table {table!r}: rows were applied another number of times")
    return [*verdicts, verdict("every sample counted exactly once", problems)]


def _silent() -> Progress:
    """Nothing is shown: what counts is said at the end."""
    return Progress(stream=io.StringIO(), is_terminal=False)


class _Operator:
    """Does to the run what the schedule's faults need to come about, in a thread, while the driver waits."""

    def __init__(self, job: JobConfig, plan: ChaosPlan, schedule: Schedule, say: Callable[[str], None]) -> None:
        self._job, self._plan, self._schedule, self._say = job, plan, schedule, say
        self.provocations: list[str] = []
        self._workers = 0
        self._quiet_since = time.monotonic()
        self._is_settled = False
        #: Process that was told to go, as long as it lives: one at a time.
        self._leaving = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)

    def __enter__(self) -> _Operator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(30.0)

    def note(self, item: Any) -> None:
        """What the driver learns of the run."""
        if not isinstance(item, tuple):
            return
        kind, fields = item
        if kind in ("view", "recovered"):
            self._workers, self._is_settled = int(fields.get("workers", self._workers)), True
        elif kind in ("prepare", "failure", "waiting"):
            self._is_settled = False
        elif kind == "abort":
            self._is_settled = True
        self._quiet_since = time.monotonic()

    def _run(self) -> None:
        told: set[int] = set()
        while not self._is_over.wait(0.1):
            fired = read_fired(self._schedule)
            for one in fired:
                if one.index not in told:
                    told.add(one.index)
                    self._say(f"fault: {one.fault.action.value} at {one.fault.point} in {one.process}")
            waiting = [fault for index, fault in enumerate(self._plan.faults) if index not in told]
            if not waiting:
                faults.release(self._schedule)
                return
            if self._is_settled and time.monotonic() - self._quiet_since > SETTLED_S:
                try:
                    self._provoke(waiting)
                except Exception as error:  # the controller may be dead just now: tried again
                    self._say(f"operator: {type(error).__name__}: {error}")
                self._quiet_since = time.monotonic()

    def _provoke(self, waiting: Sequence[Fault]) -> None:
        provocation = next_provocation(self._plan, waiting, len(self.provocations))
        if provocation is None:
            return
        # Nobody but the controller moves row blocks about on Ray; a drain comes past the same places.
        if provocation is Provocation.REBALANCE:
            provocation = Provocation.DRAIN
        if provocation is Provocation.DRAIN and self._leaving and _is_alive(self._leaving):
            return
        self._say(f"operator: {provocation.value}")
        self.provocations.append(provocation.value)
        if provocation in (Provocation.GROW, Provocation.SHRINK):
            from shoal.platform.run_actor import RayController, find_controller

            change = 1 if provocation is Provocation.GROW else -1
            scaling = self._job.scaling
            number = min(scaling.max_workers, max(2, scaling.min_workers, self._workers + change))
            RayController(find_controller(self._job.run.name)).scale(number)
            return
        members = {w: p for w, p in read_processes(self._schedule).items() if p[1] & set(ROLES[:3]) and _is_alive(p[0])}
        is_loss = provocation is Provocation.LOSS
        spared = {f.role for f in waiting if not is_loss or f.point.startswith("recovery.")}
        staying = {pid: roles for pid, roles in members.values() if LEAVER not in roles}
        targets = [pid for pid, roles in staying.items() if not roles & spared] or list(staying)
        if targets:
            number = signal.SIGKILL if is_loss else signal.SIGTERM
            target = targets[len(self.provocations) % len(targets)]
            self._leaving = target if not is_loss else self._leaving
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, number)


def _is_alive(pid: int) -> bool:
    try:
        return "ray::" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
