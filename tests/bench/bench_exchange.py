"""One step's exchanges over our transports, against ``torch.distributed.all_to_all_single`` over Gloo.

Sizes are those of 26 tables x 32 columns, batch 2,048 per rank, Zipf 1.2: 19,800 unique ids per rank, 208 KB of dense
gradients. Both sides start with the data where their producer can write it and end with it where their consumer can
read it: for Gloo two tensors, for shared memory the segment itself. ``copied`` adds to ours a copy in and a copy out.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import torch
import torch.distributed as dist

from shoal.actors.groups import GroupSpec, form, host_store
from shoal.kernels.exchange import Exchange
from shoal.kernels.frame import Identity, Kind

EXPECTATION = (
    "Gloo moves ~0.8 GB/s between processes of a host and costs 0.25-0.35 ms per collective at 2 ranks, 1.1-3 ms at 4 "
    "ranks on 2 cores. Shared memory moves nothing: what is left is a wake-up per rank (5-50 us) and ~20 us of Python."
)
UNIQUE_IDS, ROW_BYTES, DENSE_BYTES, HEADER_BYTES = 19_800, 128, 208_000, 512
ROUNDS = 40


class Ours:
    """The rounds of a step over one of our transports."""

    def __init__(self, groups: Any, *, is_copied: bool) -> None:
        spec = groups.spec
        identity = Identity(run=1, epoch=spec.epoch, rank=spec.rank, world_size=spec.world_size)
        self.exchange = Exchange(groups.transport, identity, timeout_s=60)
        self.scratch = np.ones(8 << 20, np.uint8) if is_copied else None
        self.sizes: dict[int, np.ndarray] = {}

    def header(self) -> None:
        self.exchange.header(Kind.BATCH, 0)

    def round(self, kind: Kind, num_bytes: int) -> None:
        sections = self.sizes.get(num_bytes)
        if sections is None:
            sections = self.sizes[num_bytes] = np.full((1, self.exchange.identity.world_size), num_bytes, np.int64)
        opened = self.exchange.round(kind, 0, sections, sections)
        if self.scratch is None:
            opened.run()
            return
        at = self.scratch.ctypes.data
        for peer, address in enumerate(opened.send_addresses[0].tolist()):
            ctypes.memmove(address, at + peer * num_bytes, num_bytes)
        for peer, address in enumerate(opened.run()[0].tolist()):
            ctypes.memmove(at + peer * num_bytes, address, num_bytes)


class Theirs:
    """The same bytes through torch.distributed's default group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def header(self) -> None:
        self.round(Kind.BATCH, HEADER_BYTES)

    def round(self, kind: Kind, num_bytes: int) -> None:
        if num_bytes not in self.buffers:
            total = num_bytes * self.world_size
            self.buffers[num_bytes] = (torch.zeros(total, dtype=torch.uint8), torch.ones(total, dtype=torch.uint8))
        dist.all_to_all_single(*self.buffers[num_bytes])


def five(side: Ours | Theirs, world_size: int) -> None:
    """Header, ids, rows, gradients of rows, dense gradients."""
    ids, rows = UNIQUE_IDS // world_size * 8, UNIQUE_IDS // world_size * ROW_BYTES
    side.header()
    side.round(Kind.IDS, ids)
    side.round(Kind.VALUES, rows)
    side.round(Kind.GRADIENTS, rows)
    side.round(Kind.DENSE, DENSE_BYTES)


def two(side: Ours | Theirs, world_size: int) -> None:
    """Rows with the next step's ids; gradients with the dense ones and the next header."""
    ids, rows = UNIQUE_IDS // world_size * 8, UNIQUE_IDS // world_size * ROW_BYTES
    side.round(Kind.VALUES, rows + ids)
    side.round(Kind.GRADIENTS, rows + DENSE_BYTES + HEADER_BYTES)


def small(side: Ours | Theirs, world_size: int) -> None:
    """Ten headers: the cost of a collective without bytes."""
    for _ in range(10):
        side.header()


def run_rank(rank: int, world_size: int, port: int, barrier: Any, results: Any) -> None:
    """All cases on one rank, in lock-step with the others; rank 0 reports."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=world_size)
    hosts = ("here",) * world_size
    common = {"rank": rank, "hosts": hosts, "store_port": port, "timeout_s": 60.0}
    shm = form(GroupSpec(run=f"bench-{os.getppid()}", epoch=0, transport="shm", **common))
    gloo = form(GroupSpec(run=f"bench-{os.getppid()}", epoch=1, transport="gloo", **common))
    sides: dict[str, Ours | Theirs] = {
        "shm": Ours(shm, is_copied=False),
        "gloo": Ours(gloo, is_copied=False),
        "torch": Theirs(world_size),
    }
    copied = Ours(shm, is_copied=True)
    times: dict[str, dict[str, list[float]]] = {}
    for shape in (five, two, small):
        calls: dict[str, Callable[[], Any]] = {
            name: lambda side=side, shape=shape: shape(side, world_size) for name, side in sides.items()
        }
        if shape is not small:
            calls["shm copied"] = lambda shape=shape: shape(copied, world_size)
        times[shape.__name__] = harness.alternate(calls, ROUNDS, warmup=4, before=barrier.wait)
    if rank == 0:
        results.put(times)
    dist.barrier()
    shm.destroy()
    gloo.destroy()
    dist.destroy_process_group()


def measure(world_size: int) -> dict[str, dict[str, list[float]]]:
    """Start the ranks, return rank 0's seconds by shape and side."""
    context = multiprocessing.get_context("spawn")
    store, _, port = host_store()
    results = context.Queue()
    # Neither side's own barrier: it would warm the threads of that side alone.
    barrier = context.Barrier(world_size)
    processes = [
        context.Process(target=run_rank, args=(rank, world_size, port, barrier, results)) for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        return results.get(timeout=120)
    finally:
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()
        del store


def main() -> list[dict]:
    """Run all cases and write results/exchange.json."""
    cases = []
    for world_size in (2, 4):
        note = {"oversubscribed": world_size > (os.cpu_count() or 1)}
        for shape, by_side in measure(world_size).items():
            for side, seconds in by_side.items():
                if side == "torch":
                    continue
                cases.append(
                    harness.case(
                        f"{shape} exchanges, {side}, {world_size} ranks",
                        "ms",
                        seconds,
                        by_side["torch"],
                        "all_to_all_single",
                        None,
                        value_scale=1e3,
                        **note,
                    )
                )
    return harness.write("exchange", cases, EXPECTATION)


if __name__ == "__main__":
    main()
