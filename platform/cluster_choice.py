"""Which Ray cluster a command uses, and why. Pure.

A bare ``ray.init()`` joins any cluster it finds on the machine, also somebody else's. So Shoal always passes an
explicit address: the one that was asked for, the cluster of the submitted job, or a local one of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

#: Set by Ray for the entry point of a submitted job, beside RAY_ADDRESS.
_IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@dataclasses.dataclass(frozen=True)
class ClusterChoice:
    """The address to pass to ``ray.init`` and the reason to print."""

    address: str
    reason: str

    @property
    def is_local(self) -> bool:
        """Whether a cluster of our own is started for the run."""
        return self.address == "local"

    def __str__(self) -> str:
        return f"cluster={self.address} reason={self.reason!r}"


def choose_cluster(address: str | None, environ: Mapping[str, str]) -> ClusterChoice:
    """Decide by: an explicit address, the cluster of the submitted job that we are, else a local one.

    ``RAY_ADDRESS`` alone, outside a job, is not followed: it may be another person's or another day's.
    """
    if address:
        return ClusterChoice(address, "--address or scaling.address")
    job_address = environ.get("RAY_ADDRESS", "")
    if job_address and _IN_JOB in environ:
        return ClusterChoice(job_address, "RAY_ADDRESS of the Ray job that runs this command")
    if job_address:
        return ClusterChoice("local", f"no address given; RAY_ADDRESS={job_address} needs --address to be used")
    return ClusterChoice("local", "no address given")


def choose_live_cluster(address: str | None, environ: Mapping[str, str]) -> ClusterChoice:
    """Where a command looks for a run that is alive: an explicit address, RAY_ADDRESS, else the one on this machine.

    Such a command only speaks to the run that it names, so a cluster that is found by itself does no harm.
    """
    if address:
        return ClusterChoice(address, "--address")
    if environ.get("RAY_ADDRESS"):
        return ClusterChoice(environ["RAY_ADDRESS"], "RAY_ADDRESS")
    return ClusterChoice("auto", "no address given: the cluster that runs on this machine")
