"""What can be checked of a job before any actor starts: its files, its model's name, its storage, its hardware.

``check_job`` touches the machine and the storage; ``cluster_problems`` is pure.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping

from shoal.kernels.errors import ConfigError, ShoalError
from shoal.platform.cluster_choice import choose_cluster
from shoal.platform.config import JobConfig
from shoal.platform.config_fields import Problem, raise_problems
from shoal.platform.factory import add_working_dir_to_path, load_factory


def check_job(config: JobConfig) -> None:
    """Raise one ConfigError for all that is wrong; an error of the data or the storage passes as it is when alone."""
    config.validate()
    problems: list[str] = []
    errors: list[ShoalError] = []
    for check in (_check_model, _check_data, _check_storage, _check_hardware):
        try:
            problems += [str(problem) for problem in check(config)]
        except ShoalError as error:
            errors.append(error)
    if len(errors) == 1 and not problems:
        raise errors[0]
    raise_problems(problems + [str(error) for error in errors])


def cluster_problems(config: JobConfig, totals: Mapping[str, float]) -> list[Problem]:
    """What a cluster with these total resources (``ray.cluster_resources()``) lacks for the job. Pure.

    The totals bound what can ever be free: a job that exceeds them would wait until its start deadline.
    """
    scaling = config.scaling
    wanted = {"CPU": scaling.cpus_per_worker, "GPU": scaling.gpus_per_worker, **scaling.custom_resources}
    if scaling.memory_per_worker:
        wanted["memory"] = float(scaling.memory_per_worker)
    found = []
    for name, amount in wanted.items():
        need, have = amount * scaling.min_workers, totals.get(name, 0.0)
        if need > have:
            message = (
                f"asks for {scaling.min_workers} workers with {amount:g} {name} each, {need:g} in all, "
                f"but the cluster has {have:g}: use fewer workers, ask for less, or add nodes"
            )
            found.append(Problem("scaling", message))
    return found


def _check_model(config: JobConfig) -> Iterator[Problem]:
    add_working_dir_to_path()
    load_factory(config.model.factory)
    return iter(())


def _check_data(config: JobConfig) -> Iterator[Problem]:
    if not config.data.train:
        yield Problem("data.train", "names no files to train on")
        return
    if not config.data.sparse:
        yield Problem("data.sparse", "names no features: there would be nothing to look up")
        return
    from shoal.actors.dataset import scan_dataset

    # Footers only. It finds an empty data set, unreadable files and types that do not fit before a cluster starts.
    schema = config.data.schema()
    for paths in (config.data.train, config.data.eval):
        if paths:
            scan_dataset(list(paths), schema, max_bad_files=config.data.max_bad_files)


def _check_storage(config: JobConfig) -> Iterator[Problem]:
    from shoal.platform.storage import RetryPolicy, Storage

    storage = Storage(config.run.storage_path, RetryPolicy(attempts_max=2, deadline_s=15.0))
    name = f".write-test-{uuid.uuid4().hex}"
    try:
        storage.write_bytes(name, b"")
        storage.delete_file(name)
    except ConfigError:
        raise
    except ShoalError as error:
        yield Problem("run.storage_path", f"is not writable: {str(error).partition('] ')[2]}")


def _check_hardware(config: JobConfig) -> Iterator[Problem]:
    is_local = choose_cluster(config.scaling.address, os.environ).is_local
    if config.scaling.use_gpu and is_local:
        import torch

        if not torch.cuda.is_available():
            yield Problem("scaling.use_gpu", "is true, but this machine has no GPU that torch can use: set it to false")
