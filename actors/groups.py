"""Process groups of one epoch, of their own (no default group), and the transport the step uses over them.

A view's ranks meet at a TCPStore under the prefix (run, epoch), call the roll, and form one Gloo group for control and,
where the transport needs it, one for data. Everything has a deadline and says who is missing. ``Groups.abort`` releases
every peer that waits in an exchange of this epoch (F1) and may be called from any thread; ``destroy`` frees all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.kernels.errors import ConfigError, ExchangeTimeoutError, PeerError
from shoal.kernels.rollcall import LEFT, RollCall
from shoal.kernels.transport import LoopbackTransport, Transport, name_ranks
from shoal.kernels.transport_composite import CompositeTransport
from shoal.kernels.transport_gloo import GlooTransport, mesh_sockets, socket_inodes
from shoal.kernels.transport_nccl import NcclTransport
from shoal.kernels.transport_shm import ShmTransport, memory_name, shm_available

TRANSPORTS = ("auto", "shm", "gloo", "nccl")
#: How soon forming ends once it is cancelled. Seconds.
_CANCEL_INTERVAL_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """Where and with whom to form the groups of an epoch; equal on all ranks but for ``rank`` and ``bind_address``."""

    #: Name of the run; its hash is in every prefix and segment name.
    run: str
    epoch: int
    rank: int
    #: Host (network locality) of each rank, in rank order; its length is the world size.
    hosts: tuple[str, ...]
    store_host: str = "127.0.0.1"
    store_port: int = 0
    #: auto: shared memory among ranks of a host, Gloo across; shm, gloo; nccl: rows over NCCL, the rest as auto.
    transport: str = "auto"
    #: Whether the ranks of a host need an exchange of their own (``row_exchange``).
    has_local: bool = False
    #: Address of the interface Gloo listens on; empty: loopback when all ranks share a host, else Gloo's choice.
    bind_address: str = ""
    #: Deadline of forming, in seconds.
    form_timeout_s: float = 60.0
    #: Deadline of one operation, in seconds (F1: short, never 30 min).
    timeout_s: float = 10.0

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    def validate(self) -> None:
        """Raise ConfigError naming the field, its value and what is allowed."""
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport is {self.transport!r}; it must be one of {', '.join(TRANSPORTS)}")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank is {self.rank}; it must be in [0, {self.world_size})")
        if self.transport == "shm" and len(set(self.hosts)) > 1:
            names = ", ".join(sorted(set(self.hosts)))
            raise ConfigError(f"transport is 'shm' but the ranks are on several hosts ({names}); use 'auto'")


def run_hash(run: str) -> int:
    """64-bit hash of a run's name, stable across processes: names segments and identifies headers."""
    return int.from_bytes(hashlib.blake2b(run.encode(), digest_size=8).digest(), "little")


def host_store(bind_address: str = "127.0.0.1") -> tuple[dist.TCPStore, str, int]:
    """Host a TCPStore on a free port; (store, host, port). It lives as long as the returned object."""
    # Binding the socket ourselves lets the kernel choose a free port on exactly this address.
    family = socket.AF_INET6 if ":" in bind_address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((bind_address, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        bind_address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
        master_listen_fd=listener.detach(),
    )
    return store, bind_address, port


class Groups:
    """The formed groups of one rank in one epoch. ``control`` is None in a world of one."""

    def __init__(
        self,
        spec: GroupSpec,
        transport: Transport,
        *,
        payload_transport: Transport | None = None,
        local_transport: Transport | None = None,
        control: dist.ProcessGroup | None = None,
        roll_call: RollCall | None = None,
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        self.spec = spec
        #: Headers, ids and, without NCCL, everything else.
        self.transport = transport
        #: Rows and gradients, when they take another way than ``transport``.
        self.payload_transport = payload_transport
        #: Among the ranks of this host only, in rank order; None unless ``GroupSpec.has_local``. It may share memory
        #: with ``transport``: the thread that uses one uses the other (S11).
        self.local_transport = local_transport
        #: A Gloo group for rare control traffic (broadcast of dense state, barriers); never used by the step.
        self.control = control
        self._roll_call = roll_call
        self._sockets = list(sockets)
        self._is_destroyed = False

    def _transports(self) -> list[Transport]:
        found = (self.transport, self.payload_transport, self.local_transport)
        return [transport for transport in found if transport is not None]

    def abort(self, reason: str = "aborted") -> None:
        """Release every peer that waits for this rank, from any thread; this rank's blocked calls raise PeerError."""
        if self._is_destroyed:
            return
        if self._roll_call is not None:
            self._roll_call.sign(LEFT, reason)
        for transport in self._transports():
            transport.abort(reason)
        for connection in self._sockets:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def destroy(self, reason: str = "destroyed") -> None:
        """``abort``, then free sockets, threads, memory and segments; idempotent. No exchange may be running here."""
        if self._is_destroyed:
            return
        self.abort(reason)
        self._is_destroyed = True
        for transport in self._transports():
            transport.close()
        for connection in self._sockets:
            connection.close()
        self._sockets = []
        self.control = None
        self._roll_call = None


def form(spec: GroupSpec, is_cancelled: Callable[[], bool] = lambda: False) -> Groups:
    """Form the groups of an epoch; every rank calls it with the same spec. Blocks at most about ``form_timeout_s``, and
    a moment only once ``is_cancelled``.

    Raises ConfigError for a spec that cannot work, ExchangeTimeoutError naming the ranks that did not come or did not
    finish, PeerError when it was cancelled or the store cannot be reached, CapacityError when /dev/shm is too small.
    """
    spec.validate()
    if spec.world_size == 1:
        return Groups(spec, LoopbackTransport())
    return _Former(spec, is_cancelled).form()


class _Former:
    """The steps of forming, sharing one deadline."""

    def __init__(self, spec: GroupSpec, is_cancelled: Callable[[], bool]) -> None:
        self.spec = spec
        self.is_cancelled = is_cancelled
        self.deadline = time.monotonic() + spec.form_timeout_s
        self.prefix = f"{run_hash(spec.run):016x}/{spec.epoch}"
        self.sockets: list[socket.socket] = []
        self.store = self._connect()

    def form(self) -> Groups:
        self.meet("arrive")
        control, control_sockets = self._form_gloo("control")
        # Forming is the only other user of this connection and is over when the roll is called. A second one is not
        # made lightly: torch looks up the name of both ends, and a lost DNS answer costs 5 s (torch 2.13, measured).
        roll_call = RollCall(self.store, self.spec.rank, self.spec.world_size)
        transport: Transport | None = None
        payload: Transport | None = None
        local: Transport | None = None
        try:
            transport = self._transport(roll_call)
            if self.spec.has_local:
                local = self._local(transport)
            if self.spec.transport == "nccl":
                payload = self._nccl()
            self.meet("formed")
        except BaseException:
            for opened in (transport, payload, local):
                if opened is not None:
                    opened.close()
            for connection in control_sockets:
                connection.close()
            raise
        return Groups(
            self.spec,
            transport,
            payload_transport=payload,
            local_transport=local,
            control=control,
            roll_call=roll_call,
            sockets=control_sockets,
        )

    def meet(self, name: str) -> None:
        """Wait until every rank has come to the point ``name``; names those that have not when time is up."""
        spec = self.spec
        try:
            self.store.set(f"{name}/{spec.rank}", b"1")
            waiting = set(range(spec.world_size))
            while True:
                waiting = {rank for rank in waiting if not self.store.check([f"{name}/{rank}"])}
                if not waiting:
                    return
                self._check_cancelled()
                if time.monotonic() >= self.deadline:
                    raise ExchangeTimeoutError(
                        f"forming epoch {spec.epoch} of run {spec.run!r} on rank {spec.rank}: {name_ranks(waiting)} "
                        f"of {spec.world_size} did not {name.removesuffix('d')} within {spec.form_timeout_s:g} s"
                    )
                time.sleep(0.002)
        except (dist.DistError, dist.DistNetworkError, dist.DistStoreError) as error:
            raise self._store_error(error) from error

    def _check_cancelled(self) -> None:
        if self.is_cancelled():
            raise PeerError(f"forming epoch {self.spec.epoch} of run {self.spec.run!r} was given up")

    def remaining_s(self) -> float:
        return max(0.1, self.deadline - time.monotonic())

    def _connect(self) -> Any:
        spec = self.spec
        try:
            store = dist.TCPStore(
                spec.store_host,
                spec.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=max(1.0, spec.form_timeout_s)),
            )
        except (RuntimeError, ValueError) as error:
            raise self._store_error(error) from error
        return dist.PrefixStore(self.prefix, store)

    def _store_error(self, error: BaseException) -> PeerError:
        return PeerError(
            f"forming epoch {self.spec.epoch} of run {self.spec.run!r}: the store at {self.spec.store_host}:"
            f"{self.spec.store_port} cannot be reached ({str(error).splitlines()[0][:160]})"
        )

    def _form_gloo(
        self, name: str, ranks: Sequence[int] | None = None
    ) -> tuple[dist.ProcessGroup, list[socket.socket]]:
        """A Gloo group over ``ranks`` (default: all) and its connections. Gloo can overstay its timeout, so a thread
        waits for it."""
        store = dist.PrefixStore(name, self.store)
        members = list(range(self.spec.world_size)) if ranks is None else list(ranks)
        rank, size = members.index(self.spec.rank), len(members)
        outcome: list[Any] = []

        def work() -> None:
            before = socket_inodes()
            try:
                group = dist.ProcessGroupGloo(store, rank, size, self._gloo_options())
                outcome.append((group, mesh_sockets(store, rank, size, before)))
            except Exception as error:  # of any kind: whoever waits for the thread must not wait in vain
                outcome.append(error)

        thread = threading.Thread(target=work, name=f"shoal-form-{name}", daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < self.deadline:
            self._check_cancelled()
            thread.join(_CANCEL_INTERVAL_S)
        if outcome and not isinstance(outcome[0], BaseException):
            return outcome[0]
        self._sign_and_explain(f"{name}-failed", outcome[0] if outcome else None)
        raise AssertionError("unreachable")

    def _sign_and_explain(self, name: str, cause: BaseException | None) -> None:
        """Name the ranks that cannot even say that forming failed: those are the ones that died."""
        found = RollCall(dist.PrefixStore(name, self.store), self.spec.rank, self.spec.world_size)
        error = found.explain(f"forming epoch {self.spec.epoch}", "timeout", self.spec.form_timeout_s, str(cause))
        raise error from cause

    def _gloo_options(self) -> Any:
        spec = self.spec
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        address = spec.bind_address or ("127.0.0.1" if len(set(spec.hosts)) == 1 else "")
        create = dist.ProcessGroupGloo
        options._devices = [create.create_device(hostname=address) if address else create.create_default_device()]
        options._timeout = timedelta(seconds=min(spec.timeout_s, self.remaining_s()))
        # With a single worker thread an operation took 3 ms instead of 0.07 (torch 2.13, measured), though a group
        # carries one at a time (S11).
        options._threads = 2
        return options

    def _local_ranks(self) -> list[int]:
        """Ranks of this rank's host, ascending."""
        return [rank for rank, host in enumerate(self.spec.hosts) if host == self.spec.hosts[self.spec.rank]]

    def _transport(self, roll_call: RollCall) -> Transport:
        spec = self.spec
        local = self._local_ranks()
        near = self._sharing_memory() if spec.transport != "gloo" else []
        mine = near[spec.rank] if near else ""
        sharing = [rank for rank in local if near and near[rank] == mine]
        if len(sharing) == spec.world_size:
            return self._shm(sharing)
        group, sockets = self._form_gloo("data")
        gloo = GlooTransport(
            group, spec.rank, spec.world_size, roll_call=roll_call, sockets=sockets, local_ranks=frozenset(local)
        )
        if not near or len(set(zip(spec.hosts, near))) == spec.world_size:
            return gloo
        try:
            shared = self._shm(sharing) if len(sharing) > 1 else LoopbackTransport()
            return CompositeTransport(gloo, shared, sharing, local_ranks=frozenset(local))
        except BaseException:
            gloo.close()
            raise

    def _local(self, transport: Transport) -> Transport:
        """The transport among the ranks of this host: shared memory that is there already, or Gloo."""
        local = self._local_ranks()
        # If one rank of a host shares memory with all of its ranks, so does each of them.
        if isinstance(transport, CompositeTransport) and transport.num_near == len(local):
            return transport.local_transport
        if len(local) == self.spec.world_size:
            return transport
        if len(local) == 1:
            return LoopbackTransport()
        group, sockets = self._form_gloo(f"local-{local[0]}", local)
        number = local.index(self.spec.rank)
        return GlooTransport(group, number, len(local), sockets=sockets, local_ranks=frozenset(range(len(local))))

    def _sharing_memory(self) -> list[str]:
        """Every rank's memory by name: ranks of a host with the same can share it. Empty: not used, as one rank without
        it turns it off for all (transport auto). A host may span machines where its name is given (a rack)."""
        reason = shm_available(len(self._local_ranks()))
        if reason and self.spec.transport == "shm":
            raise ConfigError(f"transport is 'shm' but this host cannot: {reason}")
        self.store.set(f"shm/{self.spec.rank}", "" if reason else memory_name())
        self.meet("shm-known")
        names = [self.store.get(f"shm/{rank}").decode() for rank in range(self.spec.world_size)]
        if self.spec.transport == "shm" and len(set(names)) > 1:
            raise ConfigError("transport is 'shm' but the ranks are on several machines; use 'auto'")
        return names if all(names) else []

    def _shm(self, local: list[int]) -> ShmTransport:
        spec = self.spec
        return ShmTransport(
            name=f"shoal-{run_hash(spec.run):016x}-e{spec.epoch}-{self._nonce()}-{local[0]}",
            rank=local.index(spec.rank),
            ranks=local,
            attach_timeout_s=self.remaining_s(),
        )

    def _nonce(self) -> str:
        """The same 8 random characters on all ranks: two runs of one name never share a segment."""
        return self.store.compare_set("nonce", "", secrets.token_hex(4)).decode()

    def _nccl(self) -> NcclTransport:
        spec = self.spec
        if not torch.cuda.is_available():
            raise ConfigError("transport is 'nccl' but this process sees no CUDA device; use 'auto'")
        return NcclTransport.form(
            dist.PrefixStore("nccl", self.store), spec.rank, spec.world_size, timeout_s=spec.timeout_s
        )
