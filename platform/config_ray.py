"""Ray Train's own configuration objects as ours, where they fit.

A field that we cannot honour is refused by its name; nothing is dropped in silence. Ray itself is not imported: the
objects are read by their fields, so that a configuration can be converted without a cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shoal.kernels.errors import ConfigError
from shoal.platform.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from shoal.platform.config_fields import build

#: What to say about a field of Ray's that has no counterpart here.
_ADVICE = {
    "accelerator_type": "use resources_per_worker with the accelerator's resource",
    "callbacks": "read events/ and metrics/ in the run's folder",
    "checkpoint_score_attribute": "checkpoints are kept by age; set num_to_keep",
    "label_selector": "placement by label is not available",
    "max_preemption_failures": "losses on nodes that were announced to go are never counted",
    "preemption_grace_s": "workers leave a draining node before its deadline",
    "relax_collectives_on_preemption": "workers leave a draining node before its deadline",
    "storage_filesystem": "give storage_path as a URI such as s3://bucket/path",
    "worker_runtime_env": "pass the runtime environment to `ray job submit`",
}

#: Fields with the same name and meaning on both sides.
_SCALING_FIELDS = ("num_workers", "use_gpu", "elastic_resize_monitor_interval_s")
_FAILURE_FIELDS = ("max_failures", "controller_failure_limit")


def scaling_config(value: Any) -> ScalingConfig:
    """A ScalingConfig from ours, ray.train's, a mapping or None (defaults). Raises ConfigError naming the field."""
    if value is None or isinstance(value, ScalingConfig):
        return value or ScalingConfig()
    if isinstance(value, Mapping):
        return build(ScalingConfig, value, "scaling")
    fields = _fields(value, "ScalingConfig")
    resources = dict(fields.pop("resources_per_worker", None) or {})
    memory = resources.pop("memory", None)
    # Every worker has a placement group of its own, so a strategy over all workers has nothing to act on.
    fields.pop("placement_strategy", None)
    taken = {name: fields.pop(name) for name in _SCALING_FIELDS if name in fields}
    _refuse_rest(fields, "ray.train.ScalingConfig")
    return ScalingConfig(
        **taken,
        resources_per_worker=resources,
        memory_per_worker=None if memory is None else int(memory),
    )


def run_config(value: Any) -> RunConfig:
    """A RunConfig from ours, ray.train's, a mapping or None (defaults). Raises ConfigError naming the field."""
    if value is None or isinstance(value, RunConfig):
        return value or RunConfig()
    if isinstance(value, Mapping):
        return build(RunConfig, value, "run")
    fields = _fields(value, "RunConfig")
    failure = failure_config(fields.pop("failure_config", None))
    checkpoint = fields.pop("checkpoint_config", None)
    # Verbosity of Ray Train's own console; ours is one progress line.
    fields.pop("logging_config", None)
    taken = {name: fields.pop(name) for name in ("name", "storage_path") if fields.get(name) is not None}
    _refuse_rest(fields, "ray.train.RunConfig")
    return RunConfig(**taken, checkpoint=checkpoint_config(checkpoint), failure=failure)


def checkpoint_config(value: Any) -> CheckpointConfig:
    """A CheckpointConfig from ours, ray.train's or None (defaults). Raises ConfigError naming the field."""
    if value is None or isinstance(value, CheckpointConfig):
        return value or CheckpointConfig()
    fields = _fields(value, "CheckpointConfig")
    keep = fields.pop("num_to_keep", None)
    # The order means nothing without the attribute it orders by, which is refused.
    fields.pop("checkpoint_score_order", None)
    _refuse_rest(fields, "ray.train.CheckpointConfig")
    return CheckpointConfig(num_to_keep=keep)


def failure_config(value: Any) -> FailureConfig:
    """A FailureConfig from ours, ray.train's or None (defaults). Raises ConfigError naming the field.

    Ray's default of no restarts cannot be told from its absence, and means ours: any number, with progress in between.
    """
    if value is None or isinstance(value, FailureConfig):
        return value or FailureConfig()
    fields = _fields(value, "FailureConfig")
    taken = {name: fields.pop(name) for name in _FAILURE_FIELDS if name in fields}
    _refuse_rest(fields, "ray.train.FailureConfig")
    return FailureConfig(**taken)


def _fields(value: Any, class_name: str) -> dict[str, Any]:
    """The fields of a Ray dataclass that differ from their defaults."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type) or type(value).__name__ != class_name:
        raise ConfigError(f"expected a {class_name} of shoal or ray.train, not {type(value).__name__}")
    changed = {}
    for field in dataclasses.fields(value):
        current = getattr(value, field.name)
        if current != _default(field):
            changed[field.name] = current
    return changed


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _refuse_rest(fields: dict[str, Any], what: str) -> None:
    for name, value in sorted(fields.items()):
        if value not in (None, [], {}):
            advice = _ADVICE.get(name, "it has no counterpart in Shoal")
            raise ConfigError(f"{what}({name}={value!r}) is not supported: {advice}")
