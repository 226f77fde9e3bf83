"""Elastic runs that tests put faults into: two workloads, and the harness that drives a run to the end of its schedule.

* ``identical``: the parity tests' model with Adam; what it ends with is compared bit for bit.
* ``counted``: a table keyed by row number, initial values 0, SGD with learning rate 1 and gradient 1 per sample: every
  row ends at minus the number of epochs, if each sample counted exactly once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from nursery import Nursery
from torch import Tensor, nn

from shoal.actors.dense import DenseOptimizerSpec
from shoal.actors.embedding import EmbeddingBagCollection
from shoal.actors.messages import View
from shoal.actors.worker_spec import ElasticSpec, WorkerSpec
from shoal.kernels import faults
from shoal.kernels.batch import Batch
from shoal.kernels.faults import Fault, Fired, Schedule, read_fired
from shoal.kernels.spec import OptimizerKind, OptimizerSpec, TableSpec
from shoal.kernels.tables import EmbeddingBagConfig
from shoal.platform.chaos import ChaosPlan, Promise, Provocation, next_provocation
from shoal.platform.chaos_checks import TrainedState, check_events, check_fired, check_lineage, read_state
from shoal.platform.config import DataConfig, JobConfig, ScalingConfig, TrainConfig
from shoal.platform.config_failure import FailureConfig
from shoal.platform.placement import ShardingType
from shoal.platform.run_plan import RunPlan
from shoal.platform.state_messages import RunPhase
from shoal.platform.telemetry import read_events

PROTECT_EVERY = 5
OP_TIMEOUT_S = 3.0
BRAKE_S = 0.25
#: A view is left alone for this long before the next provocation.
SETTLED_S = 0.5
#: A number of workers that was asked for is waited for this long.
PATIENCE_S = 15.0
STEPS_IDENTICAL = 140
NUM_ROWS, BATCH_ROWS, EPOCHS = 512, 32, 8
WORKERS_MAX = 4


# ---- workloads ------------------------------------------------------------------------------------------------------


class CountingModel(nn.Module):
    """Loss per sample such that the gradient of its row is 1, whatever the batch is divided by."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="row",
            num_embeddings=NUM_ROWS,
            embedding_dim=4,
            feature_names=["row"],
            weight_init_min=0.0,
            weight_init_max=0.0,
        )
        self.bags = EmbeddingBagCollection(tables=[config])
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        values = self.bags(batch.sparse_features).values()
        return BATCH_ROWS * (values.sum(1) + self.bias), torch.sigmoid(values[:, 0])


@dataclasses.dataclass(frozen=True)
class ZeroTable(parity.MakeTable):
    """The table of CountingModel."""

    def __call__(self, config: Any) -> Any:
        return dataclasses.replace(super().__call__(config), init_min=0.0, init_max=0.0)


def write_counted(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(np.random.default_rng(0).permutation(NUM_ROWS), 3)):
        columns = {"label": np.zeros(len(part), np.int8), "row": part.astype(np.int64)}
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=40)
    return folder


def counted_spec(run: str, data: Path, storage: Path) -> WorkerSpec:
    config = JobConfig(
        data=DataConfig(
            train=(str(data),),
            sparse=("row",),  # type: ignore[arg-type]
            batch_size=BATCH_ROWS,
            window_rows=128,
        ),
        train=TrainConfig(epochs=EPOCHS, seed=3),
    )
    source = parity.source_of(config)
    assert source.num_steps == EPOCHS * NUM_ROWS // BATCH_ROWS
    sgd = OptimizerSpec(kind=OptimizerKind.SGD, lr=1.0)
    spec = parity.worker_spec(run, source, sgd, storage, model=CountingModel, checkpoint_every_steps=40)
    return dataclasses.replace(
        spec,
        make_table=ZeroTable(sgd, 3, num_blocks=8),
        dense_optimizer=DenseOptimizerSpec(kind="sgd", lr=0.0625),
        learning_rates=functools.partial(parity.ConstantRates, 0.0625),
    )


def identical_spec(run: str, data: Path, storage: Path) -> WorkerSpec:
    config = parity.job_config(data, max_steps=STEPS_IDENTICAL, epochs=20)
    adam = OptimizerSpec(kind=OptimizerKind.ADAM, lr=0.01)
    return parity.worker_spec(run, parity.source_of(config), adam, storage, checkpoint_every_steps=40)


def run_plan(spec: WorkerSpec, promise: Promise, num_workers: int, schedule: Schedule | None) -> RunPlan:
    elastic = ElasticSpec(protect_every_steps=PROTECT_EVERY, form_timeout_s=20.0, copy_timeout_s=20.0, pause_max_s=5.0)
    spec = dataclasses.replace(spec, elastic=elastic, op_timeout_s=OP_TIMEOUT_S, faults=schedule, start_timeout_s=60.0)
    is_elastic = promise is Promise.EXACTLY_ONCE
    return RunPlan(
        name=spec.run,
        scaling=ScalingConfig(
            num_workers=(2, min(WORKERS_MAX, num_workers + 1)) if is_elastic else num_workers,
            elastic_resize_monitor_interval_s=86_400.0,
        ),
        failure=FailureConfig(
            recovery="replicated",
            on_loss="replace",
            max_failures_without_progress=-1,
            protect_every_steps=PROTECT_EVERY,
            pause_max_s=5.0,
            lease_s=5.0,
        ),
        worker=spec,
        storage=spec.storage,
        steps_total=spec.loop.total_steps,
        sharding=RowWise(),
        record=nothing,
        check_fingerprint=nothing,
        num_to_keep=None,
        op_timeout_s=OP_TIMEOUT_S,
        start_timeout_s=60.0,
        poll_interval_s=0.05,
        call_timeout_s=2.0,
    )


def nothing(*_: Any) -> None:
    """A hook of the plan that travels to the controller's process."""


@dataclasses.dataclass(frozen=True)
class RowWise:
    def __call__(self, table: TableSpec) -> ShardingType:
        return ShardingType.ROW_WISE


# ---- the harness ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Outcome:
    """How a run under a schedule ended."""

    plan: ChaosPlan
    phase: RunPhase | None
    reason: str
    fired: tuple[Fired, ...]
    events: list[dict[str, Any]]
    provocations: list[str]
    num_controllers: int
    seconds: float
    problems: list[str]
    state: TrainedState | None = None

    def story(self) -> str:
        """What happened, for a message."""
        lines = [f"seed {self.plan.seed}: {self.plan.promise.value}, {self.plan.num_workers} workers"]
        lines += [f"  fault {f.fault.point} {f.fault.role} {f.fault.action.value} in {f.process}" for f in self.fired]
        lines += [f"  provoked {text}" for text in self.provocations]
        lines += [f"  event { ({k: v for k, v in event.items() if k != 'time'}) }" for event in self.events]
        return "\n".join([*lines, f"  ended {self.phase} {self.reason} after {self.seconds:.1f} s"])


class ElasticRun:
    """One run under a schedule: starts it, restarts its controller, provokes what does not come by itself."""

    def __init__(self, plan: ChaosPlan, nursery: Nursery, run: RunPlan, schedule: Schedule, limit_s: float) -> None:
        self.plan, self.nursery, self.run, self.schedule, self.limit_s = plan, nursery, run, schedule, limit_s
        self.provocations: list[str] = []
        self._is_released = not plan.faults
        self._wanted = 0
        self._quiet_since, self._last = time.monotonic(), (RunPhase.STARTING, -1)

    def drive(self) -> Outcome:
        """Run to the end, within the limit."""
        began = time.monotonic()
        self.nursery.start_controller(self.run)
        if self._is_released:
            faults.release(self.schedule)
        while self.nursery.outcome() is None and time.monotonic() - began < self.limit_s:
            if not self.nursery.is_controller_alive and self.nursery.outcome() is None:
                self.nursery.start_controller(self.run)
            self._look()
            time.sleep(0.05)
        return self._outcome(time.monotonic() - began)

    def _look(self) -> None:
        happened = {fired.index for fired in read_fired(self.schedule)}
        waiting = [fault for index, fault in enumerate(self.plan.faults) if index not in happened]
        if not waiting and not self._is_released:
            faults.release(self.schedule)
            self._is_released = True
        report, view = self.nursery.ask("report", 0), self.nursery.ask("view")
        if report is None or view is None:
            return
        now = (report.phase, view.epoch)
        if now != self._last:
            self._last, self._quiet_since = now, time.monotonic()
        is_settled = report.phase is RunPhase.RUNNING and time.monotonic() - self._quiet_since > SETTLED_S
        is_done = self._wanted in (0, view.world_size) or time.monotonic() - self._quiet_since > PATIENCE_S
        if waiting and is_settled and is_done and report.step > PROTECT_EVERY:
            self._provoke(waiting, view)

    def _provoke(self, waiting: Sequence[Fault], view: View) -> None:
        provocation = next_provocation(self.plan, waiting, len(self.provocations))
        if provocation is None:
            return
        match provocation:
            case Provocation.GROW | Provocation.SHRINK:
                change = 1 if provocation is Provocation.GROW else -1
                self._wanted = min(self.run.scaling.max_workers, max(2, view.world_size + change))
                self.nursery.ask("scale", self._wanted)
            case Provocation.REBALANCE:
                self.nursery.ask("rebalance")
            case Provocation.DRAIN:
                if not self.nursery.drain(self._pick({fault.role for fault in waiting}, view)):
                    return
            case Provocation.LOSS:
                self._kill_another(waiting, view)
        self.provocations.append(f"{provocation.value} in epoch {view.epoch}")
        self._quiet_since = time.monotonic() + 2.0  # what was asked for begins a moment later

    def _kill_another(self, waiting: Sequence[Fault], view: View) -> None:
        """Kill a member that no waiting fault is for; they take turns."""
        spared = {fault.role for fault in waiting if fault.point.startswith("recovery.")}
        pid = self.nursery.pids().get(self._pick(spared, view))
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pick(self, spared: Collection[str], view: View) -> str:
        """A member without any of the roles ``spared``, where there is one; they take turns."""
        roles = {m.worker_id: faults.roles_in(m.rank, view.buddies, view.world_size) for m in view.members}
        targets = [worker_id for worker_id, mine in roles.items() if not mine & set(spared)] or list(roles)
        return targets[len(self.provocations) % len(targets)]

    def _outcome(self, seconds: float) -> Outcome:
        found = self.nursery.outcome()
        report = found[0] if found is not None else self.nursery.ask("report", 0)
        events = list(read_events(self.run.storage))
        outcome = Outcome(
            plan=self.plan,
            phase=None if report is None else report.phase,
            reason="" if report is None else f"{report.reason} {found[1] if found else ''}",
            fired=read_fired(self.schedule),
            events=events,
            provocations=self.provocations,
            num_controllers=self.nursery.num_controllers,
            seconds=seconds,
            problems=check_fired(self.schedule) + check_events(events),
        )
        if outcome.phase is not RunPhase.FINISHED:
            outcome.problems.insert(0, f"the run stands at {outcome.phase} after {seconds:.0f} s: {outcome.reason}")
            return outcome
        run_dir = self.run.storage.uri
        outcome.problems += check_lineage(run_dir)
        outcome.state = read_state(run_dir)
        return outcome


def run_case(
    plan: ChaosPlan,
    data: Path,
    runs: Path,
    *,
    limit_s: float = 150.0,
    patch: Callable[[], None] | None = None,
) -> Outcome:
    """Run ``plan`` over its workload; ``patch`` is run in every worker process first."""
    name = f"{plan.promise.name.lower()}-{plan.num_workers}-{plan.seed}"
    storage = runs / name
    with _short_folder() as folder:
        schedule = Schedule(faults=plan.faults, folder=str(folder / "faults"), brake_s=BRAKE_S if plan.faults else 0.0)
        Path(schedule.folder).mkdir()
        if plan.promise is Promise.IDENTICAL:
            spec = identical_spec(name, data, storage)
        else:
            spec = counted_spec(name, data, storage)
        nursery = Nursery(folder / "n")
        nursery.patch = patch
        try:
            return ElasticRun(
                plan, nursery, run_plan(spec, plan.promise, plan.num_workers, schedule), schedule, limit_s
            ).drive()
        finally:
            nursery.close()


@contextlib.contextmanager
def _short_folder() -> Iterator[Path]:
    """A folder whose sockets' names are short enough for the kernel."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_counts(state: TrainedState) -> list[str]:
    """Exactly once, read from the weights (and from every counter that should say the same)."""
    rows = state.rows["row"]
    problems = [] if len(rows) == NUM_ROWS else [f"{len(rows)} rows instead of {NUM_ROWS}"]
    wrong = (rows.weights != -EPOCHS).any(1)
    if wrong.any():
        ids = rows.ids[wrong]
        values = rows.weights[wrong][:5, 0].tolist()
        problems.append(f"{len(ids)} rows do not stand at {-EPOCHS}, such as {ids[:5].tolist()} at {values}")
    if (rows.count != EPOCHS).any():
        problems.append(f"{int((rows.count != EPOCHS).sum())} rows were not applied {EPOCHS} times")
    # 32 per step, at a learning rate of 1/16.
    bias = next(tensor for name, tensor in state.dense.items() if name.endswith("bias")).item()
    if bias != -2.0 * state.step:
        problems.append(f"the bias stands at {bias} after {state.step} steps")
    samples = state.metadata.get("samples")
    if samples != EPOCHS * NUM_ROWS:
        problems.append(f"{samples} samples were counted instead of {EPOCHS * NUM_ROWS}")
    return problems
