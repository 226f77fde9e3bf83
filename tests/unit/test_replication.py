"""Replicator: copies follow their owner bit for bit, move at a cutover, and bring a failed world back (V, F, C)."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from replicas import (
    Peer,
    all_keys,
    assert_copy,
    columns_of,
    is_synced,
    make_tables,
    make_view,
    peers,
    snapshot_all,
    start,
    until,
)

from shoal.actors import shipping
from shoal.actors.messages import BlockSet
from shoal.kernels.errors import ExchangeTimeoutError, PeerError, ProtocolError


def two(a: Peer, b: Peer, **options):
    return make_view([a.place, b.place], [0, 0, 1, 1], [1, 0], **options)


def test_buddies_hold_every_block_bit_for_bit_after_each_snapshot_f3():
    with peers("a", "b") as (a, b):
        view = two(a, b)
        start(view, [a, b])
        for _ in range(4):
            for peer in (a, b):
                peer.train(num_steps=3)
            step = snapshot_all([a, b])
            until(lambda step=step: all(c.steps == (step,) for p in (a, b) for c in p.repl.copies.versions()), "folds")
            assert_copy(b, a, view.owned_by(0))
            assert_copy(a, b, view.owned_by(1))
            assert b.repl.held_aux("a", step) == f"a@{step}".encode()
            assert a.repl.snapshots == (step,)
        assert a.repl.unprotected_bytes == 0
        assert a.repl.counters()["checksum_failures"] == 0


def test_staged_changes_wait_until_their_step_is_protected_f3():
    with peers("a", "b") as (a, b):
        view = two(a, b)
        start(view, [a, b])
        before = [b.rows(*key) for key in b.repl.copies.keys_of(view.owned_by(0))]
        for peer in (a, b):
            peer.train()
        step = snapshot_all([a, b], protect=False)
        (copies,) = b.repl.copies.versions()
        assert copies.steps == (0, step)
        assert [b.rows(*key) for key in b.repl.copies.keys_of(view.owned_by(0))] == before
        assert b.repl.counters()["staged_bytes"] > 0
        b.repl.protect(step)
        until(lambda: b.repl.counters()["staged_bytes"] == 0, "fold")
        assert_copy(b, a, view.owned_by(0))


def test_roll_back_restores_own_rows_and_copies_and_is_idempotent_f4():
    with peers("a", "b") as (a, b):
        view = two(a, b)
        start(view, [a, b])
        for peer in (a, b):
            peer.train(num_steps=2)
        step = snapshot_all([a, b])
        frozen = {(p.worker_id, key): p.rows(*key) for p in (a, b) for key in all_keys(p.tables)}
        for peer in (a, b):
            peer.train(num_steps=2)
        snapshot_all([a, b], protect=False)
        for peer in (a, b):
            peer.train()
            peer.repl.park()
        assert a.repl.holdings().snapshots == (step, step + 2)
        again = two(a, b, epoch=2)
        for _ in range(2):
            for peer in (a, b):
                peer.repl.expect(again)
                peer.repl.roll_back(step)
        until(lambda: all(c.steps == (step,) for p in (a, b) for c in p.repl.copies.versions()), "copies")
        now = {(p.worker_id, key): p.rows(*key) for p in (a, b) for key in all_keys(p.tables)}
        for key in frozen:
            if key[0] == "a" and a.store.owns(*key[1]):
                assert now[key] == frozen[key]
        assert_copy(b, a, view.owned_by(0))
        assert b.repl.held_aux("a", step) is not None
        assert b.repl.held_aux("a", step + 2) is None
        # The recovered view goes on: the buddies' copies are known to be at ``step``, so no base is sent again.
        for peer in (a, b):
            peer.repl.set_view(again, again.rank_of(peer.worker_id), step)
            peer.step = step
        until(lambda: is_synced(a) and is_synced(b), "in sync")
        assert a.repl.counters()["base_rows"] == 0
        for peer in (a, b):
            peer.train()
        snapshot_all([a, b])
        until(lambda: b.repl.counters()["staged_bytes"] == 0, "fold")
        assert_copy(b, a, again.owned_by(0))


def test_a_rank_without_blocks_counts_its_steps_from_the_target_again_f4():
    """As many workers as blocks, or more, leave some without; they train on like the others."""
    with peers("a", "b") as (a, b):
        start(make_view([a.place, b.place], [0, 0, 0, 0], [1, 0]), [a, b])
        for peer in (a, b):
            peer.train(num_steps=2)
        step = snapshot_all([a, b])
        again = make_view([a.place, b.place], [0, 0, 0, 0], [1, 0], epoch=2)
        for peer in (a, b):
            peer.train(num_steps=3)
            peer.repl.park()
            peer.repl.expect(again)
            peer.repl.roll_back(step)
            peer.step = step
            peer.train(num_steps=3)


def test_a_joiner_counts_its_steps_from_the_cutover_whatever_it_tried_before_f4():
    """A recovery to step 9 that was given up; the next one went back to a checkpoint, without this worker."""
    with peers("a") as (a,):
        view = make_view([a.place], [0, 0, 0, 0])
        a.repl.expect(view)
        a.repl.roll_back(9)
        a.repl.park()
        a.repl.count_from(4)
        a.own(view)
        a.step = 4
        a.train()


def grow(a: Peer, b: Peer, c: Peer, **options):
    """The view after ``two``: block 1 and 3 move to c; c's buddy is a, a's is b, b's is c."""
    return make_view([a.place, b.place, c.place], [0, 2, 1, 2], [1, 2, 0], epoch=2, **options)


def prepare_all(view, members, *, rounds: int = 2) -> None:
    """Prepare ``view`` on the members of the old one, with snapshots as long as some member wants them (V2)."""
    for peer in members:
        peer.repl.prepare(view)
    for _ in range(50):
        progress = [(p.repl.progress(), p.repl._preparing) for p in members]
        if all(made.is_ready and (not channels or made.rounds >= rounds) for made, channels in progress):
            return
        until(lambda: any(p.repl.wants_haste for p in members), "bases")
        for peer in members:
            peer.train()
        snapshot_all(members)
        for peer in members:
            until(lambda peer=peer: all(c.acked >= peer.step or not c.is_in_sync for c in peer.repl._channels()))
    raise AssertionError([p.repl.progress() for p in members])


def cut_over_all(view, old, members, *, aux: str = "aux"):
    """The cutover of all members of the old view, each in a thread of its own, then flip and decide."""
    step = old[0].step
    errors = []

    def run(peer: Peer) -> None:
        try:
            peer.repl.cut_over(step, view, f"{peer.worker_id}@{step}".encode(), 10.0)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(peer,)) for peer in old]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if errors:
        raise errors[0]
    for joiner in members:
        if joiner not in old:
            joiner.repl.receive(view.held_by(view.rank_of(joiner.worker_id)), step, wants_dense=False, timeout_s=5)
            joiner.step = step
    for peer in {*old, *members}:
        peer.repl.flip(view, view.rank_of(peer.worker_id), step)
    for peer in members:
        peer.repl.set_view(view, view.rank_of(peer.worker_id), step, b"x")
    # A copy that stays where it was folds its last changes beside training (F3).
    until(lambda: all(peer.repl.counters()["staged_bytes"] == 0 for peer in members), "folds after the cutover")
    return step


def test_growth_moves_blocks_to_a_joiner_and_its_buddy_beside_training_v2_v4():
    with peers("a", "b", "c") as (a, b, c):
        old = two(a, b)
        start(old, [a, b])
        for peer in (a, b):
            peer.train(num_steps=3)
        snapshot_all([a, b])
        new = grow(a, b, c)
        c.repl.expect(new)
        prepare_all(new, [a, b])
        for peer in (a, b):
            peer.train()
        expected = {key: (a if a.store.owns(*key) else b).rows(*key) for key in all_keys(a.tables)}
        step = cut_over_all(new, [a, b], [a, b, c])
        for rank, peer in enumerate((a, b, c)):
            assert {k for k in all_keys(peer.tables) if peer.store.owns(*k)} == set(
                peer.repl.copies.keys_of(new.owned_by(rank))
            )
            for key in peer.repl.copies.keys_of(new.held_by(rank)):
                assert peer.rows(*key) == expected[key]
        for peer in (a, b, c):
            until(lambda peer=peer: is_synced(peer), "sync after cutover")
            assert peer.repl.counters()["base_rows"] == 0, "the new buddies had everything at the cutover"
            assert peer.repl.unprotected_bytes == 0
        assert b.repl.held_aux("a", step) == b"x" or b.repl.held_aux("a", step) == f"a@{step}".encode()
        for peer in (a, b, c):
            peer.repl.release(new, new.rank_of(peer.worker_id))
            held = {k for k in all_keys(peer.tables) if peer.store.holds(*k)}
            assert held == set(peer.repl.copies.keys_of(new.held_by(new.rank_of(peer.worker_id))))
        for peer in (a, b, c):
            peer.train()
        snapshot_all([a, b, c])
        until(lambda: all(p.repl.counters()["staged_bytes"] == 0 for p in (a, b, c)), "folds")
        assert_copy(a, c, new.owned_by(2))
        assert_copy(c, b, new.owned_by(1))
        assert_copy(b, a, new.owned_by(0))


def test_a_leaver_hands_its_blocks_over_and_its_metrics_to_rank_0():
    with peers("a", "b", "c") as (a, b, c):
        old = make_view([a.place, b.place, c.place], [0, 1, 2, 2], [1, 2, 0])
        start(old, [a, b, c])
        for peer in (a, b, c):
            peer.train()
        snapshot_all([a, b, c])
        new = make_view([a.place, b.place], [0, 1, 1, 0], [1, 0], epoch=2)
        for peer in (a, b):
            peer.repl.expect(new)
        prepare_all(new, [a, b, c])
        for peer in (a, b, c):
            peer.train()
        expected = {key: next(p for p in (a, b, c) if p.store.owns(*key)).rows(*key) for key in all_keys(a.tables)}
        step = cut_over_all(new, [a, b, c], [a, b])
        assert dict(a.repl.aux_for_merge(step)) == {"c": f"c@{step}".encode()}
        for rank, peer in enumerate((a, b)):
            for key in peer.repl.copies.keys_of(new.held_by(rank)):
                assert peer.rows(*key) == expected[key]
        assert not any(c.store.owns(*key) for key in all_keys(c.tables))
        assert all(c.rows(*key) == expected[key] for key in c.repl.copies.keys_of(old.owned_by(2)))


def test_parking_after_a_flip_gives_back_the_decided_views_blocks_v4():
    with peers("a", "b") as (a, b):
        old = two(a, b)
        start(old, [a, b])
        for peer in (a, b):
            peer.train()
        snapshot_all([a, b])
        new = make_view([a.place, b.place], [1, 0, 0, 1], [1, 0], epoch=2)
        prepare_all(new, [a, b])
        for peer in (a, b):
            peer.train()
        step = a.step
        before = {(p.worker_id, key): p.rows(*key) for p in (a, b) for key in all_keys(p.tables) if p.store.owns(*key)}
        threads = [threading.Thread(target=p.repl.cut_over, args=(step, new, b"", 5.0)) for p in (a, b)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        for peer in (a, b):
            peer.repl.flip(new, new.rank_of(peer.worker_id), step)
        assert a.store.owns(0, 2)
        assert not a.store.owns(0, 0)
        for peer in (a, b):
            peer.repl.park()
            assert peer.repl.holdings().owned == old.owned_by(old.rank_of(peer.worker_id))
            again = two(a, b, epoch=3)
            peer.repl.expect(again)
            peer.repl.roll_back(step)
        for (worker, key), rows in before.items():
            assert (a if worker == "a" else b).rows(*key) == rows
        for peer in (a, b):
            peer.repl.set_view(again, again.rank_of(peer.worker_id), step)
        until(lambda: is_synced(a) and is_synced(b), "sync")
        assert_copy(b, a, again.owned_by(0))


def test_a_dead_owners_blocks_come_from_its_buddy_and_reach_a_replacement_f4():
    with peers("a", "b", "c") as (a, b, c):
        old = two(a, b)
        start(old, [a, b])
        for peer in (a, b):
            peer.train(num_steps=2)
        step = snapshot_all([a, b])
        expected = {key: (a if a.store.owns(*key) else b).rows(*key) for key in all_keys(a.tables)}
        for peer in (a, b):
            peer.train()
        snapshot_all([a, b], protect=False)
        a.repl.close()
        b.train()
        b.repl.park()
        assert b.repl.holdings().aux["a"] == (step, step + 1)
        new = make_view([c.place, b.place], [0, 0, 1, 1], [1, 0], epoch=2)
        target = step
        c.repl.expect(new)
        b.repl.expect(new)
        b.repl.roll_back(target)
        c.repl.roll_back(target)
        aux = b.repl.held_aux("a", target)
        received = []
        wanted = new.owned_by(0)
        thread = threading.Thread(
            target=lambda: received.append(
                c.repl.receive(wanted, target, wants_dense=True, wants_aux=["a"], timeout_s=10)
            )
        )
        thread.start()
        b.repl.ship(new.members[0], 2, target, wanted, dense=b"d" * 50_000_000, aux={"a": aux})
        thread.join(10)
        assert received[0].dense == b"d" * 50_000_000
        assert received[0].aux == {"a": b"a@2"}
        for rank, peer in enumerate((c, b)):
            peer.repl.flip(new, rank, target)
            peer.repl.set_view(new, rank, target, b"aux")
            peer.step = target
        for key in all_keys(a.tables):
            assert (c if c.store.owns(*key) else b).rows(*key) == expected[key]
        until(lambda: is_synced(b) and is_synced(c) and b.repl.unprotected_bytes == 0, "unprotected bases")
        assert_copy(c, b, new.owned_by(1))
        assert_copy(b, c, new.owned_by(0))
        for peer in (b, c):
            peer.train()
        snapshot_all([b, c])
        until(lambda: b.repl.counters()["staged_bytes"] == 0, "fold")
        assert_copy(b, c, new.owned_by(0))


def test_a_copy_that_is_not_what_its_owner_says_is_dropped_and_sent_again_v4(caplog):
    with peers("a", "b") as (a, b):
        view = two(a, b)
        start(view, [a, b])
        for peer in (a, b):
            peer.train(num_steps=2)
        snapshot_all([a, b])
        until(lambda: b.repl.counters()["staged_bytes"] == 0, "fold")
        # Damage a row of the copy that the next step changes as well.
        a.train(deletes=False)
        b.train(deletes=False)
        changed = a.store.export_block(0, 0)
        damaged = b.store.export_block(0, 0)
        both = [i for i, id_ in enumerate(damaged.ids.tolist()) if id_ in set(changed.ids.tolist())]
        damaged.weights[both] += 1
        b.store.import_block(0, 0, damaged)
        snapshot_all([a, b])
        until(lambda: b.repl.counters()["checksum_failures"] == 1, "detection")
        for peer in (a, b):
            peer.train()
        snapshot_all([a, b])
        until(lambda: a.repl.counters()["resent_blocks"] == 1 and is_synced(a), "the base is sent again")
        for peer in (a, b):
            peer.train()
        snapshot_all([a, b])
        until(lambda: b.repl.counters()["staged_bytes"] == 0, "fold")
        assert_copy(b, a, view.owned_by(0))


def test_an_aborted_preparation_leaves_nothing_at_the_targets_v1():
    with peers("a", "b") as (a, b):
        old = two(a, b, epoch=1)
        old = make_view([a.place, b.place], [0, 0, 1, 1], epoch=1)
        start(old, [a, b])
        for peer in (a, b):
            peer.train()
        new = make_view([a.place, b.place], [1, 0, 1, 0], epoch=2)
        for peer in (a, b):
            peer.repl.expect(new)
        prepare_all(new, [a, b])
        assert b.store.is_replica(0, 0)
        for peer in (a, b):
            peer.repl.cancel_prepare(2)
        assert not any(b.store.is_replica(*key) for key in all_keys(b.tables))
        assert not b.repl.progress().is_ready
        for peer in (a, b):
            peer.train()
        snapshot_all([a, b])


def test_a_prepared_target_that_dies_fails_the_cutover_and_the_old_view_goes_on():
    with peers("a", "b", "c", timeout_s=1.0) as (a, b, c):
        old = two(a, b)
        start(old, [a, b])
        for peer in (a, b):
            peer.train()
        snapshot_all([a, b])
        new = grow(a, b, c)
        c.repl.expect(new)
        prepare_all(new, [a, b])
        c.repl.close()
        for peer in (a, b):
            peer.train()
        with pytest.raises((PeerError, ExchangeTimeoutError)):
            cut_over_all(new, [a, b], [a, b])
        for peer in (a, b):
            peer.repl.cancel_prepare(2)
            peer.train()
        snapshot_all([a, b])
        until(lambda: b.repl.counters()["staged_bytes"] == 0, "fold")
        assert_copy(b, a, old.owned_by(0))


def test_a_dead_buddy_leaves_snapshots_unacknowledged_and_is_no_error_of_training():
    with peers("a", "b", timeout_s=1.0) as (a, b):
        view = two(a, b)
        start(view, [a, b])
        b.repl.close()
        a.train()
        a.repl.snapshot(a.step, b"")
        until(lambda: a.repl._buddy.error, "the channel's error")
        assert a.repl.acked == 0
        assert a.repl.snapshots == (0, a.step)


def test_a_joiner_without_all_blocks_is_told_which_are_missing():
    with peers("a", "b") as (a, b):
        view = two(a, b)
        a.repl.expect(view)
        with pytest.raises(ExchangeTimeoutError, match=r"did not reach step 3.*a/0"):
            a.repl.receive(view.owned_by(0), 3, wants_dense=False, timeout_s=0.05)
        with pytest.raises(ProtocolError, match="no copy here at step 3"):
            a.repl.flip(view, 0, 3)
        a.repl.flip(view, 0, 3, from_storage=view.owned_by(0))
        assert a.store.owns(0, 0)
        assert a.store.num_rows() == 0


def test_bins_of_a_worker_that_left_are_kept_until_a_later_snapshot_is_protected_f3():
    with peers("a", "b") as (a, b):
        view = two(a, b)
        start(view, [a, b])
        step = a.repl.last_snapshot
        a.repl.ship(view.members[1], view.epoch, step, aux={"gone": b"bins"}, is_kept=True)
        assert b.repl.holdings().aux["gone"] == (step,) and b.repl.held_aux("gone", step) == b"bins"
        assert "gone" not in b.repl.aux_for_merge(step)
        for peer in (a, b):
            peer.train(num_steps=2)
        snapshot_all([a, b])
        until(lambda: b.repl.held_aux("gone", step) is None, "it is let go")


def test_messages_of_other_epochs_and_of_non_members_are_refused_f7():
    with peers("a", "b", timeout_s=1.0) as (a, b):
        view = two(a, b)
        start(view, [a, b])
        with pytest.raises(PeerError, match="epoch 7"):
            a.repl.ship(view.members[1], 7, 0, BlockSet.of({"a": [0]}))
        with peers("z", timeout_s=1.0) as (z,), pytest.raises(PeerError, match="z is no member"):
            z.repl.ship(view.members[1], 1, 0, aux={"z": b""})
        assert b.repl.counters()["refused"] >= 2


def test_a_base_taken_beside_training_equals_the_cut_bit_for_bit_c1():
    """Bases and rounds while a thread trains without a break, in blocks of several pieces."""
    tables = make_tables(num_blocks=2, dim=64, names="a")
    with peers("a", "b", tables=tables) as (a, b):
        old = make_view([a.place, b.place], [0, 0], epoch=1, names="a")
        start(old, [a, b])
        a.train(num_ids=150_000, deletes=False)
        new = make_view([a.place, b.place], [1, 0], epoch=2, names="a")
        b.repl.expect(new)
        a.repl.snapshot(a.step, b"")
        a.repl.prepare(new)
        frozen = {}
        while not (a.repl.progress().is_ready and a.repl.progress().rounds >= 3):
            a.train(num_ids=2_000)
            if a.step % 5 == 0 and a.repl.wants_haste and a.repl._preparing["b"].acked >= a.repl.last_snapshot:
                a.repl.protect(a.repl.last_snapshot)
                a.repl.snapshot(a.step, b"")
                frozen[a.step] = columns_of(a.repl.shelf.get(a.step).cut.export_block(0, 0))
            assert a.step < 5_000
        newest = a.repl.last_snapshot
        until(lambda: b.repl.copies.can_reach((0, 0), newest), "the newest snapshot")
        until(lambda: b.repl.counters()["staged_bytes"] == 0, "a copy of a view to come folds at once")
        assert b.rows(0, 0) == frozen[newest]
        assert a.repl.progress().bytes_moved > 40_000_000


def test_blocks_read_from_storage_are_no_copies_until_their_view_is_decided_f4():
    with peers("a", "b") as (a, b):
        view = two(a, b)
        start(view, [a, b])
        for peer in (a, b):
            peer.train()
        step = snapshot_all([a, b])
        b.repl.close()
        a.repl.park()
        alone = make_view([a.place], [0, 0, 0, 0], epoch=2)
        a.repl.expect(alone)
        a.repl.roll_back(step)
        # Partial recovery: block 2 is lost and begins empty, block 3 comes from the copy.
        lost = BlockSet.of({"a": [2], "b": [2]})
        a.repl.flip(alone, 0, step, from_storage=lost)
        assert a.store.num_rows(0, 2) == 0
        a.repl.park()
        held = a.repl.holdings()
        assert held.owned == view.owned_by(0)
        assert {key for copies in held.copies for key in copies.blocks} == {("a", 3), ("b", 3)}
        a.repl.reset()
        assert len(a.repl.holdings().owned) == 0
        a.repl.flip(alone, 0, 0, from_storage=alone.owned_by(0))
        a.repl.park()
        assert a.repl.holdings().copies == ()
        assert len(a.repl.holdings().owned) == 0


def test_who_waits_for_the_dense_state_waits_for_leavers_metrics_too():
    with peers("a", "b") as (a, b):
        view = make_view([b.place], [0, 0, 0, 0], epoch=2)
        b.repl.expect(view)
        a.repl.ship(view.members[0], 2, 5, dense=b"dense", announces_aux=["a"])
        assert b.repl.dense_step() == 5
        with pytest.raises(ExchangeTimeoutError, match="aux:a of step 5"):
            b.repl.receive(BlockSet(), 5, wants_dense=True, timeout_s=0.05)
        a.repl.ship(view.members[0], 2, 5, aux={"a": b"bins"})
        received = b.repl.receive(BlockSet(), 5, wants_dense=True, timeout_s=5)
        assert (received.dense, received.aux) == (b"dense", {"a": b"bins"})
        assert b.repl.aux_for_merge(5) == {"a": b"bins"}
        b.repl.expect(make_view([b.place], [0, 0, 0, 0], epoch=3))
        assert b.repl.dense_step() == -1, "what an abandoned view sent is forgotten"


def test_abort_from_another_thread_ends_a_cutover_at_once_f1():
    with peers("a", "b", timeout_s=30.0) as (a, b):
        view = two(a, b)
        start(view, [a, b])
        for peer in (a, b):
            peer.train()
        snapshot_all([a, b])
        new = make_view([a.place, b.place], [1, 0, 0, 1], [1, 0], epoch=2)
        prepare_all(new, [a, b])
        a.train()
        errors = []

        def cut_over() -> None:
            try:
                a.repl.cut_over(a.step, new, b"", 30.0)
            except PeerError as error:
                errors.append(error)

        # b never comes to the boundary, so a waits for its changes.
        thread = threading.Thread(target=cut_over)
        thread.start()
        until(lambda: a.repl.last_snapshot == a.step, "the cutover has begun")
        a.repl.abort()
        thread.join(5)
        assert not thread.is_alive()
        assert errors
        a.repl.park()
        assert a.repl.holdings().snapshots[-1] == a.step


def test_snapshots_go_on_beside_a_slow_base_in_many_pieces_and_messages_stay_small(monkeypatch):
    """Blocks in sync advance with every snapshot while the pieces of another block's base are under way (V2, F5)."""
    piece_bytes = 2**16
    monkeypatch.setattr(shipping, "PIECE_BYTES", piece_bytes)
    tables = make_tables(num_blocks=2, dim=32, names="a")
    with peers("a", "b", tables=tables, bytes_per_s=3e6) as (a, b):
        sizes = []
        handler = b.repl._inbound.server._handler

        def record(message):
            sizes.append(message.payload.size)
            return handler(message)

        b.repl._inbound.server._handler = record
        view = make_view([a.place, b.place], [0, 0], [1, 0], names="a")
        a.repl.expect(view)
        b.repl.expect(view)
        a.own(view)
        a.train(num_ids=12_000, deletes=False)
        a.repl.set_view(view, 0, a.step)
        b.repl.set_view(view, 1, a.step)
        total = a.repl.unprotected_bytes
        assert total > 2_000_000
        snapshots = 0
        while a.repl.unprotected_bytes:
            a.train(num_ids=300)
            if a.repl.acked == a.repl.last_snapshot:
                a.repl.protect(a.repl.acked)
                b.repl.protect(a.repl.acked)
                a.repl.snapshot(a.step, b"")
                snapshots += 1
            assert a.step < 20_000
        assert snapshots > 3, "acknowledgements did not wait for the base"
        until(lambda: a.repl.acked == a.repl.last_snapshot)
        a.train()
        a.repl.snapshot(a.step, b"")
        until(lambda: a.repl.acked == a.step)
        b.repl.protect(a.step)
        until(lambda: b.repl.counters()["staged_bytes"] == 0, "fold")
        assert_copy(b, a, view.owned_by(0))
        assert max(sizes) < 2 * piece_bytes + 4096
        assert len(a.repl.snapshots) <= 3


def test_a_channel_that_lost_its_connection_goes_on_without_a_new_base_v2():
    with peers("a", "b") as (a, b):
        view = two(a, b)
        start(view, [a, b])
        for peer in (a, b):
            peer.train()
        snapshot_all([a, b])
        made = a.repl._buddy
        rows = made.counters.base_rows
        for _ in range(3):
            made._client.abort()  # as a broken link the client cannot mend
            for peer in (a, b):
                peer.train()
            snapshot_all([a, b])
        assert made.counters.base_rows == rows
        until(lambda: made.error is None, "the channel is well again")
        until(lambda: b.repl.counters()["staged_bytes"] == 0, "fold")
        assert_copy(b, a, view.owned_by(0))
