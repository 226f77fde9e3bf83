"""What a run tells while it goes on: the event log, TensorBoard, Ray's gauges, and the items a driver fetches."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from shoal.actors.messages import Progress, View, WorkerStatus
from shoal.actors.phases import COUNTER_NAMES
from shoal.platform.flow_advice import advise_flows
from shoal.platform.run_plan import RunPlan
from shoal.platform.telemetry import EventLog, MetricWriter, ProgressRecord, RayGauges

#: Tables that one event names.
_SHOWN = 10


class RunLog:
    """Collects and writes; safe to call from several threads."""

    def __init__(self, plan: RunPlan, incarnation: int) -> None:
        self._plan = plan
        self._writer = f"c{incarnation}"
        self._lock = threading.Lock()
        self._items: list[Any] = []
        self._events = EventLog(plan.storage, self._writer)
        self._metrics: MetricWriter | None = None
        self._gauges: RayGauges | None = None
        self._samples = 0
        self._exchange: dict[str, Any] = {}
        self._advised: frozenset[tuple[str, str]] = frozenset()
        #: The view whose progress is told, and what its members last said.
        self.view: View | None = None
        self.members: Sequence[WorkerStatus] = ()

    def items_since(self, cursor: int) -> tuple[Any, ...]:
        with self._lock:
            return tuple(self._items[cursor:])

    def publish(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        self._events.write(kind, **fields)
        with self._lock:
            self._items.append((kind, fields))

    def record(self, record: Progress) -> None:
        """Take in what rank 0 says at a log or evaluation boundary."""
        if self._metrics is None:
            self._metrics = MetricWriter(self._plan.storage, self._writer)
            self._gauges = RayGauges.connect(self._plan.name)
        if record.flows and self.view is not None:
            self._tell_exchange(record, self.view)
            self._advise(record)
        if record.kind != "train":
            self._metrics.write_scalars(record.step, record.values)
            item: Any = record
        else:
            item = self._progress(record)
            self._metrics.write(item)
            if self._gauges is not None:
                self._gauges.write(item)
        self._metrics.flush()
        with self._lock:
            self._items.append(item)

    def _tell_exchange(self, record: Progress, view: View) -> None:
        """Say how rows travel, when that is news."""
        pooled = sorted(table for table, cost in record.flows.items() if cost.flow == "pooled")
        fields = {
            "exchange": view.exchange,
            "hosts": dict(Counter(view.hosts)),
            "pooled_tables": pooled[:_SHOWN],
            "num_pooled": len(pooled),
            "num_tables": len(record.flows),
        }
        if fields != self._exchange:
            self._exchange = fields
            self.publish("exchange", epoch=view.epoch, **fields)

    def _advise(self, record: Progress) -> None:
        """Say which tables should have another flow, when that is news."""
        advice = advise_flows(record.flows)
        tables = frozenset((found.table, found.flow) for found in advice)
        if tables and tables != self._advised:
            self.publish(
                "flow_advice",
                step=record.step,
                tables={found.table: found.reason for found in advice[:_SHOWN]},
                num_tables=len(advice),
            )
        self._advised = tables

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.flush()
        if self._metrics is not None:
            self._metrics.close()

    def _progress(self, record: Progress) -> ProgressRecord:
        values = record.values
        left = self._plan.steps_total - record.step
        self._samples = int(values.get("samples", self._samples))
        protected = max((status.protected for status in self.members), default=-1)
        return ProgressRecord(
            step=record.step,
            epoch=-1 if self.view is None else self.view.epoch,
            steps_total=self._plan.steps_total,
            samples=self._samples,
            samples_per_s=values["samples_per_s"],
            loss=values["loss"],
            ne=values["ne"],
            auc=values["auc"],
            calibration=values["calibration"],
            exchange_ms=values["exchange_ms"],
            workers=0 if self.view is None else self.view.world_size,
            exchange="" if self.view is None else self.view.exchange,
            flows={table: cost.flow for table, cost in record.flows.items()},
            bytes_within_hosts=values.get("bytes_within_hosts", 0.0),
            bytes_across_hosts=values.get("bytes_across_hosts", 0.0),
            eta_s=left * values["step_ms"] / 1e3,
            phases_ms={k.split("/", 1)[1]: v for k, v in values.items() if k.startswith("phase_ms/")},
            counters={name: values.get(name, 0.0) for name in ("rows", "skipped_steps", *COUNTER_NAMES)},
            protected_step=protected if protected >= 0 else None,
            unprotected_bytes=sum(status.unprotected_bytes for status in self.members),
        )
