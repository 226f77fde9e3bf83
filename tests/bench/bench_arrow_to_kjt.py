"""Arrow columns to a KeyedJaggedTensor: ids per second and the cost per column, against pyarrow + numpy.

The baseline is what one writes with pyarrow's public functions: per column ``flatten`` and the differences of the
offsets, then one concatenation (it neither checks nor applies null policies). Both sides start from tables that were
just sliced out of a larger one, as a feed does, and end with a KeyedJaggedTensor.
"""

from __future__ import annotations

import harness
import numpy as np
import pyarrow as pa
import torch

from shoal.kernels.arrow import BatchConverter
from shoal.kernels.jagged import KeyedJaggedTensor
from shoal.kernels.schema import Schema, SparseColumn

EXPECTATION = (
    "Per id 8 bytes are read and 8 written: at the ~8 GB/s of one core's cold copies 2 ns, so 100 M ids/s leaves a "
    "factor of five. Per column the cost is Arrow's export (0.26 us measured) plus a dozen branches: 2 us bounds it. "
    "The baseline pays several pyarrow calls per column, 5-20 us."
)


def table(num_columns: int, rows: int, pooling: int, seed: int) -> pa.Table:
    """``num_columns`` columns of ids, scalar (pooling 1) or lists of 0 .. 2 * pooling, and a label."""
    rng = np.random.default_rng(seed)
    columns: dict[str, pa.Array] = {"label": pa.array(rng.integers(0, 2, rows).astype(np.float32))}
    for c in range(num_columns):
        if pooling == 1:
            columns[f"c{c}"] = pa.array(rng.integers(0, 1 << 40, rows))
            continue
        lengths = rng.integers(0, 2 * pooling + 1, rows)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        columns[f"c{c}"] = pa.ListArray.from_arrays(offsets, rng.integers(0, 1 << 40, offsets[-1]))
    return pa.table(columns)


def with_pyarrow(batch: pa.Table, keys: list[str]) -> KeyedJaggedTensor:
    """The baseline."""
    values, lengths = [], []
    for key in keys:
        column = batch.column(key).combine_chunks()
        if pa.types.is_list(column.type):
            values.append(column.flatten().to_numpy())
            lengths.append(np.diff(column.offsets.to_numpy()))
        else:
            values.append(column.to_numpy())
            lengths.append(np.ones(len(column), dtype=np.int64))
    return KeyedJaggedTensor.from_lengths_sync(
        keys=keys,
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int64)),
    )


def measure(name: str, num_columns: int, rows: int, pooling: int, rounds: int) -> list[dict]:
    """Both sides over 16 rotating batches of one shape; caches flushed before each timed group of 16."""
    whole = [table(num_columns, rows * 8, pooling, seed) for seed in range(2)]
    batches = [whole[i % 2].slice((i // 2) * rows, rows) for i in range(16)]
    keys = [f"c{c}" for c in range(num_columns)]
    schema = Schema(label="label", sparse=tuple(SparseColumn(name=key) for key in keys))
    converter = BatchConverter(schema)
    num_ids = sum(converter.convert(batch).sparse_features.values().numel() for batch in batches) / 16
    first, reference = converter.convert(batches[3]).sparse_features, with_pyarrow(batches[3], keys)
    assert torch.equal(first.values(), reference.values()) and torch.equal(first.lengths(), reference.lengths())

    def ours() -> None:
        for batch in batches:
            converter.convert(batch)

    def baseline() -> None:
        for batch in batches:
            with_pyarrow(batch, keys)

    times = harness.alternate({"ours": ours, "baseline": baseline}, rounds, warmup=2, before=harness.flush_caches)
    seconds = {side: [t / 16 for t in values] for side, values in times.items()}
    rates = [num_ids / t / 1e6 for t in seconds["ours"]]
    columns_us = [t / num_columns * 1e6 for t in seconds["ours"]]
    notes = {"columns": num_columns, "rows": rows, "ids_per_batch": num_ids}
    return [
        harness.case(f"{name}: against pyarrow", "ms", seconds["ours"], seconds["baseline"], "pyarrow + numpy", None,
                     value_scale=1e3, **notes),
        harness.case(f"{name}: rate", "M ids/s", rates, None, None, 100.0, **notes),
        harness.case(f"{name}: per column", "us", columns_us, None, None,
                     2.0 if rows * pooling < 512 else None, higher_is_better=False, **notes),
    ]  # fmt: skip


def main() -> list[dict]:
    """Run all cases."""
    cases = measure("26 x 2,048, lists of 10", 26, 2048, 10, rounds=15)
    cases += measure("26 x 2,048, scalars", 26, 2048, 1, rounds=15)
    cases += measure("1,000 x 256, scalars", 1000, 256, 1, rounds=7)
    return harness.write("arrow_to_kjt", cases, EXPECTATION)


if __name__ == "__main__":
    main()
