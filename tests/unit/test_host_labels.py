"""Hosts by a Ray node label: how it is written, which nodes lack it, what is refused."""

from __future__ import annotations

import pytest

from shoal.kernels.errors import ConfigError
from shoal.platform.config import ScalingConfig
from shoal.platform.host_labels import check_label, host_label, nodes_without

NODES = [
    {"NodeID": "a", "Alive": True, "Labels": {"rack": "left", "ray.io/node-id": "a"}},
    {"NodeID": "b", "Alive": True, "Labels": {"ray.io/node-id": "b"}},
    {"NodeID": "c", "Alive": False, "Labels": {"row": "7"}},
    {"NodeID": "d", "Alive": True},
]


def test_a_label_is_written_with_its_prefix():
    assert host_label("auto") == "" and host_label("label:rack") == "rack"
    for wrong in ("rack", "label:", "label: rack", ""):
        assert host_label(wrong) is None
        with pytest.raises(ConfigError, match="hosts is"):
            ScalingConfig(num_workers=2, hosts=wrong).validate()


def test_no_worker_is_put_on_a_node_without_the_label():
    assert nodes_without("rack", NODES) == {"b", "c", "d"}
    assert nodes_without("", NODES) == set()


def test_a_label_that_no_living_node_has_is_refused_with_those_there_are():
    check_label("rack", NODES)
    check_label("", [])
    with pytest.raises(ConfigError, match=r"label:row, but none of the cluster's 3 nodes .* they have rack, ray.io"):
        check_label("row", NODES)
