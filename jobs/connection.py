"""The connection of a driver to a Ray cluster: the one chosen for a run, or the one a run already lives in."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Self

from shoal.kernels.errors import ClusterError
from shoal.platform.cluster_choice import choose_cluster, choose_live_cluster


class connected:
    """A connection to the chosen Ray cluster; a cluster of our own is ended afterwards, an existing one is kept."""

    def __init__(
        self, address: str | None, num_workers: int, cpus_per_worker: float, tell: Callable[[Any], None]
    ) -> None:
        self._address = address
        self._num_cpus = int(num_workers * max(1.0, cpus_per_worker)) + 2
        self._tell = tell
        self._is_ours = False
        #: Whether the cluster was started here, for this run.
        self.is_own_cluster = False

    def __enter__(self) -> Self:
        import ray

        if ray.is_initialized():
            return self
        choice = choose_cluster(self._address, os.environ)
        self._tell(("cluster", {"address": choice.address, "reason": choice.reason}))
        # Workers import the user's model from where the driver does.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        # Ray's own start-up lines would break the progress bar; its errors still come through.
        options: dict[str, Any] = {"log_to_driver": False, "namespace": "shoal", "logging_level": logging.ERROR}
        if choice.is_local:
            # Logical CPUs: a laptop may run more workers than it has cores, more slowly.
            options |= {"num_cpus": max(self._num_cpus, os.cpu_count() or 1), "include_dashboard": False}
        try:
            ray.init(address=choice.address, **options)
        except ConnectionError as error:
            where = f"the Ray cluster at {choice.address}"
            raise ClusterError(f"cannot reach {where}: {error}; try `shoal doctor`") from error
        self._is_ours = True
        self.is_own_cluster = choice.is_local
        return self

    def __exit__(self, *exc: object) -> None:
        import ray

        if self._is_ours:
            ray.shutdown()


@contextlib.contextmanager
def connected_to_live(address: str | None) -> Iterator[None]:
    """A connection to the cluster in which a run lives; nothing is started. One that exists already is used."""
    import ray

    if ray.is_initialized():
        yield
        return
    choice = choose_live_cluster(address, os.environ)
    try:
        ray.init(address=choice.address, log_to_driver=False, namespace="shoal", logging_level=logging.ERROR)
    except ConnectionError as error:
        text = f"no Ray cluster is reached at {choice.address} ({choice.reason}): {error}; name it with --address"
        raise ClusterError(text) from error
    try:
        yield
    finally:
        ray.shutdown()
