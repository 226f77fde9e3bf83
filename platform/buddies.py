"""Who holds the copies of whose row blocks (PROTOCOLS F5). Pure.

Invariants, asserted by number in the test:
1. With two hosts or more, every rank's buddy is on another host; on one host it is another rank; alone, nobody.
2. No rank holds copies for more ranks than the hosts' sizes force: max over hosts of ceil(n / (W - n)), at least 1.
3. A buddy that is still allowed stays, unless (2) needs its place.
4. Hosts of equal size are paired, so that the loss of two hosts that are no pair loses nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence


def plan_buddies(hosts: Sequence[str], kept: Sequence[int | None] = ()) -> tuple[int, ...]:
    """The buddy of every rank.

    Ranks are matched to holders, at most (2) each, by augmenting paths; a full matching exists, because the ranks of
    one host may use all other hosts and the ranks of two hosts may use all.

    Args:
        hosts: host of every rank.
        kept: for every rank the rank that holds its copies already, or None; may be shorter.

    Returns: one rank per rank; empty for a world of one. Complexity: O(W^2 log W), more only where ranks must make way.
    """
    world_size = len(hosts)
    if world_size < 2:
        return ()
    return _Matching(hosts if len(set(hosts)) > 1 else [str(rank) for rank in range(world_size)], kept).solve()


class _Matching:
    def __init__(self, hosts: Sequence[str], kept: Sequence[int | None]) -> None:
        self.hosts = hosts
        sizes = Counter(hosts)
        world_size = len(hosts)
        self.wards_max = max(-(-size // (world_size - size)) for size in sizes.values())
        self.buddies = [-1] * world_size
        self.wards: list[set[int]] = [set() for _ in range(world_size)]
        for rank, buddy in enumerate(kept):
            is_allowed = buddy is not None and hosts[buddy] != hosts[rank]
            if buddy is not None and is_allowed and len(self.wards[buddy]) < self.wards_max:
                self.buddies[rank] = buddy
                self.wards[buddy].add(rank)
        self.partners = self._pair_hosts(sizes)

    def solve(self) -> tuple[int, ...]:
        for rank, buddy in enumerate(self.buddies):
            if buddy < 0:
                self._place(rank)
        return tuple(self.buddies)

    def _pair_hosts(self, sizes: Counter[str]) -> dict[str, str]:
        """Host -> the host that should hold its copies: where most of them are already, else one of its size."""
        partners: dict[str, str] = {}
        for host in sizes:
            held = Counter(self.hosts[b] for r, b in enumerate(self.buddies) if b >= 0 and self.hosts[r] == host)
            if held:
                partners[host] = max(held, key=lambda other: (held[other], other))
        first = {host: rank for rank, host in reversed(list(enumerate(self.hosts)))}
        order = sorted(sizes, key=lambda host: (-sizes[host], first[host]))
        free = [host for host in order if host not in partners]
        unclaimed = [host for host in order if host not in set(partners.values())]
        for host in free:
            if host in partners:
                continue
            # Whoever keeps its copies with this host is its natural partner; then a host that is as free as this one.
            back = [other for other, partner in partners.items() if partner == host and other in unclaimed]
            both = [other for other in free if other != host and other not in partners and other in unclaimed]
            options = back or both or [other for other in order if other != host]
            partners[host] = options[0]
            if not back and both and host in unclaimed:
                partners[options[0]] = host
                unclaimed.remove(host)
            if options[0] in unclaimed:
                unclaimed.remove(options[0])
        return partners

    def _candidates(self, ward: int) -> list[int]:
        partner = self.partners[self.hosts[ward]]
        others = (rank for rank, host in enumerate(self.hosts) if host != self.hosts[ward])
        return sorted(others, key=lambda rank: (self.hosts[rank] != partner, len(self.wards[rank]), rank))

    def _place(self, rank: int) -> None:
        """Give ``rank`` a buddy; where all it may use are full, one of their wards moves on (breadth first)."""
        reached_from: dict[int, int] = {}
        queue = deque([rank])
        while queue:
            ward = queue.popleft()
            for holder in self._candidates(ward):
                if holder in reached_from:
                    continue
                reached_from[holder] = ward
                if len(self.wards[holder]) < self.wards_max:
                    self._shift(holder, reached_from)
                    return
                queue.extend(sorted(self.wards[holder]))
        raise AssertionError("a holder with room always exists")

    def _shift(self, holder: int, reached_from: dict[int, int]) -> None:
        while holder >= 0:
            ward = reached_from[holder]
            previous = self.buddies[ward]
            self.buddies[ward] = holder
            self.wards[holder].add(ward)
            if previous >= 0:
                self.wards[previous].discard(ward)
            holder = previous
