"""A Ray cluster of several raylets on this machine, whose nodes can be killed or frozen whole.

The head takes no workers; every other node has one CPU, so that a worker is a node of its own. Both sides of a
comparison run on the same cluster, one after the other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

#: Has to be set before Ray is imported anywhere in the process.
QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",
    # Workers find a spare CPU where there is one; starting processes ahead of need only disturbs what is measured.
    "RAY_enable_worker_prestart": "0",
}
os.environ.update(QUIET)
# Workers import what their spec names (elastic_steps); raylets hand their environment on to them.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))))

STORE_BYTES = 150 * 2**20


class BenchCluster:
    """The cluster, to which this process is connected as a driver."""

    def __init__(self, num_nodes: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        # Unix sockets of Ray have paths of at most 107 bytes.
        self.temp = tempfile.mkdtemp(prefix="sb-", dir="/tmp")
        head = {
            "num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES, "temp_dir": self.temp,
        }  # fmt: skip
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self._add() for _ in range(num_nodes)]
        self._cluster.wait_for_nodes()
        ray.init(address=self.address, log_to_driver=False, namespace="shoal", logging_level="ERROR")

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, wait=False)

    @property
    def address(self) -> str:
        return self._cluster.address

    def add_node(self, timeout_s: float = 60.0) -> Any:
        """One more node of one CPU; returns when it is usable."""
        node = self._add()
        self.nodes.append(node)
        self._cluster.wait_for_nodes(timeout_s)
        return node

    def node_of(self, pid: int) -> Any:
        """The node whose raylet started the process."""
        for node in self.nodes:
            if pid in descendants(raylet_pid(node)):
                return node
        raise LookupError(f"process {pid} belongs to no node")

    def has_controller(self, node: Any) -> bool:
        """Whether a controller of ours is on the node."""
        return any(b"ControllerActor" in _command(pid) for pid in node_pids(node))

    def kill_node(self, node: Any) -> float:
        """SIGKILL everything of a node at once; returns when."""
        pids = node_pids(node)
        when = time.time()
        signal_pids(pids, signal.SIGKILL)
        self.nodes.remove(node)
        return when

    def forget_node(self, node: Any) -> None:
        """Let the cluster's bookkeeping know of a killed node."""
        with contextlib.suppress(Exception):
            self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End all nodes."""
        import ray

        with contextlib.suppress(Exception):
            ray.shutdown()
        for node in self.nodes:  # what is frozen would not end
            signal_pids(node_pids(node), signal.SIGCONT)
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
        shutil.rmtree(self.temp, ignore_errors=True)


@contextlib.contextmanager
def bench_cluster(num_nodes: int) -> Iterator[BenchCluster]:
    """A cluster that ends with the block."""
    cluster = BenchCluster(num_nodes)
    try:
        yield cluster
    finally:
        cluster.close()


def raylet_pid(node: Any) -> int:
    """The process of a node's raylet."""
    return node.all_processes["raylet"][0].process.pid


def node_pids(node: Any) -> list[int]:
    """A node's raylet and everything it started."""
    raylet = raylet_pid(node)
    return [raylet, *descendants(raylet)]


def signal_node(node: Any, number: int) -> float:
    """Send a signal (SIGSTOP, SIGCONT) to everything of a node; returns when."""
    pids = node_pids(node)
    when = time.time()
    signal_pids(pids, number)
    return when


def signal_process(pid: int, number: int) -> float:
    """Send a signal to a process; returns when."""
    when = time.time()
    os.kill(pid, number)
    return when


def signal_pids(pids: Sequence[int], number: int) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, level = [], {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found += sorted(level)
    return found
