"""What every benchmark shares: alternation of both sides in one run, cold caches, ratios with their spread, one file.

A benchmark module has ``EXPECTATION`` (what bounds the result, stated before measuring) and ``main()``, which measures,
calls ``write`` and returns the cases.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
_FLUSH_BYTES = 512 * 2**20  # beyond the last-level cache of one machine of this size
_flush_buffer: np.ndarray | None = None


def flush_caches() -> None:
    """Write more memory than the caches hold, so that the next timed kernel starts cold."""
    global _flush_buffer
    if _flush_buffer is None:
        _flush_buffer = np.zeros(_FLUSH_BYTES // 8, dtype=np.int64)
    _flush_buffer += 1


def alternate(
    sides: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2, before: Callable[[], Any] | None = None
) -> dict[str, list[float]]:
    """Run every side once per round, in turn, and return the seconds of each; ``before`` runs untimed ahead of each.

    A side may return a float: its own measure in seconds, taken instead of the wall time of the call.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(warmup + rounds):
        for name, run in sides.items():
            if before is not None:
                before()
            start = time.perf_counter()
            own = run()
            elapsed = own if isinstance(own, float) else time.perf_counter() - start
            if index >= warmup:
                times[name].append(elapsed)
    return times


def record_of_ranks(run_rank: Callable[..., None], world_size: int, *args: Any) -> Any:
    """What rank 0 of ``world_size`` new processes writes as JSON: each is ``run_rank(rank, *args, port, path)``.

    ``port`` is that of a store of torch on 127.0.0.1, ``path`` the file to write.
    """
    import torch.distributed as dist
    import torch.multiprocessing as mp

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        mp.spawn(run_rank, args=(*args, store.port, str(path)), nprocs=world_size)
        return json.loads(path.read_text(encoding="utf-8"))


def case(
    name: str,
    unit: str,
    ours: Sequence[float],
    baseline: Sequence[float] | None,
    baseline_name: str | None,
    target: float | None,
    *,
    higher_is_better: bool = True,
    value_scale: float = 1.0,
    **notes: Any,
) -> dict[str, Any]:
    """One result. ``ours`` and ``baseline`` are paired seconds (or values); ratio = baseline / ours, per round.

    The ratio's spread is its 10th and 90th percentile over rounds. Without a baseline the ratio is the median of
    ``ours`` itself (a value with a target). ``higher_is_better`` says how the ratio meets the target.
    """
    ours_median = statistics.median(ours)
    if baseline is None:
        ratios = sorted(ours)
        baseline_median = None
    else:
        ratios = sorted(b / o for b, o in zip(baseline, ours))
        baseline_median = statistics.median(baseline) * value_scale
    ratio = statistics.median(ratios)
    met = None if target is None else bool(ratio >= target if higher_is_better else ratio <= target)
    return {
        "case": name,
        "unit": unit,
        "ours": ours_median * value_scale,
        "baseline": baseline_median,
        "baseline_name": baseline_name,
        "ratio": ratio,
        "ratio_min": ratios[len(ratios) // 10],
        "ratio_max": ratios[(len(ratios) * 9) // 10],
        "target": target,
        "target_is": "at least" if higher_is_better else "at most",
        "met": met,
        **notes,
    }


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1), "os": platform.system()}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for package in ("torch", "ray", "pyarrow", "numpy", "fbgemm-gpu-cpu", "torchrec", "scikit-learn"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(name: str, cases: list[dict[str, Any]], expectation: str) -> list[dict[str, Any]]:
    """Write ``results/<name>.json`` and print its table; returns the cases."""
    RESULTS.mkdir(exist_ok=True)
    record = {"bench": name, "expectation": expectation, "machine": machine(), "versions": versions(), "cases": cases}
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print_table(name, cases)
    return cases


def print_table(name: str, cases: Sequence[Mapping[str, Any]]) -> None:
    """One line per case: ours, baseline, ratio with spread, target."""

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    for row in cases:
        target = "" if row["target"] is None else f"target {row['target_is']} {row['target']:g}"
        verdict = {True: "met", False: "MISSED", None: ""}[row["met"]]
        print(
            f"{name:18s} {row['case']:44s} ours {number(row['ours']):>9s} {row['unit']:10s} "
            f"{row['baseline_name'] or '':18s} {number(row['baseline']):>9s} ratio {row['ratio']:.3g} "
            f"[{row['ratio_min']:.3g}, {row['ratio_max']:.3g}] {target} {verdict}",
            flush=True,
        )
