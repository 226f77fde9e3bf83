"""What a run tells about itself: progress records, the event log and TensorBoard, in the run's folder (DESIGN 7).

* ``events/<number>-<writer>.jsonl``: view changes, failures, recoveries, checkpoints. Object stores have no append, so
  each flush is a new numbered file; a file is never rewritten, and two writers never share a name.
* ``metrics/``: TensorBoard. On a local path its writer appends in place; elsewhere it writes to a temporary folder,
  whose files are copied whole at each flush.

Numbers only inform: a storage that fails costs a warning, never the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from shoal.platform.secrets import redact, redact_tree

logger = logging.getLogger(__name__)

#: Events kept in memory when storage fails, before the oldest are dropped (and counted).
EVENTS_PENDING_MAX = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgressRecord:
    """How training stands at a step. Rates and times are of the window since the previous record."""

    #: Steps applied so far.
    step: int
    #: The view's epoch number.
    epoch: int = 0
    #: Steps of the whole run, or None while unknown.
    steps_total: int | None = None
    #: Samples trained so far.
    samples: int = 0
    samples_per_s: float = 0.0
    #: Mean loss per sample of the window.
    loss: float | None = None
    #: Normalised entropy, AUC and calibration of the window.
    ne: float | None = None
    auc: float | None = None
    calibration: float | None = None
    #: Time of one step's exchanges, median over the window, slowest rank.
    exchange_ms: float | None = None
    workers: int = 0
    #: How rows travel between workers: flat or hierarchical. Bytes that all workers together send in one step of
    #: training, to workers of their own host and to those of others; what carriers hand on is in the former.
    exchange: str = ""
    bytes_within_hosts: float = 0.0
    bytes_across_hosts: float = 0.0
    #: Logical table -> its flow, rows or pooled; empty with one worker.
    flows: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Newest step that a loss of a worker does not take back; None: nothing is kept for that.
    protected_step: int | None = None
    #: Bytes of rows whose copy on another worker is not complete.
    unprotected_bytes: int = 0
    #: Seconds to the end of the run, or None while unknown.
    eta_s: float | None = None
    #: Mean time of each phase of a step: name -> milliseconds.
    phases_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    #: Further counters worth a curve: name (with its unit last) -> value.
    counters: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """TensorBoard tag -> value, without what is unknown."""
        values = {f"train/{name}": getattr(self, name) for name in ("loss", "ne", "auc", "calibration")}
        values |= {f"speed/{name}": getattr(self, name) for name in ("samples_per_s", "exchange_ms", "workers")}
        values |= {f"exchange/{name}": getattr(self, name) for name in ("bytes_within_hosts", "bytes_across_hosts")}
        values |= {f"elastic/{name}": getattr(self, name) for name in ("protected_step", "unprotected_bytes", "epoch")}
        values |= {f"phase/{name}_ms": value for name, value in self.phases_ms.items()}
        values |= {f"count/{name}": value for name, value in self.counters.items()}
        return {name: float(value) for name, value in values.items() if value is not None}


class FileStore(Protocol):
    """What telemetry needs of ``shoal.platform.storage.Storage``."""

    @property
    def uri(self) -> str: ...
    @property
    def is_local(self) -> bool: ...
    def write_bytes(self, path: str, data: bytes) -> None: ...
    def read_bytes(self, path: str) -> bytes: ...
    def list_dir(self, path: str = "") -> list[Any]: ...


class EventLog:
    """Appends events to numbered files. Safe to call from several threads."""

    def __init__(self, storage: FileStore, writer: str, clock: Callable[[], float] = time.time) -> None:
        """``writer`` tells this process's files from another's: letters, digits and dashes, such as ``c0``."""
        assert writer.replace("-", "").isalnum(), writer
        self._storage = storage
        self._writer = writer
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: list[str] = []
        self._num_dropped = 0
        self._next_number: int | None = None

    def write(self, kind: str, /, *, flush: bool = True, **fields: Any) -> None:
        """Record an event; ``flush`` makes it visible at once. Secrets among the fields are masked."""
        event = {"time": round(self._clock(), 3), "kind": kind, **redact_tree(fields)}
        line = json.dumps(event, default=_shown, separators=(",", ":"))
        with self._lock:
            self._pending.append(line)
            excess = len(self._pending) - EVENTS_PENDING_MAX
            if excess > 0:
                del self._pending[:excess]
                self._num_dropped += excess
        logger.info("event=%s %s", kind, " ".join(f"{name}={value}" for name, value in redact_tree(fields).items()))
        if flush:
            self.flush()

    def flush(self) -> None:
        """Write pending events to a new file. On failure they stay pending and a warning says so."""
        with self._lock:
            if not self._pending:
                return
            lines = list(self._pending)
            if self._num_dropped:
                dropped = {"time": round(self._clock(), 3), "kind": "events_dropped", "num_dropped": self._num_dropped}
                lines.insert(0, json.dumps(dropped, separators=(",", ":")))
            try:
                if self._next_number is None:
                    self._next_number = 1 + max((n for n, _ in _event_files(self._storage)), default=0)
                name = f"events/{self._next_number:08d}-{self._writer}.jsonl"
                self._storage.write_bytes(name, ("\n".join(lines) + "\n").encode())
            except Exception as error:
                logger.warning("cannot write %d events: %s", len(lines), redact(str(error)))
                return
            self._next_number += 1
            self._pending.clear()
            self._num_dropped = 0


def read_events(storage: FileStore) -> Iterator[dict[str, Any]]:
    """All events of a run, in the order of their files, then lines. A damaged line is passed over."""
    for _, name in sorted(_event_files(storage)):
        for line in storage.read_bytes(f"events/{name}").decode("utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)


class MetricWriter:
    """TensorBoard curves of a run. ``close`` or ``flush`` makes them visible on remote storage."""

    def __init__(self, storage: FileStore, writer: str) -> None:
        # Imported here: TensorBoard takes a second to import and only the process that writes needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._storage = storage
        self._temp_dir = None if storage.is_local else tempfile.mkdtemp(prefix="shoal-metrics-")
        folder = self._temp_dir or os.path.join(_local_path(storage.uri), "metrics")
        self._writer = SummaryWriter(folder, filename_suffix=f".{writer}")

    def write(self, record: ProgressRecord) -> None:
        """Add every known value of a record at its step."""
        self.write_scalars(record.step, record.scalars())

    def write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add values by tag at a step; values that are not finite are left out (TensorBoard draws them as gaps)."""
        for tag, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        """Make what was written visible."""
        self._writer.flush()
        if self._temp_dir is None:
            return
        for name in sorted(os.listdir(self._temp_dir)):
            try:
                with open(os.path.join(self._temp_dir, name), "rb") as file:
                    self._storage.write_bytes(f"metrics/{name}", file.read())
            except Exception as error:
                logger.warning("cannot write metrics/%s: %s", name, redact(str(error)))

    def close(self) -> None:
        self.flush()
        self._writer.close()
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)


class RayGauges:
    """A run's main numbers as Ray metrics (``ray_shoal_...``), tagged by run only; usable inside Ray processes."""

    NAMES = (
        *("step", "samples_per_s", "loss", "ne", "auc", "exchange_ms", "workers", "unprotected_bytes", "eta_s"),
        *("bytes_within_hosts", "bytes_across_hosts"),
    )

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Gauge

        self._gauges = {name: Gauge(f"shoal_{name}", f"Shoal run: {name}", ("run",)) for name in self.NAMES}
        self._tags = {"run": run}

    @classmethod
    def connect(cls, run: str) -> RayGauges | None:
        """The gauges of a run inside Ray, None outside: nothing here starts or joins a cluster."""
        ray = sys.modules.get("ray")
        return cls(run) if ray is not None and ray.is_initialized() else None

    def write(self, record: ProgressRecord) -> None:
        """Set the gauges of every known value."""
        for name, gauge in self._gauges.items():
            value = getattr(record, name)
            if value is not None and math.isfinite(value):
                gauge.set(float(value), tags=self._tags)


def _event_files(storage: FileStore) -> list[tuple[int, str]]:
    """(number, name) of the files in events/."""
    names = [entry.name for entry in storage.list_dir("events")]
    return [(int(name[:8]), name) for name in names if name[:8].isdigit() and name.endswith(".jsonl")]


def _local_path(uri: str) -> str:
    return os.path.abspath(os.path.expanduser(uri.removeprefix("file://")))


def _shown(value: Any) -> Any:
    """What JSON cannot hold, as something it can."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
