"""What a worker does when a bound is reached: row versions (C3), the lease on storage (F7)."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))

import parity
import world as worlds

from shoal.actors.messages import WorkerPhase
from shoal.actors.worker import Worker
from shoal.actors.worker_spec import ElasticSpec
from shoal.kernels.spec import OptimizerKind, OptimizerSpec

SGD = OptimizerSpec(kind=OptimizerKind.SGD, lr=0.1)


def run(tmp_path, elastic: ElasticSpec, **loop) -> Worker:
    source = parity.source_of(parity.job_config(parity.write_data(tmp_path / "data"), max_steps=30))
    spec = parity.worker_spec("limits", source, SGD, tmp_path, **loop)
    worker = Worker("w0", dataclasses.replace(spec, elastic=elastic))
    worker.prepare("here")
    view = worlds.make_view(worker, 1, run="limits", epoch=0, store=("", 0), transport="auto")
    worker.start(dataclasses.replace(view, members=(dataclasses.replace(view.members[0], worker_id="w0"),)))
    worker.join(60)
    return worker


def test_full_row_versions_bring_snapshots_forward(tmp_path):
    """C3: with local snapshots every 1000 steps and no room for versions, snapshots are taken early all the same."""
    elastic = ElasticSpec(protect_every_steps=1000, has_local_snapshots=True, version_bytes_max=1)
    worker = run(tmp_path, elastic)
    assert worker.poll().status.phase is WorkerPhase.FINISHED
    assert worker.poll().status.protected >= 20
    worker.shut_down()


def test_a_checkpoint_that_versions_leave_no_room_for_is_given_up_and_training_goes_on(tmp_path):
    elastic = ElasticSpec(protect_every_steps=1000, has_local_snapshots=True, version_bytes_max=1)
    worker = run(tmp_path, elastic, checkpoint_every_steps=13, checkpoint_at_end=False)
    poll = worker.poll()
    assert poll.status.phase is WorkerPhase.FINISHED
    assert poll.parts and all("version_bytes_max" in (part.error or "") for part in poll.parts)
    worker.shut_down()


def test_a_worker_nobody_polls_writes_nothing(tmp_path):
    worker = run(tmp_path, ElasticSpec(write_lease_s=0.0), checkpoint_every_steps=10, checkpoint_at_end=False)
    poll = worker.poll()
    assert poll.status.phase is WorkerPhase.FINISHED
    assert len(poll.parts) == 3 and all("no controller" in (part.error or "") for part in poll.parts)
    worker.shut_down()
