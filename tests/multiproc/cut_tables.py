"""The parity workload with its tables cut into column blocks, and their rows put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import parity

from shoal.actors.worker_spec import WorkerSpec
from shoal.kernels.column_blocks import cut_columns, logical_tables
from shoal.kernels.spec import TableSpec

#: Uneven cuts of the tables of ``parity.TinyModel``; "genre" stays whole.
WIDTHS = {"user": (5, 3), "item": (4, 7, 1), "word": (2, 6)}

Row = tuple[bytes, bytes, int]


@dataclasses.dataclass(frozen=True)
class MakeBlocks:
    """The column blocks of a test table."""

    make: parity.MakeTable
    widths: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: WIDTHS)

    def __call__(self, config: Any) -> tuple[TableSpec, ...]:
        return cut_columns(self.make(config), self.widths.get(config.name, (config.embedding_dim,)))


def cut(spec: WorkerSpec, widths: Mapping[str, tuple[int, ...]] = WIDTHS) -> WorkerSpec:
    """The same job over cut tables."""
    assert isinstance(spec.make_table, parity.MakeTable)
    return dataclasses.replace(spec, make_table=MakeBlocks(spec.make_table, widths))


def blocks_of(spec: WorkerSpec) -> list[TableSpec]:
    """The tables of a job as the data plane sees them."""
    model = parity.TinyModel()
    configs = [*model.bags.embedding_bag_configs(), *model.sequence.embedding_configs()]
    made = [spec.make_table(config) for config in configs]
    return [block for item in made for block in ((item,) if isinstance(item, TableSpec) else item)]


def whole_rows(rows: dict[str, dict[int, Row]], tables: list[TableSpec]) -> dict[str, dict[int, Row]]:
    """Rows of column blocks as rows of their logical tables; what the blocks of a row must agree on is checked."""
    found: dict[str, dict[int, Row]] = {}
    for name, blocks in logical_tables(tables).items():
        ids = {frozenset(rows[block.name]) for block in blocks}
        assert len(ids) == 1, f"{name}: the column blocks have other rows"
        whole = found[name] = {}
        for row_id in next(iter(ids)):
            parts = [rows[block.name][row_id] for block in blocks]
            assert len({count for _, _, count in parts}) == 1, (name, row_id)
            whole[row_id] = (b"".join(w for w, _, _ in parts), _whole_slots(blocks, parts), parts[0][2])
    return found


def _whole_slots(blocks: tuple[TableSpec, ...], parts: list[Row]) -> bytes:
    pieces: list[list[bytes]] = []
    for block, (_, slots, _) in zip(blocks, parts):
        start = 0
        for number, (_, width) in enumerate(block.optimizer.slots(block.embedding_dim)):
            if number == len(pieces):
                pieces.append([])
            pieces[number].append(slots[4 * start : 4 * (start + width)])
            start += width
    if blocks[0].optimizer.slots(1) == blocks[0].optimizer.slots(2):  # one statistic for all columns
        assert all(len(set(piece)) == 1 for piece in pieces)
        pieces = [piece[:1] for piece in pieces]
    return b"".join(part for piece in pieces for part in piece)
