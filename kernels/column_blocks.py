"""Cutting a table into column blocks: each is a table of the data plane, placed, moved, copied and saved on its own.

Pure: values only. Invariants:

1. A table that is not cut stays the very TableSpec that it was, name included.
2. ``logical_table`` of any block of ``cut_columns(spec, ...)`` is ``spec``.
3. The blocks of a table follow each other in column order wherever tables are listed, and differ in name, width and
   columns only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shoal.kernels.errors import ConfigError
from shoal.kernels.spec import ColumnBlock, TableSpec

#: A column block is no narrower than this unless asked for (TorchRec's MIN_CW_DIM).
WIDTH_MIN = 128
#: Widths are multiples of this where they can be: vectors of four floats.
_WIDTH_UNIT = 4


def column_widths(embedding_dim: int, num_blocks: int | None = None, *, table: str = "") -> tuple[int, ...]:
    """Widths of the column blocks of a table, which sum to ``embedding_dim``.

    Without ``num_blocks`` all are the smallest divisor of the width that is at least 128 and a multiple of 4 (as
    TorchRec's default), or the whole width if there is none. With it, they differ as little as multiples of 4 allow,
    or single columns where the width is no multiple of 4 or too small; wider ones first.

    Raises ConfigError naming ``table`` when there are not as many columns as blocks.
    """
    if num_blocks is None:
        divisors = (w for w in range(WIDTH_MIN, embedding_dim, _WIDTH_UNIT) if embedding_dim % w == 0)
        width = next(divisors, embedding_dim)
        return (width,) * (embedding_dim // width)
    if not 1 <= num_blocks <= embedding_dim:
        raise ConfigError(
            f"table {table!r}: {num_blocks} column blocks of {embedding_dim} columns; there must be between 1 and "
            f"{embedding_dim}"
        )
    unit = _WIDTH_UNIT if embedding_dim % _WIDTH_UNIT == 0 and embedding_dim // _WIDTH_UNIT >= num_blocks else 1
    units, wider = divmod(embedding_dim // unit, num_blocks)
    return tuple(unit * (units + (block < wider)) for block in range(num_blocks))


def block_name(table: str, index: int) -> str:
    """Name of a column block as a table of the data plane and in checkpoints."""
    return f"{table}.c{index}"


def cut_columns(spec: TableSpec, widths: Sequence[int], *, has_own_statistic: bool = False) -> tuple[TableSpec, ...]:
    """The column blocks of a logical table, in column order; one width: the table itself, uncut.

    Args:
        widths: of the blocks, in columns; they sum to the table's width.
        has_own_statistic: see ``ColumnBlock``.

    Raises ConfigError naming the table when the widths do not fit it or it is a column block already.
    """
    if spec.columns is not None:
        raise ConfigError(f"table {spec.name!r} is a column block already")
    if not widths or min(widths) < 1 or sum(widths) != spec.embedding_dim:
        raise ConfigError(
            f"table {spec.name!r}: column widths {list(widths)} must be positive and sum to its embedding_dim, "
            f"{spec.embedding_dim}"
        )
    if len(widths) == 1:
        return (spec,)
    blocks: list[TableSpec] = []
    first = 0
    for index, width in enumerate(widths):
        columns = ColumnBlock(
            table=spec.name,
            table_dim=spec.embedding_dim,
            index=index,
            first_column=first,
            has_own_statistic=has_own_statistic,
        )
        name = block_name(spec.name, index)
        blocks.append(dataclasses.replace(spec, name=name, embedding_dim=width, columns=columns))
        first += width
    return tuple(blocks)


def logical_table(spec: TableSpec) -> TableSpec:
    """The table that ``spec`` is a column block of, or ``spec`` where it is whole."""
    if spec.columns is None:
        return spec
    return dataclasses.replace(spec, name=spec.logical_name, embedding_dim=spec.logical_dim, columns=None)


def logical_tables(tables: Sequence[TableSpec]) -> dict[str, tuple[TableSpec, ...]]:
    """Logical name -> its column blocks in column order (one where it is not cut), in the order of ``tables``."""
    found: dict[str, tuple[TableSpec, ...]] = {}
    for spec in tables:
        found[spec.logical_name] = (*found.get(spec.logical_name, ()), spec)
    return found


def covers(outer: TableSpec, inner: TableSpec) -> bool:
    """Whether all columns of ``inner`` are in ``outer``, a block of the same logical table."""
    end, inner_end = outer.first_column + outer.embedding_dim, inner.first_column + inner.embedding_dim
    return outer.first_column <= inner.first_column and inner_end <= end


def overlap(a: TableSpec, b: TableSpec) -> bool:
    """Whether two blocks of one logical table have a column in common."""
    return a.first_column < b.first_column + b.embedding_dim and b.first_column < a.first_column + a.embedding_dim


def check_tables(tables: Sequence[TableSpec]) -> None:
    """Raise ConfigError where names are not unique or the column blocks of a table are not all there, in order."""
    names: dict[str, TableSpec] = {}
    for spec in tables:
        spec.validate()
        other = names.setdefault(spec.name, spec)
        if other is not spec:
            raise ConfigError(
                f"two tables are named {spec.name!r}"
                + (f": a column block of table {spec.logical_name!r} and another; rename one" if spec.columns else "")
            )
    first = 0
    for name, blocks in logical_tables(tables).items():
        whole = logical_table(blocks[0])
        columns = 0
        for spec in blocks:
            if logical_table(spec) != whole or spec.first_column != columns:
                raise ConfigError(f"table {name!r}: column block {spec.name!r} does not continue the one before it")
            columns += spec.embedding_dim
        if columns != whole.embedding_dim or tuple(tables[first : first + len(blocks)]) != blocks:
            raise ConfigError(f"table {name!r}: its column blocks are not all there, one after the other")
        first += len(blocks)
