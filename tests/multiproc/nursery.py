"""Workers and controllers as plain processes that may be killed one by one: a WorkerLauncher without Ray.

The test's process has a *nursery*, which forks workers and controllers from a server that has everything imported. Both
listen on sockets in one folder, so a controller that is started again finds the workers of the one before it (F8).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from shoal.actors.groups import host_store
from shoal.actors.messages import Holdings, Order, WorkerInfo, WorkerPoll
from shoal.actors.worker import Worker
from shoal.actors.worker_spec import WorkerSpec
from shoal.kernels.errors import ClusterError
from shoal.platform.controller import Controller
from shoal.platform.launch import (
    Capacity,
    LaunchEvent,
    LaunchFailed,
    Placed,
    Ready,
    WorkerGoneError,
    WorkerHandle,
)
from shoal.platform.run_plan import RunPlan, RunReport
from shoal.platform.state_messages import RebalanceRequested

CALL_S = 10.0


# ---- a process that answers on a socket -----------------------------------------------------------------------------


def serve(path: Path, answer: Callable[[str, tuple[Any, ...]], Any]) -> Listener:
    """Answer calls on the socket ``path``, each in a thread of its own, as a busy method must not hold up others."""
    listener = Listener(str(path), backlog=64)

    def one(connection: Any) -> None:
        with connection, contextlib.suppress(EOFError, OSError):
            method, args = connection.recv()
            try:
                result: tuple[bool, Any] = (True, answer(method, args))
            except Exception as error:
                result = (False, ClusterError(f"{type(error).__name__}: {error}"))
            connection.send(result)

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=one, args=(listener.accept(),), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener


def call(path: Path, timeout_s: float, method: str, *args: Any) -> Any:
    """Call ``method`` of the process that listens on ``path``."""
    try:
        with Client(str(path)) as connection:
            connection.send((method, args))
            if not connection.poll(timeout_s):
                raise ClusterError(f"{path.stem} did not answer {method} within {timeout_s:g} s")
            is_good, value = connection.recv()
    except (EOFError, OSError) as error:
        raise WorkerGoneError(f"{path.stem} is gone: {error}") from None
    if not is_good:
        raise value
    return value


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end(pid: int) -> None:
    """Kill a process and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.002)


# ---- workers --------------------------------------------------------------------------------------------------------


def worker_main(worker_id: str, packed: bytes, host: str, folder: str, patch: Callable[[], None] | None) -> None:
    if patch is not None:
        patch()
    spec: WorkerSpec = pickle.loads(packed)
    base = Path(folder)
    worker = Worker(worker_id, spec)
    outcome: Any
    try:
        outcome = worker.prepare(host)
    except Exception as error:
        outcome = ClusterError(f"{type(error).__name__}: {error}")

    def answer(method: str, args: tuple[Any, ...]) -> Any:
        return outcome if method == "describe" else getattr(worker, method)(*args)

    _listener = serve(base / f"{worker_id}.sock", answer)
    _write(base / f"{worker_id}.ready", pickle.dumps(outcome))
    worker.join()
    threading.Event().wait()  # the controller ends it


def _write(path: Path, data: bytes) -> None:
    """Write a file that nobody sees half done."""
    temporary = path.with_suffix(f".{os.getpid()}.part")
    temporary.write_bytes(data)
    temporary.rename(path)


class Handle:
    """A worker process as the controller sees it."""

    def __init__(self, worker_id: str, folder: Path) -> None:
        self.worker_id = worker_id
        self._path = folder / f"{worker_id}.sock"

    def describe(self, timeout_s: float) -> WorkerInfo:
        return call(self._path, timeout_s, "describe")

    def order(self, order: Order, timeout_s: float) -> None:
        call(self._path, timeout_s, "order", order)

    def poll(self, timeout_s: float) -> WorkerPoll:
        return call(self._path, timeout_s, "poll")

    def holdings(self, timeout_s: float) -> Holdings:
        return call(self._path, timeout_s, "holdings")

    def request(self, flags: int, timeout_s: float) -> None:
        call(self._path, timeout_s, "request", flags)

    def __getattr__(self, method: str) -> Any:
        return lambda *args: call(self._path, args[-1], method, *args[:-1])


class NurseryLauncher:
    """Workers from the nursery of the test's process, ``room`` of them at once, on hosts that only exist in views."""

    is_fixed = False
    cluster_address = ""

    def __init__(self, folder: Path, hosts: Sequence[str], room: int) -> None:
        self.folder, self.hosts, self.room = folder, tuple(hosts), room
        self._wanted: list[tuple[str, WorkerSpec]] = []
        self._launching: set[str] = set()
        self._handles: dict[str, Handle] = {}
        self._store: Any = None
        self._address = ("", 0)

    def start_feeder(self, start_step: int, num_workers: int) -> None:
        """Workers read the files themselves."""

    def forget_ranks(self) -> None:
        """There is no feeder."""

    def pids(self) -> dict[str, int]:
        """Worker id -> process, of those that live."""
        found = {path.stem: int(path.read_text()) for path in self.folder.glob("w*.pid")}
        return {worker_id: pid for worker_id, pid in sorted(found.items()) if is_running(pid)}

    def launch_worker(self, worker_id: str, spec: WorkerSpec) -> None:
        self._wanted.append((worker_id, spec))

    def advance(self) -> Sequence[LaunchEvent]:
        events: list[LaunchEvent] = []
        live = self.pids()
        while self._wanted and len(live) < self.room:
            worker_id, spec = self._wanted.pop(0)
            host_of = {w: (self.folder / f"{w}.host").read_text() for w in live}
            host = min(self.hosts, key=lambda host: list(host_of.values()).count(host))
            live[worker_id] = call(self.folder / "nursery.sock", CALL_S, "worker", worker_id, pickle.dumps(spec), host)
            self._launching.add(worker_id)
            events.append(Placed(worker_id=worker_id, host=host))
        for worker_id in sorted(self._launching):
            event = self._launched(worker_id, worker_id in live)
            if event is not None:
                self._launching.discard(worker_id)
                events.append(event)
        return events

    def _launched(self, worker_id: str, is_alive: bool) -> LaunchEvent | None:
        ready = self.folder / f"{worker_id}.ready"
        if not ready.exists():
            gone = ClusterError(f"worker {worker_id} died while it was prepared")
            return None if is_alive else LaunchFailed(worker_id=worker_id, error=gone)
        outcome = pickle.loads(ready.read_bytes())
        if isinstance(outcome, WorkerInfo):
            self._handles[worker_id] = Handle(worker_id, self.folder)
            return Ready(worker_id=worker_id, info=outcome)
        return LaunchFailed(worker_id=worker_id, error=outcome)

    def handle(self, worker_id: str) -> WorkerHandle | None:
        return self._handles.get(worker_id)

    def release_worker(self, worker_id: str) -> None:
        self._wanted = [wanted for wanted in self._wanted if wanted[0] != worker_id]
        self._launching.discard(worker_id)
        self._handles.pop(worker_id, None)
        pid = self.pids().get(worker_id)
        if pid is not None:
            end(pid)

    def kill_worker(self, worker_id: str, pid: int, host: str) -> bool:
        self.release_worker(worker_id)
        return True

    def adopt(self) -> Mapping[str, WorkerHandle]:
        for worker_id in self.pids():
            if (self.folder / f"{worker_id}.ready").exists():
                self._handles[worker_id] = Handle(worker_id, self.folder)
            else:
                self.release_worker(worker_id)
        return dict(self._handles)

    def capacity(self) -> Capacity:
        free = max(0, self.room - len(self.pids()) - len(self._wanted))
        return Capacity(free={self.hosts[0]: free}, num_waiting=len(self._wanted), text="processes")

    def draining(self) -> Mapping[str, float | None]:
        return {path.stem: 30.0 for path in self.folder.glob("w*.drain")}

    def open_store(self) -> tuple[str, int]:
        if self._store is None:
            self._store, host, port = host_store()
            self._address = (host, port)
        return self._address

    def forget_epochs(self, run: str, before: int) -> None:
        """A test's epochs are few."""

    def release(self) -> None:
        self._wanted = []
        for worker_id in self.pids():
            self.release_worker(worker_id)


# ---- the controller -------------------------------------------------------------------------------------------------


def controller_main(packed: bytes, folder: str, hosts: tuple[str, ...], room: int) -> None:
    plan: RunPlan = pickle.loads(packed)
    base = Path(folder)
    controller = Controller(plan, NurseryLauncher(base, hosts, room))

    def rebalance() -> str:
        """Exchange the owners of two row blocks of different owners, in every table that has such."""
        state = controller._state
        assert state is not None and state.view is not None
        placement = {}
        for table, owners in state.view.placement.items():
            other = next((block for block, owner in enumerate(owners) if owner != owners[0]), 0)
            swapped = list(owners)
            swapped[0], swapped[other] = owners[other], owners[0]
            placement[table] = tuple(swapped)
        controller._ask(lambda now_s: RebalanceRequested(now_s=now_s, placement=placement, reason="test"))
        return "asked"

    def view() -> Any:
        state = controller._state
        return None if state is None else state.view

    def answer(method: str, args: tuple[Any, ...]) -> Any:
        return {"rebalance": rebalance, "view": view}.get(method, lambda *a: getattr(controller, method)(*a))(*args)

    path = base / "controller.sock"
    path.unlink(missing_ok=True)
    _listener = serve(path, answer)
    controller.run()
    _write(base / "outcome", pickle.dumps((controller.report(0), str(controller.failure or ""))))


class Nursery:
    """Starts workers and controllers of one run, and ends whatever is left of it."""

    def __init__(self, folder: Path, *, hosts: Sequence[str] = ("host0", "host1"), room: int = 6) -> None:
        self.folder, self.hosts, self.room = folder, tuple(hosts), room
        folder.mkdir(parents=True)
        #: Run in every worker process before it does anything: for mutants.
        self.patch: Callable[[], None] | None = None
        self.num_controllers = 0
        self._context = multiprocessing.get_context("forkserver")
        # Not this module: the server does not know where tests are.
        self._context.set_forkserver_preload(["pyarrow.parquet", "shoal.platform.job", "shoal.platform.chaos_checks"])
        self._controller: Any = None
        self._lock = threading.Lock()
        self._listener = serve(folder / "nursery.sock", lambda method, args: self._worker(*args))

    def _worker(self, worker_id: str, packed: bytes, host: str) -> int:
        with self._lock:
            process = self._context.Process(
                target=worker_main, args=(worker_id, packed, host, str(self.folder), self.patch), name=worker_id
            )
            process.start()
        (self.folder / f"{worker_id}.host").write_text(host)
        assert process.pid is not None
        _write(self.folder / f"{worker_id}.pid", str(process.pid).encode())
        return process.pid

    def start_controller(self, plan: RunPlan) -> None:
        with self._lock:
            self.num_controllers += 1
            self._controller = self._context.Process(
                target=controller_main, args=(pickle.dumps(plan), str(self.folder), self.hosts, self.room)
            )
            self._controller.start()

    @property
    def is_controller_alive(self) -> bool:
        return self._controller is not None and is_running(self._controller.pid)

    def ask(self, method: str, *args: Any) -> Any:
        """Call the controller; None while it is not there."""
        try:
            return call(self.folder / "controller.sock", CALL_S, method, *args)
        except ClusterError:
            return None

    def pids(self) -> dict[str, int]:
        return NurseryLauncher(self.folder, self.hosts, self.room).pids()

    def drain(self, worker_id: str) -> bool:
        """Announce that a worker's node will go, unless another one is going already."""
        live = self.pids()
        if worker_id not in live or any(path.stem in live for path in self.folder.glob("w*.drain")):
            return False
        (self.folder / f"{worker_id}.drain").touch()
        return True

    def outcome(self) -> tuple[RunReport, str] | None:
        path = self.folder / "outcome"
        return pickle.loads(path.read_bytes()) if path.exists() else None

    def close(self) -> None:
        """End everything."""
        self._listener.close()
        if self._controller is not None and self._controller.pid is not None:
            end(self._controller.pid)
        for pid in self.pids().values():
            end(pid)
