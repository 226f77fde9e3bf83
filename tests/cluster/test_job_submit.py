"""``ray job submit --working-dir . -- shoal train job.yaml``: the job's own cluster, the model from the folder; and
what ``ray job stop`` leaves of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.platform.checkpoint import CheckpointState, list_checkpoints
from shoal.platform.storage import Storage
from shoal.platform.telemetry import read_events

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# A process of its own: the job server needs the dashboard, which the other tests' cluster does without. It is asked for
# what is left of a run by its name. ``ray.init`` would have its agent listen on a fixed port.
HEAD = """
import sys, ray
from ray.cluster_utils import Cluster
sys.path.insert(0, sys.argv[2])
from live_run import left_behind
head = {"num_cpus": 4, "include_dashboard": True, "dashboard_agent_listen_port": 0,
        "object_store_memory": 150 * 2**20, "temp_dir": sys.argv[1]}
cluster = Cluster(initialize_head=True, head_node_args=head)
context = ray.init(address=cluster.address, log_to_driver=False)
print("HEAD", context.dashboard_url, cluster.address, flush=True)
for line in sys.stdin:
    print("LEFT", left_behind(line.strip()), flush=True)
ray.shutdown()
cluster.shutdown()
"""

JOB = """
model: my_clicks:build
data:
  train: train.parquet
  dense: [d0, d1, d2]
  sparse: [user, item]
  batch_size: 256
train: {max_steps: 6, log_every_steps: 2}
scaling: {num_workers: 1}
"""


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


class Head:
    """A cluster with a job server, in another process."""

    def __init__(self, environ: dict[str, str], temp: str) -> None:
        command = [sys.executable, "-c", HEAD, temp, str(Path(__file__).parent)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
        self._environ = environ
        self.url, self.address = self._answer("HEAD ").split()

    def run(self, *words: str, cwd: Path | None = None, again_if: str | None = None) -> str:
        """What a command prints; it must succeed. ``again_if``: but may fail with these words for a while."""
        deadline = time.monotonic() + 60.0
        while True:
            done = subprocess.run(words, cwd=cwd, env=self._environ, capture_output=True, text=True, timeout=240)
            output = done.stdout + done.stderr
            if done.returncode == 0:
                return output
            assert again_if is not None and again_if in output and time.monotonic() < deadline, output[-4000:]

    def job(self, verb: str, *words: str, cwd: Path | None = None) -> str:
        command = (sys.executable, "-m", "ray.scripts.scripts", "job", verb, "--address", f"http://{self.url}")
        # The job server answers before the agent that starts jobs is up.
        return self.run(*command, *words, cwd=cwd, again_if="No available agent")

    def left_behind(self, run: str) -> str:
        """The actors and placement groups of ``run``."""
        self._process.stdin.write(f"{run}\n")
        self._process.stdin.flush()
        return self._answer("LEFT ")

    def _answer(self, word: str) -> str:
        """The rest of the next line that begins with ``word``; Ray prints messages of its own between them."""
        return next(line for line in self._process.stdout if line.startswith(word)).removeprefix(word).strip()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture(scope="module")
def head(environ) -> Iterator[Head]:
    temp = tempfile.mkdtemp(prefix="sh-", dir="/tmp")
    head = Head(environ, temp)
    try:
        yield head
    finally:
        head.close()
        shutil.rmtree(temp, ignore_errors=True)


@pytest.fixture
def folder(tmp_path) -> Path:
    """What a user submits: data, the model, a job file."""
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("models.py"), folder / "my_clicks.py")
    rng = np.random.default_rng(0)
    columns = {f"d{i}": rng.normal(size=2000) for i in range(3)}
    columns |= {"user": rng.integers(0, 500, 2000), "item": rng.integers(0, 800, 2000)}
    columns |= {"label": rng.integers(0, 2, 2000)}
    pq.write_table(pa.table(columns), folder / "train.parquet")
    (folder / "job.yaml").write_text(JOB)
    return folder


def test_submitted_job_trains_on_its_own_cluster(head, folder, tmp_path):
    command = ("--working-dir", ".", "--", "shoal", "train", "job.yaml", "-o", f"run.storage_path={tmp_path}/runs")
    output = head.job("submit", *command, cwd=folder)
    assert "reason=RAY_ADDRESS of the Ray job that runs this command" in output
    assert "run job finished: steps=6" in output and "shoal ckpt ls" in output
    assert (tmp_path / "runs" / "job" / "config.yaml").exists()


def until(condition: Any, what: str, timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)
    return found


def test_job_stopped_in_a_view_change_leaves_no_actors_and_no_placement_groups(head, folder, tmp_path):
    """F8: SIGTERM of the driver ends the run, whatever it is about to do; it can be resumed."""
    overrides = ["run.name=ended", f"run.storage_path={tmp_path}/runs", "train.max_steps=1000000"]
    overrides += ["train.epochs=1000000", "model=my_clicks:build_slow"]
    # The view change takes as long as its copies: 20 s and more.
    overrides += ["run.failure.copy_rate_limit_bytes_per_s=1000"]
    words = [word for text in overrides for word in ("-o", text)]
    options = ("--no-wait", "--submission-id", "ended", "--working-dir", ".")
    head.job("submit", *options, "--", "shoal", "train", "job.yaml", *words, cwd=folder)
    run = tmp_path / "runs" / "ended"

    def events(kind: str) -> list[Any]:
        return [event for event in read_events(Storage(str(run))) if event.get("kind") == kind] if run.exists() else []

    until(lambda: events("view"), "it trains")
    head.run("shoal", "scale", "ended", "--workers", "2", "--address", head.address)
    until(lambda: events("prepare"), "the view change has begun")
    assert "ended" in head.job("stop", "ended")
    until(lambda: head.left_behind("ended") == "[]", "nothing is left")
    assert len(events("view")) == 1 and [event["phase"] for event in events("end")] == ["stopped"]
    assert any(info.state is CheckpointState.COMPLETE for info in list_checkpoints(str(run)))
