"""What protecting rows costs: saving them after a cut, exporting and applying changes, checksums, rolling back.

Expectation: each handles a 280-byte record in random order, five cache lines asked for ahead, some ten requests in
flight at 80-100 ns each: 40 to 60 ns a record, and as much again for a second record (an export compares the saved one
with the live one, a roll-back copies it) or for writing to fresh memory. So 2 to 4 M rows/s for an export and an
import, 5 to 10 for applying changes and for rolling back. The first update of a row after a cut copies it once more.

Rows: 64 float32 columns and row-wise Adagrad; ids uniform over a million rows, the worst case (a Zipf batch meets rows
that are saved already), 50 batches of 8,192 between two cuts, as a snapshot every 50 steps has them. Time is the
thread's CPU time: nothing here waits, and other processes on the machine do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import harness
import torch

from shoal.kernels.cut import BlockChanges, rows_checksum
from shoal.kernels.packed import export_changes
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import DataType, OptimizerKind, OptimizerSpec, TableSpec

EXPECTATION = "rows of 280 bytes in random order: every path at least 1 M rows/s on one thread"
NUM_ROWS, NUM_BLOCKS, BATCH, NUM_STEPS, ROUNDS = 1_000_000, 8, 8192, 50, 5


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this thread, and the result."""
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


class Trained:
    """A store of NUM_ROWS rows, and the batches of an interval between two snapshots."""

    def __init__(self) -> None:
        spec = TableSpec(
            name="t", num_embeddings=0, embedding_dim=64, num_blocks=NUM_BLOCKS, data_type=DataType.FP32,
            optimizer=OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD),
        )  # fmt: skip
        self.store = RowStore([spec], undo_steps=0)
        self.store.add_all_blocks()
        generator = torch.Generator().manual_seed(0)
        self.gradients = torch.randn(BATCH, 64, generator=generator)
        for ids in torch.randperm(NUM_ROWS, generator=generator).split(BATCH):
            self.train(ids)
        self.batches = [torch.randint(NUM_ROWS, (BATCH,), generator=generator).unique() for _ in range(NUM_STEPS)]

    def train(self, ids: torch.Tensor) -> None:
        store = self.store.native
        store.apply(0, ids.data_ptr(), ids.numel(), self.gradients.data_ptr(), store.step + 1, 0.1)

    def interval(self) -> float:
        """Mean milliseconds of a step."""
        return seconds(lambda: [self.train(ids) for ids in self.batches])[0] / NUM_STEPS * 1e3

    def each_block(self, call: Callable[[int], Any]) -> tuple[float, list[Any]]:
        return seconds(lambda: [call(block) for block in range(NUM_BLOCKS)])


def main() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    trained = Trained()
    store = trained.store
    copy = RowStore(store.tables, undo_steps=0)
    rates: dict[str, list[float]] = {}

    def note(name: str, count: int, took_s: float) -> None:
        rates.setdefault(name, []).append(count / took_s / 1e6)

    plain_ms, saving_ms = [], []
    for _ in range(ROUNDS + 1):
        plain_ms.append(trained.interval())
        base = store.cut()
        saving_ms.append(trained.interval())
        cut = store.cut()
        took_s, rows = trained.each_block(lambda block, cut=base: cut.export_block(0, block))
        note("export of whole blocks from a cut", NUM_ROWS, took_s)
        note("checksum of columns", NUM_ROWS, seconds(lambda rows=rows: [rows_checksum(r) for r in rows])[0])
        for block in range(NUM_BLOCKS):
            copy.drop_block(0, block)
            copy.add_block(0, block, is_replica=True)
        took_s, _ = trained.each_block(lambda block, rows=rows: copy.import_block(0, block, rows[block]))
        note("import into replicas", NUM_ROWS, took_s)
        took_s, parts = trained.each_block(lambda block, cut=cut, base=base: export_changes(cut, base, 0, block))
        changes: list[BlockChanges] = parts
        num_changed = sum(len(part) for part in changes)
        note("export of changes", num_changed, took_s)
        took_s, deltas = trained.each_block(lambda block, parts=changes: copy.apply_changes(0, block, parts[block]))
        note("apply changes to replicas", num_changed, took_s)
        assert deltas == [part.checksum_delta for part in changes]
        took_s, sums = trained.each_block(lambda block: store.block_checksum(0, block))
        note("checksum of held blocks", NUM_ROWS, took_s)
        assert sums == [copy.block_checksum(0, block) for block in range(NUM_BLOCKS)]
        cut.release()
        note("roll back", num_changed, seconds(lambda base=base: store.rollback(base, store.native.step))[0])
        base.release()
        store.commit(store.native.step)
    cases = [harness.case(name, "M rows/s", all_rates[1:], None, None, 1.0) for name, all_rates in rates.items()]
    steps = ("sparse update of a step, 8,192 uniform rows", "ms")
    cases.append(harness.case(*steps, saving_ms[1:], plain_ms[1:], "no cut open", None))
    return harness.write("row_changes", cases, EXPECTATION)


if __name__ == "__main__":
    main()
