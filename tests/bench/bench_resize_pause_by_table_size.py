"""The pause of a growth 1->2 by table size, at one rate of updates, and by rows that change, at one size.

The table is fully materialised: every row was trained. Growing to two workers on two hosts gives the joiner a copy of
every row, as owner of one half and buddy of the other. Workers are processes under the production controller and read
real files themselves.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import numpy as np
from elastic_processes import ProcessRun, process_run, resident_bytes
from elastic_steps import resize_outage, steps_per_s
from elastic_workloads import BigTable

EXPECTATION = (
    "Rows travel while training goes on, at about 0.3-1 GB/s; what they cost the step is the sender's share of two "
    "cores. The pause holds only the rows changed since the last round: a few steps' ids, 10^4 rows of 284 bytes, "
    "3 MB: milliseconds beside the two exchanges and the flip, which are O(row blocks). So the pause does not grow "
    "with the table, and grows by about a microsecond a changed row. With one trainer thread the copy has a core."
)
SIZES_GB = (0.25, 1.0, 2.0)
GB = 10**9
ROUNDS = 3
PAUSE_RATIO_MAX = 1.3
MOVED_SHARE_MIN = 0.95
THROUGHPUT_MIN = 0.7
#: Ids per step at the smallest size: the slope.
RATES = (2048, 8192, 32_768)
BASELINE_S = 2.0


@dataclasses.dataclass
class Growth:
    """One growth from 1 to 2 workers."""

    pause_s: float
    #: Rows that the last round before the cutover sent: as many change until the next.
    dirty_rows: int
    bytes_moved: int
    #: From the order to the first step of two workers.
    seconds: float
    throughput: float
    resident_bytes: int


def grow(run: ProcessRun) -> Growth:
    """Grow to 2 workers and measure."""
    before = time.time()
    time.sleep(BASELINE_S)
    owner = run.ranks()[0]
    resident = resident_bytes(owner.process.pid)
    ordered = run.scale(2)
    rate = steps_per_s(run.marks(), before, ordered)
    seen: dict[str, int] = {"bytes": 0, "rows": 0}

    def has_grown() -> bool:
        for status in run.statuses().values():
            if status.prepare is not None:
                seen["bytes"] = max(seen["bytes"], status.prepare.bytes_moved)
                seen["rows"] = status.prepare.rows_last_round or seen["rows"]
        return resize_outage(run.marks(), ordered, 2) is not None

    run.wait_for(has_grown, 180.0, "2 workers")
    outage = resize_outage(run.marks(), ordered, 2)
    assert outage is not None
    committed = outage.first.time
    return Growth(
        pause_s=outage.seconds,
        dirty_rows=seen["rows"],
        bytes_moved=seen["bytes"],
        seconds=committed - ordered,
        throughput=steps_per_s(run.marks(), ordered, committed) / rate,
        resident_bytes=resident,
    )


def measure(folder: Path, table: BigTable, name: str, rounds: int) -> list[Growth]:
    """Make all rows, then grow and shrink ``rounds`` times."""
    job = table.job(folder, name, recovery="replicated")
    found = []
    with process_run(folder / name, job, room=2) as run:
        run.tempo.limit = table.sweep_steps + table.steady_steps
        run.wait(lambda m: m.step >= table.sweep_steps + 30, 180.0, "all rows made")
        for index in range(rounds):
            found.append(grow(run))
            one = found[-1]
            print(
                f"{name}: pause {1e3 * one.pause_s:.0f} ms, {one.dirty_rows} rows in the last round, "
                f"{one.bytes_moved / GB:.3f} GB moved in {one.seconds:.1f} s, resident {one.resident_bytes / GB:.2f} "
                f"GB, {one.throughput:.2f} of the steps",
                flush=True,
            )
            if index + 1 < rounds:
                run.resize(1, 60.0)
    shutil.rmtree(Path(job.data.train[0]), ignore_errors=True)
    return found


def size_cases(found: dict[float, list[Growth]], tables: dict[float, BigTable]) -> list[dict[str, Any]]:
    """Pauses by size, and what was moved meanwhile at which cost."""
    cases = []
    for size, growths in found.items():
        table = tables[size]
        expected = table.num_rows * table.row_bytes
        notes = {
            "rows": table.num_rows,
            "expected_bytes": expected,
            "resident_bytes": growths[0].resident_bytes,
            "moved_bytes": [growth.bytes_moved for growth in growths],
            "seconds": [round(growth.seconds, 2) for growth in growths],
        }
        pauses = [1e3 * growth.pause_s for growth in growths]
        dirty = [growth.dirty_rows for growth in growths]
        moved = [growth.bytes_moved / expected for growth in growths]
        rates = [growth.throughput for growth in growths]
        cases += [
            harness.case(f"{size:g} GB: pause", "ms", pauses, None, None, None, dirty_rows=dirty),
            harness.case(f"{size:g} GB: moved / expected", "share", moved, None, None, MOVED_SHARE_MIN, **notes),
            harness.case(f"{size:g} GB: throughput until commit", "share", rates, None, None, THROUGHPUT_MIN),
        ]
    small, large = (sorted(growth.pause_s for growth in found[size]) for size in (SIZES_GB[0], SIZES_GB[-1]))
    ratio = statistics.median(large) / statistics.median(small)
    name = f"pause({SIZES_GB[-1]:g} GB) / pause({SIZES_GB[0]:g} GB)"
    cases.append(harness.case(name, "ratio", [ratio], None, None, PAUSE_RATIO_MAX, higher_is_better=False))
    return cases


def slope_cases(growths: list[Growth]) -> list[dict[str, Any]]:
    """The line through (rows changed, pause)."""
    rows = np.array([growth.dirty_rows for growth in growths], dtype=np.float64)
    pause_s = np.array([growth.pause_s for growth in growths])
    slope, intercept = np.polyfit(rows, pause_s, 1)
    residual = pause_s - (slope * rows + intercept)
    fit = 1.0 - float(residual.var() / pause_s.var()) if pause_s.var() > 0 else 1.0
    return [
        harness.case(
            f"slope at {SIZES_GB[0]:g} GB", "us/row", [1e6 * slope], None, None, None,
            intercept_ms=round(1e3 * float(intercept), 2), r_squared=round(fit, 3),
            points=[[int(r), round(1e3 * float(p), 2)] for r, p in zip(rows, pause_s)],
        )
    ]  # fmt: skip


def main() -> list[dict[str, Any]]:
    """Measure all sizes and rates, and write the results."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-pause-"))
    try:
        tables = {size: BigTable(table_bytes=int(size * GB)) for size in SIZES_GB}
        found = {size: measure(folder, table, f"gb{size:g}", ROUNDS) for size, table in tables.items()}
        by_rate = []
        for rate in RATES:
            table = BigTable(table_bytes=int(SIZES_GB[0] * GB), ids_per_step=rate, steady_steps=3000)
            by_rate += measure(folder, table, f"rate{rate}", 2)
        return harness.write(
            "resize_pause_by_table_size", size_cases(found, tables) + slope_cases(by_rate), EXPECTATION
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
