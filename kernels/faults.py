"""Faults: named places in the code where a schedule kills, stalls or cuts off this process.

A place is one line, ``faults.reach("step.ids_done")``; its name, what it stands for and who comes past it are in
``POINTS``. A schedule is a frozen value that travels to every process of a run in its specification and is installed
there; no environment variable has a part in it. Whoever comes to a fault's place first, in the fault's role, claims it
by creating a file in the schedule's folder and then suffers it: so a fault happens once in a run, whatever is
restarted, and the folder proves what happened.

Without a schedule nothing happens, and a place costs one comparison (measured: 80 ns, of which an empty call is 50).
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from shoal.kernels.errors import PeerError

OWNER, BUDDY, RANK0, JOINER, LEAVER = "owner", "buddy", "rank0", "joiner", "leaver"
CONTROLLER, FEEDER = "controller", "feeder"
#: Who a process can be. Of a worker: ``roles_in`` says which.
ROLES = (OWNER, BUDDY, RANK0, JOINER, LEAVER, CONTROLLER, FEEDER)

#: A process that dies by Action.EXIT ends with this code.
EXIT_CODE = 86
#: While this file is missing in the schedule's folder, steps last ``Schedule.brake_s`` longer.
RELEASE_FILE = "released"
BRAKE_POINT = "step.begin"


class Action(enum.Enum):
    """What happens to the process that comes to a fault's place."""

    #: SIGKILL.
    KILL = "kill"
    #: The process ends without a word, but the kernel closes its connections in order.
    EXIT = "exit"
    #: The thread sleeps for ``seconds``; the rest of the process goes on.
    STALL = "stall"
    #: SIGSTOP; SIGCONT after ``seconds``, unless they are 0: then somebody else has to end the process.
    STOP = "stop"
    #: PeerError is raised, as if a peer were gone.
    RAISE = "raise"
    #: The message at this place is lost; its receiver never hears of it.
    DROP = "drop"
    #: For ``seconds`` nothing this worker sends or receives gets through, to other workers or the controller.
    PARTITION = "partition"


@dataclasses.dataclass(frozen=True)
class Point:
    """A place where faults can happen."""

    name: str
    text: str
    #: Who comes past it.
    roles: tuple[str, ...]
    #: Its caller can lose the message it is about to send (Action.DROP).
    is_message: bool = False
    #: What a partition blocks.
    is_wire: bool = False
    #: An exchange or a message may fail here, so that PeerError is no surprise (Action.RAISE).
    can_fail: bool = False


_MEMBERS = (OWNER, BUDDY, RANK0)
_POINTS = (
    Point("join.meet", "before the run's first header exchange", (JOINER,)),
    Point("join.decided", "the run's first header exchange is complete", (JOINER,)),
    Point("step.begin", "before the step's header exchange", _MEMBERS, can_fail=True),
    Point("step.header_done", "after the header exchange, before ids travel", _MEMBERS, can_fail=True),
    Point("step.ids_done", "between the exchanges of ids and of values", _MEMBERS, can_fail=True),
    Point("step.values_done", "after the values exchange, before the model runs", _MEMBERS, can_fail=True),
    Point("step.before_gradients", "after backward, before the gradient exchange", _MEMBERS, can_fail=True),
    Point("step.gradients_done", "after the gradient exchange, before anything is applied", _MEMBERS, can_fail=True),
    Point("step.rows_applied", "rows are updated, the dense part is not", _MEMBERS, can_fail=True),
    Point("step.applied", "the step is applied, before the next header", _MEMBERS, can_fail=True),
    Point("snapshot.cut", "a snapshot is due, before its cut", (OWNER, RANK0)),
    Point(
        "snapshot.send", "before a message with changes to the worker that holds copies", (OWNER, RANK0), can_fail=True
    ),
    Point("snapshot.ack", "changes are staged, before the holder answers", (BUDDY,), can_fail=True),
    Point("snapshot.protected", "a snapshot is complete on all ranks, before anything older is dropped", _MEMBERS),
    Point("snapshot.fold", "while staged changes become part of the copy", (BUDDY,)),
    Point("prepare.begin", "the order to prepare a view has come", (OWNER, RANK0, JOINER, LEAVER)),
    Point("prepare.base", "base rows are being sent", (OWNER, RANK0), can_fail=True),
    Point("prepare.form", "before the groups of the next view are formed", (BUDDY, RANK0, JOINER), can_fail=True),
    Point(
        "prepare.ready",
        "copies are current and groups formed, before that is told",
        (RANK0, JOINER, LEAVER),
        can_fail=True,
    ),
    Point("cutover.called", "this worker knows that the cutover is on", (BUDDY, RANK0, JOINER, LEAVER), can_fail=True),
    Point("cutover.closed", "after the old view's closing exchange", (BUDDY, RANK0, LEAVER), can_fail=True),
    Point("cutover.copied", "the last changes are at their holders", (BUDDY, RANK0, JOINER, LEAVER), can_fail=True),
    Point("cutover.agreed", "all ranks know that the copies are complete", (BUDDY, RANK0, LEAVER), can_fail=True),
    Point(
        "cutover.flip",
        "blocks have changed owner, before the data plane is attached",
        (BUDDY, RANK0, JOINER),
        can_fail=True,
    ),
    Point("cutover.meet", "before the new view's first header exchange", (BUDDY, RANK0, JOINER), can_fail=True),
    Point(
        "cutover.decided",
        "that exchange is complete, before the worker acts on it",
        (BUDDY, RANK0, JOINER),
        can_fail=True,
    ),
    Point("cutover.release", "the view is journalled, before old copies are dropped", (BUDDY, RANK0)),
    Point("recovery.parked", "groups are destroyed after a failure", _MEMBERS),
    Point("recovery.holdings", "before what this worker holds is told to the controller", _MEMBERS),
    Point("recovery.rolled_back", "rows and dense state are back at the target", _MEMBERS, can_fail=True),
    Point("recovery.ship", "before rows or dense state are sent to who lacks them", _MEMBERS, can_fail=True),
    Point("recovery.meet", "before the recovered view's first header exchange", (*_MEMBERS, JOINER), can_fail=True),
    Point(
        "recovery.decided",
        "that exchange is complete, before the worker acts on it",
        (*_MEMBERS, JOINER),
        can_fail=True,
    ),
    Point("checkpoint.part", "part files are being written", (OWNER, RANK0)),
    Point("checkpoint.written", "a part is complete, before that is told", (OWNER, RANK0)),
    Point("checkpoint.manifest", "all parts are there, before the manifest is written", (CONTROLLER,)),
    Point("checkpoint.collect", "the manifest is written, before old checkpoints are collected", (CONTROLLER,)),
    Point("controller.journal", "before a journal record is written", (CONTROLLER,)),
    Point("controller.journalled", "a journal record is written, before anybody acts on it", (CONTROLLER,)),
    Point("controller.order", "before an order is sent to a worker", (CONTROLLER,), is_message=True),
    Point("feeder.window", "before a window of input is delivered", (FEEDER,)),
    Point("wire.exchange", "before a worker takes part in an exchange", _MEMBERS, is_wire=True),
    Point("wire.send", "before a message to another worker's copies", (OWNER, RANK0), is_message=True, is_wire=True),
    Point("wire.serve", "before a message from another worker is answered", (BUDDY,), is_message=True, is_wire=True),
    Point("wire.poll", "before the controller's poll is answered", _MEMBERS, is_wire=True),
)
POINTS = {point.name: point for point in _POINTS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong in a run."""

    point: str
    role: str
    action: Action
    #: At which passage of one process, in that role; 1: the first.
    nth: int = 1
    #: How long it lasts (STALL, STOP, PARTITION).
    seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.point in POINTS, f"no fault point {self.point!r}"
        assert self.role in POINTS[self.point].roles, f"{self.role} never comes past {self.point}"
        assert self.nth >= 1 and self.seconds >= 0
        point = POINTS[self.point]
        assert self.action is not Action.DROP or point.is_message, f"{self.point} loses no message"
        assert self.action is not Action.RAISE or point.can_fail, f"{self.point} raises nothing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """All that goes wrong in a run; picklable. ``folder`` is one that all its processes see, and is empty at first."""

    faults: tuple[Fault, ...]
    folder: str
    #: Steps are made to last this much longer until ``release`` is called, so that there is time for what is to happen.
    brake_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fired:
    """A fault that happened: to whom, and when."""

    index: int
    fault: Fault
    process: str
    pid: int
    #: Wall clock.
    time: float


# ---- in the processes of a run ------------------------------------------------------------------------------------


def reach(name: str) -> bool:
    """This thread has come to the place ``name``: what the schedule says happens here.

    Returns whether the message that is about to be sent is lost. Raises PeerError where the schedule says so.
    """
    return _armed is not None and _armed.reach(name)


def install(schedule: Schedule | None, process: str, roles: Collection[str] = ()) -> None:
    """Obey ``schedule`` from now on; None: none. ``process``: this one's name, such as a worker's id."""
    global _armed
    _armed = None if schedule is None else _Armed(schedule, process, roles)


def set_roles(roles: Collection[str]) -> None:
    """Who this process is from now on."""
    if _armed is not None:
        _armed.set_roles(roles)


def is_installed() -> bool:
    """Whether this process obeys a schedule."""
    return _armed is not None


class _Armed:
    """A schedule in one process."""

    def __init__(self, schedule: Schedule, process: str, roles: Collection[str]) -> None:
        self._schedule, self._process, self._roles = schedule, process, frozenset(roles)
        self._by_point: dict[str, list[int]] = {}
        for index, fault in enumerate(schedule.faults):
            self._by_point.setdefault(fault.point, []).append(index)
        self._passages = [0] * len(schedule.faults)
        self._is_braking = schedule.brake_s > 0
        self._cut_off_until = 0.0
        self._lock = threading.Lock()
        self._sign_in()

    def set_roles(self, roles: Collection[str]) -> None:
        self._roles = frozenset(roles)
        self._sign_in()

    def _sign_in(self) -> None:
        """Say who this process is, for whoever watches the run from outside."""
        path = Path(self._schedule.folder, f"process-{self._process}.json")
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"pid": os.getpid(), "roles": sorted(self._roles)}), encoding="utf-8")
        temporary.rename(path)

    def reach(self, name: str) -> bool:
        if self._is_braking and name == BRAKE_POINT:
            self._brake()
        is_lost = False
        for index in self._by_point.get(name, ()):
            fault = self._schedule.faults[index]
            if fault.role in self._roles and self._is_due(index) and self._claim(index):
                is_lost = self._suffer(fault) or is_lost
        if self._cut_off_until and POINTS[name].is_wire:
            self._wait_for_the_wire()
        return is_lost

    def _brake(self) -> None:
        if os.path.exists(os.path.join(self._schedule.folder, RELEASE_FILE)):
            self._is_braking = False
        else:
            time.sleep(self._schedule.brake_s)

    def _is_due(self, index: int) -> bool:
        with self._lock:
            self._passages[index] += 1
            # Tried once: if another process has claimed it by then, it is over.
            return self._passages[index] == self._schedule.faults[index].nth

    def _claim(self, index: int) -> bool:
        """Whether the fault has not happened yet in this run: one process alone creates its file."""
        fault = self._schedule.faults[index]
        text = {"process": self._process, "pid": os.getpid(), "time": time.time(), "point": fault.point}
        try:
            file = os.open(_fired_path(self._schedule.folder, index), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        try:
            os.write(file, json.dumps(text).encode())
        finally:
            os.close(file)
        return True

    def _suffer(self, fault: Fault) -> bool:
        match fault.action:
            case Action.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Action.EXIT:
                os._exit(EXIT_CODE)
            case Action.STALL:
                time.sleep(fault.seconds)
            case Action.STOP:
                self._stop(fault.seconds)
            case Action.RAISE:
                raise PeerError(f"fault at {fault.point}")
            case Action.PARTITION:
                self._cut_off_until = time.monotonic() + fault.seconds
        return fault.action is Action.DROP

    def _stop(self, seconds: float) -> None:
        pid = os.getpid()
        if seconds:
            # A stopped process cannot wake itself.
            subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds:.3f}; kill -CONT {pid}"], start_new_session=True)
        os.kill(pid, signal.SIGSTOP)

    def _wait_for_the_wire(self) -> None:
        while (left_s := self._cut_off_until - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))


_armed: _Armed | None = None

# ---- who a worker is ----------------------------------------------------------------------------------------------


def roles_in(
    rank: int | None,
    buddies: Sequence[int],
    world_size: int,
    *,
    is_joining: bool = False,
    is_leaving: bool = False,
) -> frozenset[str]:
    """The roles of a worker with ``rank`` (None: no member) in a view, which joins or leaves with the next one.

    RANK0 is rank 0, BUDDY the rank that holds rank 0's copies (rank 1 where nobody does), OWNER the highest rank that
    is neither, or, of two, rank 1. So a view has at most one of each.
    """
    roles = {JOINER: is_joining, LEAVER: is_leaving}
    if rank is not None:
        buddy = buddies[0] if buddies and buddies[0] >= 0 else 1
        owner = max((r for r in range(world_size) if r not in (0, buddy)), default=world_size - 1)
        roles |= {RANK0: rank == 0, BUDDY: rank == buddy, OWNER: rank == owner}
    return frozenset(role for role, is_it in roles.items() if is_it)


# ---- whoever watches a run ----------------------------------------------------------------------------------------


def read_fired(schedule: Schedule) -> tuple[Fired, ...]:
    """The faults that have happened so far, in the schedule's order."""
    found = []
    for index, fault in enumerate(schedule.faults):
        try:
            text = json.loads(Path(_fired_path(schedule.folder, index)).read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):  # not yet, or just being written
            continue
        found.append(
            Fired(index=index, fault=fault, process=text["process"], pid=int(text["pid"]), time=float(text["time"]))
        )
    return tuple(found)


def read_processes(schedule: Schedule) -> dict[str, tuple[int, frozenset[str]]]:
    """Name -> (process number, roles) of the last process that obeyed the schedule under that name; it may be dead."""
    found = {}
    for path in sorted(Path(schedule.folder).glob("process-*.json")):
        text = json.loads(path.read_text(encoding="utf-8"))
        found[path.stem.removeprefix("process-")] = (int(text["pid"]), frozenset(text["roles"]))
    return found


def release(schedule: Schedule) -> None:
    """Take the brake off."""
    Path(schedule.folder, RELEASE_FILE).touch()


def _fired_path(folder: str, index: int) -> str:
    return os.path.join(folder, f"fault-{index:03d}.json")
