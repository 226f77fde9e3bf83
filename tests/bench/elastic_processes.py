"""A production run whose workers are processes of this machine: the production Controller and Workers without Ray.

The feed is real: every worker reads the files itself (``LocalFeed``). Hosts only exist in views.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))

from elastic_steps import Kind, Mark, Tempo, applied, logged, read_marks, wait_until
from processes import ProcessLauncher

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessRun:
    """One run, from launch on; ``close`` ends it."""

    def __init__(self, folder: Path, job: Any, *, hosts: Sequence[str] = ("host0", "host1"), room: int = 4) -> None:
        from shoal.jobs.train import ElasticTrainer
        from shoal.platform.controller import Controller
        from shoal.platform.job import open_source

        self.folder, self.job = folder, job
        self._marks = folder / "marks"
        self._marks.mkdir(parents=True)
        self.tempo = Tempo(self._marks)
        trainer = ElasticTrainer.from_config(job)
        source = open_source(job, job.data.train, is_training=True)
        plan = trainer._plan(source, None, source.local_feed)
        plan = dataclasses.replace(plan, worker=logged(plan.worker, self._marks))
        self.launcher = ProcessLauncher(hosts=hosts, room=room)
        self.controller = Controller(plan, self.launcher)
        self._thread = threading.Thread(target=self.controller.run, name=f"controller-{job.run.name}", daemon=True)
        self._thread.start()

    def marks(self) -> list[Mark]:
        """Everything its workers wrote so far."""
        return read_marks(self._marks)

    def step(self) -> int:
        """Steps applied, as the marks say."""
        return max((m.step for m in applied(self.marks())), default=-1) + 1

    def events(self, since: float = 0.0) -> list[dict[str, Any]]:
        """What the controller has told since a time."""
        from shoal.platform.storage import Storage
        from shoal.platform.telemetry import read_events

        return [event for event in read_events(Storage(self.job.run.run_dir)) if event["time"] >= since]

    def scale(self, num_workers: int) -> float:
        """Order a number of workers; returns when."""
        ordered = time.time()
        self.controller.scale(num_workers)
        return ordered

    def resize(self, num_workers: int, timeout_s: float = 60.0, more_steps: int = 20) -> float:
        """Order a number of workers; returns the moment of the order once they have made some steps."""
        ordered = self.scale(num_workers)
        first = self.wait(lambda m: m.time > ordered and m.world_size == num_workers, timeout_s, f"{num_workers} ranks")
        self.wait(lambda m: m.time > first.time and m.step >= first.step + more_steps, 60.0, "more steps")
        return ordered

    def wait(self, condition: Callable[[Mark], bool], timeout_s: float, what: str) -> Mark:
        """The first applied step that fulfils ``condition``."""
        return self.wait_for(lambda: next((m for m in applied(self.marks()) if condition(m)), None), timeout_s, what)

    def wait_event(self, kind: str, since: float, timeout_s: float = 60.0) -> dict[str, Any]:
        """The first event of a kind since a time."""
        return self.wait_for(
            lambda: next((e for e in self.events(since) if e["kind"] == kind), None), timeout_s, f"event {kind}"
        )

    def wait_for(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """The first truthy value of ``condition``, while the run lives."""

        def found() -> Any:
            value = condition()
            if not value and not self._thread.is_alive():
                raise RuntimeError(f"the run ended: {self.controller.failure!r}; {self.tail()}")
            return value

        try:
            return wait_until(found, timeout_s, f"{self.job.run.name}: {what}", 0.05)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {self.tail()}") from None

    def tail(self) -> str:
        """The last events, shortened."""
        return "; ".join(str({k: str(v)[:160] for k, v in event.items()}) for event in self.events()[-6:])

    def join(self, timeout_s: float) -> Any:
        """Wait for the run's own end; raises what ended it badly."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.job.run.name} did not end within {timeout_s:g} s; {self.tail()}")
        if self.controller.failure is not None:
            raise self.controller.failure
        return self.controller.report(0)

    def ranks(self) -> dict[int, Any]:
        """Rank -> process handle of the present view."""
        pids = {m.pid: m for m in self.marks() if m.rank >= 0}
        live = {h.process.pid: h for h in self.launcher.handles.values() if h.is_alive}
        return {pids[pid].rank: handle for pid, handle in live.items() if pid in pids}

    def statuses(self) -> dict[str, Any]:
        """What the workers last told the controller."""
        executor = self.controller._executor
        return {} if executor is None else dict(executor.statuses)

    def close(self) -> None:
        """End the run now."""
        self.tempo.limit = float("inf")
        self.controller.abort()
        self._thread.join(30.0)
        self.launcher.release()


@contextlib.contextmanager
def process_run(folder: Path, job: Any, **options: Any) -> Iterator[ProcessRun]:
    """A run that ends with the block."""
    run = ProcessRun(folder, job, **options)
    try:
        yield run
    finally:
        run.close()


def resident_bytes(pid: int) -> int:
    """Memory of a process that is not shared with others."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(pages[1]) - int(pages[2])) * PAGE_BYTES


def started_kinds(marks: Sequence[Mark]) -> list[Mark]:
    """The records of processes that started."""
    return [m for m in marks if m.kind == Kind.HELLO]
