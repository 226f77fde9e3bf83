"""How fast the store finds ids, and what a row costs beyond its weights and optimizer state.

Expectation: a find touches two random cache lines, a bucket of the id map and the header of the row. With both asked
for ahead and some ten requests in flight at 80-100 ns each, about 8 ns a line: 50 to 60 M finds/s on a quiet core,
less where pages are not huge. 20 header bytes, 0 to 7 of padding, 6.1 to 9.2 of id map: 26 to 32 bytes a row.

Time is the thread's CPU time: the finds never wait, and other processes on the machine do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import TableSpec

EXPECTATION = "two random lines per find, asked for ahead: 25 M/s at 2 M ids, 20 M/s at 20 M, at most 32 bytes a row"
NUM_QUERIES = 1 << 20
MISS_SHARE = 0.2
ROUNDS = 5
INSERT_ROWS = 250_000


def random_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(-(2**63), 2**63 - 1, count, dtype=np.int64)


def resolve(store: RowStore, ids: np.ndarray, slots: np.ndarray, reserve: bool) -> float:
    """Seconds of CPU of one native call."""
    start = time.thread_time()
    store.native.resolve(0, ids.ctypes.data, len(ids), slots.ctypes.data, reserve)
    return time.thread_time() - start


def overhead_bytes(store: RowStore, num_rows: int) -> float:
    used = store.nbytes()
    return (used["rows"] + used["id_map"]) / num_rows - store.tables[0].row_bytes


def fill(store: RowStore, ids: np.ndarray) -> float:
    """Reserve all ids in parts; returns seconds of CPU."""
    slots = np.empty(INSERT_ROWS, np.uint32)
    return sum(resolve(store, ids[at : at + INSERT_ROWS], slots, True) for at in range(0, len(ids), INSERT_ROWS))


def grow_once(store: RowStore, rng: np.random.Generator) -> np.ndarray:
    """Add rows until the id map has just grown; returns their ids."""
    before, added = store.nbytes()["id_map"], []
    slots = np.empty(1024, np.uint32)
    while store.nbytes()["id_map"] == before:
        added.append(random_ids(rng, 1024))
        resolve(store, added[-1], slots, True)
    return np.concatenate(added)


def measure_finds(store: RowStore, ids: np.ndarray, rng: np.random.Generator) -> list[float]:
    """Million finds per second of several rounds, caches flushed before each; 20 % of the ids are misses."""
    slots = np.empty(NUM_QUERIES, np.uint32)
    rates = []
    for _ in range(ROUNDS):
        queries = ids[rng.integers(0, len(ids), NUM_QUERIES)]
        misses = rng.random(NUM_QUERIES) < MISS_SHARE
        queries[misses] = random_ids(rng, int(misses.sum()))
        harness.flush_caches()
        rates.append(NUM_QUERIES / resolve(store, queries, slots, False) / 1e6)
        found_share = float((slots != 0xFFFFFFFF).mean())
        assert abs(found_share - (1 - MISS_SHARE)) < 0.01
    return rates


def measure_dict(ids: np.ndarray, rng: np.random.Generator) -> list[float]:
    """The same with Python's dict, for scale: million finds per second."""
    known = {int(i): at for at, i in enumerate(ids)}
    queries = [int(i) for i in ids[rng.integers(0, len(ids), 200_000)]]
    rates = []
    for _ in range(ROUNDS):
        harness.flush_caches()
        start = time.thread_time()
        for query in queries:
            known.get(query)
        rates.append(len(queries) / (time.thread_time() - start) / 1e6)
    return rates


def main(sizes: tuple[int, ...] = (2_000_000, 20_000_000)) -> list[dict[str, Any]]:
    cases = []
    value: Callable[..., dict[str, Any]] = harness.case
    for size, target in zip(sizes, (25.0, 20.0)):
        rng = np.random.default_rng(size)
        store = RowStore([TableSpec(name="t", num_embeddings=0, embedding_dim=8)], undo_steps=0)
        store.add_all_blocks()
        ids = random_ids(rng, size)
        seconds = fill(store, ids)
        label = f"{size // 1_000_000} M ids"
        cases.append(value(f"insert, {label}", "M rows/s", [size / seconds / 1e6], None, None, None))
        cases.append(value(f"find, {label}", "M finds/s", measure_finds(store, ids, rng), None, None, target))
        cases.append(
            value(f"bytes beyond the row, {label}", "bytes", [overhead_bytes(store, size)], None, None, 32.0,
                  higher_is_better=False)
        )  # fmt: skip
        ids = np.concatenate([ids, grow_once(store, rng)])
        cases.append(
            value(f"find just after growth, {label}", "M finds/s", measure_finds(store, ids, rng), None, None, target)
        )
        cases.append(
            value(f"bytes just after growth, {label}", "bytes", [overhead_bytes(store, len(ids))], None, None, 32.0,
                  higher_is_better=False)
        )  # fmt: skip
        if size <= 2_000_000:
            cases.append(value(f"Python dict, {label}", "M finds/s", measure_dict(ids, rng), None, None, None))
    return harness.write("id_map", cases, EXPECTATION)


if __name__ == "__main__":
    main()
