"""What all ranks must agree on before their first step in a view, and the first thing in which they do not.

Only the hash of a rank's facts (``facts``) travels, in one header; texts are exchanged where it differs, so agreement
costs one small collective whatever the number of tables.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from shoal.kernels.errors import ConfigError, ProtocolError
from shoal.kernels.exchange import Exchange
from shoal.kernels.facts import Facts, first_difference, shown
from shoal.kernels.frame import Kind
from shoal.kernels.transport import name_ranks


def rarest_first(values: Sequence[str]) -> list[tuple[str, list[int]]]:
    """(value, its ranks); of values that are as rare, the one that comes up later is first."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return sorted(ranks.items(), key=lambda item: (len(item[1]), -item[1][0]))


def describe_difference(path: str, values: Sequence[str]) -> str:
    """Who says what about ``path``: the value of each rank, the rarest first."""
    found = rarest_first(values)
    says = "; ".join(f"{name_ranks(who)} {'has' if len(who) == 1 else 'have'} {value}" for value, who in found[:4])
    more = f"; and {len(found) - 4} other values" if len(found) > 4 else ""
    return f"{path}: {says}{more}"


def agree(exchange: Exchange, step: int, hash_value: int, describe: Callable[[], Facts], timeout_s: float) -> None:
    """Compare all ranks' facts, collectively; returns where they are equal.

    Args:
        exchange: of all ranks, whose identity says nothing that the facts say: a disagreement there has no names.
        hash_value: of this rank's facts, 63 bits.
        describe: the facts; called only where hashes differ.
        timeout_s: patience for the other ranks.

    Raises the same ConfigError on all ranks, naming the first fact that differs, its value on each rank and the ranks.
    """
    headers = exchange.header(Kind.AGREE, step, control=hash_value, timeout_s=timeout_s)
    if len(set(headers.control.tolist())) == 1:
        return
    facts = describe()
    first = _facts_of_rank_0(exchange, step, facts, timeout_s)
    index = first_difference(first, facts)
    own = facts[index] if 0 <= index < len(facts) else ("", "nothing")
    path = first[index][0] if 0 <= index < len(first) else own[0]
    # A fact of another name at this place is named itself.
    detail = shown(own[1]) if own[0] in ("", path) else shown(f"{own[0]} = {own[1]}")
    answers = exchange.header(Kind.AGREE, step, control=index, detail=f"{detail}\n{path}", timeout_s=timeout_s)
    indices = answers.control.tolist()
    differing = [at for at in indices if at >= 0]
    if not differing:
        raise ProtocolError(f"ranks differ in what they hash, not in what they say: {headers.control.tolist()}")
    at = min(differing)
    texts = [text.partition("\n") for text in answers.details]
    common = shown(first[at][1]) if at < len(first) else "nothing"
    name = first[at][0] if at < len(first) else texts[indices.index(at)][2]
    values = [texts[rank][0] if mine == at else common for rank, mine in enumerate(indices)]
    error = ConfigError(
        f"the ranks do not agree before step {step}. {describe_difference(name, values)}. All ranks need the same job, "
        "code, model and library versions"
    )
    error.is_origin = exchange.identity.rank in rarest_first(values)[0][1]
    raise error


def _facts_of_rank_0(exchange: Exchange, step: int, facts: Facts, timeout_s: float) -> Facts:
    """Rank 0's facts, on all ranks."""
    rank, world = exchange.identity.rank, exchange.identity.world_size
    payload = zlib.compress("\1".join(f"{path}\0{value}" for path, value in facts).encode())
    out = np.zeros((1, world), np.int64)
    if rank == 0:
        out[0, 1:] = len(payload)
    headers = exchange.header(Kind.AGREE, step, sections=out, timeout_s=timeout_s)
    round_ = exchange.round(Kind.AGREE, step, out, headers.section_bytes)
    if rank == 0:
        for address in round_.send_addresses[0, 1:]:
            ctypes.memmove(int(address), payload, len(payload))
    sources = round_.run(timeout_s=timeout_s)
    if rank == 0:
        return facts
    data = ctypes.string_at(int(sources[0, 0]), int(headers.section_bytes[0, 0]))
    text = zlib.decompress(data).decode()
    pairs = [line.partition("\0") for line in text.split("\1")] if text else []
    return tuple((path, value) for path, _, value in pairs)
