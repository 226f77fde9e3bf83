"""Which tables would exchange clearly fewer bytes in the other flow, by what a run has measured. Pure.

A run keeps the flows it began with: the two differ in rounding, so a switch on the way (at a view change, say) would
break the promise that moving rows changes no bit. So this is advice for whoever edits the job: with ``flow`` set, the
next run, or the resumption of this one, is a declared change of numbers (S5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from shoal.actors.messages import FlowCost

#: A switch is advised where it saves this part of the table's bytes and of all tables' together.
TABLE_GAIN_MIN = 0.2
STEP_GAIN_MIN = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowAdvice:
    """Bytes are of one step, all ranks together."""

    table: str
    flow: str
    bytes_now: float
    bytes_then: float

    @property
    def reason(self) -> str:
        share = 1.0 - self.bytes_then / self.bytes_now
        return f"flow {self.flow} would take {share:.0%} fewer bytes of rows and gradients"


def advise_flows(costs: Mapping[str, FlowCost]) -> tuple[FlowAdvice, ...]:
    """Advice for tables with much to gain, the greatest gain first; ties by name."""
    total = sum(cost.bytes_now for cost in costs.values())
    found = []
    for table, cost in costs.items():
        if cost.pooled_bytes is None:
            continue
        now = cost.bytes_now
        flow, then = ("pooled", cost.pooled_bytes) if cost.flow == "rows" else ("rows", cost.rows_bytes)
        if now - then > TABLE_GAIN_MIN * now and now - then > STEP_GAIN_MIN * total:
            found.append(FlowAdvice(table=table, flow=flow, bytes_now=now, bytes_then=then))
    return tuple(sorted(found, key=lambda advice: (advice.bytes_then - advice.bytes_now, advice.table)))
