"""``ray job submit --working-dir . -- shoal train job.yaml``: the job's own cluster, the model from the folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# A process of its own: the job server needs the dashboard, which the other tests' cluster does without.
HEAD = """
import sys, ray
context = ray.init(address="local", num_cpus=4, include_dashboard=True, log_to_driver=False,
                   object_store_memory=150 * 2**20, _temp_dir=sys.argv[1])
print("URL", context.dashboard_url, flush=True)
sys.stdin.read()
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


@pytest.fixture
def environ() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture
def url(environ) -> Iterator[str]:
    temp = tempfile.mkdtemp(prefix="sh-", dir="/tmp")
    command = [sys.executable, "-c", HEAD, temp]
    head = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        yield next(line.split()[1] for line in head.stdout if line.startswith("URL"))
    finally:
        head.stdin.close()
        head.wait(60)
        shutil.rmtree(temp, ignore_errors=True)


def test_submitted_job_trains_on_its_own_cluster(url, environ, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("models.py"), folder / "my_clicks.py")
    rng = np.random.default_rng(0)
    columns = {f"d{i}": rng.normal(size=2000) for i in range(3)}
    columns |= {"user": rng.integers(0, 500, 2000), "item": rng.integers(0, 800, 2000)}
    columns |= {"label": rng.integers(0, 2, 2000)}
    pq.write_table(pa.table(columns), folder / "train.parquet")
    (folder / "job.yaml").write_text(JOB)
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", f"http://{url}"]
    command += ["--working-dir", ".", "--", "shoal", "train", "job.yaml", "-o", f"run.storage_path={tmp_path}/runs"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert "reason=RAY_ADDRESS of the Ray job that runs this command" in output
    assert "run job finished: steps=6" in output and "shoal ckpt ls" in output
    assert (tmp_path / "runs" / "job" / "config.yaml").exists()
