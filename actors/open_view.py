"""OpenView: one rank's data plane in one view: its groups, step plan, exchange and session, opened and closed as one.

Forming groups and building the plan need nothing of the present view, so both happen in the background while the view
before still trains (V3); ``take_over`` is what remains for the boundary.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from shoal.actors.groups import Groups, GroupSpec, form, run_hash
from shoal.actors.messages import View
from shoal.actors.rank_facts import view_facts, view_hash
from shoal.actors.session import Session
from shoal.actors.sharded import ModelTables
from shoal.kernels.agreement import agree
from shoal.kernels.exchange import Exchange
from shoal.kernels.facts import Facts
from shoal.kernels.frame import Identity
from shoal.kernels.plan import StepPlan
from shoal.kernels.row_exchange import FlatRows, HierarchicalRows, RowExchange, host_numbers
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import WireCodecs

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenOptions:
    """How a rank opens views; the same for all views of a run."""

    num_threads: int = 1
    #: Deadline of one exchange.
    op_timeout_s: float = 10.0
    #: Address Gloo listens on where the ranks are on several hosts.
    bind_address: str = ""
    #: What this worker's numbers depend on in every view, and the hash of it (``rank_facts``).
    facts: Facts = ()
    facts_hash: int = 0


class OpenView:
    """A view that this worker has formed groups for, as ``rank``."""

    def __init__(
        self,
        view: View,
        rank: int,
        model_tables: ModelTables,
        store: RowStore,
        options: OpenOptions,
        *,
        form_timeout_s: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Form the groups of ``view`` with all its members, and plan its steps. Blocks, until ``is_cancelled``; any
        thread.

        Raises ExchangeTimeoutError naming the ranks that did not come, PeerError when it was cancelled or the store is
        out of reach.
        """
        self.view, self.rank = view, rank
        self._model_tables, self._store, self._options = model_tables, store, options
        self.session: Session | None = None
        # On one host there is nobody to carry rows to.
        self._is_hierarchical = view.exchange == "hierarchical" and len(set(view.hosts)) > 1
        self.groups: Groups = form(
            GroupSpec(
                run=view.run,
                epoch=view.epoch,
                rank=rank,
                hosts=view.hosts,
                store_host=view.store_host,
                store_port=view.store_port,
                transport=view.transport,
                has_local=self._is_hierarchical,
                # Among ranks of one host Gloo listens on loopback; across hosts it may choose that too, unless told.
                bind_address=options.bind_address if len(set(view.hosts)) > 1 else "",
                form_timeout_s=form_timeout_s,
                timeout_s=options.op_timeout_s,
            ),
            is_cancelled,
        )
        try:
            self.plan = StepPlan(
                store,
                model_tables.tables,
                model_tables.features,
                [view.owners(table.name) for table in model_tables.tables],
                rank=rank,
                world_size=view.world_size,
                num_threads=options.num_threads,
                hosts=host_numbers(view.hosts) if self._is_hierarchical else (),
                codecs=[view.codecs.get(table.name, WireCodecs()) for table in model_tables.tables],
                mirrored=[t for t, table in enumerate(model_tables.tables) if table.name in view.mirrored],
            )
        except BaseException:
            self.groups.destroy()
            raise

    def take_over(self, *, start_timeout_s: float) -> Session:
        """Attach the model's collections to this view's data plane. The step-loop thread, at a boundary.

        ``start_timeout_s``: patience for the other ranks at the first exchange and step, beyond the usual deadline.
        """
        exchange = Exchange(
            self.groups.transport,
            self._identity(),
            timeout_s=self._options.op_timeout_s,
            payload_transport=self.groups.payload_transport,
        )
        self.session = Session(
            self._model_tables,
            self._store,
            self.plan,
            exchange,
            rows=self._rows(exchange),
            start_timeout_s=start_timeout_s,
        )
        return self.session

    def agree(self, step: int, timeout_s: float) -> None:
        """Compare with all ranks what their numbers depend on, before the view's first step; collective.

        Raises the same ConfigError on all ranks, which names the first difference, its values and their ranks.
        """
        # An identity without a plan: where plans differ, it is to be said in what.
        identity = dataclasses.replace(self._identity(), plan_hash=0, num_tables=0)
        exchange = Exchange(self.groups.transport, identity, timeout_s=timeout_s)
        hash_value = view_hash(self._options.facts_hash, self.view, self.plan)
        agree(exchange, step, hash_value, lambda: self._options.facts + view_facts(self.view, self.plan), timeout_s)

    def _identity(self) -> Identity:
        return Identity(
            run=run_hash(self.view.run),
            epoch=self.view.epoch,
            rank=self.rank,
            world_size=self.view.world_size,
            plan_hash=self.plan.hash,
            num_tables=len(self._model_tables.tables),
        )

    def _rows(self, exchange: Exchange) -> RowExchange:
        if not self._is_hierarchical:
            return FlatRows(exchange, self.plan)
        transport = self.groups.local_transport
        assert transport is not None, "formed with has_local"
        identity = dataclasses.replace(exchange.identity, rank=transport.rank, world_size=transport.world_size)
        return HierarchicalRows(
            exchange, Exchange(transport, identity, timeout_s=self._options.op_timeout_s), self.plan
        )

    def abort(self, reason: str = "aborted") -> None:
        """Break the groups from any thread: an exchange in progress raises, here and at the peers (F1)."""
        self.groups.abort(reason)

    def close(self) -> None:
        """Leave the groups and forget lookups in flight; idempotent. The collections stay attached where another
        session has them by now."""
        for step in (self.groups.destroy, self._abandon_session):
            try:
                step()
            except Exception:  # what follows must still be released
                logger.exception("run=%s epoch=%d action=close_view", self.view.run, self.view.epoch)

    def _abandon_session(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.abandon()
