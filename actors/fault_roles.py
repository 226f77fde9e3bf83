"""Who a worker is to the faults of a schedule (``shoal.kernels.faults``): its roles in its views."""

from __future__ import annotations

from shoal.actors.messages import View
from shoal.kernels import faults


def take_roles(worker_id: str, view: View | None, next_view: View | None = None) -> None:
    """This process is ``worker_id``, in ``view`` (None: not in any yet), and ``next_view`` is to follow."""
    if not faults.is_installed():
        return
    rank = None if view is None else view.rank_of(worker_id)
    is_next = next_view is not None and next_view.rank_of(worker_id) is not None
    faults.set_roles(
        faults.roles_in(
            rank,
            () if view is None else view.buddies,
            0 if view is None else view.world_size,
            is_joining=rank is None and is_next,
            is_leaving=rank is not None and next_view is not None and not is_next,
        )
    )
