"""How long planning takes: 1,000 tables on 1,024 workers, ours beside the four public greedy planners.

The tables are generated: rows 10^2 to 10^8, widths 16 to 256 and pooling 1 to 50, at random.
"""

from __future__ import annotations

import random

from harness import alternate, case, write

from shoal.kernels.spec import TableSpec
from shoal.platform.baselines import BASELINES, plan_baseline
from shoal.platform.costs import TableProfile
from shoal.platform.planner import plan_tables
from shoal.platform.topology import Topology, uniform_hosts

EXPECTATION = (
    "1,000 tables on 1,024 workers (8 a host) are planned in under 10 s on one core: about 10 options a table, then "
    "placement, which looks at every worker for every table (10^6 steps), at most nine times. The greedy planners "
    "place whole tables only: 10^6 comparisons, about a second. Balance is not timed: max/mean of loads by our cost."
)
SIZES = ((100, 16), (1000, 128), (1000, 1024))
WORKERS_PER_HOST = 8
ROUNDS = 3


def make_tables(count: int, seed: int = 1) -> tuple[list[TableSpec], dict[str, TableProfile]]:
    """Random tables and their use by a rank's 512 samples."""
    draw = random.Random(seed)
    specs, profiles = [], {}
    for i in range(count):
        rows, dim = int(10 ** draw.uniform(2, 8)), draw.choice([16, 32, 64, 128, 256])
        specs.append(TableSpec(name=f"t{i}", num_embeddings=rows, embedding_dim=dim))
        num_ids = 512 * draw.choice([1, 1, 1, 5, 20, 50])
        num_unique = min(rows, num_ids) ** draw.uniform(0.6, 1.0)
        profiles[f"t{i}"] = TableProfile(num_unique=num_unique, num_ids=num_ids, num_bags=512)
    return specs, profiles


def main() -> list[dict]:
    cases = []
    for num_tables, num_workers in SIZES:
        specs, profiles = make_tables(num_tables)
        topology = Topology(hosts=uniform_hosts(num_workers, WORKERS_PER_HOST))
        sides = {"ours": lambda: plan_tables(specs, topology, profiles=profiles)}  # noqa: B023
        sides |= {name: lambda name=name: plan_baseline(name, specs, topology, profiles) for name in BASELINES}  # noqa: B023
        times = alternate(sides, ROUNDS, warmup=0)
        plan = plan_tables(specs, topology, profiles=profiles)
        title = f"{num_tables} tables, {num_workers} workers"
        for name in ("ours", *BASELINES):
            is_ours = name == "ours"
            other = plan if is_ours else plan_baseline(name, specs, topology, profiles)
            cases.append(
                case(
                    f"{title}: {name}",
                    "s",
                    times[name],
                    None,
                    None,
                    10.0 if is_ours else None,
                    higher_is_better=False,
                    imbalance=other.imbalance,
                    fullest_worker_s=max(other.worker_loads),
                )
            )
    return write("planner_scale", cases, EXPECTATION)


if __name__ == "__main__":
    main()
