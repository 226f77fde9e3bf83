"""Metrics of a checkpoint on any data set, in this process: no Ray, nothing written, no row created.

One worker of a world of one loads the whole checkpoint, so its tables must fit this machine's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from shoal.actors.feed import BatchSource
from shoal.actors.messages import Member, View
from shoal.actors.shard_host import Restore
from shoal.actors.worker import Worker
from shoal.actors.worker_spec import Seat, WorkerSpec
from shoal.kernels.errors import CheckpointError, ConfigError
from shoal.platform.checkpoint import decide_resume, list_checkpoints
from shoal.platform.config import JobConfig
from shoal.platform.job import FactoryModel, make_plan, open_source
from shoal.platform.loadplan import plan_load
from shoal.platform.manifest import Manifest
from shoal.platform.storage import Storage


def evaluate_run(config: JobConfig, *, paths: Sequence[str], step: int | None = None) -> dict[str, Any]:
    """Metrics of ``BinaryMetrics.compute`` on all rows behind ``paths``, with ``step`` and ``checkpoint`` added.

    Rows that were never trained read as their initial values; ids outside a table follow the job's policies.

    Args:
        config: the run's job; its model, tables, columns and batch size are used.
        paths: Parquet files, folders or globs.
        step: of the checkpoint; None takes the newest complete one.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit the model.
        ConfigError: ``paths`` is empty, or the model returns no predictions.
        SchemaError, DataError, BadIdError: the data do not fit the job.
    """
    if not paths:
        raise ConfigError("there is nothing to evaluate on: name files, folders or globs")
    source = open_source(config, paths, is_training=False)
    storage = Storage(config.run.run_dir)
    resume = "must" if step is None else step
    decision = decide_resume(list_checkpoints(storage), resume, where=f"run {config.run.name!r}")
    assert decision.manifest is not None, "resume=must and resume=STEP name a checkpoint or raise"
    manifest = decision.manifest
    build_model = FactoryModel(config.model.factory, dict(config.model.args))
    plan = make_plan(config, build_model, source, source, _no_training)
    # A loop whose last step is behind it already: it evaluates once and ends.
    loop = dataclasses.replace(
        plan.worker.loop,
        total_steps=manifest.name.step,
        checkpoint_at_end=False,
        checkpoint_every_steps=None,
        eval_every_steps=None,
    )
    # Its world never changes: nothing is to be copied to anybody.
    values = _run_worker(dataclasses.replace(plan.worker, loop=loop, elastic=None), manifest)
    return {"step": manifest.name.step, "checkpoint": manifest.name.directory, **values}


def _run_worker(spec: WorkerSpec, manifest: Manifest) -> dict[str, float]:
    """Restore the whole checkpoint into one worker, let its loop run, and return what it evaluated."""
    worker = Worker("evaluate", spec)
    info = worker.prepare("local")
    owned = {table.name: list(range(table.num_blocks)) for table in info.tables}
    view = View(
        run=spec.run,
        epoch=manifest.name.epoch,
        members=(Member(rank=0, worker_id=worker.worker_id, host=info.host, share=1.0),),
        placement={name: (0,) * len(blocks) for name, blocks in owned.items()},
        transport="auto",
        store_host="",
        store_port=0,
    )
    dense = manifest.find("dense")
    if dense is None:
        raise CheckpointError(f"{manifest.name}: its manifest names no dense state")
    restore = Restore(
        step=manifest.name.step,
        directory=manifest.name.directory,
        parts=tuple(plan_load(manifest, info.tables, owned)),
        dense=dense,
    )
    worker.start(view, restore)
    worker.join()
    end = worker.poll()
    if end.failure is not None:
        raise end.failure
    assert end.summary is not None, f"the worker ended in phase {end.status.phase} without a summary"
    return dict(end.summary["eval"])


class _NoBatches:
    """A feed that is never asked: the loop has no step left."""

    def is_ready(self, step: int, timeout_s: float) -> bool:
        return True

    def next_batch(self, step: int) -> Any:
        raise AssertionError(f"evaluation asked for training batch {step}")

    def reassign(self, assignment: Any, step: int) -> None:
        pass

    def keep_from(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def _no_training(seat: Seat) -> BatchSource:
    return _NoBatches()
