"""A run that stops and resumes equals one that never stopped, bit for bit, through the real trainer in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))
sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

import models
import parity
import safetensors.numpy

import shoal
from shoal.kernels.errors import CheckpointError, ConfigError
from shoal.platform.checkpoint import list_checkpoints
from shoal.platform.export import export_parquet

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return parity.write_data(tmp_path_factory.mktemp("data") / "train")


def train(data: Path, folder: Path, max_steps: int, optimizer: str = "adam", epochs=5, on_record=None, **run):
    """Train models.Clicks for ``max_steps`` of 5 epochs of 11 batches, in this process."""
    return shoal.ElasticTrainer(
        model=models.build,
        data={
            "train": [str(data)],
            "weight": "weight",
            "dense": ["d0", "d1", "d2"],
            "sparse": ["user", "item"],
            "batch_size": 64,
            "window_rows": 200,
        },
        train={
            "epochs": epochs,
            "max_steps": max_steps,
            "lr": 0.05,
            "log_every_steps": 5,
            "sparse_optimizer": {"kind": optimizer},
        },
        scaling={"num_workers": 0},
        run={"name": "run", "storage_path": str(folder), **run},
    ).fit(on_record=on_record)


def contents(checkpoint: str, folder: Path) -> dict[str, object]:
    """Everything a checkpoint holds, comparable: rows sorted by id, dense tensors, metric state."""
    import pyarrow.parquet as pq

    export_parquet(checkpoint, str(folder))
    found: dict[str, object] = {}
    for path in sorted(Path(folder).rglob("*.parquet")):
        table = pq.read_table(path)
        found[path.parent.name + "/" + path.name] = table.sort_by("id").to_pydict()
    root = Path(checkpoint.removeprefix("file://"))
    for name, value in safetensors.numpy.load_file(root / "dense.safetensors").items():
        found[name] = value.tobytes()
    return found


def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(data, tmp_path):
    # Steps 7 and 18 lie inside epochs 0 and 1, so the cursor is in the middle of a window both times.
    whole = train(data, tmp_path / "whole", 25)
    for max_steps in (7, 18, 25):
        parts = train(data, tmp_path / "parts", max_steps)
        assert parts.steps == max_steps
    one, two = contents(whole.checkpoint, tmp_path / "a"), contents(parts.checkpoint, tmp_path / "b")
    assert one.keys() == two.keys() and len(one) > 4
    for name in one:
        assert one[name] == two[name], name
    assert whole.metrics["lifetime/auc"] == parts.metrics["lifetime/auc"]


def test_finished_run_started_again_does_nothing_more(data, tmp_path):
    first = train(data, tmp_path, 6)
    again = train(data, tmp_path, 6)
    assert again.steps == 6 and again.checkpoint == first.checkpoint


def test_resume_policies(data, tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        train(data, tmp_path, 4, resume="must")
    train(data, tmp_path, 4)
    train(data, tmp_path, 8)
    third = train(data, tmp_path, 8, resume=4)
    assert third.steps == 8 and third.checkpoint is not None and third.checkpoint.endswith(".e2")
    with pytest.raises(CheckpointError, match="no checkpoint of step 5"):
        train(data, tmp_path, 8, resume=5)


def test_damaged_checkpoint_is_passed_over_and_named(data, tmp_path):
    train(data, tmp_path, 4)
    train(data, tmp_path, 8)
    newest = list_checkpoints(str(tmp_path / "run"))[-1]
    part = next(Path(newest.uri.removeprefix("file://")).rglob("*.arrow"))
    blob = bytearray(part.read_bytes())
    blob[len(blob) // 2] ^= 1
    part.write_bytes(bytes(blob))
    result = train(data, tmp_path, 12)
    assert result.steps == 12
    events = "".join(path.read_text() for path in sorted((tmp_path / "run" / "events").glob("*.jsonl")))
    assert "checkpoint_damaged" in events and part.name in events


def test_other_data_or_batch_size_is_refused_by_name(data, tmp_path):
    # D2: the order of a run is fixed for its life.
    train(data, tmp_path, 4)
    other = parity.write_data(tmp_path / "other", num_rows=500)
    with pytest.raises(ConfigError, match=r"part-0\.parquet"):
        train(other, tmp_path, 8)


def test_refused_start_leaves_the_config_of_the_run_as_it_was(data, tmp_path):
    train(data, tmp_path, 4)
    path = tmp_path / "run" / "config.yaml"
    first = path.read_text()
    other = parity.write_data(tmp_path / "other", num_rows=500)
    with pytest.raises(ConfigError):
        train(other, tmp_path, 8)
    with pytest.raises(CheckpointError):
        train(data, tmp_path, 8, resume=5)
    assert path.read_text() == first
    train(data, tmp_path, 8, resume=4)
    assert "max_steps: 8" in path.read_text() and "resume: auto" in path.read_text()


def test_other_optimizer_is_refused_table_by_table(data, tmp_path):
    # Storage fault 31.
    train(data, tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"(?s)'user': optimizer: expected sgd, found adam.*'item'"):
        train(data, tmp_path, 8, optimizer="sgd")


def test_counts_and_rows_are_those_of_the_data(data, tmp_path):
    import pyarrow.parquet as pq

    result = train(data, tmp_path, 11)
    export_parquet(result.checkpoint, str(tmp_path / "out"))
    users = np.concatenate([pq.read_table(p)["user"].to_numpy() for p in sorted(data.glob("*.parquet"))])
    exported = [pq.read_table(p) for p in (tmp_path / "out").rglob("*.parquet") if "user" in str(p)]
    ids = np.concatenate([t["id"].to_numpy() for t in exported])
    assert sorted(ids.tolist()) == sorted(set(users.tolist()))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_interrupted_driver_leaves_no_training_thread_and_torch_as_it_was(data, tmp_path, error):
    import threading

    import torch

    def interrupt(item) -> None:
        if getattr(item, "step", 0) >= 5:
            raise error

    before = set(threading.enumerate())
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with pytest.raises(error):
        train(data, tmp_path, 50_000, on_record=interrupt, epochs=10_000)
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("step-loop") or thread.name == "controller"]
    for thread in left:  # readers of the feed finish the piece they are at
        thread.join(10.0)
        assert not thread.is_alive(), thread
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


def test_run_with_incremental_checkpoints_resumes_from_a_chain_bit_for_bit(data, tmp_path):
    """K3 through the real controller, worker and trainer; the run goes on from whatever link is the newest."""
    whole = train(data, tmp_path / "whole", 30)
    checkpoint = {"full_every": 3, "every_steps": 2, "num_to_keep": 2}
    parents = []
    for max_steps in (14, 23, 30):
        parts = train(data, tmp_path / "parts", max_steps, checkpoint=checkpoint)
        infos = list_checkpoints(str(tmp_path / "parts" / "run"))
        assert all(info.state.value == "complete" for info in infos)
        parents += [info.parent for info in infos]
    assert any(parents), "no checkpoint was incremental"
    one, two = contents(whole.checkpoint, tmp_path / "a"), contents(parts.checkpoint, tmp_path / "b")
    for name in (name for name in one if not name.endswith(".parquet")):
        assert one[name] == two[name], name
    for folder in {Path(name).parent.name for name in one if name.endswith(".parquet")}:
        assert rows(tmp_path / "a" / folder) == rows(tmp_path / "b" / folder), folder


def rows(folder: Path) -> dict[str, list]:
    """All rows of an exported table, by id; a chain has other files than a full checkpoint."""
    import pyarrow.dataset as ds

    return ds.dataset(folder, format="parquet").to_table().sort_by("id").to_pydict()
