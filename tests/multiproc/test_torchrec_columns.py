"""TorchRec as a second oracle of row-wise Adagrad: table-wise it is what our column blocks give (S7); its column-wise
sharding, whose state depends on the cut, is ``optimizer_scope: shard``."""

from __future__ import annotations

import importlib.util
import multiprocessing as mp
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import torchrec_columns as peer

from shoal.actors.groups import host_store
from shoal.kernels.column_blocks import cut_columns
from shoal.kernels.cut import BlockRows
from shoal.kernels.plan import StepPlan
from shoal.kernels.rowstore import RowStore
from shoal.kernels.spec import FeatureSpec, OptimizerKind, OptimizerSpec, TableSpec

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchrec") is None, reason="torchrec is not installed")


def ours(*, has_own_statistic: bool) -> np.ndarray:
    """The same table in two column blocks, trained on both ranks' batches at once."""
    optimizer = OptimizerSpec(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=peer.LR)
    table = TableSpec(name="t", num_embeddings=peer.ROWS, embedding_dim=peer.DIM, optimizer=optimizer)
    blocks = cut_columns(table, (peer.DIM // 2,) * 2, has_own_statistic=has_own_statistic)
    store = RowStore(blocks, undo_steps=0)
    store.add_all_blocks()
    ids, zeros = torch.arange(peer.ROWS), torch.zeros(peer.ROWS, dtype=torch.int64)
    halves = peer.first_weights().chunk(2, dim=1)
    for number, half in enumerate(halves):
        state = torch.zeros(peer.ROWS, 1)
        store.import_block(number, 0, BlockRows(ids, half.contiguous(), state, zeros, zeros))
    features = [FeatureSpec(name="f", table=number, collection=0) for number in range(2)]
    plan = StepPlan(store, blocks, features, [np.zeros(1, np.uint16)] * 2, rank=0, world_size=1)
    nobody, rates = np.zeros(1, np.int64), np.full(2, peer.LR, np.float32)
    for step in range(peer.STEPS):
        parts = [peer.batch_of(step, rank) for rank in range(2)]
        values, wanted = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        lookup = plan.new_lookup()
        lookup.route(values, torch.arange(len(values) + 1), None, np.zeros(2, np.int32), len(values))
        lookup.resolve(nobody, nobody)
        outputs = lookup.new_outputs()
        lookup.pool(nobody, outputs)
        # The mean over each rank's batch; TorchRec divides the gradients of both by the number of ranks.
        lookup.segment_sum([2 * (outputs[0] - wanted) / wanted.numel()], nobody)
        plan.apply([lookup], [nobody], step + 1, rates)
        if plan.shares_statistics:
            plan.write_statistics(nobody)
            plan.apply_shared(nobody, step + 1, rates)
    return torch.cat([store.lookup(number, ids) for number in range(2)], dim=1).numpy()


@pytest.mark.timeout(240)
def test_row_wise_adagrad_equals_torchrecs_of_the_same_scope():
    keep, _, port = host_store()
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=peer.train, args=(rank, port, queue), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        theirs = queue.get(timeout=200)
    finally:
        for process in ranks:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
        del keep
    np.testing.assert_allclose(ours(has_own_statistic=False), theirs["table_wise"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours(has_own_statistic=True), theirs["column_wise"], rtol=1e-5, atol=1e-6)
    moved = np.linalg.norm(theirs["table_wise"] - peer.first_weights().numpy())
    apart = np.linalg.norm(theirs["table_wise"] - theirs["column_wise"])
    assert apart > 0.05 * moved, "without S7 the cut changes the numbers"
