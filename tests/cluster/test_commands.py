"""Commands on a run that is disturbed: Ctrl-C once and twice, and ``shoal chaos``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))
sys.path.insert(0, str(Path(__file__).parent))

import parity
from live_run import left_behind

from shoal.platform.checkpoint import CheckpointState, list_checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_data(tmp_path_factory.mktemp("data") / "train")


def write_job(data: Path, folder: Path, **sections: dict[str, Any]) -> Path:
    """A job file: JSON is YAML, too."""
    job: dict[str, Any] = {
        "model": "models:build",
        "data": {
            "train": [str(data)],
            "weight": "weight",
            "dense": ["d0", "d1", "d2"],
            "sparse": ["user", "item"],
            "batch_size": 64,
            "window_rows": 200,
        },
        "train": {"epochs": 100, "lr": 0.05, "log_every_steps": 1},
        "scaling": {"num_workers": 2},
        "run": {"storage_path": str(folder)},
    }
    for section, fields in sections.items():
        job[section] = fields if isinstance(fields, str) else {**job[section], **fields}
    path = folder / "job.yaml"
    path.write_text(json.dumps(job), encoding="utf-8")
    return path


class Train:
    """``shoal train`` in a terminal of its own: Ctrl-C reaches all processes that it has started."""

    def __init__(self, job: Path, *words: str) -> None:
        import ray

        command = [sys.executable, "-m", "shoal.jobs.cli", "train", str(job)]
        command += ["--address", ray.get_runtime_context().gcs_address, *words]
        self.process = subprocess.Popen(
            command,
            cwd=Path(__file__).parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def wait_for(self, text: str) -> str:
        """The next line with ``text``."""
        for line in self._read():
            if text in line:
                return line
        raise AssertionError(f"no {text!r}:\n{''.join(self.lines)}")

    def _read(self) -> Iterator[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            yield line

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> int:
        list(self._read())
        return self.process.wait(60)


def newest_checkpoint(run_dir: Path) -> int:
    found = [info for info in list_checkpoints(str(run_dir)) if info.state is CheckpointState.COMPLETE]
    return found[-1].name.step if found else -1


def test_ctrl_c_once_ends_a_run_in_good_order_and_twice_at_once(local_ray, data, tmp_path):
    """Both times the run can be resumed: from the step in which it was interrupted, or from its newest checkpoint."""
    job = write_job(data, tmp_path, model="models:build_standing", run={"name": "held", "storage_path": str(tmp_path)})
    train = Train(job)
    train.wait_for("step=2/")
    train.interrupt()
    assert train.end() == 130, train.lines
    step = newest_checkpoint(tmp_path / "held")
    assert step >= 3 and left_behind("held") == [], train.lines

    train = Train(job, "--resume", "must")
    train.wait_for(f"step={step + 1}/")
    train.interrupt()
    train.wait_for("event=stopping")
    train.interrupt()
    began = time.monotonic()
    assert train.end() == 130, train.lines
    assert time.monotonic() - began < 20 and "interrupted" in train.lines[-1]
    saved = newest_checkpoint(tmp_path / "held")
    assert saved >= step and left_behind("held") == []

    train = Train(job, "--resume", "must", "-o", f"train.max_steps={saved + 1}")
    assert train.end() == 0, train.lines
    assert newest_checkpoint(tmp_path / "held") == saved + 1


def test_chaos_command_reports_every_promise_as_kept(local_ray, data, tmp_path, capsys, monkeypatch):
    from shoal.jobs.cli import main

    monkeypatch.chdir(Path(__file__).parent)
    job = write_job(
        data,
        tmp_path,
        train={"epochs": 100, "lr": 0.05, "max_steps": 90},
        run={
            "name": "stirred",
            "failure": {"protect_every_steps": 3, "lease_s": 2.0},
            "timeouts": {"op_timeout_s": 2.0},
        },
    )
    code = main(["chaos", str(job), "--seed", "13", "--out", str(tmp_path / "out"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["is_good"], report
    promises = " ".join(verdict["promise"] for verdict in report["verdicts"])
    assert "every fault of the schedule happened" in promises and "bit for bit" in promises
    assert left_behind("stirred-chaos-13") == []
