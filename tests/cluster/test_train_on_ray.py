"""The whole run on a local Ray cluster: same numbers as in one process, resume, clean end, clear failures."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))
sys.path.insert(0, str(Path(__file__).parent))

import parity

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return parity.write_data(tmp_path_factory.mktemp("data") / "train")


def trainer(
    data: Path,
    folder: Path,
    *,
    workers: int,
    max_steps: int = 24,
    name: str = "run",
    epochs: int = 5,
    scaling=None,
    **run,
):
    import models

    import shoal

    return shoal.ElasticTrainer(
        model=models.build,
        data={
            "train": [str(data)],
            "eval": [str(data)],
            "weight": "weight",
            "dense": ["d0", "d1", "d2"],
            "sparse": ["user", "item"],
            "batch_size": 64,
            "window_rows": 200,
        },
        train={"epochs": epochs, "max_steps": max_steps, "lr": 0.05, "log_every_steps": 8},
        scaling={"num_workers": workers, **(scaling or {})},
        run={"name": name, "storage_path": str(folder), **run},
    )


def actors_of(run: str) -> list[str]:
    import ray

    return [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if f":{run}:" in a["name"]]


def groups_of(run: str) -> list[str]:
    from ray.util.placement_group import placement_group_table

    groups = placement_group_table().values()
    return [g["name"] for g in groups if f":{run}:" in g["name"] and g["state"] != "REMOVED"]


def test_stdlib_platform_is_intact_in_a_worker_started_from_the_root(local_ray):
    import ray

    root = Path(__file__).resolve().parents[2]

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"PYTHONPATH": str(root)}})
    def system() -> str:
        import os
        import platform

        os.chdir(root)
        return platform.system()

    assert ray.get(system.remote(), timeout=60) == __import__("platform").system()


def test_two_workers_train_like_one_process_and_leave_nothing_behind(local_ray, data, tmp_path):
    alone = trainer(data, tmp_path / "a", workers=0).fit()
    spread = trainer(data, tmp_path / "b", workers=2).fit()
    assert alone.steps == spread.steps == 24
    for name in ("eval/auc", "eval/log_loss", "loss"):
        assert spread.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-4), name
    assert actors_of("run") == []
    assert spread.checkpoint is not None and "step-00000024" in spread.checkpoint


def test_run_resumes_on_another_world_size(local_ray, data, tmp_path):
    trainer(data, tmp_path, workers=0, max_steps=12).fit()
    resumed = trainer(data, tmp_path, workers=2, max_steps=24).fit()
    whole = trainer(data, tmp_path / "whole", workers=0, max_steps=24).fit()
    assert resumed.steps == 24
    assert resumed.metrics["eval/log_loss"] == pytest.approx(whole.metrics["eval/log_loss"], rel=1e-4)


def test_killed_worker_is_replaced_and_the_run_ends_well(local_ray, data, tmp_path):
    """F9: one host and a fixed number of workers: from the newest checkpoint, here step 0, with a new worker."""
    import signal

    import ray

    from shoal.actors.runtime import NAMESPACE

    pids: list[int] = []
    kinds: list[str] = []

    def kill_one(item) -> None:
        if isinstance(item, tuple):
            kinds.append(item[0])
        if getattr(item, "step", 0) >= 8 and not pids:
            name = next(n for n in actors_of("victim") if n.endswith(".1"))
            pids.append(ray.get(ray.get_actor(name, namespace=NAMESPACE).poll.remote()).status.pid)
            os.kill(pids[0], signal.SIGKILL)

    result = trainer(data, tmp_path, workers=2, max_steps=200, epochs=100, name="victim").fit(on_record=kill_one)
    assert result.steps == 200 and not result.is_stopped and "lost" in kinds, kinds
    assert actors_of("victim") == [] and groups_of("victim") == []


def test_killed_controller_leaves_nothing_behind_and_the_name_is_free_again(local_ray, data, tmp_path):
    import ray

    from shoal.actors.runtime import NAMESPACE, actor_name
    from shoal.kernels.errors import ClusterError

    killed: list[int] = []

    def kill_controller(item) -> None:
        if getattr(item, "step", 0) >= 8 and not killed:
            killed.append(item.step)
            ray.kill(ray.get_actor(actor_name("headless", "controller"), namespace=NAMESPACE))

    with pytest.raises(ClusterError, match="controller died"):
        long = trainer(data, tmp_path, workers=2, max_steps=20_000, epochs=2_000, name="headless")
        long.fit(on_record=kill_controller)
    assert actors_of("headless") == [] and groups_of("headless") == []
    assert trainer(data, tmp_path, workers=2, max_steps=8, epochs=2_000, name="headless").fit().steps == 8


class Idle:
    """An actor that a run might have left behind."""


def test_reaping_a_run_spares_its_controller_and_other_runs(local_ray):
    from shoal.actors.runtime import actor_name, create_actor, reap, release_group, reserve

    names = [actor_name(run, role) for run, role in (("a", "feeder"), ("a", "controller"), ("a.b", "feeder"))]
    actors = [create_actor(Idle, name) for name in names]
    groups = [reserve(actor_name(run, "w0"), {"CPU": 1.0}) for run in ("a", "a.b")]
    assert sorted(reap("a")) == ["shoal:a:feeder", "shoal:a:w0"]
    assert actors_of("a") == ["shoal:a:controller"] and groups_of("a") == []
    assert actors_of("a.b") == ["shoal:a.b:feeder"] and groups_of("a.b") == ["shoal:a.b:w0"]
    import ray

    release_group(groups[1])
    [ray.kill(actor) for actor in actors[1:]]


def test_ctrl_c_while_the_cluster_has_no_room_ends_the_run_at_once(local_ray, data, tmp_path):
    import signal

    def interrupt(item) -> None:
        if isinstance(item, tuple) and item[0] == "launch":
            os.kill(os.getpid(), signal.SIGINT)

    scaling = {"resources_per_worker": {"CPU": 64}}
    waiting = trainer(data, tmp_path, workers=2, name="waiting", scaling=scaling)
    started = time.monotonic()
    assert waiting.fit(on_record=interrupt).is_stopped
    assert time.monotonic() - started < 60  # not the 180 s of start_timeout_s
    assert actors_of("waiting") == [] and groups_of("waiting") == []
