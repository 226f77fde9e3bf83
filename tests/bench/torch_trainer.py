"""The peer: the quickstart's model under ``ray.train.torch.TorchTrainer`` with elastic ScalingConfig.

Run as a program it is the driver of one such run; ``Peer`` starts it and resizes it. Ray's own code makes the numbers:
the scaling policy resizes when the reservation that its autoscaling coordinator grants changes, and another requester
that came first takes or gives back CPUs at our word. So a resize needs neither a new node nor the coordinator's tick.
In its favour: every worker keeps the whole training set in memory as an Arrow table (Ray Data would have to start an
execution), and nothing is written but checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from elastic_steps import Kind, Mark, process_log, read_marks, wait_until

#: What Ray Train is told: the shortest intervals it works with, and none at all.
INTERVALS: dict[str, dict[str, float]] = {
    "minimum": {"monitor_s": 0.0, "poll_s": 0.1, "preemption_s": 0.5},
    "default": {},
}
CHECKPOINT_STEPS = 50


def train_loop(config: dict[str, Any]) -> None:
    """One worker: all steps from the newest checkpoint on."""
    import ray.train
    import torch
    from ray.train.torch import prepare_model

    from shoal.jobs.models.dlrm import build

    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(config["seed"])
    model = build(**config["model"], device="cpu")
    tables = [p for name, p in model.named_parameters() if "embedding_bags" in name]
    rest = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    optimizers = [torch.optim.Adagrad(tables, lr=config["lr"], eps=config["eps"]), torch.optim.Adam(rest, lr=1e-3)]
    start = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        start = state["step"]
    trained = prepare_model(model)
    batches = Batches(config, rank, world_size)
    log = process_log(config["marks"])
    log.rank, log.world_size = rank, world_size
    log.add(Kind.HELLO, start)
    for step in range(start, config["total_steps"]):
        batch = batches.get(step)
        losses, _ = trained(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        if rank == 0:
            log.add(Kind.APPLIED, step)
        if (step + 1) % CHECKPOINT_STEPS == 0:
            _report(rank, step + 1, model, optimizers)


def _report(rank: int, step: int, model: Any, optimizers: list[Any]) -> None:
    """A checkpoint of rank 0, as Ray Train wants it: all ranks report."""
    import ray.train
    import torch

    if rank:
        ray.train.report({"step": step})
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


class Batches:
    """A rank's slice of global batch s, shuffled per epoch; every rank draws the same order."""

    def __init__(self, config: dict[str, Any], rank: int, world_size: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from shoal.kernels.arrow import BatchConverter
        from shoal.platform.config import JobConfig
        from shoal.platform.config_fields import build
        from shoal.platform.job import make_schema

        data = build(JobConfig, config["job"]).data
        schema = make_schema(data)
        self._converter = BatchConverter(schema)
        tables = [pq.read_table(path, columns=self._converter.names) for path in data.train]
        self._table = pa.concat_tables(tables).combine_chunks()
        self._seed, self._batch_size = config["seed"], data.batch_size
        self._rank, self._world_size = rank, world_size
        self._epoch, self._order = -1, None

    def get(self, step: int) -> Any:
        import numpy as np

        per_epoch = -(-self._table.num_rows // self._batch_size)
        epoch, index = divmod(step, per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng((self._seed, epoch))
            self._epoch, self._order = epoch, rng.permutation(self._table.num_rows)
        rows = self._order[index * self._batch_size : (index + 1) * self._batch_size]
        return self._converter.convert(self._table.take(np.array_split(rows, self._world_size)[self._rank]))


def drive(config: dict[str, Any]) -> None:
    """The driver: fits until it is ended."""
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    intervals = INTERVALS[config["intervals"]]
    if "poll_s" in intervals:
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = str(intervals["poll_s"])
        os.environ["RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S"] = str(intervals["preemption_s"])
    ray.init(address=config["address"], log_to_driver=True, namespace="peer")
    elastic = {"elastic_resize_monitor_interval_s": intervals["monitor_s"]} if "monitor_s" in intervals else {}
    TorchTrainer(
        train_loop,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=tuple(config["num_workers"]), resources_per_worker={"CPU": 1}, **elastic
        ),
        run_config=ray.train.RunConfig(
            name=config["name"],
            storage_path=config["storage_path"],
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


class Rival:
    """Another requester of the cluster's CPUs, which came before the trainer and so is served first."""

    def __init__(self) -> None:
        from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
            ResourceRequestPriority,
            get_or_create_autoscaling_coordinator,
        )

        self._coordinator = get_or_create_autoscaling_coordinator()
        self._priority = ResourceRequestPriority.HIGH

    def take(self, num_cpus: int) -> None:
        """Hold this many CPUs from now on: the trainer's reservation changes at once."""
        import ray

        ray.get(
            self._coordinator.request_resources.remote(
                requester_id="rival",
                resources=[{"CPU": 1.0}] * num_cpus,
                expire_after_s=3600.0,
                priority=self._priority,
            ),
            timeout=30,
        )

    def refresh(self) -> None:
        """Let the coordinator look at the nodes there are, now rather than at its next tick."""
        import ray

        ray.get(self._coordinator.get_reserved_resources.remote("rival", recompute=True), timeout=30)


@dataclasses.dataclass
class Peer:
    """A TorchTrainer run on a cluster of ``num_cpus`` single-CPU nodes, in a process of its own."""

    process: subprocess.Popen[bytes]
    folder: Path
    rival: Rival
    num_cpus: int

    @classmethod
    def start(
        cls, folder: Path, address: str, job: dict[str, Any], model: dict[str, Any], *, intervals: str,
        num_workers: int, max_workers: int, num_cpus: int, lr: float, eps: float,
    ) -> Peer:  # fmt: skip
        """Start with ``num_workers`` and wait for the first steps."""
        marks = folder / "marks"
        marks.mkdir(parents=True)
        config = {
            "address": address, "job": job, "model": model, "intervals": intervals, "marks": str(marks), "seed": 0,
            "lr": lr, "eps": eps, "total_steps": 10**9, "num_workers": [1, max_workers], "name": folder.name,
            "storage_path": str(folder / "runs"),
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        rival = Rival()
        rival.take(num_cpus - num_workers)
        rival.refresh()
        with (folder / "driver.log").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, __file__, str(folder / "config.json")], stdout=output, stderr=subprocess.STDOUT
            )
        peer = cls(process, folder, rival, num_cpus)
        try:
            peer.wait(lambda m: m.world_size == num_workers, 120, f"step of {num_workers} workers")
        except BaseException:
            process.kill()
            raise
        return peer

    def marks(self) -> list[Mark]:
        """Everything its workers wrote so far."""
        return read_marks(self.folder / "marks")

    def wait(self, condition: Any, timeout_s: float, what: str) -> Mark:
        """The first applied step that fulfils ``condition``."""

        def found() -> Mark | None:
            if self.process.poll() is not None:
                raise RuntimeError(f"TorchTrainer ended: {(self.folder / 'driver.log').read_text()[-2000:]}")
            return next((m for m in self.marks() if m.kind == Kind.APPLIED and condition(m)), None)

        return wait_until(found, timeout_s, f"TorchTrainer: {what}", 0.2)

    def resize(self, num_workers: int, timeout_s: float) -> float:
        """Let the trainer have this many CPUs; returns when once it has made 20 steps with them."""
        after = time.time()
        self.rival.take(self.num_cpus - num_workers)
        first = self.wait(lambda m: m.time > after and m.world_size == num_workers, timeout_s, f"{num_workers} workers")
        self.wait(lambda m: m.time > first.time and m.step >= first.step + 2 * CHECKPOINT_STEPS, 60, "steps")
        return after

    def newest_pids(self) -> dict[int, int]:
        """Rank -> process of the present worker group."""
        hellos = [m for m in self.marks() if m.kind == Kind.HELLO]
        return {m.rank: m.pid for m in hellos[-hellos[-1].world_size :]}

    def stop(self) -> None:
        """End the driver; Ray ends what it had started."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        with contextlib.suppress(Exception):
            self.rival.take(0)


if __name__ == "__main__":
    drive(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
