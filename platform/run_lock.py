"""The lock of a run's folder: one controller at a time, across clusters, on any storage (faults row 29, PROTOCOLS F7).

Neither a rename nor a conditional write can be relied on: object stores may have neither. What is relied on is what
local file systems, S3 and its kin give: who lists a folder after a write has returned sees what was written. So nobody
ever writes another's object. A *claim* is an object of its owner alone, ``lock/<incarnation>-<nonce>.json``, which the
owner rewrites every few seconds; who wants the folder *announces itself first and looks then*: of two that announce
at the same time at least one sees the other and withdraws.

1. At most one claim is held, unless its owner was silent for a whole lease, measured by who takes over on its own
   clock: clocks of different hosts are never compared.
2. Who was taken over learns it at its next ``renew``, however late that is: incarnations only grow (the claim of a run
   that has ended stays as ``released``), and a lower one ends on seeing a higher.
3. A claim whose process is known to be gone (same machine, no such process) is taken over at once.
4. A storage outage loses nothing: while nobody can write, nobody can take over.

On NFS a listing may be older than a write by the attribute cache's time; then two may start at once, and by 2 the lower
one ends within seconds. What it wrote meanwhile is of an epoch of its own (``epochs``).
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import getpass
import json
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping

from shoal.kernels.errors import LockHeldError, LockLostError, StorageMissingError
from shoal.platform.storage import Storage

LOCK = "lock"
_NAME = re.compile(r"(\d{8,})-[0-9a-f]+\.json")
#: How often who announced itself beside another tries again, after a random wait, before it gives up.
_ATTEMPTS_MAX = 10
#: Who was silent for a lease waits this long for an announced successor to take over or to withdraw; a successor
#: withdraws when it needs half as long.
_HANDOVER_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LockOwner:
    """Who holds a folder, for messages; ``process`` identifies the process on its machine."""

    host: str
    pid: int
    user: str
    #: Address of the Ray cluster.
    cluster: str = ""
    process: str = ""

    def __str__(self) -> str:
        cluster = f", cluster {self.cluster}" if self.cluster else ""
        return f"{self.user}@{self.host}, process {self.pid}{cluster}"

    @classmethod
    def here(cls, cluster: str = "") -> LockOwner:
        """This process."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user without a name
            user = str(os.getuid())
        pid = os.getpid()
        return cls(host=socket.gethostname(), pid=pid, user=user, cluster=cluster, process=_process_identity(pid))

    def is_gone(self) -> bool:
        """Whether the process has certainly ended: it ran on this machine, as this process sees it, and is not there.

        False where that cannot be told.
        """
        machine, _, started = self.process.rpartition("/")
        mine, _, _ = _process_identity(os.getpid()).rpartition("/")
        if not machine or machine != mine:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass  # another user's
        found = _started(self.pid)
        return found is not None and found != started


class ClaimState(enum.Enum):
    """Where a claim stands."""

    #: Announced; its owner is still looking whether another is there.
    ASKING = "asking"
    HELD = "held"
    RELEASED = "released"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim to a run's folder. Ordered by ``key``: the highest held or released one counts."""

    incarnation: int
    #: Tells claims of one incarnation apart.
    nonce: str
    #: Of the run: a controller that was restarted has the token of the one before.
    token: str
    owner: LockOwner
    state: ClaimState
    lease_s: float
    #: UTC, ISO 8601, by the owner's clock: for messages only.
    since: str
    renewed: str
    #: Grows with every renewal.
    renewals: int = 0

    @property
    def key(self) -> tuple[int, str]:
        return self.incarnation, self.nonce

    @property
    def path(self) -> str:
        return f"{LOCK}/{self.incarnation:08d}-{self.nonce}.json"

    def encode(self) -> bytes:
        return json.dumps({**dataclasses.asdict(self), "state": self.state.value}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Claim | None:
        """Inverse of ``encode``; None for a text that is torn or of another kind."""
        try:
            values = json.loads(data)
            owner = LockOwner(**values["owner"])
            return cls(**{**values, "owner": owner, "state": ClaimState(values["state"])})
        except (ValueError, KeyError, TypeError):
            return None


# ---- decisions ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """Another's claim as it was watched from here, on this process's clock."""

    claim: Claim
    #: Seconds since it was first seen as it is now.
    silent_s: float
    #: It was renewed while it was watched.
    is_renewed: bool = False
    #: Its process has certainly ended.
    is_gone: bool = False

    @property
    def is_in_the_way(self) -> bool:
        is_over = self.claim.state is ClaimState.RELEASED or self.is_gone
        return not is_over and self.silent_s < self.claim.lease_s


@dataclasses.dataclass(frozen=True)
class EntryDecision:
    """Whether to announce a claim (``held_by`` and ``wait_for`` are None), to give up, or to watch on."""

    held_by: Claim | None
    wait_for: Claim | None
    reason: str


def decide_entry(others: Iterable[Watched]) -> EntryDecision:
    """What to do about the claims of others. Pure."""
    waited: Claim | None = None
    for watched in others:
        if watched.is_in_the_way and watched.is_renewed:
            return EntryDecision(watched.claim, None, f"{watched.claim.owner} renewed its claim while it was watched")
        if watched.is_in_the_way:
            waited = waited or watched.claim
    if waited is not None:
        return EntryDecision(None, waited, f"{waited.owner} may be alive until it is silent for {waited.lease_s:g} s")
    return EntryDecision(None, None, "nobody holds the folder")


def decide_standing(own: Claim, others: Iterable[Claim]) -> Claim | None:
    """The claim that has taken over from ``own``, or None while ``own`` stands. Pure."""
    higher = [c for c in others if c.key > own.key and c.state is not ClaimState.ASKING]
    return max(higher, key=lambda claim: claim.key, default=None)


# ---- effects ------------------------------------------------------------------------------------------------------


class RunLock:
    """The claim of one controller to the run's folder in ``storage``. Not for several threads at once.

    Args:
        owner: this process; ``LockOwner.here(cluster)``.
        lease_s: a holder that is silent for so long may be taken over. Call ``renew`` three times as often.
        token: of the run; the same one for a controller that Ray restarted, which then takes over at once.
    """

    def __init__(
        self,
        storage: Storage,
        owner: LockOwner,
        lease_s: float = 15.0,
        *,
        token: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._storage = storage
        self._owner = owner
        self._lease_s = lease_s
        self._token = token or secrets.token_hex(8)
        self._clock = clock
        self._sleep = sleep
        self._own: Claim | None = None
        self._renewed_at = clock()

    @property
    def incarnation(self) -> int:
        """Grows with every controller of the folder: what ``claim_epoch`` takes. 0 before ``acquire``."""
        return self._own.incarnation if self._own is not None else 0

    def acquire(self) -> None:
        """Take the folder. Waits up to a lease for a holder that may be dead.

        Raises LockHeldError when its holder is alive, LockLostError when a newer controller of the same run is, and
        StorageError.
        """
        for _ in range(_ATTEMPTS_MAX):
            passed = self._watch()
            started = self._clock()
            own = self._announce()
            rival = self._find_rival(own, passed)
            if rival is None:
                held = dataclasses.replace(own, state=ClaimState.HELD, renewals=1)
                self._write(held)
                # Later than that, a holder that has come back no longer waits for this claim.
                if self._clock() - started < _HANDOVER_S / 2:
                    self._own, self._renewed_at = held, started
                    self._remove_older(held)
                    return
            self._storage.delete_file(own.path)
            if rival is not None and rival.token == self._token:
                raise LockLostError(
                    f"controller {rival.incarnation} of this run, {rival.owner}, is newer than this one"
                )
            self._sleep(random.uniform(0.05, 1.0))
        raise LockHeldError(
            f"{self._storage.shown_uri}: several runs are being started here at once; start one of them again"
        )

    def renew(self) -> None:
        """Say that this controller is alive, and look whether it still stands: before each write that must not be a
        replaced controller's, and every ``lease_s / 3``.

        Raises LockLostError when another has taken over (write nothing any more and end), StorageError when storage
        fails (the claim stands; renew again).
        """
        assert self._own is not None, "renew before acquire"
        now = self._clock()
        self._own = dataclasses.replace(self._own, renewals=self._own.renewals + 1, renewed=_utc_now())
        self._write(self._own)
        written = self._clock()  # the write may have taken long
        deadline = written + (_HANDOVER_S if written - self._renewed_at >= self._lease_s else 0.0)
        while True:
            others = self._read_others(self._own)
            successor = decide_standing(self._own, others.values())
            if successor is not None:
                self._storage.delete_file(self._own.path)
                raise LockLostError(
                    f"{self._storage.shown_uri} was taken over by {successor.owner} at {successor.since}, for this "
                    f"controller was silent for longer than its lease of {self._lease_s:g} s; it ends"
                )
            # Silent for a lease: one that has announced itself may have looked before this renewal, and take over yet.
            is_asked = any(claim.state is ClaimState.ASKING for claim in others.values())
            if not is_asked or self._clock() >= deadline:
                break
            self._sleep(0.2)
        self._renewed_at = now

    def release(self) -> None:
        """Give the folder back at the end of the run. Harmless where the lock is not held."""
        own, self._own = self._own, None
        if own is not None:
            self._write(dataclasses.replace(own, state=ClaimState.RELEASED, renewed=_utc_now()))

    # ---- details --------------------------------------------------------------------------------------------------

    def _watch(self) -> Mapping[str, Claim]:
        """Wait until no claim is in the way; returns what was seen of those that are there, by path."""
        first_seen: dict[str, tuple[Claim, float]] = {}
        renewed: set[str] = set()
        while True:
            now = self._clock()
            claims = {c.path: c for c in self._read_others(None).values() if c.token != self._token}
            for path, claim in claims.items():
                if path not in first_seen or first_seen[path][0] != claim:
                    # An announced claim that is now held was not renewed by a living holder, only completed.
                    was_held = path in first_seen and first_seen[path][0].state is ClaimState.HELD
                    renewed |= {path} if was_held else set()
                    first_seen[path] = (claim, now)
            decision = decide_entry(
                Watched(
                    claim=claim,
                    silent_s=now - first_seen[path][1],
                    is_renewed=path in renewed,
                    is_gone=claim.owner.is_gone(),
                )
                for path, claim in claims.items()
            )
            if decision.held_by is not None:
                raise LockHeldError(self._held_message(decision.held_by))
            if decision.wait_for is None:
                return claims
            self._sleep(min(1.0, self._lease_s / 10))

    def _announce(self) -> Claim:
        matches = (_NAME.fullmatch(entry.name) for entry in self._storage.list_dir(LOCK))
        newest = max((int(match[1]) for match in matches if match), default=0)
        now = _utc_now()
        own = Claim(
            incarnation=newest + 1,
            nonce=secrets.token_hex(4),
            token=self._token,
            owner=self._owner,
            state=ClaimState.ASKING,
            lease_s=self._lease_s,
            since=now,
            renewed=now,
        )
        self._write(own)
        return own

    def _find_rival(self, own: Claim, passed: Mapping[str, Claim]) -> Claim | None:
        """Another claim that forbids ``own``: it has appeared, or was renewed, since the watch (``passed``) ended."""
        for path, claim in self._read_others(own).items():
            is_same = passed.get(path) == claim
            if claim.token == self._token:
                if claim.key > own.key:
                    return claim
            elif claim.state is not ClaimState.RELEASED and not is_same and not claim.owner.is_gone():
                return claim
        return None

    def _read_others(self, own: Claim | None) -> dict[str, Claim]:
        """All claims but ``own``, by path."""
        found = {}
        for entry in self._storage.list_dir(LOCK):
            path = f"{LOCK}/{entry.name}"
            if own is None or path != own.path:
                claim = self._read(path)
                if claim is not None:
                    found[path] = claim
        return found

    def _read(self, path: str) -> Claim | None:
        """The claim at ``path``; None where it is gone meanwhile, or torn by a crash: that one is of nobody alive."""
        for _ in range(5):
            try:
                claim = Claim.decode(self._storage.read_bytes(path))
            except StorageMissingError:
                return None
            if claim is not None:
                return claim
            self._sleep(0.05)  # a local file is not written at once
        return None

    def _remove_older(self, own: Claim) -> None:
        for path, claim in self._read_others(own).items():
            if claim.key < own.key:
                self._storage.delete_file(path)

    def _write(self, claim: Claim) -> None:
        self._storage.write_bytes(claim.path, claim.encode())

    def _held_message(self, claim: Claim) -> str:
        return (
            f"{self._storage.shown_uri} is in use by another run: {claim.owner}, since {claim.since}, last renewed "
            f"{claim.renewed}. End that run first, or give this one another name. Once its processes are gone and it "
            f"has been silent for {claim.lease_s:g} s, a new start takes the folder over by itself"
        )


def _utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _process_identity(pid: int) -> str:
    """``boot/namespace/start``: tells a process from all others there ever were; empty where /proc does not tell."""
    started = _started(pid)
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{started}" if started else ""
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process was started, in ticks since boot; "ended" for one that waits to be collected; None: not told."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return "ended" if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        return None
