"""Incremental checkpoints: chains that add up whatever happened between their links (K2, K3, F4, faults 20, 25, 26)."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_fleet import TABLES, Fleet, assert_bit_equal, assert_saved, gathered, load, newest, reload

from shoal.actors.messages import SnapshotPart
from shoal.actors.restore import load_rows
from shoal.jobs.cli import main
from shoal.kernels.deletions import DeletionLog
from shoal.kernels.errors import CheckpointError
from shoal.kernels.packed import export_changes
from shoal.kernels.rowstore import RowStore
from shoal.platform import checkpoint
from shoal.platform.chain import CheckpointState, decide_base, merge_parts
from shoal.platform.checkpoint import decide_resume, list_checkpoints, verify_checkpoint
from shoal.platform.export import export_parquet
from shoal.platform.loadplan import plan_load
from shoal.platform.manifest import CheckpointName, Manifest
from shoal.platform.storage import Storage


def test_chain_holds_what_a_full_checkpoint_would_and_fewer_bytes(tmp_path: Path) -> None:
    """K3; also with another number of row blocks, and as Parquet."""
    fleet = Fleet(tmp_path, 2, seed=0)
    fleet.train(20)
    full = fleet.save()
    links = []
    for _ in range(3):
        fleet.train(1, deletes=5)
        links.append(fleet.save())
        assert_saved(fleet, 3)
    assert full.parent is None and [m.parent for m in links] == [str(m.name) for m in (full, *links[:2])]
    assert all(m.size_bytes < full.size_bytes for m in links)
    assert any(f.kind == "deleted" for f in links[0].files)
    fleet.train()
    assert fleet.save().parent is None  # full_every = 4
    checkpoint.discard(fleet.storage, newest(fleet.storage).name)
    last = newest(fleet.storage)
    assert last.name == links[-1].name
    expected = load(fleet.storage, last, 1)
    for factor in (2, 0.5):
        other = tuple(dataclasses.replace(t, num_blocks=int(t.num_blocks * factor)) for t in TABLES)
        loaded = load(fleet.storage, last, 3, other)
        for table in range(len(TABLES)):
            assert_bit_equal(gathered(loaded, table), gathered(expected, table))
    report = export_parquet(str(tmp_path), str(tmp_path / "out"))
    for table, exported in enumerate(report.tables):
        rows = gathered(expected, table)
        ids = [
            i for f in sorted((tmp_path / "out" / exported.path).iterdir()) for i in pq.read_table(f)["id"].to_pylist()
        ]
        assert sorted(ids) == rows.ids.tolist() and exported.num_rows == len(ids)
    vectors = pq.read_table(tmp_path / "out" / report.tables[0].path).to_pydict()
    by_id = dict(zip(vectors["id"], vectors["vector"]))
    rows = gathered(expected, 0)
    assert [by_id[i] for i in rows.ids.tolist()] == rows.weights.tolist()


@pytest.mark.parametrize("seed", range(12))
def test_chain_adds_up_after_any_history(tmp_path: Path, seed: int) -> None:
    """K2, K3: training, deletions, moves, rollbacks and reloads between the links, ranks that learn of a base late."""
    fleet = Fleet(tmp_path, 3, seed, full_every=5)
    rng = np.random.default_rng(1000 + seed)
    floor = 0  # a rollback never goes behind what is durable
    kinds = set()
    for _ in range(24):
        match rng.choice(["train", "train", "delete", "move", "back", "save", "save", "reload"]):
            case "train":
                fleet.train(int(rng.integers(1, 4)))
            case "delete":
                fleet.train(1, deletes=8)
            case "move":
                table = int(rng.integers(0, 2))
                fleet.move(table, int(rng.integers(0, TABLES[table].num_blocks)), int(rng.integers(0, 3)))
                fleet.new_epoch()
                floor = max(floor, fleet.step)  # what was imported cannot be undone
            case "back" if fleet.step > floor:
                fleet.roll_back(int(rng.integers(floor, fleet.step)))
            case "reload" if any(i.state is CheckpointState.COMPLETE for i in list_checkpoints(fleet.storage)):
                reload(fleet, newest(fleet.storage))
                floor = fleet.step
            case "save" if not any(
                i.name == CheckpointName(fleet.epoch, fleet.step) for i in list_checkpoints(fleet.storage)
            ):
                manifest = fleet.save(keep=2, set_base=False)
                kinds.add(manifest.parent is None)
                if rng.random() < 0.7:
                    fleet.set_base()
                else:
                    fleet.set_base(only=int(rng.integers(0, 3)))
                assert_saved(fleet, int(rng.integers(1, 4)))
                floor = fleet.step if rng.random() < 0.5 else floor
            case _:
                pass
    assert seed > 3 or kinds, seed


def test_steps_trained_again_after_a_rollback_are_in_the_next_increment(tmp_path: Path) -> None:
    """K3: the dirty set survives a rollback, also where the same step is reached by other values."""
    fleet = Fleet(tmp_path, 2, seed=3)
    fleet.train(10)
    base = fleet.save()
    fleet.train(3, deletes=6)
    name, parts = fleet.write_parts()  # a checkpoint of step 13 that never gets its manifest
    fleet.roll_back(11)
    with pytest.raises(CheckpointError, match=r"epoch 1 went on from step 11"):
        checkpoint.complete(fleet.storage, name, parts, TABLES, run="r", world_size=2)
    fleet.train(2, deletes=3)  # other draws: step 13 again, with other rows
    link = fleet.save()
    assert link.parent == str(base.name)
    assert_saved(fleet)


def test_checkpoint_of_a_left_history_is_never_a_parent(tmp_path: Path) -> None:
    """K2: its rows of the same steps have other values, which last_step alone could not tell."""
    fleet = Fleet(tmp_path, 2, seed=4)
    fleet.train(6)
    first = fleet.save()
    fleet.train(4)
    left = fleet.save()
    assert left.parent == str(first.name)
    fleet.roll_back(8)
    assert fleet.base == 6
    fleet.train(2)  # step 10 again
    link = fleet.save()
    assert link.name.step == left.name.step and link.parent == str(first.name)
    assert_saved(fleet)
    infos = list_checkpoints(fleet.storage)
    assert [i.state for i in infos] == [CheckpointState.COMPLETE, CheckpointState.ABANDONED, CheckpointState.COMPLETE]
    part = SnapshotPart(epoch=1, step=12, rank=0, files=(), since=10)
    assert merge_parts(CheckpointName(1, 12), [part], infos, TABLES)[1] == str(link.name)
    with pytest.raises(CheckpointError, match="builds on step 10, of which no checkpoint is left"):
        merge_parts(CheckpointName(1, 12), [part], [i for i in infos if i.name != link.name], TABLES)
    manifest = dataclasses.replace(link, name=CheckpointName(1, 11), parent=str(left.name), files=())
    with pytest.raises(CheckpointError, match=f"its parent {left.name} is not a complete checkpoint"):
        checkpoint.write_manifest(fleet.storage, manifest)


def test_increment_after_moves_has_moved_blocks_whole_and_others_not(tmp_path: Path) -> None:
    """K3: what was deleted elsewhere before a block came is not known to its new owner."""
    fleet = Fleet(tmp_path, 2, seed=5)
    fleet.train(10)
    fleet.save()
    fleet.train(1, deletes=20)
    fleet.move(0, 0, 1)
    fleet.move(0, 1, 0)
    fleet.move(0, 1, 1)
    fleet.new_epoch()
    fleet.train(1)
    link = fleet.save()
    whole = {b for f in link.files if f.table == "user" and f.kind == "table" and f.since is None for b in f.blocks}
    assert whole == {0, 1}
    assert_saved(fleet)


def test_command_line_shows_and_checks_chains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = Fleet(tmp_path, 1, seed=12)
    fleet.train(3)
    full = fleet.save()
    fleet.train(1, deletes=9)
    link = fleet.save()
    total = sum(store.num_rows() for store in fleet.stores())
    assert newest(fleet.storage).num_rows_total == total

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["ckpt", *arguments])
        return code, capsys.readouterr().out

    code, text = run("ls", str(tmp_path))
    assert code == 0 and f"{link.num_rows} of {total}" in text and f"  {full.name}  " in text.splitlines()[-1]
    listed = json.loads(run("ls", str(tmp_path), "--json")[1])
    assert [(i["parent"], i["num_rows_total"]) for i in listed] == [(None, full.num_rows), (str(full.name), total)]
    code, text = run("verify", str(tmp_path))
    assert code == 0 and "with the 1 it builds on: sound" in text
    victim = tmp_path / full.name.directory / next(f.path for f in full.files if f.kind == "table")
    victim.unlink()
    code, text = run("ls", str(tmp_path))
    assert code == 0 and f"its parent {full.name} is damaged: tables/" in text
    assert main(["ckpt", "verify", str(tmp_path / link.name.directory)]) == 1
    error = capsys.readouterr().err
    assert f"its parent {full.name} is damaged" in error and len(error.splitlines()) <= 2


def test_stored_chain_of_format_version_2_still_loads() -> None:
    """Faults row 32: the fixture was written once, by the first release of the format, and is never rewritten."""
    folder = Path(__file__).parent / "fixtures" / "run-v2"
    storage = Storage(str(folder))
    infos = list_checkpoints(storage)
    assert [(i.state, i.parent) for i in infos] == [
        (CheckpointState.COMPLETE, None),
        (CheckpointState.COMPLETE, "step-00000003.e0"),
        (CheckpointState.COMPLETE, "step-00000004.e0"),
    ]
    assert verify_checkpoint(str(folder)).is_ok
    expected = json.loads((folder / "expected.json").read_text())
    manifest = newest(storage)
    assert manifest.format_version == 2
    for world_size in (1, 3):
        loaded = load(storage, manifest, world_size)
        for table, spec in enumerate(TABLES):
            rows = gathered(loaded, table)
            columns = (rows.ids, rows.weights, rows.slots, rows.last_step, rows.count)
            assert [column.tolist() for column in columns] == expected[spec.name]


def test_parts_are_merged_only_within_one_epoch_and_under_the_newest_base(tmp_path: Path) -> None:
    """chain invariant 3; K1: no part of an interrupted epoch completes the checkpoint of another."""
    fleet = Fleet(tmp_path, 2, seed=6)
    fleet.train(4)
    fleet.save()
    fleet.train(2)
    second = fleet.save(set_base=False)
    fleet.set_base(only=1)  # rank 0 still builds on step 4
    fleet.train(1)
    name, parts = fleet.write_parts()
    assert [part.since for part in parts] == [4, 6]
    manifest = checkpoint.complete(fleet.storage, name, parts, TABLES, run="r", world_size=2)
    assert manifest.parent == str(second.name)
    assert_saved(fleet)
    with pytest.raises(
        CheckpointError, match=r"step-00000007.e1 cannot be completed by rank 0's part of step 7 of epoch 0"
    ):
        merge_parts(CheckpointName(1, 7), parts, list_checkpoints(fleet.storage), TABLES)
    failed = dataclasses.replace(parts[1], error="disk full")
    with pytest.raises(CheckpointError, match=r"rank 1's part .*disk full"):
        merge_parts(name, [parts[0], failed], [], TABLES)


def test_damaged_parent_makes_its_children_unusable_and_resume_takes_an_older_one(tmp_path: Path) -> None:
    """Faults rows 25, 26 along a chain."""
    fleet = Fleet(tmp_path, 1, seed=7, full_every=3)
    fleet.train(3)
    alone = fleet.save(set_base=False)
    fleet.train(1)
    fleet.workers[0].writer.set_base(None)
    parent = fleet.save()
    fleet.train(1)
    child = fleet.save()
    assert child.parent == str(parent.name)
    victim = next(f for f in parent.files if f.kind == "table")
    path = tmp_path / parent.name.directory / victim.path
    good = path.read_bytes()

    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 4
    path.write_bytes(bytes(flipped))
    (problem,) = verify_checkpoint(str(tmp_path)).problems
    assert problem.startswith(f"{parent.name}: {victim.path} (table 'user'): damaged")
    with pytest.raises(CheckpointError, match=f"{parent.name.directory}/{victim.path}.*damaged"):
        load(fleet.storage, newest(fleet.storage), 1)
    infos = list_checkpoints(fleet.storage)
    decision = decide_resume(infos, "auto", exclude=[parent.name])
    assert decision.manifest is not None and decision.manifest.name == alone.name and str(child.name) in decision.reason

    path.write_bytes(good[:-1])
    infos = list_checkpoints(fleet.storage)
    assert [i.state for i in infos[1:]] == [CheckpointState.DAMAGED] * 2
    assert infos[2].reason.startswith(f"its parent {parent.name} is damaged: {victim.path} (table 'user'): truncated")
    decision = decide_resume(infos, "auto")
    assert decision.manifest is not None and decision.manifest.name == alone.name
    with pytest.raises(CheckpointError, match=f"{child.name} cannot be used: its parent"):
        verify_checkpoint(str(tmp_path / child.name.directory))
    assert decide_base(infos, 3, TABLES).step == alone.name.step

    checkpoint.discard(fleet.storage, parent.name)
    assert list_checkpoints(fleet.storage)[1].reason == f"its parent {parent.name} is missing"


def test_block_that_does_not_add_up_is_refused(tmp_path: Path) -> None:
    """Not silently: a lost tombstone would bring a row back."""
    fleet = Fleet(tmp_path, 1, seed=8)
    fleet.train(4)
    fleet.save()
    fleet.train(1, deletes=30)
    link = fleet.save()
    linked = newest(fleet.storage)
    assert linked.name == link.name
    forged = dataclasses.replace(linked, files=tuple(f for f in linked.files if f.kind != "deleted"))
    with pytest.raises(CheckpointError, match=r"row block \d has \d+ rows after loading, its manifest says \d+"):
        load(fleet.storage, forged, 2)


def test_collection_keeps_what_kept_checkpoints_build_on(tmp_path: Path) -> None:
    """K3: everything reachable from a kept manifest stays; children go before their parents."""
    fleet = Fleet(tmp_path, 2, seed=9, full_every=3)
    for _ in range(7):
        fleet.train(1)
        fleet.save(keep=1)
        assert_saved(fleet)
    infos = list_checkpoints(fleet.storage)
    assert [(i.name.step, i.parent is None) for i in infos] == [(7, True)]
    fleet.train(1)
    fleet.save(keep=1)
    assert [i.name.step for i in list_checkpoints(fleet.storage)] == [7, 8]


def test_base_is_chosen_by_length_bytes_and_tables() -> None:
    """chain invariant 4."""
    from shoal.actors.datafile import FileEntry
    from shoal.platform.chain import CheckpointInfo

    def info(step: int, size: int, parents: tuple[Manifest, ...] = ()) -> CheckpointInfo:
        manifest = Manifest(
            name=CheckpointName(0, step),
            run="r",
            world_size=1,
            tables=TABLES,
            files=(FileEntry(path="x", kind="blob", size_bytes=size, checksum=""),),
            parent=str(parents[-1].name) if parents else None,
            ancestors=parents,
        )
        return CheckpointInfo(name=manifest.name, uri="", state=CheckpointState.COMPLETE, manifest=manifest)

    full = info(1, 100)
    assert full.manifest is not None
    small, large = info(2, 10, (full.manifest,)), info(2, 101, (full.manifest,))
    assert decide_base([], 3, TABLES).reason == "there is no complete checkpoint"
    assert decide_base([full], 1, TABLES).step is None
    assert decide_base([full], 2, TABLES).step == 1
    assert decide_base([full, small], 2, TABLES).step is None
    assert decide_base([full, small], 3, TABLES).step == 2
    assert "more bytes" in decide_base([full, large], 3, TABLES).reason
    other = (dataclasses.replace(TABLES[0], num_blocks=16), *TABLES[1:])
    assert decide_base([full], 3, other).reason == "table 'user' has another num_blocks than in step-00000001.e0"


def test_deletion_log_tells_all_it_knows_and_no_more() -> None:
    """DeletionLog invariants 1 to 4."""
    small = DeletionLog([1], bytes_max=16)
    small.mark_known(0, 0, 0)
    small.record(0, torch.arange(2))
    assert small.since(0)[0, 0].tolist() == [0, 1]
    small.record(0, torch.arange(1))
    assert small.since(0) == {} and small.nbytes == 0
    log = DeletionLog([1])
    log.record(0, torch.tensor([1]))
    assert log.since(0) == {}
    log.seal(5)
    log.mark_known(0, 0, 5)
    log.record(0, torch.tensor([7, 7, -3]))
    log.seal(8)
    log.record(0, torch.tensor([9]))
    assert log.since(4) == {}
    assert log.since(5)[0, 0].tolist() == [-3, 7, 9]
    assert log.since(8)[0, 0].tolist() == [9]
    log.trim(8)
    assert log.since(5) == {} and log.since(8)[0, 0].tolist() == [9] and log.nbytes == 8
    log.forget(0, 0)
    assert log.since(8) == {}


def test_block_reloaded_from_an_older_checkpoint_is_written_whole(tmp_path: Path) -> None:
    """Partial recovery: lost rows went back further than the base, which last_step cannot tell."""
    fleet = Fleet(tmp_path, 1, seed=10)
    fleet.train(5)
    older = fleet.save()
    fleet.train(3)
    fleet.save()
    worker = fleet.workers[0]
    worker.store.commit(fleet.step)
    lost = {"user": (2, 5)}
    load_rows(worker.store, TABLES, lost, plan_load(older, TABLES, lost), fleet.storage)
    fleet.new_epoch()
    fleet.train(1)
    link = fleet.save()
    assert link.parent is not None
    whole = {b for f in link.files if f.kind == "table" and f.since is None for b in f.blocks if f.table == "user"}
    assert whole >= {2, 5}
    assert_saved(fleet)


def test_store_forgets_the_past_of_blocks_that_others_changed() -> None:
    """DeletionLog invariant 3: a promoted replica, an import, changes from elsewhere, a block given away."""
    spec = TABLES[0]
    source = RowStore(TABLES)
    source.add_block(0, 3)
    with source.cut() as before, source.cut() as cut:
        changes = export_changes(cut, before, 0, 3)
        rows = cut.export_block(0, 3)

    def replaced(store: RowStore) -> None:
        store.import_block(0, 3, rows)

    def changed(store: RowStore) -> None:
        store.apply_changes(0, 3, changes)

    def demoted(store: RowStore) -> None:
        store.set_replica(0, 3, True)

    def dropped(store: RowStore) -> None:
        store.drop_block(0, 3)

    for act in (replaced, changed, demoted, dropped):
        store = RowStore(TABLES)
        for block in range(spec.num_blocks):
            store.add_block(0, block)
            store.deletions.mark_known(0, block, 5)
        act(store)
        assert sorted(b for _, b in store.deletions.since(5)) == [0, 1, 2, 4, 5, 6, 7], act.__name__
    store = RowStore(TABLES)
    store.add_block(0, 3, is_replica=True)
    store.deletions.mark_known(0, 3, 5)
    store.set_replica(0, 3, False)
    assert store.deletions.since(5) == {}
