"""What each table's rows cost in its own flow, and would in the other, measured from the batches of a run.

One step per progress record is looked at: a pass over its ids. Sums over ranks are figures of one whole step, as if no
row were its reader's own, which takes the same part off both flows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shoal.actors.messages import FlowCost
from shoal.kernels.flow_rule import FlowCounts, flow_bytes
from shoal.kernels.plan import Lookup, StepPlan
from shoal.kernels.spec import Flow, PoolingType

#: Numbers per table: unique rows, ids, partial sums per row block, partial sums per owner.
COUNTS = 4


def count_flows(plan: StepPlan, lookups: Sequence[Lookup]) -> list[float]:
    """[T * COUNTS] of this rank's step; nothing where there is nobody to exchange with."""
    if plan.world_size == 1:
        return []
    total = np.zeros((len(plan.tables), COUNTS), np.int64)
    for lookup in lookups:
        total += lookup.flow_counts()
    return total.astype(np.float64).ravel().tolist()


def flow_costs(plan: StepPlan, counts: Sequence[float]) -> dict[str, FlowCost]:
    """Logical table -> what a step costs in either flow; ``counts``: the sum of all ranks' ``count_flows``."""
    costs: dict[str, FlowCost] = {}
    if not counts:
        return costs
    needs_rows = tables_that_need_rows(plan)
    weighted = {feature.table for feature in plan.features if feature.is_weighted}
    for t, row in enumerate(np.reshape(counts, (-1, COUNTS)).tolist()):
        spec, wire = plan.tables[t], plan.codecs[t]
        num_unique, num_ids, by_block, by_owner = row
        sums = by_owner if wire.flow is Flow.POOLED_BY_OWNER else by_block
        found = FlowCounts(num_unique, num_ids, sums)
        rows = flow_bytes(Flow.ROWS, found, spec.embedding_dim, wire)
        pooled = flow_bytes(Flow.POOLED, found, spec.embedding_dim, wire, is_weighted=t in weighted)
        before = costs.get(spec.logical_name, FlowCost("rows", 0.0, 0.0))
        costs[spec.logical_name] = FlowCost(
            flow="rows" if wire.flow is Flow.ROWS else "pooled",
            rows_bytes=before.rows_bytes + rows,
            pooled_bytes=None if t in needs_rows else (before.pooled_bytes or 0.0) + pooled,
        )
    return costs


def tables_that_need_rows(plan: StepPlan) -> frozenset[int]:
    """Tables that nobody should advise to pool: unpooled, kept by every rank, or with weights that may be learned."""
    read_singly = {f.table for f in plan.features if f.pooling is PoolingType.NONE}
    weighted = {f.table for f in plan.features if f.is_weighted and plan.codecs[f.table].flow is Flow.ROWS}
    return frozenset(read_singly | weighted | set(plan.mirrored))
