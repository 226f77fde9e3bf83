"""Hosts that the user names: a worker's host is the value of a Ray node label, a rack's for instance. Pure.

Labels belong to nodes, so a host given in this way is one node or several, never a part of one: copies on another host
are on another machine. Memory is shared between workers of one machine all the same (``actors/groups``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.kernels.errors import ConfigError

_PREFIX = "label:"


def host_label(hosts: str) -> str | None:
    """The label that ``scaling.hosts`` names; empty for ``auto``; None where it is neither."""
    if hosts == "auto":
        return ""
    name = hosts.removeprefix(_PREFIX)
    return name if hosts.startswith(_PREFIX) and name and name == name.strip() else None


def nodes_without(label: str, nodes: Iterable[Mapping[str, Any]]) -> set[str]:
    """Ids of the nodes (as ``ray.nodes`` lists them) that lack the label: no worker can be there."""
    return {node["NodeID"] for node in nodes if label and not (node.get("Labels") or {}).get(label)}


def check_label(label: str, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError naming the labels there are where no living node has ``label``."""
    alive = [node for node in nodes if node.get("Alive", True)]
    if not label or len(nodes_without(label, alive)) < len(alive):
        return
    known = sorted({name for node in alive for name in node.get("Labels") or {}})
    raise ConfigError(
        f"scaling.hosts is {_PREFIX}{label}, but none of the cluster's {len(alive)} nodes has that label; they have "
        f"{', '.join(known) or 'none'}. Start nodes with ray start --labels {label}=NAME"
    )
