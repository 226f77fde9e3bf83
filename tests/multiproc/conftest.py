"""``run_world``: run a function on W ranks, each a process of its own, over groups formed for it.

Processes come from a fork server that has torch loaded, so a rank starts in milliseconds. A scenario is a module-level
function ``(groups, *args) -> value``; it is found by file and name, so test modules need not be importable.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


@dataclasses.dataclass
class Outcome:
    """How one rank ended: its value, or its error's type and text; ``None`` of both if it died."""

    value: Any = None
    error: str | None = None
    message: str = ""
    exit_code: int | None = None


def _load(path: str, name: str) -> Callable[..., Any]:
    module_name = f"scenario_{Path(path).stem}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    return getattr(sys.modules[module_name], name)


def _rank_main(pipe: Any, path: str, name: str, spec_fields: dict[str, Any] | None, args: tuple[Any, ...]) -> None:
    import torch

    from shoal.actors.groups import GroupSpec, form

    torch.set_num_threads(1)
    try:
        scenario = _load(path, name)
        if spec_fields is None:
            pipe.send(("ok", scenario(*args)))
            return
        groups = form(GroupSpec(**spec_fields))
        try:
            pipe.send(("ok", scenario(groups, *args)))
        finally:
            groups.destroy()
    except BaseException as error:
        traceback.print_exc()
        pipe.send((type(error).__name__, str(error)))


class World:
    """Starts ranks and collects their outcomes; every process is gone when the test ends."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "pytest", "shoal.actors.groups"])
        self.processes: list[Any] = []

    def start(
        self,
        scenario: Callable[..., Any],
        rank_args: Sequence[tuple[Any, ...]],
        spec_fields: Sequence[dict[str, Any] | None],
    ) -> list[Any]:
        """One process per entry; the parent's ends of their pipes."""
        pipes = []
        for args, fields in zip(rank_args, spec_fields):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_rank_main, args=(theirs, scenario.__code__.co_filename, scenario.__name__, fields, args)
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            pipes.append(ours)
        return pipes

    def collect(self, pipes: Sequence[Any], timeout_s: float = 60.0) -> list[Outcome]:
        deadline = time.monotonic() + timeout_s
        outcomes = []
        for process, pipe in zip(self.processes[-len(pipes) :], pipes):
            outcome = Outcome()
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise AssertionError(f"a rank gave no outcome within {timeout_s} s")
                kind, value = pipe.recv()
                if kind == "ok":
                    outcome.value = value
                else:
                    outcome.error, outcome.message = kind, value
            except EOFError:
                pass
            process.join(max(1.0, deadline - time.monotonic()))
            outcome.exit_code = process.exitcode
            outcomes.append(outcome)
        return outcomes

    def run(
        self,
        scenario: Callable[..., Any],
        hosts: str | Sequence[str],
        *args: Any,
        transport: str = "auto",
        timeout_s: float = 60.0,
        **spec: Any,
    ) -> list[Outcome]:
        """Form groups over ``hosts`` (one letter per rank will do), run ``scenario(groups, *args)`` on every rank."""
        from shoal.actors.groups import host_store

        store, host, port = host_store()
        common = {
            "run": f"test-{os.getpid()}",
            "epoch": 1,
            "hosts": tuple(hosts),
            "store_host": host,
            "store_port": port,
            "transport": transport,
        }
        fields = [common | {"rank": rank} | spec for rank in range(len(hosts))]
        outcomes = self.collect(self.start(scenario, [args] * len(hosts), fields), timeout_s)
        del store
        return outcomes

    def values(self, *args: Any, **kwargs: Any) -> list[Any]:
        """``run``, where every rank must succeed."""
        outcomes = self.run(*args, **kwargs)
        assert all(outcome.error is None and outcome.exit_code == 0 for outcome in outcomes), outcomes
        return [outcome.value for outcome in outcomes]

    def stop(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)


@pytest.fixture
def world() -> Iterator[World]:
    instance = World()
    yield instance
    instance.stop()


@pytest.fixture
def no_shm_left() -> Iterator[None]:
    """Nothing of this test's runs may stay in /dev/shm, however its processes ended."""
    from shoal.actors.groups import run_hash

    yield
    prefix = f"shoal-{run_hash(f'test-{os.getpid()}'):016x}"
    assert [name for name in os.listdir("/dev/shm") if name.startswith(prefix)] == []
