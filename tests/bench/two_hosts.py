"""Two hosts on one machine: network namespaces joined by a bridge, with a token bucket on each way out. Needs root."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shoal.actors.groups import host_store

_CLONE_NEWNET = 0x40000000
_SUBNET = "10.213.77"
#: Where the parent process is, reachable from both hosts.
PARENT_ADDRESS = f"{_SUBNET}.254"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _name(host: int) -> str:
    return f"shoal{os.getpid() % 10_000}h{host}"


def outside_link(name: str) -> str:
    """The device on the bridge that a host's traffic passes; with it down the host is cut off."""
    return f"{name}o"


def address_of(host: int) -> str:
    """Address of a host, for its ranks to listen on."""
    return f"{_SUBNET}.{host + 1}"


@contextlib.contextmanager
def two_hosts(num_hosts: int = 2) -> Iterator[list[str]]:
    """Make the hosts; yields the names of their namespaces. All is removed at the end."""
    bridge, names = f"shoal{os.getpid() % 10_000}", [_name(host) for host in range(num_hosts)]
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{PARENT_ADDRESS}/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for host, name in enumerate(names):
            outside = outside_link(name)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", outside, "master", bridge, "up")
            inside = ("ip", "-n", name)
            _run(*inside, "addr", "add", f"{address_of(host)}/24", "dev", "eth0")
            _run(*inside, "link", "set", "eth0", "up")
            _run(*inside, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def limit(names: list[str], mbit_per_s: int) -> None:
    """Limit what each host may send; what it receives is limited by its peers' limit."""
    for name in names:
        _run(
            *("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"),
            *("rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "1s"),
        )


def enter(name: str) -> None:
    """Move the calling thread, and what it starts, to a host; call it before anything opens a socket."""
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")
    finally:
        os.close(descriptor)


def group_options(run: str, rank: int, hosts: Sequence[int], store_port: int) -> dict[str, Any]:
    """What GroupSpec must know of a rank on these hosts, but for the epoch."""
    return {
        "run": run,
        "rank": rank,
        "hosts": tuple(str(host) for host in hosts),
        "timeout_s": 60.0,
        "store_host": PARENT_ADDRESS,
        "store_port": store_port,
        "bind_address": address_of(hosts[rank]),
    }


def run_on_hosts(hosts: Sequence[int], body: Callable[..., None], num_results: int) -> list[Any]:
    """Run ``body(rank, names, store_port, barrier, results)`` in a process per rank; the ``num_results`` they put."""
    context = multiprocessing.get_context("spawn")
    with two_hosts() as names:
        store, _, port = host_store(PARENT_ADDRESS)
        meet, results = context.Barrier(len(hosts)), context.Queue()
        processes = [
            context.Process(target=body, args=(rank, names, port, meet, results)) for rank in range(len(hosts))
        ]
        for process in processes:
            process.start()
        try:
            return [results.get(timeout=300) for _ in range(num_results)]
        finally:
            for process in processes:
                process.join(20)
                if process.is_alive():
                    process.kill()
            del store
