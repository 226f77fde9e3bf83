"""A Ray cluster whose nodes are hosts of their own, in network namespaces, so that a link can go down. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from elastic_cluster import STORE_BYTES, descendants, signal_pids
from elastic_steps import wait_until
from two_hosts import PARENT_ADDRESS, address_of, outside_link, two_hosts

#: Every host sees a folder of its own where the head has Ray's session: Ray keeps a node's address there.
_IN_OWN_FOLDER = 'mount -t tmpfs none "$0" && exec "$@"'


class HostCluster:
    """The head, without CPUs, is on this side of the bridge; every host is a node of one CPU."""

    def __init__(self, names: list[str]) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.temp = tempfile.mkdtemp(prefix="sh-", dir="/tmp")
        head = {
            "num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES, "temp_dir": self.temp,
            "node_ip_address": PARENT_ADDRESS,
        }  # fmt: skip
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._names = names
        self._hosts = [self._start(host, name) for host, name in enumerate(names)]
        ray.init(address=self.address, log_to_driver=False, namespace="shoal", logging_level="ERROR")
        wait_until(lambda: self._num_alive() == 1 + len(names), 90.0, "hosts in the cluster")

    def _start(self, host: int, name: str) -> subprocess.Popen[bytes]:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", self.address, "--block"]
        options = [f"--node-ip-address={address_of(host)}", "--num-cpus=1", f"--object-store-memory={STORE_BYTES}"]
        return subprocess.Popen(
            ["ip", "netns", "exec", name, "sh", "-c", _IN_OWN_FOLDER, self.temp, *ray, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    @staticmethod
    def _num_alive() -> int:
        import ray

        return sum(node["Alive"] for node in ray.nodes())

    @property
    def address(self) -> str:
        return self._cluster.address

    def host_of(self, pid: int) -> int:
        """The host on which a process is."""
        return next(host for host, process in enumerate(self._hosts) if pid in descendants(process.pid))

    def cut(self, host: int) -> float:
        """Take a host's link down: nothing is refused, nothing arrives. Returns when."""
        when = time.time()
        subprocess.run(["ip", "link", "set", outside_link(self._names[host]), "down"], check=True)
        return when

    def close(self) -> None:
        """End all nodes."""
        import ray

        with contextlib.suppress(Exception):
            ray.shutdown()
        for process in self._hosts:
            signal_pids([process.pid, *descendants(process.pid)], signal.SIGKILL)
            process.wait(10)
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
        shutil.rmtree(self.temp, ignore_errors=True)


@contextlib.contextmanager
def host_cluster(num_hosts: int) -> Iterator[HostCluster]:
    """A cluster that ends with the block."""
    with two_hosts(num_hosts) as names:
        cluster = HostCluster(names)
        try:
            yield cluster
        finally:
            cluster.close()


def can_make_hosts() -> Any:
    """Whether this machine lets us: root, and the ``ip`` command."""
    return os.geteuid() == 0 and shutil.which("ip")
