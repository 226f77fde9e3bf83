"""Workers as plain processes: a WorkerLauncher without Ray, for elastic runs that tests and benchmarks may kill.

The production Controller drives production Workers; only the actor calls are replaced, by one pipe a worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing as mp
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from world import dump

from shoal.actors.feed import BatchSource
from shoal.actors.groups import host_store
from shoal.actors.messages import Holdings, Order, WorkerInfo, WorkerPoll
from shoal.actors.worker import Worker
from shoal.actors.worker_spec import Seat, WorkerSpec
from shoal.kernels.errors import ClusterError
from shoal.platform.launch import Capacity, LaunchEvent, LaunchFailed, Placed, Ready, WorkerHandle

#: A preparation gets this request number, and its answer comes without being asked for.
_PREPARED = 0


def _serve(worker_id: str, packed: bytes, host: str, connection: Any) -> None:
    """A worker's process: answers requests one after the other; all of them return at once."""
    spec: WorkerSpec = pickle.loads(packed)
    worker = Worker(worker_id, spec)

    def answer(number: int, call: Callable[[], Any]) -> None:
        try:
            result: tuple[bool, Any] = (True, call())
        except BaseException as error:
            result = (False, ClusterError(f"{type(error).__name__}: {error}"))
        connection.send((number, *result))

    def end_when_left() -> None:
        worker.has_left.wait()
        time.sleep(0.2)  # for the answers that are on their way
        os._exit(0)

    threading.Thread(target=end_when_left, name="leave-watch", daemon=True).start()
    answer(_PREPARED, lambda: worker.prepare(host))
    while True:
        try:
            number, method, args = connection.recv()
        except EOFError:
            os._exit(0)  # the test has ended
        call = dump if method == "dump" else None
        answer(
            number, lambda method=method, args=args, call=call: call(worker) if call else getattr(worker, method)(*args)
        )


@dataclasses.dataclass(frozen=True)
class Paced:
    """A feed that takes its time for a batch as long as ``marker`` exists, so that changes fall into the training."""

    make: Callable[[Seat], BatchSource]
    marker: str
    seconds: float = 0.025

    def __call__(self, seat: Seat) -> BatchSource:
        feed = self.make(seat)
        fast = feed.next_batch

        def next_batch(step: int) -> Any:
            if os.path.exists(self.marker):
                time.sleep(self.seconds)
            return fast(step)

        feed.next_batch = next_batch  # type: ignore[method-assign]
        return feed


class ProcessHandle:
    """A worker process."""

    def __init__(self, worker_id: str, spec: WorkerSpec, host: str) -> None:
        self.worker_id, self.host = worker_id, host
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(worker_id, pickle.dumps(spec), host, theirs), daemon=True, name=f"worker-{worker_id}"
        )
        self.process.start()
        theirs.close()
        self._numbers = itertools.count(_PREPARED + 1)
        self._lock = threading.Lock()
        self.info: WorkerInfo | None = None
        self.error: BaseException | None = None

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def look(self) -> bool:
        """Whether the worker has said how its preparation ended."""
        if self.info is None and self.error is None:
            try:
                if not self._connection.poll(0):
                    return False
                _, is_good, value = self._connection.recv()
            except (EOFError, OSError):
                self.error = ClusterError(f"worker {self.worker_id} died while it was prepared")
                return True
            self.info, self.error = (value, None) if is_good else (None, value)
        return True

    def _call(self, timeout_s: float, method: str, *args: Any) -> Any:
        with self._lock:
            number = next(self._numbers)
            deadline = time.monotonic() + timeout_s
            try:
                self._connection.send((number, method, args))
                while self._connection.poll(max(0.0, deadline - time.monotonic())):
                    answered, is_good, value = self._connection.recv()
                    if answered == number:
                        if is_good:
                            return value
                        raise value
            except (EOFError, OSError, BrokenPipeError):
                raise ClusterError(f"worker {self.worker_id} died") from None
            raise ClusterError(f"worker {self.worker_id} did not answer {method} within {timeout_s:g} s")

    def order(self, order: Order, timeout_s: float) -> None:
        self._call(timeout_s, "order", order)

    def poll(self, timeout_s: float) -> WorkerPoll:
        return self._call(timeout_s, "poll")

    def holdings(self, timeout_s: float) -> Holdings:
        return self._call(timeout_s, "holdings")

    def request(self, flags: int, timeout_s: float) -> None:
        self._call(timeout_s, "request", flags)

    def dump(self, timeout_s: float = 30.0) -> dict[str, Any]:
        """Every row the worker owns, and its dense state; once training has ended."""
        return self._call(timeout_s, "dump")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the process a signal; a killed one is waited for."""
        if self.process.pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it ended this moment
                os.kill(self.process.pid, number)
            if number == signal.SIGKILL:
                self.process.join(10)


class ProcessLauncher:
    """Workers as processes of this machine, ``room`` of them at most, on hosts that take turns.

    Args:
        hosts: names of the hosts; they only exist in views.
        room: how many workers may live at once; may be changed while the run goes on.
    """

    def __init__(self, *, hosts: Sequence[str] = ("host0", "host1"), room: int = 4) -> None:
        self.hosts, self.room = tuple(hosts), room
        self.handles: dict[str, ProcessHandle] = {}
        self._wanted: list[tuple[str, WorkerSpec]] = []
        self._told: set[str] = set()
        self._store: Any = None
        self._address = ("", 0)
        self.drains: dict[str, float | None] = {}

    #: As ``WorkerLauncher`` has them: not a Ray cluster, and not one worker only.
    cluster_address = ""
    is_fixed = False

    def start_feeder(self, start_step: int, num_workers: int) -> None:
        """Workers read the files themselves."""

    def forget_ranks(self) -> None:
        """There is no feeder."""

    def launch_worker(self, worker_id: str, spec: WorkerSpec) -> None:
        self._wanted.append((worker_id, spec))

    def advance(self) -> Sequence[LaunchEvent]:
        events: list[LaunchEvent] = []
        while self._wanted and self.num_live < self.room:
            worker_id, spec = self._wanted.pop(0)
            counts = {host: sum(h.host == host and h.is_alive for h in self.handles.values()) for host in self.hosts}
            host = min(self.hosts, key=lambda host: counts[host])
            self.handles[worker_id] = ProcessHandle(worker_id, spec, host)
            events.append(Placed(worker_id=worker_id, host=host))
        for worker_id, handle in self.handles.items():
            if worker_id not in self._told and handle.look():
                self._told.add(worker_id)
                if handle.info is not None:
                    events.append(Ready(worker_id=worker_id, info=handle.info))
                else:
                    assert handle.error is not None
                    events.append(LaunchFailed(worker_id=worker_id, error=handle.error))
        return events

    @property
    def num_live(self) -> int:
        return sum(handle.is_alive for handle in self.handles.values())

    def handle(self, worker_id: str) -> WorkerHandle | None:
        return self.handles.get(worker_id) if worker_id in self._told else None

    def release_worker(self, worker_id: str) -> None:
        self._wanted = [wanted for wanted in self._wanted if wanted[0] != worker_id]
        handle = self.handles.get(worker_id)
        if handle is not None:
            handle.kill()

    def kill_worker(self, worker_id: str, pid: int, host: str) -> bool:
        self.release_worker(worker_id)
        return True

    def adopt(self) -> Mapping[str, WorkerHandle]:
        return {i: h for i, h in self.handles.items() if i in self._told and h.is_alive}

    def capacity(self) -> Capacity:
        left = max(0, self.room - self.num_live)
        return Capacity(free={self.hosts[0]: left}, num_waiting=len(self._wanted))

    def draining(self) -> Mapping[str, float | None]:
        return dict(self.drains)

    def open_store(self) -> tuple[str, int]:
        if self._store is None:
            self._store, host, port = host_store()
            self._address = (host, port)
        return self._address

    def forget_epochs(self, run: str, before: int) -> None:
        """A test's epochs are few."""

    def release(self) -> None:
        for worker_id in list(self.handles):
            self.release_worker(worker_id)
