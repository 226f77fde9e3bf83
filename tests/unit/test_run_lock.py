"""The run lock: one holder, refusals that name it, takeover of the silent and the dead, the lower one ends (F7)."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.kernels.errors import LockHeldError, LockLostError, StorageError
from shoal.platform.epochs import EpochRecord, claim_epoch, epoch_first_steps, first_steps_of, newest_epoch
from shoal.platform.run_lock import Claim, ClaimState, LockOwner, RunLock, Watched, decide_entry, decide_standing
from shoal.platform.storage import Entry, RetryPolicy, Storage

LEASE_S = 15.0


class Clock:
    """A clock that only sleeping moves; ``during`` runs after each sleep, as what others do in the meantime."""

    def __init__(self) -> None:
        self.now = 0.0
        self.during: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during()


def owner(host: str = "alpha", pid: int = 7) -> LockOwner:
    return LockOwner(host=host, pid=pid, user="ann", cluster="10.0.0.1:6379")


def make_lock(storage: Storage, clock: Clock, host: str = "alpha", **options: Any) -> RunLock:
    return RunLock(storage, owner(host), LEASE_S, clock=clock, sleep=clock.sleep, **options)


def held(storage: Storage) -> list[Claim]:
    claims = [Claim.decode(storage.read_bytes(f"lock/{entry.name}")) for entry in storage.list_dir("lock")]
    return [claim for claim in claims if claim is not None and claim.state is ClaimState.HELD]


def test_second_run_is_refused_with_the_first_one_named(tmp_path: Path) -> None:
    """Faults row 29."""
    storage, clock = Storage(str(tmp_path)), Clock()
    first = make_lock(storage, clock)
    first.acquire()
    clock.during = first.renew
    with pytest.raises(LockHeldError) as caught:
        make_lock(storage, clock, "beta").acquire()
    text = str(caught.value)
    for expected in (str(tmp_path), "ann@alpha, process 7, cluster 10.0.0.1:6379", "since 20", "renewed 20", "15 s"):
        assert expected in text
    assert clock.now < LEASE_S / 2
    first.renew()
    assert len(held(storage)) == 1


def test_ended_run_leaves_the_folder_free_and_incarnations_grow(tmp_path: Path) -> None:
    storage, clock = Storage(str(tmp_path)), Clock()
    for expected in (1, 2, 3):
        lock = make_lock(storage, clock)
        lock.acquire()
        assert lock.incarnation == expected
        lock.release()
        lock.release()
    assert clock.now == 0 and len(storage.list_dir("lock")) == 1


def test_silent_holder_is_taken_over_and_learns_it_however_late(tmp_path: Path) -> None:
    """run_lock invariants 1 and 2: also when the successor has ended long ago."""
    storage, clock = Storage(str(tmp_path)), Clock()
    for is_over in (False, True):
        first, second = make_lock(storage, clock), make_lock(storage, clock, "beta")
        first.acquire()
        start = clock.now
        second.acquire()
        assert LEASE_S <= clock.now - start < 2 * LEASE_S
        if is_over:
            second.release()
        with pytest.raises(LockLostError, match="taken over by ann@beta"):
            first.renew()
        if not is_over:
            second.renew()
            second.release()
    assert held(storage) == []


def test_restarted_controller_of_the_same_run_takes_over_at_once(tmp_path: Path) -> None:
    storage, clock = Storage(str(tmp_path)), Clock()
    first = make_lock(storage, clock, token="run")
    first.acquire()
    second = make_lock(storage, clock, "beta", token="run")
    second.acquire()
    assert clock.now == 0 and second.incarnation == 2
    with pytest.raises(LockLostError):
        first.renew()
    second.renew()


def test_claim_of_a_process_that_has_ended_on_this_machine_is_free_at_once(tmp_path: Path) -> None:
    """run_lock invariant 3; a killed run is started again without waiting for its lease."""
    code = (
        "import sys; from shoal.platform.run_lock import LockOwner, RunLock;"
        "from shoal.platform.storage import Storage;"
        "RunLock(Storage(sys.argv[1]), LockOwner.here()).acquire(); print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        storage = Storage(str(tmp_path))
        (claim,) = held(storage)
        assert claim.owner.pid == process.pid and not claim.owner.is_gone()
        assert not dataclasses.replace(claim.owner, process="other/boot/1").is_gone()
    finally:
        process.kill()
        process.wait(30)
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()  # type: ignore[union-attr]
    assert claim.owner.is_gone()
    clock = Clock()
    lock = RunLock(storage, LockOwner.here(), clock=clock, sleep=clock.sleep)
    lock.acquire()
    assert clock.now == 0 and lock.incarnation == 2
    assert not LockOwner.here().is_gone()
    assert dataclasses.replace(LockOwner.here(), process=claim.owner.process).is_gone()  # the number was given again


def test_holder_survives_an_outage_of_storage(tmp_path: Path) -> None:
    """run_lock invariant 4."""

    class Failing(Storage):
        is_down = False

        def write_object(self, path: str, produce: Any) -> Any:
            if Failing.is_down:
                raise StorageError("down")
            return super().write_object(path, produce)

    clock = Clock()
    lock = make_lock(Failing(str(tmp_path)), clock)
    lock.acquire()
    Failing.is_down = True
    with pytest.raises(StorageError, match="down"):
        lock.renew()
    clock.now += 1000
    Failing.is_down = False
    lock.renew()
    assert len(held(Storage(str(tmp_path)))) == 1


def test_silent_holder_waits_for_an_announced_successor(tmp_path: Path) -> None:
    """run_lock invariant 1: the successor may have looked before the renewal."""
    storage, clock = Storage(str(tmp_path)), Clock()
    first = make_lock(storage, clock)
    first.acquire()
    (claim,) = held(storage)
    asking = dataclasses.replace(claim, incarnation=2, token="other", state=ClaimState.ASKING)
    clock.now += LEASE_S
    storage.write_bytes(asking.path, asking.encode())
    clock.during = lambda: storage.write_bytes(asking.path, dataclasses.replace(asking, state=ClaimState.HELD).encode())
    with pytest.raises(LockLostError):
        first.renew()


def test_torn_claim_holds_nobody_up_but_its_number_is_used(tmp_path: Path) -> None:
    storage, clock = Storage(str(tmp_path)), Clock()
    storage.write_bytes("lock/00000005-ab.json", b'{"incarnation": 5, "no')
    lock = make_lock(storage, clock)
    lock.acquire()
    assert lock.incarnation == 6 and clock.now < 5


@dataclasses.dataclass
class Turns:
    """Lets exactly one of several threads go on to its next storage operation, in a seeded order."""

    seed: int
    num_threads: int
    clock: Clock = dataclasses.field(default_factory=Clock)
    waiting: dict[int, threading.Event] = dataclasses.field(default_factory=dict)
    num_done: int = 0
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)

    def pause(self) -> None:
        turn = threading.Event()
        with self.changed:
            self.waiting[threading.get_ident()] = turn
            self.changed.notify_all()
        assert turn.wait(60)

    def finish(self) -> None:
        with self.changed:
            self.num_done += 1
            self.changed.notify_all()

    def run(self, after_each: Callable[[], None]) -> None:
        rng = random.Random(self.seed)
        while True:
            with self.changed:
                assert self.changed.wait_for(lambda: len(self.waiting) + self.num_done == self.num_threads, 60)
                after_each()
                if not self.waiting:
                    return
                turn = self.waiting.pop(rng.choice(sorted(self.waiting)))
            turn.set()


def stepped_storage(root: Path, turns: Turns) -> Storage:
    """A storage whose every operation waits for its turn."""

    class Stepped(Storage):
        def write_object(self, path: str, produce: Any) -> Any:
            turns.pause()
            return super().write_object(path, produce)

        def read_bytes(self, path: str) -> bytes:
            turns.pause()
            return super().read_bytes(path)

        def list_dir(self, path: str = "") -> list[Entry]:
            turns.pause()
            return super().list_dir(path)

    return Stepped(str(root), RetryPolicy(attempts_max=1))


def run_in_turns(turns: Turns, parts: list[Callable[[], None]], after_each: Callable[[], None] = lambda: None) -> None:
    """Run ``parts`` in threads of their own, interleaved at their storage operations and sleeps."""

    def take_part(part: Callable[[], None]) -> None:
        turns.pause()
        try:
            part()
        finally:
            turns.finish()

    threads = [threading.Thread(target=take_part, args=(part,), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    turns.run(after_each)
    for thread in threads:
        thread.join(60)


@pytest.mark.parametrize("seed", range(25))
def test_of_runs_that_start_at_once_at_most_one_holds_the_folder(tmp_path: Path, seed: int) -> None:
    """run_lock invariant 1, whatever the order of their reads and writes; and exactly one gets through in the end."""
    turns = Turns(seed, num_threads=3)
    storage = stepped_storage(tmp_path, turns)
    outcomes: list[str] = []

    def sleep(seconds: float) -> None:
        turns.clock.now += seconds / turns.num_threads
        turns.pause()

    def contend(number: int) -> None:
        lock = RunLock(storage, owner(f"h{number}"), LEASE_S, clock=turns.clock, sleep=sleep)
        try:
            lock.acquire()
            outcomes.append("held")
            while len(outcomes) < turns.num_threads:
                lock.renew()
        except LockHeldError:
            outcomes.append("refused")
        except BaseException as error:
            outcomes.append(repr(error))

    def check() -> None:
        assert len(held(Storage(str(tmp_path)))) <= 1

    run_in_turns(turns, [functools.partial(contend, number) for number in range(turns.num_threads)], check)
    assert sorted(outcomes) == ["held", "refused", "refused"], seed


@pytest.mark.parametrize("seed", range(40))
def test_silent_holder_and_its_successor_never_both_stand(tmp_path: Path, seed: int) -> None:
    """run_lock invariants 1 and 2: no renewal succeeds once a successor has the folder, however they interleave."""
    turns = Turns(seed, num_threads=2)
    storage = stepped_storage(tmp_path, turns)
    rng = random.Random(seed)
    order: list[str] = []
    stood_at = taken_at = 0.0

    def sleep(seconds: float) -> None:
        turns.clock.now += seconds / turns.num_threads
        turns.pause()

    def hold() -> None:
        nonlocal stood_at
        lock = RunLock(storage, owner("first"), LEASE_S, clock=turns.clock, sleep=sleep)
        lock.acquire()
        order.append("first")
        try:
            while not {"second", "refused"} & set(order):
                # Silent until the successor has announced itself, which it does after a lease, and some turns more.
                while len(os.listdir(tmp_path / "lock")) < 2 and rng.random() < 0.98 and "refused" not in order:
                    sleep(1.0)
                for _ in range(rng.randint(0, 4)):
                    turns.pause()
                began_at = turns.clock.now
                lock.renew()
                order.append("renewed")
                stood_at = began_at
            lock.renew()
            order.append("renewed")
        except LockLostError:
            order.append("lost")

    def follow() -> None:
        nonlocal taken_at
        while "first" not in order:
            turns.pause()
        lock = RunLock(storage, owner("second"), LEASE_S, clock=turns.clock, sleep=sleep)
        try:
            lock.acquire()
            order.append("second")
            taken_at = turns.clock.now
        except LockHeldError:
            order.append("refused")

    run_in_turns(turns, [hold, follow])
    if "second" in order:
        assert order[-1] == "lost" or (order[-1] == "second" and order[-2] == "lost"), order
        assert "renewed" not in order[order.index("second") :], order
        assert taken_at - stood_at >= LEASE_S, "a renewal that began less than a lease before did not protect"
    else:
        assert order[-1] == "renewed" and "lost" not in order, order


def test_entry_and_standing_are_decided_by_state_silence_and_order() -> None:
    claim = Claim(
        incarnation=3,
        nonce="aa",
        token="t",
        owner=owner(),
        state=ClaimState.HELD,
        lease_s=10,
        since="s",
        renewed="r",
    )
    assert Claim.decode(claim.encode()) == claim
    free = [
        Watched(claim=dataclasses.replace(claim, state=ClaimState.RELEASED), silent_s=0),
        Watched(claim=claim, silent_s=10),
        Watched(claim=claim, silent_s=0, is_gone=True),
    ]
    assert decide_entry(free).reason == "nobody holds the folder"
    assert decide_entry([*free, Watched(claim=claim, silent_s=9.9)]).wait_for == claim
    assert decide_entry([*free, Watched(claim=claim, silent_s=1, is_renewed=True)]).held_by == claim
    higher = dataclasses.replace(claim, incarnation=4)
    asking = dataclasses.replace(higher, state=ClaimState.ASKING)
    assert decide_standing(claim, [dataclasses.replace(claim, incarnation=2), asking]) is None
    assert decide_standing(claim, [dataclasses.replace(higher, state=ClaimState.RELEASED)]) is not None
    assert decide_standing(claim, [dataclasses.replace(claim, nonce="ab")]) is not None


# ---- epochs -------------------------------------------------------------------------------------------------------


def test_epochs_are_claimed_once_and_read_from_their_names(tmp_path: Path) -> None:
    """V1, K2; records of an older Shoal are read as well."""
    storage = Storage(str(tmp_path))
    assert newest_epoch(storage) == -1 and epoch_first_steps(storage) == {}
    storage.write_bytes("journal/epoch-00000000.json", b'{"epoch": 0, "first_step": 0}')
    storage.write_bytes("journal/epoch-00000001.json", b'{"epoch": 1, "fi')
    claim_epoch(storage, 2, 40, incarnation=1)
    claim_epoch(storage, 2, 40, incarnation=1)
    storage.write_bytes("journal/00000001.json", b"a record of the controller")
    assert newest_epoch(storage) == 2
    steps = epoch_first_steps(storage)
    assert steps[0] == 0 and steps[2] == 40 and steps[1] > 10**9
    with pytest.raises(LockLostError, match=r"epoch 2 is claimed twice: from step 41 .* and from step 40"):
        claim_epoch(storage, 2, 41, incarnation=1)
    claim_epoch(storage, 3, 45, incarnation=2)
    with pytest.raises(LockLostError, match="controller 2 has taken this run over; controller 1 ends"):
        claim_epoch(storage, 4, 50, incarnation=1)
    assert newest_epoch(storage) == 3
    assert first_steps_of([EpochRecord(1, 9), EpochRecord(1, 7, 2)]) == {1: 7}


@pytest.mark.skipif(os.name != "posix", reason="uses a local folder")
def test_two_controllers_that_claim_an_epoch_at_once_do_not_both_get_it(tmp_path: Path) -> None:
    """V1: whoever writes second sees the other's record, or is seen."""

    class Racing(Storage):
        raced = False

        def write_object(self, path: str, produce: Any) -> Any:
            if not Racing.raced:
                Racing.raced = True
                claim_epoch(Storage(str(tmp_path)), 5, 10, incarnation=2)
            return super().write_object(path, produce)

    with pytest.raises(LockLostError):
        claim_epoch(Racing(str(tmp_path)), 5, 12, incarnation=1)
    assert epoch_first_steps(Storage(str(tmp_path))) == {5: 10}
