"""What a table costs per step, in seconds and in bytes on the wire. Pure.

Own derivation (DESIGN 8): seconds of the owners of a table =
``a * rows * row_bytes / memory + b * bytes_to_other_workers / link + d * pieces``, where rows are the unique rows that
all ranks together ask for. The four public greedy costs are in ``baselines``.

Legend: U unique ids, N ids, P partial sums of bags, D width; per table, rank and step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from shoal.kernels import flow_rule
from shoal.kernels import spec as kernels
from shoal.kernels.flow_rule import FlowCounts
from shoal.kernels.spec import TableSpec, WireCodecs
from shoal.platform.topology import Topology

Codec = Literal["fp32", "fp16", "bf16", "int8"]
Flow = Literal["rows", "pooled"]

@dataclasses.dataclass(frozen=True, kw_only=True)
class TableProfile:
    """How a table is used: figures of one rank's part of one global batch."""

    #: Unique ids, ids, and bags that are not empty (for a sequence: ids).
    num_unique: float
    num_ids: float
    num_bags: float
    is_weighted: bool = False
    #: Rows are needed one by one: unpooled features, learned weights.
    needs_rows: bool = False
    #: Heaps' exponent: n ranks ask for ``num_unique * n ** growth`` distinct ids together. 1: they share none.
    growth: float = 1.0

    @property
    def pooling(self) -> float:
        """Mean ids per bag."""
        return self.num_ids / self.num_bags if self.num_bags else 0.0

    def partial_sums(self, num_parts: int) -> float:
        """P: (bag, part) pairs that are not empty when ids fall into ``num_parts`` equal parts at random."""
        if num_parts <= 1:
            return self.num_bags
        return self.num_bags * num_parts * (1.0 - (1.0 - 1.0 / num_parts) ** self.pooling)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostWeights:
    """Factors of the cost of a shard."""

    #: a: a row is read for the values, read and written for the update.
    memory: float = 3.0
    #: b: bytes on a link count once for both directions of it.
    link: float = 1.0
    #: d: seconds per (column block, worker) and step; what a table costs in each native call even with few rows.
    piece_s: float = 2e-6


def wire_codecs(values_codec: Codec = "fp32", gradients_codec: Codec = "fp32") -> WireCodecs:
    """Codecs by their names."""
    return WireCodecs(kernels.Codec[values_codec.upper()], kernels.Codec[gradients_codec.upper()])


def flow_bytes(
    profile: TableProfile,
    width: int,
    flow: Flow,
    num_parts: int,
    *,
    values_codec: Codec = "fp32",
    gradients_codec: Codec = "fp32",
) -> float:
    """Bytes of one rank's step for one table or column block, both directions, if no row were its own: the rule of
    ``kernels/flow_rule``.

    ``num_parts``: units of partial sums: the table's row blocks (S5), or its owners where sums need not be exact.
    """
    counts = FlowCounts(profile.num_unique, profile.num_ids, profile.partial_sums(num_parts))
    return flow_rule.flow_bytes(
        kernels.Flow[flow.upper()],
        counts,
        width,
        wire_codecs(values_codec, gradients_codec),
        is_weighted=profile.is_weighted,
    )


def flow_seconds(
    profile: TableProfile,
    width: int,
    flow: Flow,
    num_parts: int,
    topology: Topology,
    *,
    values_codec: Codec = "fp32",
    gradients_codec: Codec = "fp32",
) -> float:
    """Time of one rank's step for a flow: its bytes on the slowest link, and gathering and pooling on either side."""
    has_network = topology.num_hosts > 1
    link = topology.network_bytes_per_s if has_network else topology.local_bytes_per_s
    # Rows: gathered once, pooled by the requester. Pooled: every id is gathered by the owner.
    gathered = profile.num_unique + profile.num_ids if flow == "rows" else profile.num_ids
    if flow == "pooled":
        gathered += 2 * profile.partial_sums(num_parts)
    bytes_moved = flow_bytes(
        profile, width, flow, num_parts, values_codec=values_codec, gradients_codec=gradients_codec
    )
    return bytes_moved / link + gathered * width * 4 / topology.memory_bytes_per_s


def choose_flow(
    profile: TableProfile,
    width: int,
    num_parts: int,
    topology: Topology,
    allowed: Sequence[Flow] = ("rows", "pooled"),
    *,
    values_codec: Codec = "fp32",
    gradients_codec: Codec = "fp32",
) -> tuple[Flow, str]:
    """The faster flow of those allowed, and why."""
    if profile.needs_rows or "pooled" not in allowed:
        return "rows", "rows are read one by one" if profile.needs_rows else "the only flow allowed"
    if "rows" not in allowed:
        return "pooled", "the only flow allowed"
    codecs: dict[str, Codec] = {"values_codec": values_codec, "gradients_codec": gradients_codec}
    flows: tuple[Flow, Flow] = ("rows", "pooled")
    rows_s, pooled_s = (flow_seconds(profile, width, flow, num_parts, topology, **codecs) for flow in flows)
    rows, pooled = (flow_bytes(profile, width, flow, num_parts, **codecs) for flow in flows)
    why = f"{rows:.0f} bytes of rows, {pooled:.0f} of partial sums per rank and step"
    return ("pooled" if pooled_s < rows_s else "rows"), why


def table_seconds(
    spec: TableSpec,
    profile: TableProfile,
    topology: Topology,
    *,
    num_pieces: int,
    flow: Flow = "rows",
    num_parts: int = 1,
    values_codec: Codec = "fp32",
    gradients_codec: Codec = "fp32",
    weights: CostWeights | None = None,
) -> float:
    """Seconds per step that a table or column block costs its owners, all together.

    Args:
        num_pieces: workers that own a part of it.
        num_parts: as of ``flow_bytes``.
    """
    factors = weights or CostWeights()
    world_size, per_host = topology.world_size, topology.workers_per_host
    rows = world_size * (profile.num_unique if flow == "rows" else profile.num_ids)
    memory = factors.memory * rows * spec.row_bytes / topology.memory_bytes_per_s
    codecs: dict[str, Codec] = {"values_codec": values_codec, "gradients_codec": gradients_codec}
    sent = flow_bytes(profile, spec.embedding_dim, flow, num_parts, **codecs)
    if spec.shares_statistic:
        # S7: sums of squares go round between the owners of a row's column blocks.
        sent += 8 * profile.num_unique
    link = (per_host - 1) * sent / topology.local_bytes_per_s
    link += (world_size - per_host) * sent / topology.network_bytes_per_s
    return memory + factors.link * link + factors.piece_s * num_pieces
