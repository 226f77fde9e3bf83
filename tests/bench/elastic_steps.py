"""Which process was at which step when: time stamps written by each worker, read when the run is over.

A worker appends fixed records to a file of its own: about two microseconds each, nothing is flushed or locked, and a
killed process loses none. Times are ``time.time()``, which all processes of one machine share.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_RECORD = struct.Struct("<dqiii4x")


class Kind(enum.IntEnum):
    """What happened."""

    #: The process has started; step is where it begins.
    HELLO = 0
    #: The step's batch is asked for.
    ASK = 1
    #: The step's batch has come.
    GOT = 2
    #: The step's update has been applied.
    APPLIED = 3
    #: The process takes another slice of the batches from this step on: a view change or a rewind.
    MOVED = 4


@dataclasses.dataclass(frozen=True, order=True)
class Mark:
    """One record. ``step`` counts from 0."""

    time: float
    step: int
    kind: int
    rank: int
    world_size: int
    pid: int


class StepLog:
    """Appends to ``<folder>/<pid>.steps``."""

    def __init__(self, folder: str) -> None:
        self._file = os.open(Path(folder) / f"{os.getpid()}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.rank, self.world_size = -1, 0
        #: The newest step whose batch has come, and the newest applied one; rates are also asked for steps never made.
        self.got = self.applied = -1

    def add(self, kind: Kind, step: int) -> None:
        """Append one record, stamped now."""
        os.write(self._file, _RECORD.pack(time.time(), step, kind, self.rank, self.world_size))


@functools.cache
def process_log(folder: str) -> StepLog:
    """This process's only log in ``folder``."""
    return StepLog(folder)


def read_marks(folder: str | Path) -> list[Mark]:
    """All records of all processes, by time."""
    marks = []
    for path in Path(folder).glob("*.steps"):
        data = path.read_bytes()
        data = data[: len(data) // _RECORD.size * _RECORD.size]
        marks += [Mark(t, s, k, r, w, int(path.stem)) for t, s, k, r, w in _RECORD.iter_unpack(data)]
    return sorted(marks)


# ---- our workers: wrapped makers of a WorkerSpec, so that production code has no hook for this -----------------------


class Tempo:
    """How fast a run may go, told from any process: steps below ``limit``, each with ``pause_s`` before it."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tempo"
        if not path.exists():
            partial = path.with_suffix(".new")
            np.array([np.inf, 0.0]).tofile(partial)
            partial.rename(path)
        self._values = np.memmap(path, dtype=np.float64, mode="r+", shape=2)

    @property
    def limit(self) -> float:
        return float(self._values[0])

    @limit.setter
    def limit(self, step: float) -> None:
        self._values[0] = step

    @property
    def pause_s(self) -> float:
        return float(self._values[1])

    @pause_s.setter
    def pause_s(self, seconds: float) -> None:
        self._values[1] = seconds


class _LoggedFeed:
    """A feed that notes what is asked of it, and keeps to the run's tempo."""

    def __init__(self, feed: Any, log: StepLog, tempo: Tempo) -> None:
        self._feed, self._log, self._tempo = feed, log, tempo
        self._asked = -1

    def is_ready(self, step: int, timeout_s: float) -> bool:
        if step != self._asked:
            self._asked = step
            self._log.add(Kind.ASK, step)
        # A batch beyond the limit is late: where steps overlap it is asked for while an earlier step is under way.
        deadline_s = time.monotonic() + timeout_s
        while step >= self._tempo.limit:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(0.001)
        return self._feed.is_ready(step, max(0.0, deadline_s - time.monotonic()))

    def next_batch(self, step: int) -> Any:
        batch = self._feed.next_batch(step)
        self._log.add(Kind.GOT, step)
        self._log.got = step
        if self._tempo.pause_s:
            time.sleep(self._tempo.pause_s)
        return batch

    def reassign(self, assignment: Any, step: int) -> None:
        self._log.rank, self._log.world_size = assignment.rank, assignment.world_size
        self._log.add(Kind.MOVED, step)
        self._log.got = self._log.applied = step - 1
        self._asked = -1
        self._feed.reassign(assignment, step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)


@dataclasses.dataclass(frozen=True)
class LoggedFeedMaker:
    """Wraps ``WorkerSpec.train_feed``."""

    make: Callable[[Any], Any]
    folder: str

    def __call__(self, seat: Any) -> Any:
        log = process_log(self.folder)
        log.rank, log.world_size = seat.rank, seat.world_size
        log.got = log.applied = seat.start_step - 1
        log.add(Kind.HELLO, seat.start_step)
        return _LoggedFeed(self.make(seat), log, Tempo(self.folder))


class _LoggedRates:
    """Learning rates that note the moment a step is applied: the dense rate is read right after the rows' update."""

    def __init__(self, rates: Any, log: StepLog) -> None:
        self._rates, self._log = rates, log

    def tables(self, step: int) -> Any:
        return self._rates.tables(step)

    def dense(self, step: int) -> float:
        if self._log.applied < step <= self._log.got:
            self._log.applied = step
            self._log.add(Kind.APPLIED, step)
        return self._rates.dense(step)


@dataclasses.dataclass(frozen=True)
class LoggedRatesMaker:
    """Wraps ``WorkerSpec.learning_rates``."""

    make: Callable[[Sequence[Any]], Any]
    folder: str

    def __call__(self, tables: Sequence[Any]) -> Any:
        return _LoggedRates(self.make(tables), process_log(self.folder))


def logged(worker: Any, folder: str | Path) -> Any:
    """A WorkerSpec whose workers write their steps to ``folder``, which must exist on every node."""
    return dataclasses.replace(
        worker,
        train_feed=LoggedFeedMaker(worker.train_feed, str(folder)),
        learning_rates=LoggedRatesMaker(worker.learning_rates, str(folder)),
    )


# ---- reading ---------------------------------------------------------------------------------------------------------


def applied(marks: Iterable[Mark]) -> list[Mark]:
    """The records of applied steps, by time."""
    return [mark for mark in marks if mark.kind == Kind.APPLIED]


@dataclasses.dataclass(frozen=True)
class Outage:
    """A gap in the steps of a run."""

    #: The last applied step before, and the first after, by time.
    last: Mark
    first: Mark
    #: The first that had never been applied before.
    first_new: Mark

    @property
    def seconds(self) -> float:
        """Last applied step before to first step after."""
        return self.first.time - self.last.time

    @property
    def seconds_to_new(self) -> float:
        """Last applied step before to first new step after."""
        return self.first_new.time - self.last.time

    @property
    def redo_s(self) -> float:
        """From the first step after to the first new one."""
        return self.first_new.time - self.first.time

    @property
    def redone_steps(self) -> int:
        """Steps that had to be done again."""
        return self.first_new.step - self.first.step


def resize_outage(marks: Sequence[Mark], after: float, world_size: int) -> Outage | None:
    """The gap before the first step of ``world_size`` ranks later than ``after``; None while it lasts."""
    steps = applied(marks)
    first = next((m for m in steps if m.time > after and m.world_size == world_size), None)
    if first is None:
        return None
    return _outage(steps, [m for m in steps if m.time < first.time], first)


def loss_outage(marks: Sequence[Mark], killed: float) -> Outage | None:
    """From the last step applied before the moment ``killed`` to the first of the view formed after it, or None.

    A step that was under way may still be applied by those who had all they needed; it is not new afterwards.
    """
    moved = next((m for m in marks if m.time > killed and m.kind in (Kind.MOVED, Kind.HELLO)), None)
    if moved is None:
        return None
    steps = applied(marks)
    first = next((m for m in steps if m.time > moved.time), None)
    if first is None:
        return None
    found = _outage(steps, [m for m in steps if m.time < moved.time], first)
    last = next((m for m in reversed(steps) if m.time <= killed), None)
    return None if found is None or last is None else dataclasses.replace(found, last=last)


def _outage(steps: Sequence[Mark], before: Sequence[Mark], first: Mark) -> Outage | None:
    if not before:
        return None
    highest = max(m.step for m in before)
    first_new = next((m for m in steps if m.time >= first.time and m.step > highest), None)
    return None if first_new is None else Outage(before[-1], first, first_new)


def steps_per_s(marks: Sequence[Mark], start: float, stop: float) -> float:
    """Distinct steps applied per second of an interval."""
    return len({m.step for m in applied(marks) if start <= m.time < stop}) / (stop - start)


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str, poll_s: float = 0.05) -> Any:
    """The first truthy value of ``condition``. TimeoutError names what did not come."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {timeout_s:g} s")
        time.sleep(poll_s)
    return value
