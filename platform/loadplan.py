"""What a worker reads of a checkpoint, and whether the checkpoint fits the model at all. Pure.

1. Every difference in width, dtype, optimizer or size that would change or lose rows is refused, all tables in one
   message; what the caller explicitly allows is accepted and noted.
2. The files chosen for a worker contain every stored row of its row blocks, for any world size and placement.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shoal.actors.datafile import FileEntry
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
) -> list[FileEntry]:
    """The table files a worker that owns ``owned`` (table -> row blocks) has to read, in table and block order.

    Runs ``check_tables`` first. A table may have another number of row blocks than when it was written.
    """
    check_tables(manifest, tables, allow_missing=allow_missing, reinit=reinit)
    stored = {spec.name: spec for spec in manifest.tables}
    files: dict[str, list[FileEntry]] = {}
    for entry in manifest.files:
        if entry.kind == "table" and entry.table is not None:
            files.setdefault(entry.table, []).append(entry)
    chosen: list[FileEntry] = []
    for spec in tables:
        if spec.name not in stored or spec.name in reinit or "*" in reinit:
            continue
        blocks = _stored_blocks(owned.get(spec.name, ()), spec.num_blocks, stored[spec.name].num_blocks)
        chosen += (entry for entry in files.get(spec.name, ()) if not blocks.isdisjoint(entry.blocks))
    return chosen


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
