"""Seeded simulation of whole runs: the production state machines on virtual workers, clock and network.

A history is built from a seed, runs until the controller ends the run, and is judged by checkers while it runs:

* one owner per row block and epoch, and that owner has the rows of its step, equal to a sequential reference;
* epochs rise; no number is used twice; a view decided on any rank is honoured;
* the target of a recovery exists on everybody it is asked of;
* all ranks of a view take the same snapshots, and nobody acts on a flag alone;
* the last checkpoint holds every row updated exactly once per step, the dense state and the metrics of every sample;
* once the network is healed and there is room, every history ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shoal.actors.messages import BlockSet, Release, Shipment, View, WorkerPhase
from shoal.actors.protocol import WorkerRules, WorkerState
from shoal.actors.protocol_messages import (
    DestroyGroups,
    Event,
    Exit,
    FinishLoop,
    Instruction,
    JoinView,
    PerformCutOver,
    PerformRecover,
    RunStep,
    StepDone,
    TakeSnapshot,
    WaitForOrder,
)
from shoal.platform.config import ScalingConfig
from shoal.platform.config_failure import FailureConfig
from shoal.platform.incident import Limits
from shoal.platform.membership import ViewSpec
from shoal.platform.sim_controller import DEATH_NOTICE_S, HOST_NOTICE_S, SimController
from shoal.platform.sim_network import Group, SimulationError, World
from shoal.platform.sim_rows import KEYS, TABLES, Reference, RowState, Saved
from shoal.platform.sim_scenario import Fault, Scenario
from shoal.platform.sim_worker import SimWorker
from shoal.platform.state import ControllerSpec, ControllerState
from shoal.platform.state_messages import (
    Cause,
    DrainNotice,
    EndRun,
    JournalRecord,
    RebalanceRequested,
    RecordKind,
    RunPhase,
    ScaleRequested,
    SendOrder,
)

_BLOCKING = (JoinView, RunStep, FinishLoop, PerformCutOver, PerformRecover, WaitForOrder, Exit)
#: Virtual seconds after which the network is healed whatever has happened, and then the longest a run may take.
HEAL_AFTER_S, END_AFTER_S = 60.0, 240.0
#: Operation timeout of the simulated groups.
OP_TIMEOUT_S = 2.0
LIMITS = Limits(
    silence_s=4.0,
    answer_timeout_s=1.5,
    park_timeout_s=4.0,
    recover_timeout_s=20.0,
    cutover_timeout_s=8.0,
    resend_s=0.5,
    retry_s=0.5,
    retry_max_s=4.0,
    start_settle_s=1.0,
    start_timeout_s=200.0,
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The classes a history is made of; tests put broken ones in their place."""

    worker_state: type[WorkerState] = WorkerState
    controller_state: type[ControllerState] = ControllerState
    rows: type[RowState] = RowState
    worker: type[SimWorker] = SimWorker


@dataclasses.dataclass
class Outcome:
    """How a history went."""

    seed: int
    phase: RunPhase
    reason: str
    virtual_s: float
    #: (cause in flight, phase, cause that came), and counts of what happened.
    pairs: set[tuple[Cause, str, Cause]]
    counts: Counter[str]


def phase_name(state: ControllerState) -> str:
    """The controller's phase, recoveries in their two parts."""
    if state.phase is RunPhase.RECOVERING and state.incident is not None:
        return "collecting" if state.incident.attempt.decision is None else "restoring"
    return state.phase.value


class History:
    """One run of one scenario."""

    def __init__(self, scenario: Scenario, parts: Parts = Parts(), log: Callable[[str], None] | None = None) -> None:
        self.spec = scenario
        self.parts = parts
        self.world = World(scenario.seed, drop=scenario.drop, duplicate=scenario.duplicate)
        self.reference = _reference(scenario.total_steps)
        self.workers: dict[str, SimWorker] = {}
        self.journal: list[JournalRecord] = []
        self.counts: Counter[str] = Counter()
        self.pairs: set[tuple[Cause, str, Cause]] = set()
        self.end: tuple[RunPhase, str] | None = None
        self.controller: SimController
        self._log = log
        self._groups: dict[int, Group] = {}
        self._saved: dict[int, Saved] = {}
        self._views: dict[int, View] = {}
        self._snapshots: dict[tuple[int, int], bool] = {}
        self._counted: dict[int, dict[str, int]] = {}
        self._faults = list(scenario.faults)
        self._hosts = {f"host{i}": scenario.slots_per_host for i in range(scenario.num_hosts)}
        self._hidden_slots = scenario.num_hosts * scenario.slots_per_host - scenario.num_slots
        self._lost_hosts: set[str] = set()
        self._draining: set[str] = set()
        self._waiting: list[str] = []
        self._starting: dict[str, str] = {}
        self._to_kill: set[str] = set()
        self._is_healed = False
        self._has_lost_rows = self._has_lost_counts = False

    # ---- what the pieces ask --------------------------------------------------------------------------------------

    @property
    def has_local_snapshots(self) -> bool:
        return self.spec.recovery == "partial"

    def make_worker_state(self, worker_id: str) -> WorkerState:
        every = None if self.spec.recovery == "checkpoint" else self.spec.snapshot_every_steps
        rules = WorkerRules(
            total_steps=self.spec.total_steps,
            snapshot_every_steps=every,
            has_local_snapshots=self.has_local_snapshots,
            lease_s=6.0,
            orphan_s=60.0,
        )
        return self.parts.worker_state(worker_id, rules)

    def make_rows(self, worker_id: str) -> RowState:
        return self.parts.rows(worker_id)

    def make_controller_state(self, incarnation: int) -> ControllerState:
        spec = self.spec
        failure = FailureConfig(
            max_failures=-1,
            max_failures_without_progress=-1,
            recovery=spec.recovery,  # type: ignore[arg-type]
            on_loss=spec.on_loss,  # type: ignore[arg-type]
            num_standby=spec.num_standby,
            replace_timeout_s=6.0,
            prepare_timeout_s=10.0,
        )
        scaling = ScalingConfig(num_workers=(spec.workers_min, spec.workers_max), elastic_resize_monitor_interval_s=1.0)
        return self.parts.controller_state(
            ControllerSpec(
                scaling=scaling,
                failure=failure,
                view_spec=ViewSpec(run="sim"),
                limits=LIMITS,
                incarnation=incarnation,
                make_restore=lambda step, worker_id, blocks: (step, worker_id, blocks),
            )
        )

    def step_s(self) -> float:
        return 0.08 * (0.7 + 0.6 * self.world.random.random())

    def group(self, view: View) -> Group:
        return self._groups.setdefault(view.epoch, Group(self.world, view, OP_TIMEOUT_S))

    def saved(self, step: int | None) -> Saved | None:
        return None if step is None else self._saved.get(step)

    def durable_step(self, restore: Any) -> int | None:
        """The checkpoint that an order's restores mean."""
        if isinstance(restore, dict):
            return next((value[0] for value in restore.values()), None)
        return self.newest_durable

    @property
    def _lost_counts(self) -> bool:
        return self._has_lost_rows or self._has_lost_counts

    @property
    def newest_durable(self) -> int | None:
        return max(self._saved, default=None)

    def save(self, saved: Saved) -> None:
        self._saved[saved.step] = saved
        expected = self.reference
        if not self._lost_counts and saved.bins != expected.bins[saved.step]:
            raise SimulationError(
                f"checkpoint {saved.step}: metrics count {saved.bins} samples instead of {expected.bins[saved.step]}"
            )
        if self._has_lost_rows:
            return
        if saved.rows != expected.rows[saved.step] or saved.dense != expected.dense[saved.step]:
            raise SimulationError(f"checkpoint {saved.step} of epoch {saved.epoch} differs from the reference")

    # ---- the run --------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Run to the end. Raises SimulationError where a rule is broken."""
        self._start_controller(0)
        self.world.after(HEAL_AFTER_S, None, self._heal)
        self.world.run(HEAL_AFTER_S + END_AFTER_S, lambda: self.end is not None)
        if self.end is None:
            raise SimulationError(f"no end after {self.world.now_s:.0f} s: {self._describe()}")
        phase, reason = self.end
        if phase is not RunPhase.FINISHED:
            raise SimulationError(f"the run ended as {phase.value}: {reason}")
        if self.newest_durable != self.spec.total_steps:
            raise SimulationError(f"the last checkpoint is of step {self.newest_durable}")
        return Outcome(self.spec.seed, phase, reason, self.world.now_s, self.pairs, self.counts)

    def _start_controller(self, incarnation: int) -> None:
        self.controller = SimController(self, incarnation)
        self._waiting, self._starting = [], {}
        self.controller.start()

    def _describe(self) -> str:
        state = self.controller.state
        workers = [
            f"{w.name} {w.state.phase.value} epoch {w.state.epoch} step {w.state.step} fence {w.state.fence} "
            f"{w.doing} {w.state.reason!r}"
            for w in self.workers.values()
            if w.is_alive
        ]
        return f"controller {phase_name(state)} epoch {state.epoch}; " + "; ".join(workers)

    def log(self, text: str) -> None:
        if self._log is not None:
            self._log(f"{self.world.now_s:8.3f} {text}")

    # ---- the cluster ----------------------------------------------------------------------------------------------

    def launch(self, worker_ids: Sequence[str]) -> None:
        self._waiting.extend(worker_ids)
        self._place()

    def cancel_launch(self, worker_ids: Sequence[str]) -> None:
        self._waiting = [w for w in self._waiting if w not in worker_ids]

    def _place(self) -> None:
        """Workers that wait get slots where there are any."""
        used = Counter(w.host for w in self.workers.values() if w.is_alive)
        used.update(self._starting.values())
        while self._waiting:
            hosts = [h for h in self._hosts if h not in self._lost_hosts | self._draining]
            free = {h: self._hosts[h] - used[h] for h in hosts}
            if sum(self._hosts.values()) - sum(used.values()) <= self._hidden_slots or not any(
                number > 0 for number in free.values()
            ):
                return
            host = max(free, key=lambda h: (free[h], h))
            used[host] += 1
            self._start_worker(self.controller, self._waiting.pop(0), host)

    def _start_worker(self, controller: SimController, worker_id: str, host: str) -> None:
        self._starting[worker_id] = host
        self.world.after(0.05, controller, lambda: controller.placed(worker_id))
        self.world.after(0.2 + self.world.random.random(), None, lambda: self._started(controller, worker_id, host))

    def _started(self, controller: SimController, worker_id: str, host: str) -> None:
        self._starting.pop(worker_id, None)
        if host in self._lost_hosts or controller is not self.controller or not controller.is_alive:
            self.world.after(0.0, controller, lambda: controller.lost(worker_id, "its host was lost while it started"))
            return
        worker = self.workers[worker_id] = self.parts.worker(self, worker_id, host)
        worker.is_ready = True
        self.world.after(self.world.delay_s(), controller, lambda: controller.prepared(worker))

    def on_exit(self, worker: SimWorker) -> None:
        """A worker ended by itself."""
        self.log(f"{worker.name} exits: {worker.state.reason}")
        worker.die(is_silent=False)
        self._notice(worker, DEATH_NOTICE_S, "ended")

    def kill(self, worker: SimWorker, *, is_silent: bool = False) -> None:
        if not worker.is_alive:
            return
        self.log(f"kill {worker.name} on {worker.host}: {worker.state.phase.value} epoch {worker.state.epoch}")
        worker.die(is_silent=is_silent)
        self._notice(worker, HOST_NOTICE_S if is_silent else DEATH_NOTICE_S, "killed")

    def _notice(self, worker: SimWorker, delay_s: float, reason: str) -> None:
        def tell() -> None:
            if self.controller.is_alive:
                self.controller.lost(worker.name, reason)
            self._place()

        self.world.after(delay_s * (0.5 + self.world.random.random()), None, tell)

    def kill_when_reachable(self, worker: SimWorker) -> None:
        """What KillWorker does: at once, or when the network lets it; after the lease it counts as gone (F7)."""
        if worker.name in self._to_kill:
            return
        self._to_kill.add(worker.name)
        lease_s = self.make_worker_state("").rules.lease_s

        def attempt() -> None:
            if not worker.is_alive:
                self._notice(worker, 0.1, "was dead")
            elif self.world.is_linked(self.controller, worker):
                self.kill(worker)
            else:
                self.world.after(0.3, None, attempt)

        def give_up() -> None:
            if worker.is_alive and self.controller.is_alive:
                self.log(f"{worker.name} counts as gone: its lease is over")
                self.controller.lost(worker.name, "its lease is over")

        self.world.after(0.1, None, attempt)
        self.world.after(lease_s + 2.0, None, give_up)

    # ---- faults ---------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Fire the next fault if its phase has come."""
        if not self._faults or phase_name(self.controller.state) != self._faults[0].phase:
            return
        fault = self._faults.pop(0)
        self.world.after(fault.after_s, None, lambda: self._fire(fault))

    def _fire(self, fault: Fault) -> None:
        if self.end is not None or self._is_healed:
            return
        state = self.controller.state
        self.log(f"fault: {fault}")
        self.counts[fault.kind] += 1
        self._cover(fault)
        members = [] if state.view is None else list(state.roster.members(state.view))
        names = [e.worker_id for e in members if self.workers[e.worker_id].is_alive]
        if fault.kind == "kill controller":
            self._kill_controller(fault)
        elif fault.kind == "scale":
            number = 1 + int(fault.choice * 4)
            self.controller.handle(ScaleRequested(now_s=self.world.now_s, num_workers=number, reason="a test"))
        elif fault.kind == "capacity":
            self._hidden_slots = max(0, self._hidden_slots - 1 - int(fault.choice * 2))
            self._place()
        elif not names:
            self.counts["idle fault"] += 1
        else:
            worker = self.workers[names[int(fault.choice * len(names))]]
            self._fire_at(fault, worker)
        if not self._faults:
            self.world.after(12.0 + fault.lasts_s, None, self._heal)
        self._arm()

    def _fire_at(self, fault: Fault, worker: SimWorker) -> None:
        match fault.kind:
            case "kill worker":
                self.kill(worker)
            case "kill both":
                self.kill(worker)
                self._kill_controller(fault)
            case "kill host":
                self._lost_hosts.add(worker.host)
                for other in self.workers.values():
                    if other.host == worker.host:
                        self.kill(other, is_silent=True)
            case "stop worker":
                worker.is_stopped = True
                self.world.after(fault.lasts_s, None, lambda: self.world.resume(worker) if worker.is_stopped else None)
            case "partition":
                for host in [*self._hosts, "head"]:
                    self.world.cut(worker.host, host)
                self.world.after(fault.lasts_s, None, self.world.heal)
            case "cut worker links":
                others = [h for h in self._hosts if h != worker.host]
                self.world.cut(worker.host, others[int(fault.choice * len(others))])
                self.world.after(fault.lasts_s, None, self.world.heal)
            case "drain" | "replace":
                is_drain = fault.kind == "drain"
                if is_drain:
                    self._draining.add(worker.host)
                ids = [w.name for w in self.workers.values() if w.is_alive and w.host == worker.host]
                ids = ids if is_drain else [worker.name]
                deadline_s = 4.0 + fault.lasts_s if is_drain else float("inf")
                self.controller.handle(
                    DrainNotice(now_s=self.world.now_s, worker_ids=tuple(ids), deadline_s=deadline_s, reason="a test")
                )
                if is_drain:
                    self.world.after(deadline_s, None, lambda: self._drained(worker.host))
            case "rebalance":
                world_size = len(self.controller.state.view.members) if self.controller.state.view else 1
                rng = self.world.random
                placement = {
                    table.name: tuple(rng.randrange(world_size) for _ in range(table.num_blocks)) for table in TABLES
                }
                self.controller.handle(RebalanceRequested(now_s=self.world.now_s, placement=placement, reason="a test"))

    def _drained(self, host: str) -> None:
        """The deadline of a drain: the host goes."""
        if host in self._draining and not self._is_healed:
            for worker in self.workers.values():
                if worker.host == host:
                    self.kill(worker, is_silent=True)

    def _kill_controller(self, fault: Fault) -> None:
        old = self.controller
        old.is_alive = False

        def restart() -> None:
            if self.controller is old:
                self._start_controller(old.incarnation + 1)

        # Sometimes the lease runs out, and all park at one named step (F8).
        self.world.after(0.3 + (fault.lasts_s if fault.choice < 0.5 else 0.0) * 1.3, None, restart)

    def _cover(self, fault: Fault) -> None:
        state, phase = self.controller.state, phase_name(self.controller.state)
        cause = next((c for c, kind in _KINDS.items() if kind == fault.kind), Cause.FAILURE)
        first = state.change.cause if state.change is not None else Cause.FAILURE
        if phase in ("preparing", "cutting over", "collecting", "restoring"):
            self.pairs.add((first, phase, cause))
        self.counts[f"{phase}: {cause.name.lower()}"] += 1

    def _heal(self) -> None:
        """From here on nothing new goes wrong, and there is room for everybody."""
        if self._is_healed or (self._faults and self.world.now_s < HEAL_AFTER_S):
            return
        self.log("healed")
        self._is_healed = True
        self._faults = []
        self.world.heal()
        self.world.drop = 0.0
        self._lost_hosts, self._draining, self._hidden_slots = set(), set(), 0
        self._hosts = {host: max(slots, 3) for host, slots in self._hosts.items()}
        for worker in self.workers.values():
            if worker.is_alive and worker.is_stopped:
                self.world.resume(worker)
        self._place()

    # ---- checkers -------------------------------------------------------------------------------------------------

    def on_answer(self, worker: SimWorker, event: Event, instructions: Sequence[Instruction]) -> None:
        """After every event of a worker's machine."""
        if self._log is not None:
            shown = ", ".join(type(i).__name__ for i in instructions)
            if not (isinstance(event, StepDone) and shown == "RunStep"):
                self.log(f"{worker.name} {_short(event)} -> {shown} [{worker.state.phase.value}]")
        blocking = [i for i in instructions if isinstance(i, _BLOCKING)]
        if len(blocking) > 1 or (blocking and instructions[-1] is not blocking[0]):
            raise SimulationError(f"protocol 1: {instructions}")
        has_let_go = not worker.has_groups or any(isinstance(i, DestroyGroups) for i in instructions)
        if worker.state.phase is WorkerPhase.PARKED and not has_let_go:
            raise SimulationError(f"F1: {worker.name} parks with groups")
        if isinstance(event, StepDone):
            key = (worker.state.epoch, event.step)
            took = any(isinstance(i, TakeSnapshot) for i in instructions)
            went_on = any(isinstance(i, RunStep) for i in instructions)
            if went_on and self._snapshots.setdefault(key, took) != took:
                raise SimulationError(f"F3: ranks of epoch {key[0]} disagree on a snapshot at step {key[1]}")

    def on_view(self, worker: SimWorker, view: View) -> None:
        """A worker's first exchange of a view has completed, and its rows are in place."""
        self.log(f"{worker.name} is in epoch {view.epoch}, rank {view.rank_of(worker.name)} of {view.world_size}")
        if self._views.setdefault(view.epoch, view) != view:
            raise SimulationError(f"V1: two views of epoch {view.epoch}")
        rank = view.rank_of(worker.name)
        if rank is None or set(worker.rows.owned) != set(view.owned_by(rank)):
            raise SimulationError(f"V5: {worker.name} does not own what epoch {view.epoch} gives it")
        owners = Counter(key for m in view.members for key in view.owned_by(m.rank))
        if set(owners) != set(KEYS) or max(owners.values()) != 1:
            raise SimulationError(f"V5: row blocks of epoch {view.epoch} without one owner")
        step = max(worker.rows.snapshots)
        counted = self._counted.setdefault(view.epoch, {})
        counted[worker.name] = worker.rows.bins
        total = sum(counted.values())
        if len(counted) == view.world_size and total != self.reference.bins[step] and not self._lost_counts:
            raise SimulationError(
                f"metrics of epoch {view.epoch} begin at step {step} with {total} samples, not "
                f"{self.reference.bins[step]}: {counted}"
            )
        if not self._has_lost_rows:
            expected = self.reference.rows[step]
            wrong = [key for key, content in worker.rows.owned.items() if content != expected[key]]
            if wrong or worker.rows.dense != self.reference.dense[step]:
                raise SimulationError(f"{worker.name} enters epoch {view.epoch} at step {step} with wrong {wrong}")

    def on_record(self, controller: SimController, record: JournalRecord) -> None:
        """A record is durable."""
        if not controller.is_alive:
            return
        used = {r.view.epoch for r in self.journal if r.view is not None}
        if record.kind is not RecordKind.DECIDED and record.view is not None and record.view.epoch in used:
            raise SimulationError(f"V1: epoch {record.view.epoch} is used twice")
        self.journal.append(record)
        if record.kind is RecordKind.RECOVER and record.plan is not None:
            self.counts["recovery from a checkpoint" if record.plan.from_checkpoint else "recovery from memory"] += 1
            # Declared losses: blocks of a partial recovery, and metrics where nobody keeps copies of them.
            if record.plan.lost_blocks:
                self._has_lost_rows = True
            base = self._views.get(max((e for e in self._views if e < record.view.epoch), default=-1))  # type: ignore[union-attr]
            if base is not None and not base.buddies and "metrics counted" in record.plan.reason:
                self._has_lost_counts = True
            self._check_recovery(controller, record.view, record.plan.step)

    def _check_recovery(self, controller: SimController, view: View | None, step: int) -> None:
        """A decided view is honoured (V4), and the loss of one host loses no protected step (promise 5)."""
        incident = controller.state.incident
        decision = None if incident is None else incident.attempt.decision
        if decision is None or decision.view != view:
            return
        counted = [w for w in self.workers.values() if w.is_alive and w.name not in self._to_kill]
        newest = max((w.state.epoch for w in counted), default=-1)
        if decision.base_epoch < newest:
            raise SimulationError(f"V4: epoch {newest} is decided, recovery starts from {decision.base_epoch}")
        base = self._views.get(decision.base_epoch)
        if base is None or not base.buddies or self.spec.recovery != "replicated":
            return
        holdings = {e.worker_id: e.holdings for e in controller.state.roster.living.values() if e.holdings is not None}
        lost_hosts = {m.host for m in base.members if m.worker_id not in holdings}
        known = [h.protected for h in holdings.values() if h.view is not None and h.view.epoch == base.epoch]
        protected = max(known, default=-1)
        if len(lost_hosts) <= 1 and len(set(base.hosts)) > 1 and step < protected:
            raise SimulationError(f"F3: step {protected} was protected, one host was lost, the target is {step}")

    def on_infeasible(self, worker: SimWorker, step: int, shipment: Shipment | None) -> None:
        """A worker cannot do what a plan asks of it."""
        raise SimulationError(f"F4: {worker.name} cannot bring step {step}: {shipment}")

    def on_controller(
        self, controller: SimController, before: RunPhase, event: Any, instructions: Sequence[Any]
    ) -> None:
        """After every event of the controller's machine."""
        if before.is_over and instructions:
            raise SimulationError("controller 3: instructions after the end")
        if sum(isinstance(i, EndRun) for i in instructions) > 1:
            raise SimulationError("controller 3: two ends")
        for instruction in instructions:
            if isinstance(instruction, SendOrder) and isinstance(instruction.order, Release):
                self._check_release(instruction.order.epoch)
        if self._log is not None:
            for i in instructions:
                if isinstance(i, SendOrder):
                    self.log(f"controller -> {i.worker_id}: {_short(i.order)}")
                elif not isinstance(i, EndRun):
                    self.log(f"controller: {_short(i)}")
        self._arm()

    def _check_release(self, epoch: int) -> None:
        view = self._views.get(epoch)
        late = (
            []
            if view is None
            else [
                m.worker_id
                for m in view.members
                if self.workers[m.worker_id].is_alive and self.workers[m.worker_id].state.epoch < epoch
            ]
        )
        if view is None or late:
            raise SimulationError(f"V5: release of epoch {epoch} before {late or 'anybody'} is in it")

    def on_publish(self, kind: str, fields: dict[str, Any]) -> None:
        self.counts[f"event {kind}"] += 1

    def on_end(self, phase: RunPhase, reason: str) -> None:
        self.log(f"end: {phase.value}: {reason}")
        self.end = (phase, reason)


_KINDS = {
    Cause.DRAIN: "drain",
    Cause.REPLACE: "replace",
    Cause.SCALE: "scale",
    Cause.CAPACITY: "capacity",
    Cause.REBALANCE: "rebalance",
}
_REFERENCES: dict[int, Reference] = {}


def _reference(total_steps: int) -> Reference:
    if total_steps not in _REFERENCES:
        _REFERENCES[total_steps] = Reference(total_steps)
    return _REFERENCES[total_steps]


def _short(value: Any) -> str:
    """A value on one line, views by their number."""
    parts = []
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        item = getattr(value, field.name)
        if isinstance(item, View):
            item = f"e{item.epoch}{[m.worker_id for m in item.members]}"
        elif isinstance(item, BlockSet) or dataclasses.is_dataclass(item):
            item = _short(item) if not isinstance(item, BlockSet) else len(item)
        parts.append(f"{field.name}={item}")
    return f"{type(value).__name__}({', '.join(parts)})"[:300]


@dataclasses.dataclass
class Report:
    """Many histories."""

    num_histories: int = 0
    seconds: float = 0.0
    pairs: set[tuple[Cause, str, Cause]] = dataclasses.field(default_factory=set)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, other: Report) -> None:
        """Count ``other`` in."""
        self.num_histories += other.num_histories
        self.seconds += other.seconds
        self.pairs |= other.pairs
        self.counts.update(other.counts)

    @property
    def per_minute(self) -> float:
        return 60.0 * self.num_histories / max(self.seconds, 1e-9)


class HistoryFailed(SimulationError):
    """A rule was broken; carries the seed."""

    def __init__(self, seed: int, cause: BaseException) -> None:
        super().__init__(f"seed {seed}: {type(cause).__name__}: {cause}")
        self.seed = seed


def simulate(seeds: Iterable[int], parts: Parts = Parts(), log: Callable[[str], None] | None = None) -> Report:
    """Run one history per seed. Raises HistoryFailed at the first that breaks a rule."""
    report = Report()
    started = time.perf_counter()
    for seed in seeds:
        try:
            outcome = History(Scenario.of(seed), parts, log).run()
        except Exception as error:
            raise HistoryFailed(seed, error) from error
        report.num_histories += 1
        report.pairs |= outcome.pairs
        report.counts.update(outcome.counts)
    report.seconds = time.perf_counter() - started
    return report
