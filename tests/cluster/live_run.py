"""A run on a Ray cluster of several nodes, driven from a thread, and what tests want to know of it while it goes on."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import models

import shoal

NODE = {"object_store_memory": 150 * 2**20}


@contextlib.contextmanager
def nodes(num_cpus: tuple[int, ...]) -> Iterator[Any]:
    """A cluster whose head has no CPUs to give, and a node for every number in ``num_cpus``; its nodes are in
    ``cluster.parts``."""
    import ray
    from ray.cluster_utils import Cluster

    temp = tempfile.mkdtemp(prefix="sh-", dir="/tmp")
    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": temp, **NODE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.parts = [cluster.add_node(num_cpus=cpus, **NODE) for cpus in num_cpus]
        ray.init(address=cluster.address, namespace="shoal", log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


def job(data: Path, folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Arguments of an ElasticTrainer that trains until it is stopped."""
    values: dict[str, Any] = {
        "model": models.build_slow,
        "data": {
            "train": [str(data)],
            "weight": "weight",
            "dense": ["d0", "d1", "d2"],
            "sparse": ["user", "item"],
            "batch_size": 64,
            "window_rows": 200,
        },
        "train": {"epochs": 100_000, "max_steps": 100_000, "lr": 0.05, "log_every_steps": 20},
        "scaling": {"num_workers": 2, "elastic_resize_monitor_interval_s": 0.5},
        "run": {
            "name": name,
            "storage_path": str(folder),
            "failure": {"recovery": "replicated", "on_loss": "shrink", "protect_every_steps": 10},
            "timeouts": {"op_timeout_s": 5.0},
        },
    }
    for section, fields in changes.items():
        values[section] = {**values[section], **fields}
    return values


class LiveRun:
    """``fit`` in a thread; everything it tells is in ``items``, with the time it came."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.name = arguments["run"]["name"]
        self.trainer = shoal.ElasticTrainer(**arguments)
        self.items: list[tuple[float, Any]] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._fit, daemon=True)
        self.thread.start()

    def _fit(self) -> None:
        try:
            self.result = self.trainer.fit(on_record=lambda item: self.items.append((time.monotonic(), item)))
        except BaseException as error:
            self.error = error

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [item[1] for _, item in list(self.items) if isinstance(item, tuple) and item[0] == kind]

    def kinds(self) -> list[str]:
        return [item[0] for _, item in list(self.items) if isinstance(item, tuple)]

    def told(self) -> str:
        """What it has said so far, for a message."""
        events = [f"{at - self.items[0][0]:.2f} {item}" for at, item in list(self.items) if isinstance(item, tuple)]
        record = self.record
        last = None if record is None else (record.step, record.workers, record.epoch)
        return "\n".join([*events[-25:], f"last record (step, workers, epoch): {last}; error: {self.error!r}"])

    @property
    def record(self) -> Any:
        """The newest progress record."""
        records = [item for _, item in list(self.items) if hasattr(item, "samples_per_s")]
        return records[-1] if records else None

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert self.error is None, f"{what}: the run failed\n{self.told()}"
            assert self.thread.is_alive() or self.result is None, f"{what}: the run ended\n{self.told()}"
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{self.told()}"
            time.sleep(0.02)
        return found

    def trains_with(self, workers: int, *, beyond: int = -1, timeout_s: float = 60.0) -> Any:
        """A progress record with so many workers, of a step beyond ``beyond``."""

        def found() -> Any:
            record = self.record
            return record if record is not None and record.workers == workers and record.step > beyond else None

        return self.until(found, f"training with {workers} workers", timeout_s)

    def workers(self) -> dict[str, Any]:
        """Worker id -> actor handle, of those that live."""
        from shoal.actors.runtime import find_actor, list_actors

        names = [name for name in list_actors(self.name) if name.rpartition(":")[2] not in ("controller", "feeder")]
        return {name.rpartition(":")[2]: actor for name in names if (actor := find_actor(name)) is not None}

    def pid_of(self, actor: Any) -> int:
        import ray

        return ray.get(actor.poll.remote(), timeout=30).status.pid

    def stop(self, timeout_s: float = 60.0) -> Any:
        """End it in good order; its result."""
        with contextlib.suppress(Exception):
            shoal.stop(self.name, timeout_s=timeout_s)
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), self.told()
        assert self.error is None, repr(self.error)
        return self.result


def left_behind(name: str) -> list[str]:
    """Names of actors and placement groups of a run that are still there."""
    from shoal.actors.runtime import find_groups, list_actors

    return [*list_actors(name), *find_groups(name)]
