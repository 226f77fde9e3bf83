"""Overlapped steps against steps one after the other: two workers, on one host and on two that a slow link joins."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import torch
import two_hosts

EXPECTATION = (
    "Two exchanges a step instead of four, of the same bytes but for a header. Each side takes the same steps on "
    "sessions of its own, in turn. Over shared memory an exchange of two ranks costs some 0.1 ms beyond what they wait "
    "for each other anyway, so there is little to gain; over a link of 200 Mbit/s bytes decide, so there is little "
    "either. Where an exchange takes 2 ms whatever its bytes (a sleep in each exchange of both sides: this kernel has "
    "no netem) the two that are gone are 4 ms a step. Target: not slower."
)
HOSTS = (0, 1)
ROUNDS, WARMUP, NUM_BATCHES = 40, 4, 16
BATCH_SIZES = (2048, 256)
#: Case: Mbit/s between hosts (None: both ranks on one host), milliseconds added to every exchange.
LINKS: dict[str, tuple[int | None, float]] = {
    "shared memory": (None, 0.0),
    "200 Mbit/s": (200, 0.0),
    "Gloo, 2 ms an exchange": (10_000, 2.0),
}


def _delay(session: Any, delay_ms: float) -> None:
    transport = session.exchange.transport_of(1)
    exchange = transport.exchange

    def late(*args: Any, **options: Any) -> Any:
        found = exchange(*args, **options)
        time.sleep(1e-3 * delay_ms)
        return found

    if delay_ms:
        transport.exchange = late


def run_rank(rank: int, names: list[str], port: int, meet: Any, results: Any) -> None:
    """Both sides on one rank, over every link."""
    import step_torchrec
    from step_shoal import ShippedDense, ShoalRank

    from shoal.jobs import workloads

    two_hosts.enter(names[HOSTS[rank]])
    torch.set_num_threads(1)
    far = two_hosts.group_options("bench-overlap", rank, HOSTS, port)
    for number, (size, link) in enumerate(itertools.product(BATCH_SIZES, LINKS)):
        rate, delay_ms = LINKS[link]
        workload = workloads.dlrm_step(size)
        batches = [step_torchrec.Raw(workload, 1000 * rank + index) for index in range(NUM_BATCHES)]
        groups = far if rate else {**far, "hosts": ("h", "h")}
        off, on = (
            ShoalRank(ShippedDense, workload, rank, 2, port, 2 * number + side, groups=groups) for side in (0, 1)
        )
        meet.wait()
        if rank == 0 and rate:
            two_hosts.limit(names, rate)
        for side in (off, on):
            _delay(side.session, delay_ms)
        sides = {"off": off.step_over(batches), "on": on.step_over(batches, overlap=True)}
        seconds = harness.alternate(sides, ROUNDS, warmup=WARMUP, before=meet.wait)
        taken = tuple(side.session.exchange.num_collectives() for side in (off, on))
        results.put((f"batches of {size}, {link}", rank, seconds, taken, workload.describe()))
        off.close()
        on.close()
    meet.wait()


def main() -> list[dict[str, Any]]:
    """Run all cases and write results/overlap.json."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, dict[int, Any]] = {}
    for name, rank, *measured in two_hosts.run_on_hosts(HOSTS, run_rank, len(HOSTS) * len(BATCH_SIZES) * len(LINKS)):
        found.setdefault(name, {})[rank] = measured
    cases = []
    for name, ranks in found.items():
        # A step has ended when the last rank has what it waits for.
        both = {side: zip(*(measured[0][side] for measured in ranks.values())) for side in ("off", "on")}
        off, on = ([max(pair) for pair in pairs] for pairs in both.values())
        _, taken, workload = ranks[0]
        notes = {"exchanges": taken, "exchanges_of_steps": ROUNDS + WARMUP, "workload": workload}
        cases.append(harness.case(f"step, {name}", "ms", on, off, "one after the other", 1.0, value_scale=1e3, **notes))
    return harness.write("overlap", cases, EXPECTATION)


if __name__ == "__main__":
    main()
