"""What a plan of tables expects of every step: loads, bytes between workers, the public planners beside it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.jobs.cli_options import table_lines
from shoal.jobs.progress import format_bytes
from shoal.kernels.column_blocks import logical_table, logical_tables
from shoal.kernels.errors import PlanError
from shoal.kernels.spec import TableSpec
from shoal.platform.baselines import BASELINES, plan_baseline
from shoal.platform.costs import TableProfile
from shoal.platform.plan import Plan
from shoal.platform.topology import Topology

#: Workers that are listed one by one.
_SHOWN = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """A plan, and what the public greedy planners would make of the same tables."""

    plan: Plan
    #: Name of the baseline -> (the fullest worker over the mean, its load in seconds), or why it has no plan.
    baselines: Mapping[str, tuple[float, float] | str]

    def to_dict(self) -> dict[str, Any]:
        local, network = self.plan.exchange_bytes
        by_carriers = self.plan.hierarchical_bytes
        return {
            "hosts": list(self.plan.hosts),
            "tables": [
                {
                    "table": table.table,
                    "sharding": table.sharding.value,
                    "flow": table.flow,
                    "values_codec": table.values_codec,
                    "gradients_codec": table.gradients_codec,
                    "column_widths": list(table.column_widths),
                    "num_row_blocks": table.num_row_blocks,
                    "owners": [list(owners) for owners in table.owners],
                    "reason": table.reason,
                }
                for table in self.plan.tables
            ],
            "worker_loads_s": list(self.plan.worker_loads),
            "imbalance": self.plan.imbalance,
            "bytes_within_hosts": local,
            "bytes_between_hosts": network,
            "hierarchical": {"bytes_within_hosts": by_carriers[0], "bytes_between_hosts": by_carriers[1]},
            "baselines": dict(self.baselines),
            "digest": self.plan.digest,
        }


def make_traffic(
    plan: Plan, tables: Sequence[TableSpec], topology: Topology, profiles: Mapping[str, TableProfile] | None
) -> Traffic | None:
    """The expectations of a plan; None where nothing is known of the data."""
    if profiles is None:
        return None
    specs = [logical_table(blocks[0]) for blocks in logical_tables(tables).values()]
    found: dict[str, tuple[float, float] | str] = {}
    for name in BASELINES:
        try:
            other = plan_baseline(name, specs, topology, profiles)
            found[name] = (other.imbalance, max(other.worker_loads))
        except PlanError as error:
            found[name] = str(error)
    return Traffic(plan=plan, baselines=found)


def traffic_lines(traffic: Traffic) -> list[str]:
    """The expectations as text."""
    plan = traffic.plan
    rows = [
        [
            table.table,
            table.sharding.value,
            table.flow,
            f"{table.values_codec}/{table.gradients_codec}",
            owners_text(table.owners),
            table.reason,
        ]
        for table in plan.tables
    ]
    lines = ["expected per step, from the sample:", ""]
    lines += table_lines(rows, ["table", "sharding", "flow", "wire", "owners", "reason"])
    shown = ", ".join(f"{load * 1e6:.0f}" for load in plan.worker_loads[:_SHOWN])
    more = f", and {plan.world_size - _SHOWN} more workers" if plan.world_size > _SHOWN else ""
    local, network = plan.exchange_bytes
    lines += [
        "",
        f"owners' work per worker (us): {shown}{more}; the fullest over the mean: {plan.imbalance:.2f}",
        f"exchanged between workers: {format_bytes(round(local))} within hosts, {format_bytes(round(network))} between",
    ]
    if len(set(plan.hosts)) not in (1, plan.world_size):
        local, network = plan.hierarchical_bytes
        shown = f"{format_bytes(round(local))} within hosts, {format_bytes(round(network))} between"
        lines.append(f"with scaling.exchange hierarchical: {shown}")
    for name, other in traffic.baselines.items():
        if isinstance(other, str):
            lines.append(f"greedy by {name}: no plan: {other}")
        else:
            lines.append(f"greedy by {name}: {other[0]:.2f} over the mean, {other[1] * 1e6:.0f} us on the fullest")
    return lines


def owners_text(owners: Sequence[Sequence[int]]) -> str:
    """Workers of every column block: ``0-3``, or ``0 | 2`` for two column blocks on a worker each."""
    return " | ".join(_ranges(sorted(set(ranks))) for ranks in owners)


def _ranges(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][-1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
