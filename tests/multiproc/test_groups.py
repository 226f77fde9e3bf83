"""Forming, releasing and re-forming the groups of an epoch (V3, F1): deadlines that name, and nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from shoal.actors import groups as group_module
from shoal.actors.groups import GroupSpec, form, host_store, run_hash
from shoal.kernels.errors import ConfigError, ExchangeTimeoutError, PeerError
from shoal.kernels.transport import LoopbackTransport

pytestmark = pytest.mark.usefixtures("no_shm_left")

#: "Within a second" on an idle machine (0.06-0.6 s measured); test machines are shared.
SOON_S = 2.5


def _swap(groups: Any, timeout_s: float = 20.0) -> None:
    sizes = np.full(groups.spec.world_size, 20_000, np.int64)
    groups.transport.send_buffers(sizes)
    groups.transport.exchange(sizes, timeout_s=timeout_s)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def reform_often(groups: Any, num_epochs: int) -> tuple[bool, float]:
    spec = groups.spec
    _swap(groups)
    seconds = []
    for epoch in range(2, 2 + num_epochs):
        groups.destroy()
        if epoch == 3:
            # The first epochs may open what stays; from then on nothing may grow.
            files, threads = _open_files(), _threads()
        begin = time.perf_counter()
        groups = form(dataclasses.replace(spec, epoch=epoch))
        seconds.append(time.perf_counter() - begin)
        _swap(groups)
    groups.destroy()
    # Gloo's thread closes its files in its own time.
    deadline = time.monotonic() + 10
    while (_open_files() > files or _threads() > threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    return _open_files() <= files and _threads() <= threads, sorted(seconds)[num_epochs // 2]


@pytest.mark.parametrize(("hosts", "transport"), [("aaa", "gloo"), ("aaa", "shm"), ("aab", "auto")])
def test_v3_ten_epochs_in_the_same_processes_leak_nothing(world: Any, hosts: str, transport: str) -> None:
    for has_not_grown, median_s in world.values(reform_often, hosts, 10, transport=transport):
        assert has_not_grown
        assert median_s < 3.0


def fail_and_park(groups: Any, victim: int) -> tuple[str, float]:
    """As a worker does it (F1): on an error destroy the groups, then park, its process alive and silent."""
    for _ in range(5):
        _swap(groups)
    if groups.spec.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        while True:
            _swap(groups, 20.0)
    except PeerError as error:
        message = str(error)
    seconds = time.monotonic() - begin
    groups.destroy("parked")
    time.sleep(1.0)  # Parked: what is under test is that the others do not wait for this process to end.
    return message, seconds


@pytest.mark.parametrize(("hosts", "transport"), [("aaaa", "gloo"), ("aaaa", "shm"), ("aabb", "auto")])
def test_f1_a_death_is_known_to_all_survivors_within_a_second_even_if_they_park(
    world: Any, hosts: str, transport: str
) -> None:
    outcomes = world.run(fail_and_park, hosts, 1, transport=transport)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2, 3):
        message, seconds = outcomes[rank].value
        assert seconds < SOON_S, message
        assert "rank 1" in message


def just_form(groups: Any) -> str:
    return type(groups.transport).__name__


def test_auto_takes_shared_memory_within_and_gloo_across_hosts(world: Any) -> None:
    assert world.values(just_form, "aa") == ["ShmTransport"] * 2
    assert world.values(just_form, "ab") == ["GlooTransport"] * 2
    assert world.values(just_form, "aba") == ["CompositeTransport"] * 3
    assert isinstance(form(GroupSpec(run="alone", epoch=0, rank=0, hosts=("a",))).transport, LoopbackTransport)


def test_a_host_that_spans_machines_shares_memory_only_within_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may be a rack: its carriers talk over Gloo, and bytes between its machines are within the host."""
    machines = ["m0", "m0", "m1", "m2"]
    monkeypatch.setattr(group_module, "memory_name", lambda: threading.current_thread().name)
    store, _, port = host_store()
    found: list[Any] = [None] * 4

    def attempt(rank: int) -> None:
        spec = _spec(port, rank=rank, hosts=("r", "r", "r", "s"), has_local=True, run=f"rack-{os.getpid()}")
        groups = form(spec)
        found[rank] = groups
        _swap(groups)
        sizes = np.full(groups.local_transport.world_size, 1000, np.int64)
        groups.local_transport.send_buffers(sizes)
        groups.local_transport.exchange(sizes, timeout_s=20.0)
        _swap(groups)

    threads = [threading.Thread(target=attempt, args=(r,), name=name) for r, name in enumerate(machines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert store is not None and all(groups is not None for groups in found)
    assert [sorted(groups.transport.local_ranks) for groups in found] == [[0, 1, 2]] * 3 + [[3]]
    assert [groups.transport.num_near for groups in found] == [2, 2, 1, 1]
    assert [type(groups.local_transport).__name__ for groups in found] == ["GlooTransport"] * 3 + ["LoopbackTransport"]
    for groups in found:
        groups.destroy()


def _spec(port: int, **fields: Any) -> GroupSpec:
    defaults = {"run": f"test-{os.getpid()}", "epoch": 3, "rank": 0, "hosts": ("a", "a", "a"), "store_port": port}
    return GroupSpec(**(defaults | fields))


def test_v3_a_rank_that_never_comes_is_named_at_the_deadline() -> None:
    store, host, port = host_store()
    errors: list[BaseException] = []

    def attempt(rank: int) -> None:
        try:
            form(_spec(port, rank=rank, form_timeout_s=0.7))
        except ExchangeTimeoutError as error:
            errors.append(error)

    begin = time.monotonic()
    threads = [threading.Thread(target=attempt, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 2 and host == "127.0.0.1" and store is not None
    assert all("rank 1 of 3 did not arrive within 0.7 s" in str(error) for error in errors), errors
    assert time.monotonic() - begin < 5


def test_a_store_that_cannot_be_reached_is_named() -> None:
    store, _, port = host_store()
    del store
    with pytest.raises(PeerError, match=f"the store at 127.0.0.1:{port} cannot be reached"):
        form(_spec(port, form_timeout_s=1.0))


def die_while_forming(groups: Any, port: int, rank: int, run: str) -> str:
    """Rank 2 arrives, so the others begin to connect, and dies before it has connected itself."""
    spec = GroupSpec(
        run=run, epoch=9, rank=rank, hosts=("a", "a", "a"), store_port=port, form_timeout_s=3.0, timeout_s=2.0
    )
    if rank == 2:
        from shoal.actors import groups as module

        module._Former._form_gloo = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    begin = time.monotonic()
    try:
        form(spec)
    except PeerError as error:
        assert time.monotonic() - begin < 8
        return str(error)
    return "no error"


def die_while_forming_entry(port: int, rank: int, run: str) -> str:
    return die_while_forming(None, port, rank, run)


def test_v3_a_rank_that_dies_while_forming_is_named(world: Any) -> None:
    store, _, port = host_store()
    args = [(port, rank, f"test-{os.getpid()}") for rank in range(3)]
    outcomes = world.collect(world.start(die_while_forming_entry, args, [None] * 3))
    assert store is not None
    for rank in (0, 1):
        assert "rank 2" in outcomes[rank].value, outcomes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transport": "ib"}, "transport is 'ib'; it must be one of auto, shm, gloo, nccl"),
        ({"rank": 3}, r"rank is 3; it must be in \[0, 3\)"),
        ({"transport": "shm", "hosts": ("a", "b")}, r"several hosts \(a, b\); use 'auto'"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        form(_spec(1, **fields))


def test_run_hash_is_stable() -> None:
    assert run_hash("quickstart") == 0x0 + run_hash("quickstart")
    assert run_hash("a") != run_hash("b") and 0 <= run_hash("a") < 2**64
