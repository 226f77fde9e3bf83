"""ray.train's configuration objects are taken where they fit; what does not fit is refused by its name."""

from __future__ import annotations

import pytest

train = pytest.importorskip("ray.train")

from shoal.kernels.errors import ConfigError  # noqa: E402
from shoal.platform.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from shoal.platform.config_ray import checkpoint_config, failure_config, run_config, scaling_config  # noqa: E402


def test_scaling_config_keeps_workers_and_resources():
    theirs = train.ScalingConfig(num_workers=3, resources_per_worker={"CPU": 2, "memory": 1e9, "disk": 1})
    ours = scaling_config(theirs)
    assert (ours.num_workers, ours.cpus_per_worker, ours.memory_per_worker) == (3, 2, 10**9)
    assert ours.custom_resources == {"disk": 1}
    ours.validate()


def test_gpu_scaling_asks_for_one_gpu_per_worker():
    ours = scaling_config(train.ScalingConfig(num_workers=2, use_gpu=True))
    assert (ours.use_gpu, ours.gpus_per_worker) == (True, 1)


def test_run_config_keeps_name_path_and_checkpoints():
    theirs = train.RunConfig(
        name="n",
        storage_path="/tmp/x",
        checkpoint_config=train.CheckpointConfig(num_to_keep=3),
        failure_config=train.FailureConfig(),
    )
    assert run_config(theirs) == RunConfig(name="n", storage_path="/tmp/x", checkpoint=CheckpointConfig(num_to_keep=3))


def test_run_config_that_ray_filled_in_by_itself_is_taken():
    ours = run_config(train.RunConfig())
    assert ours.name
    ours.validate()


def test_ours_and_nothing_pass_through():
    assert scaling_config(None) == ScalingConfig()
    assert run_config(None) == RunConfig()
    assert checkpoint_config(CheckpointConfig(num_to_keep=None)).num_to_keep is None
    assert scaling_config({"num_workers": 2}).num_workers == 2


@pytest.mark.parametrize(
    ("convert", "words"),
    [
        (lambda: scaling_config(train.ScalingConfig(accelerator_type="A100")), ["accelerator_type", "A100"]),
        (lambda: scaling_config(train.ScalingConfig(label_selector={"a": "b"})), ["label_selector"]),
        (lambda: failure_config(train.RunConfig()), ["FailureConfig", "RunConfig"]),
        (
            lambda: checkpoint_config(train.CheckpointConfig(checkpoint_score_attribute="auc")),
            ["checkpoint_score_attribute", "num_to_keep"],
        ),
        (lambda: scaling_config(3), ["ScalingConfig", "int"]),
        (lambda: scaling_config(train.RunConfig()), ["ScalingConfig", "RunConfig"]),
        (lambda: scaling_config({"workers": 2}), ["workers", "did you mean 'num_workers'"]),
    ],
)
def test_unsupported_field_is_refused_by_name(convert, words):
    with pytest.raises(ConfigError) as caught:
        convert()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_elastic_pair_and_its_interval_are_taken():
    ours = scaling_config(train.ScalingConfig(num_workers=(1, 4), elastic_resize_monitor_interval_s=5))
    assert (ours.min_workers, ours.max_workers, ours.is_elastic) == (1, 4, True)
    assert ours.elastic_resize_monitor_interval_s == 5
    ours.validate()


def test_failure_config_keeps_its_budgets():
    theirs = train.FailureConfig(max_failures=3, controller_failure_limit=2)
    ours = run_config(train.RunConfig(failure_config=theirs)).failure
    assert ours == FailureConfig(max_failures=3, controller_failure_limit=2)
    assert failure_config(train.FailureConfig()) == failure_config(None) == FailureConfig()


def test_failure_field_without_counterpart_is_refused():
    theirs = train.FailureConfig()
    if not hasattr(theirs, "preemption_grace_s"):
        pytest.skip("this Ray knows no preemption budget")
    theirs = train.FailureConfig(preemption_grace_s=5.0)
    with pytest.raises(ConfigError, match="preemption_grace_s"):
        failure_config(theirs)
