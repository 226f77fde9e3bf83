"""How the ids, rows and gradients of a lookup travel: straight to their owners, or by way of one rank per host.

``FlatRows`` takes three rounds: ids, values, gradients. ``HierarchicalRows`` adds a stage among the ranks of a host, so
that a host asks another one for each row once and returns one gradient for it (PROTOCOLS S8):

    request   ranks of a host -> carriers     ids for owners on other hosts; a carrier merges them per owner
    ids       carriers, local ranks -> owners after a header that announces what was merged
    values    owners -> carriers, local ranks
    hand-out  carriers -> ranks of their host
    collect   ranks of a host -> carriers     gradients; a carrier sums those of a row in rank order
    gradients carriers, local ranks -> owners

The owner (h, i) on another host is carried by local rank i mod n, with n the number of ranks of this host: hosts may be
of different sizes. Rows of owners on the same host go straight, in the rounds that all ranks share.

Tables of the pooled flow go straight, in sections of their own of the rounds that all ranks share: no two ranks ask for
the same partial sum, so there is nothing to merge. Their results are those of ``FlatRows``, bit for bit.

Steps overlap (DESIGN 4) where rounds of one step carry a section of a later one: a ``Rider``. Only ``FlatRows`` does
that.

Gradients of a row are summed per host, then over hosts in the order of their lowest rank, wherever the row's owner is:
at a fixed assignment of ranks to hosts placement does not change the result. From ``FlatRows`` it differs in rounding.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from shoal.kernels import _core, _shm, faults  # type: ignore[attr-defined]
from shoal.kernels.errors import ProtocolError
from shoal.kernels.exchange import Exchange, Headers, Round
from shoal.kernels.frame import Kind
from shoal.kernels.plan import Lookup, StepPlan
from shoal.kernels.transport import ByteBuffer

#: Takes the name of the phase that has just ended.
Mark = Callable[[str], None]


def host_numbers(hosts: Sequence[str]) -> tuple[int, ...]:
    """The number of each rank's host; hosts are numbered by their lowest rank."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


class Rider(Protocol):
    """One more section of a round, of another step. Sizes are int64 [W]; so are the addresses given."""

    out_bytes: np.ndarray
    in_bytes: np.ndarray

    def write(self, addresses: np.ndarray) -> None: ...

    def read(self, addresses: np.ndarray) -> None:
        """Take over what was received; it is overwritten later."""
        ...


#: What rides in the round of a kind that is opened now, if anything; all ranks decide alike.
Riders = Callable[[Kind], "Rider | None"]


def no_riders(kind: Kind) -> None:
    return None


class HeldIds:
    """Rider: ids of a later step, kept in ``memory`` until that step begins.

    Owners look rows up no earlier than that: the steps between may create and delete rows.
    """

    def __init__(self, lookup: Lookup, in_bytes: np.ndarray, memory: ByteBuffer) -> None:
        self._lookup = lookup
        self.out_bytes, self.in_bytes = lookup.id_bytes(), np.ascontiguousarray(in_bytes)
        self._memory = memory
        self.is_here = False
        #: int64 [W]: where each rank's ids lie, once they are here.
        self.addresses = np.zeros(len(in_bytes), np.int64)

    def write(self, addresses: np.ndarray) -> None:
        self._lookup.write_ids(addresses)

    def read(self, addresses: np.ndarray) -> None:
        ends = np.cumsum(_aligned(self.in_bytes))
        offsets = ends - _aligned(self.in_bytes)
        base = self._memory.reserve(int(ends[-1]))
        _shm.gather_copy(np.ascontiguousarray(addresses), self.in_bytes, offsets, base)
        self.addresses = offsets + base
        self.is_here = True


class RowExchange(Protocol):
    """The way of a lookup's sections; used by one thread, collectively, in the order fetch, collect, write."""

    #: Whether ``fetch`` takes riders and ids that came before.
    can_carry: bool

    #: Sections that ``sections`` announces.
    num_sections: int

    def sections(self, lookup: Lookup) -> np.ndarray:
        """int64 [S, W]: what the step's header announces for a routed lookup."""
        ...

    def fetch(
        self,
        lookup: Lookup,
        step: int,
        headers: Headers,
        mark: Mark,
        riders: Riders = no_riders,
        ids: HeldIds | None = None,
    ) -> np.ndarray:
        """Carry ids to their owners, unless they came before, and rows back; int64 [W] addresses for ``Lookup.pool``.

        Raises what exchanges raise, and ProtocolError naming a rank whose ids cannot be.
        """
        ...

    def collect(
        self, lookups: Sequence[Lookup], grads: Sequence[Sequence[Tensor]], step: int, timeout_s: float
    ) -> None:
        """What gradients need before the round that all ranks share is opened."""
        ...

    def gradient_bytes(self, lookup: Lookup) -> tuple[np.ndarray, np.ndarray]:
        """int64 [W], int64 [W]: bytes of gradients to and from each rank in the shared round."""
        ...

    def write_gradients(self, lookup: Lookup, grads: Sequence[Tensor], destinations: np.ndarray) -> None:
        """Write this rank's part of the shared round; ``destinations`` int64 [W]."""
        ...


class _Mirrors:
    """Changed rows of mirrored tables: one more section of the rounds of values, where there are such tables."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self.num_sections = int(bool(plan.mirrored))

    def sections(self) -> np.ndarray:
        """int64 [0 or 1, W]: bytes for every other rank."""
        out = np.full((self.num_sections, self._plan.world_size), self._plan.mirror_bytes(), np.int64)
        out[:, self._plan.rank] = 0
        return out

    def write(self, send_addresses: np.ndarray) -> None:
        for addresses in send_addresses:
            self._plan.write_mirrors(addresses)

    def read(self, sources: np.ndarray, source_bytes: np.ndarray) -> None:
        for addresses, sizes in zip(sources, source_bytes):
            self._plan.read_mirrors(addresses, sizes)


class FlatRows:
    """Every rank talks to every owner."""

    can_carry = True

    def __init__(self, exchange: Exchange, plan: StepPlan) -> None:
        self._exchange = exchange
        self._mirrors = _Mirrors(plan)
        self.num_sections = 1 + self._mirrors.num_sections

    def sections(self, lookup: Lookup) -> np.ndarray:
        return np.concatenate([lookup.id_bytes()[None, :], self._mirrors.sections()])

    def fetch(
        self,
        lookup: Lookup,
        step: int,
        headers: Headers,
        mark: Mark,
        riders: Riders = no_riders,
        ids: HeldIds | None = None,
    ) -> np.ndarray:
        changed = headers.section_bytes[1:]
        if ids is not None and ids.is_here:
            sources = ids.addresses
        else:
            round_, rider = self._open(Kind.IDS, step, lookup.id_bytes()[None, :], headers.section_bytes[:1], riders)
            lookup.write_ids(round_.send_addresses[0])
            sources = self._run(round_, rider)[0]
        faults.reach("step.ids_done")
        mark("F")
        lookup.resolve(sources, headers.section_bytes[0])
        mine = self._mirrors.sections()
        if ids is not None and self._mirrors.num_sections:
            # When this step was announced, the steps before it had changed nothing yet.
            changed = self._exchange.header(Kind.CHANGED, step, sections=mine).section_bytes
        values, rider = self._open(
            Kind.VALUES,
            step,
            np.concatenate([lookup.row_bytes_out()[None, :], mine]),
            np.concatenate([lookup.row_bytes_in()[None, :], changed]),
            riders,
        )
        lookup.write_rows(values.send_addresses[0])
        self._mirrors.write(values.send_addresses[1 : 1 + len(changed)])
        mark("gather")
        received = self._run(values, rider)
        self._mirrors.read(received[1 : 1 + len(changed)], changed)
        mark("F")
        return received[0]

    def _open(
        self, kind: Kind, step: int, out: np.ndarray, into: np.ndarray, riders: Riders
    ) -> tuple[Round, Rider | None]:
        """A round with what rides in it, if anything, as its last section."""
        rider = riders(kind)
        if rider is not None:
            out, into = np.vstack([out, rider.out_bytes]), np.vstack([into, rider.in_bytes])
        return self._exchange.round(kind, step, out, into), rider

    def _run(self, round_: Round, rider: Rider | None) -> np.ndarray:
        if rider is not None:
            rider.write(round_.send_addresses[-1])
        received = round_.run()
        if rider is not None:
            rider.read(received[-1])
        return received

    def collect(
        self, lookups: Sequence[Lookup], grads: Sequence[Sequence[Tensor]], step: int, timeout_s: float
    ) -> None:
        return

    def gradient_bytes(self, lookup: Lookup) -> tuple[np.ndarray, np.ndarray]:
        return lookup.grad_bytes_out(), lookup.grad_bytes_in()

    def write_gradients(self, lookup: Lookup, grads: Sequence[Tensor], destinations: np.ndarray) -> None:
        lookup.segment_sum(grads, destinations)


@dataclasses.dataclass(frozen=True)
class Carriers:
    """Who carries what on one rank's host; pure. Arrays are int64."""

    #: Ranks of this host, ascending, and this rank's number among them.
    locals: tuple[int, ...]
    local_rank: int
    #: Ranks on other hosts that this rank carries for, ascending.
    owners: tuple[int, ...]
    #: [W] the local number of the rank that carries for each rank; -1 for ranks of this host.
    carrier: np.ndarray
    #: Ranks on other hosts by (carrier, rank), and where each carrier's begin in that order: [locals + 1].
    order: np.ndarray
    starts: np.ndarray

    @staticmethod
    def of(hosts: Sequence[int], rank: int) -> Carriers:
        """The carriers of ``rank``'s host; ``hosts`` numbers the host of every rank."""
        members: dict[int, list[int]] = {}
        for other, host in enumerate(hosts):
            members.setdefault(host, []).append(other)
        mine = members[hosts[rank]]
        carrier = np.full(len(hosts), -1, np.int64)
        for host, ranks in members.items():
            if host != hosts[rank]:
                carrier[ranks] = np.arange(len(ranks)) % len(mine)
        order = np.argsort(carrier, kind="stable")[len(mine) :]
        local_rank = mine.index(rank)
        return Carriers(
            locals=tuple(mine),
            local_rank=local_rank,
            owners=tuple(int(owner) for owner in np.flatnonzero(carrier == local_rank)),
            carrier=carrier,
            order=order,
            starts=np.searchsorted(carrier[order], np.arange(len(mine) + 1)),
        )

    def lay_out(self, sizes: np.ndarray, *, has_index: bool) -> tuple[np.ndarray, np.ndarray]:
        """Messages to the carriers: (offset of each rank's section in its carrier's message [W], bytes [locals]).

        Every section begins at a multiple of 64 bytes; ``has_index``: after 8 bytes per rank carried. A message without
        sections has 0 bytes. Offsets of ranks of this host mean nothing.
        """
        sizes = _aligned(sizes[self.order])
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        index_bytes = _aligned(8 * np.diff(self.starts)) if has_index else np.zeros(len(self.locals), np.int64)
        totals = ends[self.starts[1:]] - ends[self.starts[:-1]]
        offsets = np.zeros(len(self.carrier), np.int64)
        group = self.carrier[self.order]
        offsets[self.order] = ends[:-1] - ends[self.starts[:-1]][group] + index_bytes[group]
        return offsets, np.where(totals > 0, totals + index_bytes, 0)


class HierarchicalRows:
    """By way of carriers; see the module's docstring.

    Args:
        exchange: of all ranks.
        local: of the ranks of this host, in rank order.
        plan: made with ``hosts``: the number of each rank's host.
    """

    can_carry = False

    def __init__(self, exchange: Exchange, local: Exchange, plan: StepPlan) -> None:
        self._exchange, self.local, self._plan = exchange, local, plan
        self._mirrors = _Mirrors(plan)
        #: Sections of ids of pooled tables for other hosts.
        self._num_straight = int(plan.has_pooled_flow)
        self.num_sections = 2 + self._num_straight + self._mirrors.num_sections
        self.carriers = Carriers.of(plan.hosts, exchange.identity.rank)
        assert local.identity.rank == self.carriers.local_rank, "local ranks are numbered in rank order"
        assert local.identity.world_size == len(self.carriers.locals)
        self._locals = np.array(self.carriers.locals, np.int64)
        self._is_near = self.carriers.carrier < 0
        self._relays: dict[int, _core.Relay] = {}
        #: What the last ``collect`` received, per lookup.
        self._collected: dict[int, np.ndarray] = {}
        self.num_asked = self.num_merged = 0

    def sections(self, lookup: Lookup) -> np.ndarray:
        """Ids for owners of this host, and request messages for its carriers."""
        ids = lookup.id_bytes()
        requests = np.zeros_like(ids)
        requests[self._locals] = self.carriers.lay_out(ids, has_index=True)[1]
        near = np.where(self._is_near, ids, 0)
        return np.concatenate([near[None, :], requests[None, :], self._straight(lookup), self._mirrors.sections()])

    def _straight(self, lookup: Lookup) -> np.ndarray:
        """int64 [0 or 1, W]: bytes of ids of pooled tables for owners on other hosts."""
        return lookup.straight_id_bytes()[None, :][: self._num_straight]

    def fetch(
        self,
        lookup: Lookup,
        step: int,
        headers: Headers,
        mark: Mark,
        riders: Riders = no_riders,
        ids: HeldIds | None = None,
    ) -> np.ndarray:
        assert ids is None, "these rounds carry nothing of other steps"
        id_bytes = lookup.id_bytes()
        relay = self._request(lookup, id_bytes, step, headers.section_bytes[1][self._locals])
        mark("F")
        out = np.where(self._is_near, id_bytes, relay.id_bytes())[None, :]
        merged = self._exchange.header(Kind.RELAY, step, sections=out)
        straight = headers.section_bytes[2 : 2 + self._num_straight]
        changed = headers.section_bytes[2 + self._num_straight :]
        sizes = np.where(self._is_near, headers.section_bytes[0], merged.section_bytes[0])
        round_ = self._exchange.round(
            Kind.IDS,
            step,
            np.concatenate([out, self._straight(lookup)]),
            np.concatenate([sizes[None, :], straight]),
        )
        lookup.write_ids(self._near(round_.send_addresses[0]))
        relay.write_ids(round_.send_addresses[0])
        for addresses in round_.send_addresses[1:]:
            lookup.write_straight_ids(addresses)
        sources = round_.run()
        faults.reach("step.ids_done")
        mark("F")
        lookup.resolve(sources[0], sizes, *sources[1:], *straight)
        into = np.where(self._is_near, lookup.row_bytes_in(), relay.row_bytes() + lookup.sum_bytes_in())
        values = self._exchange.round(
            Kind.VALUES,
            step,
            np.concatenate([lookup.row_bytes_out()[None, :], self._mirrors.sections()]),
            np.concatenate([into[None, :], changed]),
        )
        lookup.write_rows(values.send_addresses[0])
        self._mirrors.write(values.send_addresses[1:])
        mark("gather")
        received = values.run()
        rows = received[0]
        self._mirrors.read(received[1:], changed)
        lookup.place_sums(rows + relay.row_bytes())
        offsets, handed = self.carriers.lay_out(lookup.row_bytes_in(), has_index=False)
        hand_out = self.local.round(Kind.VALUES, step, relay.local_row_bytes()[None, :], handed[None, :])
        relay.hand_out(rows, hand_out.send_addresses[0])
        carried = hand_out.run()[0]
        mark("F")
        return np.where(self._is_near, rows, carried[self.carriers.carrier] + offsets)

    def _request(self, lookup: Lookup, ids: np.ndarray, step: int, incoming: np.ndarray) -> _core.Relay:
        """Bring this host's requests for other hosts to their carriers, and merge what this rank carries.

        ``ids`` int64 [W]: bytes of ids for each rank.
        """
        offsets, sizes = self.carriers.lay_out(ids, has_index=True)
        round_ = self.local.round(Kind.IDS, step, sizes[None, :], incoming[None, :])
        messages = round_.send_addresses[0]
        self._write_index(ids[self.carriers.order], messages, sizes)
        lookup.write_ids(self._far(messages, offsets))
        sources = round_.run()
        relay = self._relays.get(id(lookup))
        if relay is None:
            relay = self._relays[id(lookup)] = _core.Relay(
                self._plan.native, list(self.carriers.owners), list(self.carriers.locals)
            )
        try:
            relay.merge(sources[0], incoming)
        except _core.ProtocolViolation as error:
            raise ProtocolError(str(error)) from None
        asked, merged = relay.counts()
        self.num_asked += asked
        self.num_merged += merged
        return relay

    def _write_index(self, ids: np.ndarray, messages: np.ndarray, sizes: np.ndarray) -> None:
        for number, (start, end) in enumerate(zip(self.carriers.starts[:-1], self.carriers.starts[1:])):
            if sizes[number]:
                ctypes.memmove(int(messages[number]), ids[start:end].tobytes(), 8 * int(end - start))

    def collect(
        self, lookups: Sequence[Lookup], grads: Sequence[Sequence[Tensor]], step: int, timeout_s: float
    ) -> None:
        """Sum the gradients of each lookup's rows, and bring those of rows on other hosts to their carriers."""
        layouts = [self.carriers.lay_out(lookup.grad_bytes_out(), has_index=False) for lookup in lookups]
        relays = [self._relays[id(lookup)] for lookup in lookups]
        out = np.stack([sizes for _, sizes in layouts])
        into = np.stack([relay.local_grad_bytes() for relay in relays])
        round_ = self.local.round(Kind.GRADIENTS, step, out, into)
        for lookup, flat, (offsets, _), messages in zip(lookups, grads, layouts, round_.send_addresses):
            lookup.segment_sum(flat, self._far(messages, offsets))
        received = round_.run(timeout_s=timeout_s)
        self._collected = {id(lookup): received[index] for index, lookup in enumerate(lookups)}

    def gradient_bytes(self, lookup: Lookup) -> tuple[np.ndarray, np.ndarray]:
        relay = self._relays[id(lookup)]
        far = relay.grad_bytes() + lookup.bag_grad_bytes_out()
        return np.where(self._is_near, lookup.grad_bytes_out(), far), lookup.grad_bytes_in()

    def write_gradients(self, lookup: Lookup, grads: Sequence[Tensor], destinations: np.ndarray) -> None:
        relay = self._relays[id(lookup)]
        lookup.write_sums(self._near(destinations))
        relay.sum(self._collected.pop(id(lookup)), destinations)
        if self._num_straight:
            lookup.write_straight_grads(destinations + relay.grad_bytes())

    def _near(self, addresses: np.ndarray) -> np.ndarray:
        """Addresses of ranks of this host; 0, which is left out, for the others."""
        return np.where(self._is_near, addresses, 0)

    def _far(self, messages: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Where sections for ranks of other hosts lie in the messages to their carriers; 0 for ranks of this host."""
        return np.where(self._is_near, 0, messages[self.carriers.carrier] + offsets)


def _aligned(sizes: np.ndarray) -> np.ndarray:
    return (sizes + 63) & ~np.int64(63)
