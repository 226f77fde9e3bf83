"""What a worker reads of a checkpoint, and whether the checkpoint fits the model at all. Pure.

1. Every difference in width, dtype, optimizer or size that would change or lose rows is refused, all tables in one
   message; what the caller explicitly allows is accepted and noted.
2. The files chosen for a worker contain every stored row of its row blocks, for any world size and placement.
3. Of a chain of incremental checkpoints the oldest comes first, deletions before rows of the same checkpoint, and
   nothing is taken that a newer file of the chain replaces as a whole (K3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from shoal.actors.datafile import FileEntry, PlannedFile
from shoal.kernels.errors import CheckpointError
from shoal.kernels.spec import TableSpec
from shoal.platform.manifest import Manifest


def check_tables(
    manifest: Manifest,
    tables: Sequence[TableSpec],
    *,
    allow_missing: Collection[str] = (),
    reinit: Collection[str] = (),
) -> list[str]:
    """Compare the tables of a model with those of a checkpoint; raises one CheckpointError listing all that differ.

    Args:
        allow_missing: names of tables that may be absent on either side ('*': any): absent from the checkpoint, they
            start from their initial values; absent from the model, their rows are left behind.
        reinit: names of tables to start from their initial values whatever the checkpoint holds ('*': all).

    Returns notes on differences that are allowed but worth a line: a grown table, another seed or initial range.
    """
    stored = {spec.name: spec for spec in manifest.tables}
    wanted = {spec.name: spec for spec in tables}
    problems, notes = [], []
    for name in [*wanted, *(name for name in stored if name not in wanted)]:
        if name in reinit or "*" in reinit:
            notes.append(f"table {name!r} starts from its initial values, as asked")
        elif name not in stored or name not in wanted:
            side = "checkpoint" if name not in stored else "model"
            if name in allow_missing or "*" in allow_missing:
                notes.append(f"table {name!r} is not in the {side}: allowed")
            else:
                problems.append(f"table {name!r}: not in the {side}; allow_missing accepts that")
        else:
            problems += _mismatches(wanted[name], stored[name])
            notes += _changes(wanted[name], stored[name])
    if problems:
        raise CheckpointError(f"{manifest.name} does not fit the model:\n  " + "\n  ".join(problems))
    return notes


def plan_load(
    manifest: Manifest,
    tables: Sequence[TableSpec],
    owned: Mapping[str, Sequence[int]],
    *,
    allow_missing: Collection[str] = (),
    reinit: Collection[str] = (),
) -> list[PlannedFile]:
    """The table files a worker that owns ``owned`` (table -> row blocks) has to read, in the order to read them in.

    Runs ``check_tables`` first. A table may have another number of row blocks than when it was written. Raises
    CheckpointError for an incremental checkpoint whose parents are not known (``checkpoint.list_checkpoints`` finds
    them).
    """
    check_tables(manifest, tables, allow_missing=allow_missing, reinit=reinit)
    chosen: list[PlannedFile] = []
    for spec in tables:
        if spec.name not in reinit and "*" not in reinit:
            chosen += plan_table(manifest, spec.name, spec.num_blocks, owned.get(spec.name, ()))
    return chosen


def plan_table(manifest: Manifest, table: str, num_blocks: int, blocks: Sequence[int]) -> list[PlannedFile]:
    """The files that hold the rows of some row blocks, of ``num_blocks``, of one table; as ``plan_load``."""
    layers: list[list[PlannedFile]] = []
    wanted: set[int] | None = None
    for layer in reversed(manifest.chain):
        stored = next((spec for spec in layer.tables if spec.name == table), None)
        if stored is None:  # the table is newer than this checkpoint
            break
        here = _stored_blocks(blocks, num_blocks, stored.num_blocks)
        # Block counts never change within a chain: a checkpoint after such a change is a full one.
        wanted = here if wanted is None else wanted & here
        files = [f for f in layer.files if f.table == table and not wanted.isdisjoint(f.blocks)]
        files.sort(key=lambda entry: entry.kind != "deleted")
        layers.append([_planned(entry, layer.name.directory, wanted, stored.num_blocks) for entry in files])
        if layer.parent is None:
            break
        wanted = wanted - {b for f in files if f.kind == "table" and f.since is None for b in f.blocks}
        if not wanted:
            break
    return [entry for layer_files in reversed(layers) for entry in layer_files]


def _planned(entry: FileEntry, folder: str, wanted: set[int], num_blocks: int) -> PlannedFile:
    values = {field.name: getattr(entry, field.name) for field in dataclasses.fields(FileEntry)}
    taken = tuple(block for block in entry.blocks if block in wanted)
    return PlannedFile(**values, folder=folder, taken=taken, num_blocks=num_blocks)


def _mismatches(wanted: TableSpec, stored: TableSpec) -> list[str]:
    pairs = [
        ("embedding_dim", wanted.embedding_dim, stored.embedding_dim),
        ("data_type", wanted.data_type.value, stored.data_type.value),
        ("optimizer", wanted.optimizer.kind.name.lower(), stored.optimizer.kind.name.lower()),
    ]
    lines = [
        f"table {wanted.name!r}: {field}: expected {expected}, found {found}; reinit starts it afresh"
        for field, expected, found in pairs
        if expected != found
    ]
    if wanted.is_static and (not stored.is_static or wanted.num_embeddings < stored.num_embeddings):
        found_size = str(stored.num_embeddings) if stored.is_static else "a dynamic table"
        lines.append(
            f"table {wanted.name!r}: num_embeddings: expected {wanted.num_embeddings}, found {found_size}; "
            "a table can grow or become dynamic, not shrink"
        )
    return lines


def _changes(wanted: TableSpec, stored: TableSpec) -> list[str]:
    notes = []
    if wanted.num_embeddings != stored.num_embeddings:
        notes.append(f"table {wanted.name!r}: num_embeddings {stored.num_embeddings} -> {wanted.num_embeddings}")
    fields = ("seed", "init_min", "init_max")
    pairs = ((f, getattr(stored, f), getattr(wanted, f)) for f in fields)
    changed = [f"{field} {old} -> {new}" for field, old, new in pairs if old != new]
    if changed:
        notes.append(f"table {wanted.name!r}: {', '.join(changed)}: rows not yet trained start from other values")
    return notes


def _stored_blocks(owned: Sequence[int], num_blocks: int, stored_num_blocks: int) -> set[int]:
    """The row blocks, as numbered when the file was written, that overlap ``owned``."""
    if stored_num_blocks <= num_blocks:
        return {block // (num_blocks // stored_num_blocks) for block in owned}
    factor = stored_num_blocks // num_blocks
    return {block * factor + i for block in owned for i in range(factor)}
