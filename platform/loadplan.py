"""What a worker reads of a checkpoint, and whether the checkpoint fits the model at all. Pure.

1. Every difference in width, dtype, optimizer or size that would change or lose rows is refused, all tables in one
   message; what the caller explicitly allows is accepted and noted.
2. The files chosen for a worker contain every stored row of its row blocks, for any world size and placement, and
   every column, for any cut of a table into column blocks: then and now.
3. Of a chain of incremental checkpoints the oldest comes first, deletions before rows of the same checkpoint, and
   nothing is taken that a newer file of the chain replaces as a whole (K3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from shoal.actors.datafile import FileEntry, PlannedFile, stored_blocks
from shoal.kernels.column_blocks import logical_table, logical_tables, overlap
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
        allow_missing: names of (logical) tables that may be absent on either side ('*': any): absent from the
            checkpoint, they start from their initial values; absent from the model, their rows are left behind.
        reinit: names of tables to start from their initial values whatever the checkpoint holds ('*': all).

    Returns notes on differences that are allowed but worth a line: a grown table, another seed or initial range.
    """
    stored, wanted = logical_tables(manifest.tables), logical_tables(tables)
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
            ours, theirs = logical_table(wanted[name][0]), logical_table(stored[name][0])
            problems += _mismatches(ours, theirs) + _state_mismatch(name, wanted[name], stored[name])
            notes += _changes(ours, theirs)
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
        if spec.logical_name not in reinit and "*" not in reinit:
            chosen += plan_columns(manifest, spec, owned.get(spec.name, ()))
    return chosen


def plan_columns(manifest: Manifest, spec: TableSpec, blocks: Sequence[int]) -> list[PlannedFile]:
    """The files with the columns of ``spec``, whatever the cut they were written with; of some of its row blocks.

    Files of another cut say so (``PlannedFile.stored``); those of one stored column block follow each other.
    """
    stored = logical_tables(manifest.tables).get(spec.logical_name, ())
    place = (spec.name, spec.first_column, spec.embedding_dim)
    if any((s.name, s.first_column, s.embedding_dim) == place for s in stored):
        return plan_table(manifest, spec.name, spec.num_blocks, blocks)
    return [
        dataclasses.replace(entry, target=spec.name, stored=source)
        for source in stored
        if overlap(source, spec)
        for entry in plan_table(manifest, source.name, spec.num_blocks, blocks)
    ]


def plan_table(manifest: Manifest, table: str, num_blocks: int, blocks: Sequence[int]) -> list[PlannedFile]:
    """The files that hold the rows of some row blocks, of ``num_blocks``, of one table; as ``plan_load``."""
    layers: list[list[PlannedFile]] = []
    wanted: set[int] | None = None
    for layer in reversed(manifest.chain):
        stored = next((spec for spec in layer.tables if spec.name == table), None)
        if stored is None:  # the table is newer than this checkpoint
            break
        here = stored_blocks(blocks, num_blocks, stored.num_blocks)
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


def _state_mismatch(name: str, wanted: Sequence[TableSpec], stored: Sequence[TableSpec]) -> list[str]:
    """Row-wise state that each stored column block has of its own fits no other cut, nor one that shares it (S7)."""

    def cut(blocks: Sequence[TableSpec]) -> list[tuple[int, bool]]:
        return [(spec.embedding_dim, spec.shares_statistic) for spec in blocks]

    is_own = len(stored) > 1 and stored[0].optimizer.has_row_state and not stored[0].shares_statistic
    if not is_own or cut(wanted) == cut(stored):
        return []
    widths = [spec.embedding_dim for spec in stored]
    return [
        f"table {name!r}: its optimizer state is of each of its column blocks {widths} alone (optimizer_scope: shard) "
        "and fits the same cut only; reinit starts it afresh"
    ]


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
