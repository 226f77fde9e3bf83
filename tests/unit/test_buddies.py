"""Buddies are on other hosts, evenly, and stay where they may (F5); invariants by number."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.platform.buddies import plan_buddies

HOSTS = st.lists(st.sampled_from("ABCDE"), min_size=1, max_size=12)


def check(hosts: list[str], buddies: tuple[int, ...]) -> None:
    world_size = len(hosts)
    if world_size == 1:
        assert buddies == ()  # 1
        return
    assert len(buddies) == world_size
    for rank, buddy in enumerate(buddies):
        assert 0 <= buddy < world_size and buddy != rank  # 1
        assert len(set(hosts)) == 1 or hosts[buddy] != hosts[rank]  # 1
    sizes = Counter(hosts) if len(set(hosts)) > 1 else Counter(range(world_size))
    forced = max(-(-size // (world_size - size)) for size in sizes.values())
    assert max(Counter(buddies).values()) <= max(1, forced)  # 2


@settings(max_examples=300, deadline=None)
@given(hosts=HOSTS, data=st.data())
def test_buddies_hold_their_invariants_for_any_hosts_and_any_past(hosts, data):
    ranks = st.none() | st.integers(0, len(hosts) - 1)
    kept = data.draw(st.lists(ranks, max_size=len(hosts)))
    buddies = plan_buddies(hosts, kept)
    check(hosts, buddies)
    assert plan_buddies(hosts, buddies) == buddies  # 3: all are allowed, so all stay
    assert plan_buddies(hosts, kept) == buddies


@pytest.mark.parametrize("hosts", ["AABB", "ABAB", "AABBCCDD", "ABCD", "AAABBB", "AABCDBCD"])
def test_hosts_of_equal_size_are_paired(hosts):
    buddies = plan_buddies(list(hosts))
    pairs = {(hosts[rank], hosts[buddy]) for rank, buddy in enumerate(buddies)}
    assert all((other, host) in pairs for host, other in pairs)  # 4
    assert len(pairs) == len(set(hosts))
    assert max(Counter(buddies).values()) == 1


@pytest.mark.parametrize(("hosts", "most"), [("AB", 1), ("AAB", 2), ("AAAB", 3), ("AAABBC", 1), ("AAAABB", 2)])
def test_ragged_hosts_share_the_copies_as_evenly_as_they_can(hosts, most):
    """S8's shapes: 1+1, 2+1, 3+1, 3+2+1, and one more."""
    buddies = plan_buddies(list(hosts))
    check(list(hosts), buddies)
    assert max(Counter(buddies).values()) == most


def test_ranks_of_one_host_keep_copies_for_each_other():
    assert plan_buddies(["A", "A"]) == (1, 0)
    check(["A"] * 5, plan_buddies(["A"] * 5))
    assert plan_buddies(["A"]) == () == plan_buddies([])


def test_a_new_host_changes_one_buddy_and_its_own():
    before = plan_buddies(["A", "B"])
    after = plan_buddies(["A", "B", "C"], before)
    assert sum(a != b for a, b in zip(before, after)) == 1  # 3: somebody must keep copies for the new one in turn
    check(["A", "B", "C"], after)


def test_many_ranks_are_planned_in_reasonable_time():
    hosts = [f"h{rank // 8}" for rank in range(512)]
    buddies = plan_buddies(hosts)
    check(hosts, buddies)
    assert plan_buddies([*hosts, "new"], buddies)[:512].count(-1) == 0
