"""Workers on two Ray nodes: two hosts to the exchange, so Gloo across them, with the numbers of one process."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "multiproc"))
sys.path.insert(0, str(Path(__file__).parent))

import parity
import test_train_on_ray

from shoal.kernels.errors import ConfigError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture
def two_nodes():
    import ray
    from ray.cluster_utils import Cluster

    temp = tempfile.mkdtemp(prefix="sh-", dir="/tmp")
    arguments = {"num_cpus": 1, "include_dashboard": False, "temp_dir": temp, "object_store_memory": 150 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=arguments | {"labels": {"rack": "left"}})
    cluster.add_node(num_cpus=1, object_store_memory=150 * 2**20, labels={"rack": "right"})
    ray.init(address=cluster.address, namespace="shoal", log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


def test_workers_on_two_nodes_train_like_one_process(two_nodes, tmp_path):
    data = parity.write_data(tmp_path / "train")
    alone = test_train_on_ray.trainer(data, tmp_path / "a", workers=0).fit()
    racks = {"hosts": "label:rack", "exchange": "hierarchical"}
    spread = test_train_on_ray.trainer(data, tmp_path / "b", workers=2, scaling=racks).fit()
    # One CPU a node and one CPU a worker: each worker has a node, and thereby a host, of its own.
    journal = "".join(path.read_text() for path in sorted((tmp_path / "b" / "run" / "journal").iterdir()))
    assert '"left"' in journal and '"right"' in journal, "hosts are named by the label"
    for name in ("eval/auc", "eval/log_loss", "loss"):
        assert spread.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-4), name
    with pytest.raises(ConfigError, match=r"none of the cluster's 2 nodes has that label; they have .*rack"):
        test_train_on_ray.trainer(data, tmp_path / "c", workers=2, scaling={"hosts": "label:row"}).fit()
