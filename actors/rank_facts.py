"""What a rank's numbers depend on, as facts that all ranks compare before the first step of a view (``agreement``)."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

import shoal
from shoal.actors.dense import DenseReplica
from shoal.actors.messages import View
from shoal.actors.sharded import ModelTables
from shoal.actors.worker_spec import WorkerSpec
from shoal.kernels import _core
from shoal.kernels.facts import Facts, facts_of, hash_facts
from shoal.kernels.plan import StepPlan


def version_facts() -> Iterable[tuple[str, str]]:
    """Libraries and hardware that change numbers."""
    yield "version of shoal", shoal.__version__
    yield "version of torch", torch.__version__
    yield "version of numpy", np.__version__
    yield "machine", platform.machine()
    yield "compiler of shoal's native code", _core.COMPILER
    yield "instruction set of shoal's native code", _core.INSTRUCTIONS
    # Machines of several kinds agree where ATEN_CPU_CAPABILITY is set to what all of them have.
    yield "instruction set that torch uses (ATEN_CPU_CAPABILITY)", torch.backends.cpu.get_cpu_capability()


def worker_facts(spec: WorkerSpec, tables: ModelTables, dense: DenseReplica) -> Facts:
    """Of a worker, in every view: versions, the job's settings, tables and features, the dense part."""
    facts = list(version_facts())
    facts += facts_of("train", spec.loop)
    facts.append(("number of threads", str(spec.num_threads)))
    if spec.elastic is not None:
        facts += facts_of("protect_every_steps", spec.elastic.protect_every_steps)
        facts += facts_of("has_local_snapshots", spec.elastic.has_local_snapshots)
    rates = spec.learning_rates(tables.tables)
    last = max(0, spec.loop.total_steps - 1)
    for step in sorted({0, last // 2, last}):
        facts += facts_of(f"learning rates of step {step}", rates.tables(step))
        facts += facts_of(f"dense learning rate of step {step}", rates.dense(step))
    facts += _table_facts(tables)
    facts += _dense_facts(dense)
    return tuple(facts)


def _table_facts(tables: ModelTables) -> Iterable[tuple[str, str]]:
    """Names first: what follows is then of the same table, feature or collection."""
    yield from facts_of("collections", [path for path, _ in tables.collections])
    yield from facts_of("tables", [table.name for table in tables.tables])
    yield from facts_of("features", [feature.name for feature in tables.features])
    for table in tables.tables:
        yield from facts_of(f"table {table.name!r}", table)
    for index, feature in enumerate(tables.features):
        yield from facts_of(f"feature {index}, {feature.name!r}", feature)


def _dense_facts(dense: DenseReplica) -> Iterable[tuple[str, str]]:
    parameters = list(dense.model.named_parameters())
    yield from facts_of("dense parameters", [name for name, _ in parameters])
    for name, parameter in parameters:
        yield f"dense parameter {name!r}", _layout(parameter)
    buffers = list(dense.model.named_buffers())
    yield from facts_of("buffers", [name for name, _ in buffers])
    for name, buffer in buffers:
        yield f"buffer {name!r}", _layout(buffer)
    yield "dense optimizer", dense.optimizer_kind
    for number, group in enumerate([] if dense.optimizer is None else dense.optimizer.param_groups):
        settings = {name: value for name, value in group.items() if _is_plain(value)}
        yield from facts_of(f"dense optimizer, group {number}", settings)
    # A factory that draws from a generator of its own builds another model in each process.
    for name, tensor in (*parameters, *buffers):
        yield f"initial values of {name!r}", _digest(tensor)


def view_facts(view: View, plan: StepPlan) -> Facts:
    """Of a view: who takes part, how rows travel, where they are."""
    facts: list[tuple[str, str]] = []
    facts += facts_of("exchange", view.exchange)
    facts += facts_of("shares", view.shares)
    facts += facts_of("hosts of the exchange", plan.hosts)
    facts += facts_of("data parallel tables", [plan.tables[t].name for t in plan.mirrored])
    for table, codecs, owners in zip(plan.tables, plan.codecs, plan.placement, strict=True):
        facts += facts_of(f"table {table.name!r}: wire", codecs)
        facts += facts_of(f"table {table.name!r}: owners of row blocks", owners)
    return tuple(facts)


def view_hash(worker_hash: int, view: View, plan: StepPlan) -> int:
    """Hash of the facts of worker and view: no text is made of what the plan has hashed already."""
    parts = (("worker", str(worker_hash)), ("plan", str(plan.hash)), ("view", repr((view.exchange, view.shares))))
    return hash_facts(parts)


def _layout(tensor: torch.Tensor) -> str:
    frozen = "" if tensor.requires_grad else ", frozen"
    return f"{tensor.dtype} {list(tensor.shape)}{frozen}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value) and not any(isinstance(item, torch.Tensor) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "none yet"
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()
