"""Fault points: what a schedule does in the processes of a run, and what it costs where there is none."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import timeit

import pytest

from shoal.kernels import faults
from shoal.kernels.errors import PeerError
from shoal.kernels.faults import Action, Fault, Schedule, roles_in

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    faults.install(None, "")


def schedule(folder, *listed: Fault, **fields) -> Schedule:
    return Schedule(faults=listed, folder=str(folder), **fields)


def test_a_place_costs_nothing_that_counts_without_a_schedule():
    runs = 200_000
    seconds = min(timeit.repeat(lambda: faults.reach("step.begin"), number=runs, repeat=5)) / runs
    empty = min(timeit.repeat(lambda: None, number=runs, repeat=5)) / runs
    assert seconds - empty < 250e-9  # some 80 ns on a quiet machine


def test_fault_happens_at_its_passage_in_its_role_once_in_a_run(tmp_path):
    fault = Fault(point="step.begin", role="rank0", action=Action.RAISE, nth=2)
    plan = pickle.loads(pickle.dumps(schedule(tmp_path, fault)))
    faults.install(plan, "w1", {"buddy"})
    for _ in range(5):
        assert not faults.reach("step.begin")
    faults.set_roles({"rank0"})
    faults.reach("step.begin")
    with pytest.raises(PeerError, match=r"step\.begin"):
        faults.reach("step.begin")
    (fired,) = faults.read_fired(plan)
    assert (fired.process, fired.pid, fired.fault) == ("w1", os.getpid(), fault)
    faults.install(plan, "w2", {"rank0"})  # its replacement
    for _ in range(5):
        faults.reach("step.begin")


def test_message_is_lost_only_at_the_place_of_the_fault(tmp_path):
    plan = schedule(tmp_path, Fault(point="wire.send", role="owner", action=Action.DROP))
    faults.install(plan, "w0", {"owner"})
    assert not faults.reach("wire.serve")
    assert faults.reach("wire.send") and not faults.reach("wire.send")


def test_partition_holds_up_every_wire_of_the_process_and_nothing_else(tmp_path):
    plan = schedule(tmp_path, Fault(point="wire.send", role="owner", action=Action.PARTITION, seconds=0.6))
    faults.install(plan, "w0", {"owner"})
    thread = threading.Thread(target=faults.reach, args=("wire.send",))
    thread.start()
    while not faults.read_fired(plan):
        time.sleep(0.001)
    faults.reach("step.begin")
    assert thread.is_alive(), "what is no wire passes while the others wait"
    longest_s = 0.0
    while thread.is_alive():  # the fault is told of before it begins, so the first passages may be free
        began = time.monotonic()
        faults.reach("wire.poll")
        longest_s = max(longest_s, time.monotonic() - began)
    assert longest_s > 0.2


def test_brake_holds_until_released(tmp_path):
    plan = schedule(tmp_path, brake_s=0.3)
    faults.install(plan, "w0", {"rank0"})
    started = time.monotonic()
    faults.reach("step.begin")
    assert time.monotonic() - started >= 0.3
    faults.release(plan)
    faults.reach("step.begin")
    started = time.monotonic()
    for _ in range(100):
        faults.reach("step.begin")
    assert time.monotonic() - started < 0.3


CHILD = """
import pickle, sys
from shoal.kernels import faults
faults.install(pickle.loads(bytes.fromhex(sys.argv[1])), "child", {"rank0"})
faults.reach("step.begin")
print("alive", flush=True)
"""


@pytest.mark.parametrize(("action", "code"), [(Action.KILL, -signal.SIGKILL), (Action.EXIT, faults.EXIT_CODE)])
def test_process_dies_and_the_folder_says_so(tmp_path, action, code):
    plan = schedule(tmp_path, Fault(point="step.begin", role="rank0", action=action))
    child = subprocess.run([sys.executable, "-c", CHILD, pickle.dumps(plan).hex()], capture_output=True, timeout=30)
    assert child.returncode == code and child.stdout == b""
    assert [fired.process for fired in faults.read_fired(plan)] == ["child"]


def test_stopped_process_wakes_when_its_time_is_over(tmp_path):
    plan = schedule(tmp_path, Fault(point="step.begin", role="rank0", action=Action.STOP, seconds=0.2))
    started = time.monotonic()
    child = subprocess.run([sys.executable, "-c", CHILD, pickle.dumps(plan).hex()], capture_output=True, timeout=30)
    assert child.stdout == b"alive\n" and time.monotonic() - started >= 0.2


@pytest.mark.parametrize(
    "wrong",
    [
        {"point": "step.nowhere", "role": "rank0", "action": Action.KILL},
        {"point": "snapshot.ack", "role": "joiner", "action": Action.KILL},
        {"point": "step.begin", "role": "rank0", "action": Action.DROP},
    ],
)
def test_fault_that_cannot_happen_is_refused(wrong):
    with pytest.raises(AssertionError):
        Fault(**wrong)


def test_a_view_has_one_worker_of_each_role():
    assert roles_in(0, (1, 0), 2) == {"rank0"} and roles_in(1, (1, 0), 2) == {"buddy", "owner"}
    assert [roles_in(r, (2, 0, 1), 3) for r in range(3)] == [{"rank0"}, {"owner"}, {"buddy"}]
    assert roles_in(None, (), 0, is_joining=True) == {"joiner"}
    assert roles_in(0, (), 1, is_leaving=True) == {"rank0", "owner", "leaver"}


def test_module_imports_nothing_heavy():
    code = "import sys, shoal.kernels.faults; print(sorted({'numpy', 'torch', 'ray', 'pyarrow'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert out.stdout == "[]\n"
