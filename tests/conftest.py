"""Settings every test shares: a quiet local Ray without tokens, one thread per process, no leaked processes."""

from __future__ import annotations

import os

# Ray reads these at import; `cluster_utils.Cluster` does not run the token set-up of `ray.init` (Ray 2.60).
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")

import shutil
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

# CI repeats the same examples, so that a run says something about the change and not about luck; elsewhere every run
# draws new ones and prints what reproduces a failure.
hypothesis.settings.register_profile("ci", derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def _child_pids() -> set[int]:
    """Pids of the live descendants of this process (Linux; an empty set elsewhere)."""
    parents: dict[int, int] = {}
    try:
        entries = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return set()
    for pid in entries:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[pid] = int(fields[1])
    found: set[int] = set()
    frontier = {os.getpid()}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


@pytest.fixture(scope="session", autouse=True)
def no_leaked_processes() -> Iterator[None]:
    """Fail the run if a test left a process behind. multiprocessing's own trackers end with the interpreter."""
    yield
    leaked = []
    for pid in _child_pids():
        try:
            with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
                command = file.read().replace("\0", " ").strip()
        except OSError:
            continue
        if command and "resource_tracker" not in command and "forkserver" not in command:
            leaked.append(f"{pid}: {command[:120]}")
    assert not leaked, "tests left processes behind:\n" + "\n".join(leaked)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray cluster of this module's own: 8 logical CPUs, no dashboard, a short temp dir (socket paths are limited)."""
    import ray

    temp = tempfile.mkdtemp(prefix="sh-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        namespace="test",
        _temp_dir=temp,
    )
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(temp, ignore_errors=True)
