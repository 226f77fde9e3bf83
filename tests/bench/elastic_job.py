"""Our side of the elastic benchmarks: a production run on a Ray cluster whose workers note their steps.

Run as a program it is the driver of one run; ``OurRun`` starts it, resizes it, finds its workers and reads its events.
The job is the quickstart's, made endless: constant learning rates, no evaluation, no checkpoint at the end.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from elastic_steps import Kind, Mark, applied, logged, read_marks, wait_until

#: More than any benchmark trains.
ENDLESS_EPOCHS = 1_000_000


def quickstart_job(folder: Path, name: str, **options: Any) -> Any:
    """The quickstart's data and job under ``folder``, made endless.

    Args:
        options: ``num_workers``, ``batch_size``, and ``failure``, a mapping of fields of run.failure.
    """
    from shoal.jobs import quickstart
    from shoal.platform.config import ScheduleConfig

    prepared = quickstart.prepare(folder, 0, None, lambda line: print(line, flush=True))
    job = quickstart.job(prepared, folder, seed=0, num_workers=1)
    failure = dataclasses.replace(job.run.failure, **options.get("failure", {}))
    return dataclasses.replace(
        job,
        data=dataclasses.replace(job.data, eval=(), batch_size=options.get("batch_size", job.data.batch_size)),
        train=dataclasses.replace(
            job.train, epochs=ENDLESS_EPOCHS, schedule=ScheduleConfig(), log_every_steps=1000
        ),
        scaling=dataclasses.replace(job.scaling, num_workers=options.get("num_workers", 1)),
        run=dataclasses.replace(
            job.run,
            name=name,
            storage_path=str(folder / "runs"),
            checkpoint=dataclasses.replace(job.run.checkpoint, at_end=False),
            failure=failure,
        ),
    )


def drive(config: dict[str, Any]) -> None:
    """The driver: fits until it is ended."""
    from shoal.jobs.train import ElasticTrainer
    from shoal.platform.config import JobConfig
    from shoal.platform.config_fields import build

    class Logged(ElasticTrainer):
        def _plan(self, *args: Any, **options: Any) -> Any:
            plan = super()._plan(*args, **options)
            return dataclasses.replace(plan, worker=logged(plan.worker, config["marks"]))

    Logged.from_config(build(JobConfig, config["job"])).fit()


@dataclasses.dataclass
class OurRun:
    """A run of ours, in a process of its own."""

    process: subprocess.Popen[bytes]
    folder: Path
    job: Any

    @classmethod
    def start(cls, folder: Path, address: str, job: Any, *, num_workers: int) -> OurRun:
        """Start ``job`` on the cluster and wait until ``num_workers`` or more train."""
        marks = folder / "marks"
        marks.mkdir(parents=True)
        job = dataclasses.replace(job, scaling=dataclasses.replace(job.scaling, address=address))
        config = {"job": job.to_dict(), "marks": str(marks)}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with (folder / "driver.log").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, str(folder / "config.json")], stdout=output, stderr=subprocess.STDOUT
            )
        run = cls(process, folder, job)
        try:
            run.wait(lambda m: m.world_size >= num_workers, 120, f"step of {num_workers} workers or more")
        except BaseException:
            process.kill()
            raise
        return run

    @property
    def name(self) -> str:
        return self.job.run.name

    def marks(self) -> list[Mark]:
        """Everything its workers wrote so far."""
        return read_marks(self.folder / "marks")

    def events(self, since: float = 0.0) -> list[dict[str, Any]]:
        """What the controller has told since a time."""
        from shoal.platform.storage import Storage
        from shoal.platform.telemetry import read_events

        return [event for event in read_events(Storage(self.job.run.run_dir)) if event["time"] >= since]

    def wait(self, condition: Any, timeout_s: float, what: str) -> Mark:
        """The first applied step that fulfils ``condition``."""

        def found() -> Mark | None:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended: {self.log()}")
            return next((m for m in self.marks() if m.kind == Kind.APPLIED and condition(m)), None)

        try:
            return wait_until(found, timeout_s, f"{self.name}: {what}", 0.1)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {self.log()}") from None

    def wait_event(self, kind: str, since: float, timeout_s: float) -> dict[str, Any]:
        """The first event of a kind since a time."""

        def found() -> dict[str, Any] | None:
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended: {self.log()}")
            return next((event for event in self.events(since) if event["kind"] == kind), None)

        try:
            return wait_until(found, timeout_s, f"{self.name}: event {kind}", 0.1)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; {self.log()}") from None

    def resize(self, num_workers: int, timeout_s: float) -> float:
        """Order another number of workers; returns the moment of the order once they have made 60 steps."""
        from shoal.jobs.live import scale

        ordered = time.time()
        scale(self.name, num_workers)
        first = self.wait(
            lambda m: m.time > ordered and m.world_size == num_workers, timeout_s, f"{num_workers} workers"
        )
        self.wait(lambda m: m.time > first.time and m.step >= first.step + 60, 60, "60 more steps")
        return ordered

    def pids(self) -> dict[int, int]:
        """Rank -> process of those that train now."""
        steps = applied(self.marks())
        newest = steps[-1]
        return {m.rank: m.pid for m in steps if m.step >= newest.step - 3 and m.world_size == newest.world_size}

    def log(self) -> str:
        """The end of what the driver said, and the last events."""
        text = (self.folder / "driver.log").read_text(errors="replace")[-1500:]
        events = [{k: str(v)[:200] for k, v in event.items()} for event in self.events()[-8:]]
        return f"{text}\n{json.dumps(events, indent=1)}"

    def stop(self) -> None:
        """End the run now: Ray's clean-up of what the run has left is the cluster's affair."""
        self.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


if __name__ == "__main__":
    drive(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
