"""How a run ended, and what it told on the way: the driver's side of its records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from shoal.actors.messages import Progress as EvalRecord
from shoal.jobs.progress import Progress
from shoal.platform.run_plan import RunReport
from shoal.platform.state_messages import RunPhase
from shoal.platform.telemetry import ProgressRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended; the fields that ray.train's Result has bear its names."""

    #: Last values of the training window and of the last evaluation (``eval/...``). What never happened has no key: a
    #: run that was stopped before its first evaluation has no ``eval/...``; use ``.get``.
    metrics: Mapping[str, float]
    #: The run's folder.
    path: str
    #: Steps applied, over the whole life of the run.
    steps: int
    #: Folder of the newest complete checkpoint, or None.
    checkpoint: str | None
    #: Whether the run was stopped before its last step.
    is_stopped: bool
    #: All progress records of this call, oldest first.
    records: tuple[ProgressRecord, ...] = ()


class Collector:
    """Shows what a run tells, and keeps its records."""

    def __init__(self, progress: Progress, on_record: Callable[[Any], None] | None) -> None:
        self.progress = progress
        self.records: list[ProgressRecord] = []
        #: Metric -> its last value among all records.
        self.last_values: dict[str, float] = {}
        self._on_record = on_record

    def __call__(self, item: Any) -> None:
        if isinstance(item, ProgressRecord):
            self.records.append(item)
            shown = ("loss", "ne", "auc", "calibration", "samples_per_s", "exchange_ms")
            values = {name: getattr(item, name) for name in shown}
            self.last_values |= {name: value for name, value in values.items() if value is not None}
            self.progress.update(item)
        elif isinstance(item, EvalRecord):
            self.last_values |= item.values
            shown = ("auc", "log_loss", "ne", "calibration", "num_samples")
            text = " ".join(f"{name}={item.values[f'eval/{name}']:.6g}" for name in shown)
            self.progress.note(f"eval step={item.step} {text}")
        else:
            kind, fields = item
            self.progress.note(" ".join([f"event={kind}", *(f"{k}={v}" for k, v in fields.items())]))
        if self._on_record is not None:
            self._on_record(item)


def make_result(run_dir: str, report: RunReport, collector: Collector) -> Result:
    """How the run in ``run_dir`` ended."""
    from shoal.platform.checkpoint import CheckpointState, list_checkpoints

    infos = [i for i in list_checkpoints(run_dir) if i.state is CheckpointState.COMPLETE]
    summary = report.summary or {}
    evaluated = {f"eval/{name}": value for name, value in summary.get("eval", {}).items()}
    return Result(
        # A run that was stopped may have no summary: then what its records said last.
        metrics={**collector.last_values, **summary.get("train", {}), **evaluated},
        path=run_dir,
        steps=int(summary.get("step", report.step)),
        checkpoint=infos[-1].uri if infos else None,
        is_stopped=report.phase is RunPhase.STOPPED,
        records=tuple(collector.records),
    )
