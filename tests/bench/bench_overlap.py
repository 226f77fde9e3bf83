"""Overlapped steps against steps one after the other: two workers, on one host and on two that a slow link joins."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import harness
import torch
import two_hosts

EXPECTATION = (
    "Two exchanges a step instead of four. Each side takes the same steps on sessions of its own, in turn. Over shared "
    "memory an exchange of two ranks costs some 0.1 ms beyond what they wait for each other, so the gain is below 5 %. "
    "Over a link of 1 ms each way the two rounds that are gone cost at least 2 ms a step, whatever the bytes. The "
    "targets: never slower, and those 2 ms (a bound for each case is in the results)."
)
HOSTS = (0, 1)
ROUNDS, NUM_BATCHES = 30, 16
DELAY_MS = 1.0
#: (case, Mbit/s and delay of the link); None: one host.
LINKS: tuple[tuple[str, int | None], ...] = (("one host, shared memory", None), ("1 ms, 1000 Mbit/s", 1000))


def run_rank(rank: int, names: list[str], port: int, meet: Any, results: Any) -> None:
    """Both sides on one rank, in one host and over the link."""
    import step_torchrec
    from step_shoal import ShippedDense, ShoalRank

    from shoal.jobs import workloads

    two_hosts.enter(names[HOSTS[rank]])
    torch.set_num_threads(1)
    far = two_hosts.group_options("bench-overlap", rank, HOSTS, port)
    for number, (workload_name, make) in enumerate((("DLRM, 26 tables", workloads.dlrm_step),)):
        workload = make()
        batches = [step_torchrec.Raw(workload, 1000 * rank + index) for index in range(NUM_BATCHES)]
        for link, (name, rate) in enumerate(LINKS):
            groups = far if rate else {**far, "hosts": ("h", "h")}
            epoch = 2 * (number * len(LINKS) + link)
            off, on = (ShoalRank(ShippedDense, workload, rank, 2, port, epoch + side, groups=groups) for side in (0, 1))
            meet.wait()
            if rank == 0 and rate:
                two_hosts.limit(names, rate, delay_ms=DELAY_MS)
            sides = {"off": off.step_over(batches), "on": on.step_over(batches, overlap=True)}
            seconds = harness.alternate(sides, ROUNDS, warmup=4, before=meet.wait)
            rounds = {side: session.exchange.num_collectives() for side, session in
                      (("off", off.session), ("on", on.session))}
            results.put((f"{workload_name}, {name}", rank, seconds, rounds))
            off.close()
            on.close()
    meet.wait()


def main() -> list[dict[str, Any]]:
    """Run all cases and write results/overlap.json."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, dict[int, Any]] = {}
    for name, rank, seconds, rounds in two_hosts.run_on_hosts(HOSTS, run_rank, len(HOSTS) * len(LINKS)):
        found.setdefault(name, {})[rank] = (seconds, rounds)
    cases = []
    for name, ranks in found.items():
        # A step has ended when the last rank has what it waits for.
        both = {side: zip(*(seconds[side] for seconds, _ in ranks.values())) for side in ("off", "on")}
        off, on = ([max(pair) for pair in pairs] for pairs in both.values())
        rounds = ranks[0][1]
        cases.append(
            harness.case(f"step, {name}", "ms", on, off, "one after the other", 1.0, value_scale=1e3, **{
                "exchanges of 34 steps": rounds})
        )
    return harness.write("overlap", cases, EXPECTATION)


if __name__ == "__main__":
    main()
