"""Runs W workers in processes of their own, without Ray, and returns every row and dense tensor they end with."""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.actors.groups import host_store
from shoal.actors.messages import Member, View, WorkerPhase
from shoal.actors.worker import Worker
from shoal.actors.worker_spec import WorkerSpec
from shoal.kernels.metrics import BinaryMetrics
from shoal.kernels.spec import WireCodecs
from shoal.platform.placement import plan_placement


@dataclasses.dataclass
class Outcome:
    """What one case ended with."""

    #: Table -> {id: (weights, optimizer slots, count)} as lists of Python numbers' bytes.
    rows: dict[str, dict[int, tuple[bytes, bytes, int]]]
    dense: dict[str, Any]
    summary: Mapping[str, Any] | None
    records: list[Any]
    collectives: int
    #: Metric bins of all ranks together.
    metrics: Any
    errors: list[str | None]


def make_view(
    worker: Worker,
    world: int,
    *,
    run: str,
    epoch: int,
    store: tuple[str, int],
    transport: str,
    hosts: str = "",
    exchange: str = "flat",
    mirrored: tuple[str, ...] = (),
    codecs: Mapping[str, WireCodecs] | None = None,
) -> View:
    """View of ``world`` workers, placed by the production planner; ``hosts`` has a letter for each one's host."""
    tables = worker.model_tables.tables
    loads = plan_placement(tables, world)
    on = hosts or "h" * world
    members = tuple(Member(rank=r, worker_id=str(r), host=on[r], share=1.0 / world) for r in range(world))
    return View(
        run=run,
        epoch=epoch,
        members=members,
        placement={load.table: load.owners for load in loads},
        transport=transport,
        store_host=store[0],
        store_port=store[1],
        exchange=exchange,
        mirrored=mirrored,
        codecs=codecs or {},
    )


Store = tuple[str, int]


def run_one(spec: WorkerSpec, rank: int, world: int, epoch: int, store: Store, **view: Any) -> dict[str, Any]:
    """One rank of one case, to its end; ``view`` as ``make_view`` takes it."""
    worker = Worker(str(rank), spec)
    worker.prepare("here")
    worker.start(make_view(worker, world, run=spec.run, epoch=epoch, store=store, **view))
    worker.join(120)
    poll = worker.poll()
    result: dict[str, Any] = {"error": poll.status.error, "summary": poll.summary, "records": list(poll.records)}
    if poll.status.phase is not WorkerPhase.FINISHED:
        result["error"] = result["error"] or f"rank {rank} stands at {poll.status}"
        return result
    result |= dump(worker)
    assert worker.trainer is not None
    result["collectives"] = worker.trainer.session.exchange.num_collectives()
    return result


def dump(worker: Worker) -> dict[str, Any]:
    """Every row that the worker owns, its dense state and its metric bins."""
    assert worker.shards is not None and worker.trainer is not None
    rows: dict[str, dict[int, tuple[bytes, bytes, int]]] = {}
    for index, table in enumerate(worker.model_tables.tables):
        mine = rows[table.name] = {}
        for block in worker.shards.owned[table.name]:
            part = worker.shards.store.export_block(index, block)
            for i, row_id in enumerate(part.ids.tolist()):
                mine[row_id] = (
                    part.weights[i].float().numpy().tobytes(),
                    part.slots[i].numpy().tobytes(),
                    int(part.count[i]),
                )
    dense = {name: t.numpy().copy() for name, t in worker.trainer.dense.state_tensors().items()}
    # numpy: tensors would travel as open files of a process that may have ended.
    metrics = {name: tensor.numpy().copy() for name, tensor in worker.trainer.metrics.state_dict().items()}
    return {"rows": rows, "dense": dense, "metrics": metrics}


def _rank_main(
    rank: int, world: int, cases: Sequence[WorkerSpec], store: Store, view: dict[str, Any], out: Any
) -> None:
    for epoch, spec in enumerate(cases):
        try:
            out.put((rank, epoch, run_one(spec, rank, world, epoch, store, **view)))
        except BaseException:
            out.put((rank, epoch, {"error": traceback.format_exc(), "summary": None, "records": []}))


def run_world(
    world: int,
    cases: Sequence[WorkerSpec],
    *,
    transport: str = "auto",
    hosts: str = "",
    exchange: str = "flat",
    mirrored: tuple[str, ...] = (),
    codecs: Mapping[str, WireCodecs] | None = None,
    timeout_s: float = 300,
) -> list[Outcome]:
    """Every case on ``world`` ranks; 0 runs one rank in this process. Cases share the processes, one epoch each."""
    view = {"transport": transport, "hosts": hosts, "exchange": exchange, "mirrored": mirrored, "codecs": codecs}
    if world <= 1:
        answers = {(0, e): run_one(spec, 0, 1, e, ("", 0), **view) for e, spec in enumerate(cases)}
        return [_merge([answers[(0, e)]]) for e in range(len(cases))]
    keep, host, port = host_store()
    context = mp.get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_rank_main, args=(rank, world, cases, (host, port), view, queue), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    answers = {}
    try:
        for _ in range(world * len(cases)):
            rank, epoch, result = queue.get(timeout=timeout_s)
            answers[(rank, epoch)] = result
    finally:
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
        queue.close()
        del keep
    return [_merge([answers[(rank, e)] for rank in range(world)]) for e in range(len(cases))]


def merge_metrics(states: Sequence[Any]) -> dict[str, Any]:
    """The state of the metrics of all ranks together."""
    merged = BinaryMetrics()
    for state in states:
        other = BinaryMetrics()
        other.load_state_dict({name: torch.from_numpy(values) for name, values in state.items()})
        merged.merge_(other)
    return merged.state_dict()


def _merge(results: Sequence[dict[str, Any]]) -> Outcome:
    rows: dict[str, dict[int, tuple[bytes, bytes, int]]] = {}
    for result in results:
        for table, mine in result.get("rows", {}).items():
            target = rows.setdefault(table, {})
            assert not target.keys() & mine.keys(), "two ranks own a row"
            target.update(mine)
    first = results[0]
    return Outcome(
        rows=rows,
        dense=first.get("dense", {}),
        summary=first["summary"],
        records=first["records"],
        metrics=merge_metrics([result["metrics"] for result in results if "metrics" in result]),
        collectives=first.get("collectives", 0),
        errors=[result["error"] for result in results],
    )
