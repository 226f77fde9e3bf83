"""A worker's view changes and recoveries, driven by hand: real processes, real transfers, no controller.

What the controller decides is planned by its own pure functions; what is tested is that workers do it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import parity
from processes import Paced, ProcessHandle
from world import merge_metrics, run_world

from shoal.actors.groups import host_store
from shoal.actors.messages import (
    Abort,
    CutOver,
    Leave,
    Order,
    Prepare,
    Recover,
    Release,
    Start,
    View,
    WorkerPhase,
    WorkerStatus,
)
from shoal.actors.worker_spec import ElasticSpec, WorkerSpec
from shoal.kernels.spec import OptimizerKind, OptimizerSpec
from shoal.platform.membership import NewMember, ViewSpec, plan_view
from shoal.platform.placement import ShardingType
from shoal.platform.recovery import RecoveryMode, plan_recovery

ADAGRAD = OptimizerSpec(kind=OptimizerKind.ADAGRAD, lr=0.1)
STEPS = 600
#: With one rank on a host the hierarchical exchange sums as the flat one does, so both give the same bits.
DATA_PARALLEL = {"sharding": {"genre": ShardingType.DATA_PARALLEL, "item": ShardingType.DATA_PARALLEL}}


@dataclasses.dataclass(frozen=True)
class Ending:
    """What a run ends with."""

    rows: dict[str, Any]
    dense: dict[str, Any]
    metrics: dict[str, Any]


class Cast:
    """Workers in processes, and the orders to them."""

    def __init__(self, spec: WorkerSpec, *, replicate: bool, **view: Any) -> None:
        self.spec = spec
        self.keep, host, port = host_store()
        self.view_spec = ViewSpec(run=spec.run, store_host=host, store_port=port, replicate=replicate, **view)
        self.workers: dict[str, ProcessHandle] = {}
        self.view: View | None = None
        self.epoch = -1

    def launch(self, *names: str) -> None:
        for name in names:
            self.workers[name] = ProcessHandle(name, self.spec, f"host{int(name[1:]) % 2}")
        until(lambda: all(self.workers[name].look() for name in names), "workers are prepared")
        for name in names:
            assert self.workers[name].error is None, self.workers[name].error

    def members(self, names: Sequence[str]) -> list[NewMember]:
        infos = [self.workers[name].info for name in names]
        return [NewMember(worker_id=i.worker_id, host=i.host, address=i.address) for i in infos if i is not None]

    def plan(self, names: Sequence[str], **fields: Any) -> View:
        self.epoch += 1
        info = next(w.info for w in self.workers.values() if w.info is not None)
        return plan_view(self.view, self.epoch, self.members(names), info.tables, self.view_spec, **fields).view

    def tell(self, order: Order, names: Sequence[str]) -> None:
        for name in names:
            self.workers[name].order(order, 30.0)

    def status(self, name: str) -> WorkerStatus:
        return self.workers[name].poll(30.0).status

    def start(self, *names: str) -> None:
        self.view = self.plan(names)
        self.tell(Start(view=self.view), names)

    def change(self, *names: str, view: View | None = None) -> View:
        """A planned view change, from order to release."""
        assert self.view is not None
        old = [member.worker_id for member in self.view.members]
        view = view or self.plan(names)
        everybody = list(dict.fromkeys([*old, *names]))
        # An order may be lost on a worker that is busy: it is given until a status shows its effect.
        until(lambda: self._have_begun(view, everybody), f"all prepare epoch {view.epoch}")
        until(lambda: all(self._is_ready(name, view.epoch) for name in everybody), f"epoch {view.epoch} is prepared")
        until(lambda: self._has_cut_over(view, names, old[0]), f"epoch {view.epoch} is decided")
        self.tell(Release(epoch=view.epoch), names)
        for name in old:
            if name not in names:
                self.tell(Leave(reason="not needed"), [name])
        self.view = view
        return view

    def migrate_at_random(self, *names: str, seed: int) -> None:
        """Three view changes, 10 steps apart, that put every piece of every table on one of ``names`` at random."""
        rng = np.random.default_rng(seed)
        for _ in range(3):
            self.reach(self.status(names[0]).step + 10, names)
            assert self.view is not None
            self.epoch += 1
            placement = {t: tuple(rng.integers(0, len(names), len(o)).tolist()) for t, o in self.view.placement.items()}
            self.change(*names, view=dataclasses.replace(self.view, epoch=self.epoch, placement=placement))

    def _has_cut_over(self, view: View, names: Sequence[str], first: str) -> bool:
        if all(self.status(name).epoch == view.epoch for name in names):
            return True
        if self.status(first).preparing == view.epoch:
            self.tell(CutOver(epoch=view.epoch), [first])
        return False

    def _have_begun(self, view: View, names: Sequence[str]) -> bool:
        late = [name for name in names if self.status(name).preparing != view.epoch]
        self.tell(Prepare(view=view), late)
        return not late

    def _is_ready(self, name: str, epoch: int) -> bool:
        status = self.status(name)
        assert status.phase is not WorkerPhase.FAILED, status
        prepare = status.prepare
        assert prepare is None or prepare.error is None, prepare
        return status.preparing == epoch and prepare is not None and prepare.is_ready

    def reach(self, step: int, names: Sequence[str]) -> None:
        until(lambda: all(self.status(name).step >= step for name in names), f"step {step}")

    def recover(self, lost: str, replacement: str | None = None) -> Any:
        """The loss of a worker that was killed, from parked workers to a decided view."""
        assert self.view is not None
        names = [m.worker_id for m in self.view.members if m.worker_id != lost]
        until(lambda: all(self.status(n).phase is WorkerPhase.PARKED for n in names), "survivors have parked")
        holdings = {name: self.workers[name].holdings(30.0) for name in names}
        members = [*names, *([replacement] if replacement else [])]
        self.epoch += 1
        info = self.workers[names[0]].info
        assert info is not None
        decision = plan_recovery(
            holdings,
            self.view,
            self.members(members),
            info.tables,
            self.view_spec,
            epoch=self.epoch,
            mode=RecoveryMode.REPLICATED,
            durable_step=None,
            make_restore=lambda worker, blocks: None,
            replaced={replacement: lost} if replacement else None,
        )
        self.tell(Recover(view=decision.view, plan=decision.plan), members)
        until(lambda: all(self.status(n).epoch == self.epoch for n in members), "the recovered view is decided")
        self.tell(Release(epoch=self.epoch), members)
        self.view = decision.view
        return decision

    def finish(self) -> Ending:
        """Rows and metric bins of all workers, and the dense state, at the end."""
        assert self.view is not None
        names = [member.worker_id for member in self.view.members]
        Path(self.spec.train_feed.marker).unlink()  # type: ignore[attr-defined]
        until(lambda: all(self.status(n).phase is WorkerPhase.FINISHED for n in names), "training has ended", 120)
        rows: dict[str, Any] = {}
        dense: dict[str, Any] = {}
        metrics = []
        for name in names:
            dumped = self.workers[name].dump()
            metrics.append(dumped["metrics"])
            for table, mine in dumped["rows"].items():
                assert not rows.setdefault(table, {}).keys() & mine.keys(), "two workers own a row"
                rows[table].update(mine)
            dense = dumped["dense"]
        return Ending(rows, dense, merge_metrics(metrics))

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()


def until(condition: Callable[[], bool], what: str, timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Any:
    folder = parity.write_data(tmp_path_factory.mktemp("views") / "data")
    return parity.source_of(parity.job_config(folder, max_steps=STEPS, epochs=100))


@pytest.fixture
def make_spec(source, tmp_path) -> Callable[..., WorkerSpec]:
    def make(name: str, **elastic: Any) -> WorkerSpec:
        spec = parity.worker_spec(name, source, ADAGRAD, Path(tmp_path), total_steps=STEPS)
        fields = {"protect_every_steps": 5, **elastic}
        marker = tmp_path / "slow"
        marker.touch()
        feed = Paced(spec.train_feed, str(marker))
        return dataclasses.replace(spec, elastic=ElasticSpec(**fields), op_timeout_s=10.0, train_feed=feed)

    return make


def fixed_run(spec: WorkerSpec, world: int) -> Any:
    """The same training in a world that never changes."""
    feed = spec.train_feed.make  # type: ignore[attr-defined]
    return run_world(world, [dataclasses.replace(spec, run="fixed", elastic=None, train_feed=feed)])[0]


def assert_equal(ours: Ending, expected: Any) -> None:
    """Bit for bit: weights, optimizer state, counts, dense state, metrics."""
    assert ours.rows == expected.rows
    assert all(np.array_equal(value, expected.dense[name]) for name, value in ours.dense.items())
    assert all(bool((value == expected.metrics[name]).all()) for name, value in ours.metrics.items())


def close_to(ours: Ending, expected: Any) -> None:
    rows, dense = ours.rows, ours.dense
    assert rows.keys() == expected.rows.keys()
    for table in rows:
        assert rows[table].keys() == expected.rows[table].keys()
        for row_id, (weights, _, count) in rows[table].items():
            theirs = expected.rows[table][row_id]
            assert count == theirs[2], (table, row_id)
            np.testing.assert_allclose(np.frombuffer(weights, "f4"), np.frombuffer(theirs[0], "f4"), 1e-4, 1e-5)
    for name, value in dense.items():
        np.testing.assert_allclose(value, expected.dense[name], 1e-4, 1e-5)


@pytest.mark.parametrize("replicate", [False, True])
def test_workers_join_and_leave_while_the_others_train_on(make_spec, replicate):
    spec = make_spec(f"grow-{replicate}", protect_every_steps=5 if replicate else None)
    expected = fixed_run(spec, 0)
    cast = Cast(spec, replicate=replicate)
    try:
        cast.launch("w0", "w1", "w2", "w3")
        cast.start("w0")
        cast.reach(10, ["w0"])
        cast.change("w0", "w1")
        cast.change("w0", "w1", "w2")
        cast.change("w1", "w2")
        cast.change("w1", "w2", "w3")
        steps = [cast.status(name).step for name in ("w1", "w2", "w3")]
        assert max(steps) < STEPS, "training ended before the last view change"
        close_to(cast.finish(), expected)
    finally:
        cast.close()


@pytest.mark.parametrize("view", [{}, DATA_PARALLEL], ids=["sharded", "data_parallel"])
def test_a_replaced_worker_leaves_no_trace_in_the_numbers(make_spec, view):
    spec = make_spec("replace")
    expected = fixed_run(spec, 2)
    cast = Cast(spec, replicate=True, **view)
    try:
        cast.launch("w0", "w1", "w2", "w3")
        cast.start("w0", "w1")
        cast.reach(33, ["w0", "w1"])
        cast.workers["w1"].kill()
        decision = cast.recover("w1", "w2")
        assert not decision.plan.from_checkpoint and decision.plan.step > 0
        cast.reach(90, ["w0", "w2"])
        cast.workers["w0"].kill()
        cast.recover("w0", "w3")
        assert_equal(cast.finish(), expected)
    finally:
        cast.close()


@pytest.mark.parametrize(
    ("replicate", "view"),
    [(False, {}), (True, {}), (True, {**DATA_PARALLEL, "exchange": "hierarchical"})],
    ids=["no copies", "copies", "data parallel, hierarchical"],
)
def test_moving_row_blocks_leaves_no_trace_in_the_numbers(make_spec, replicate, view):
    """S5, promise 2: k random migrations at a fixed world size, with and without buddies."""
    spec = make_spec(f"move-{replicate}", protect_every_steps=5 if replicate else None)
    expected = fixed_run(spec, 2)
    cast = Cast(spec, replicate=replicate, **view)
    try:
        cast.launch("w0", "w1")
        cast.start("w0", "w1")
        cast.migrate_at_random("w0", "w1", seed=5)
        assert cast.status("w0").step < STEPS
        assert_equal(cast.finish(), expected)
    finally:
        cast.close()


def test_a_view_that_is_aborted_leaves_no_trace(make_spec):
    spec = make_spec("abort")
    expected = fixed_run(spec, 2)
    cast = Cast(spec, replicate=True)
    try:
        cast.launch("w0", "w1", "w2")
        cast.start("w0", "w1")
        cast.reach(10, ["w0", "w1"])
        view = cast.plan(["w0", "w1", "w2"])
        cast.tell(Prepare(view=view), ["w0", "w1", "w2"])
        cast.reach(30, ["w0", "w1"])
        cast.tell(Abort(epoch=view.epoch, reason="test"), ["w0", "w1", "w2"])
        assert_equal(cast.finish(), expected)
    finally:
        cast.close()
