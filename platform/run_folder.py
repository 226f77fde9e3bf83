"""A run's folder: its ``config.yaml``, and how a folder or a job file becomes a JobConfig again (DESIGN 7)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.kernels.errors import ConfigError, StorageMissingError
from shoal.platform.config import JobConfig
from shoal.platform.config_file import dump_config, load_config, parse_config
from shoal.platform.storage import Storage

CONFIG_NAME = "config.yaml"


def write_run_config(storage: Storage, config: JobConfig, provenance: Mapping[str, Any]) -> None:
    """Record the resolved configuration of a run. ``provenance``: versions, seed, data fingerprint."""
    storage.write_bytes(CONFIG_NAME, dump_config(config, provenance).encode())


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """Writes the configuration of a run once it is accepted; picklable, for the controller does it.

    ``run.resume`` is of the one start, not of the run: the folder keeps ``auto``.
    """

    storage: Storage
    config: JobConfig
    provenance: Mapping[str, Any]

    def __call__(self) -> None:
        config = self.config.replace(run=self.config.run.replace(resume="auto"))
        write_run_config(self.storage, config, self.provenance)


def read_run_config(run_dir: str, overrides: Sequence[str] = ()) -> JobConfig:
    """The configuration of the run in a folder, with overrides applied; it lives where the folder is now.

    Raises ConfigError when the folder is not a run's.
    """
    storage = Storage(run_dir)
    where = f"{storage.shown_uri.rstrip('/')}/{CONFIG_NAME}"
    try:
        text = storage.read_bytes(CONFIG_NAME).decode("utf-8")
    except StorageMissingError:
        raise ConfigError(f"{storage.shown_uri} is not the folder of a run: it has no {CONFIG_NAME}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text (byte {error.start})") from error
    config = parse_config(text, overrides, source=where)
    # A run may have been moved or reached by another path since; the folder that was named is the one to go on in.
    parent, name = split_run_dir(run_dir)
    return config.replace(run=config.run.replace(storage_path=parent, name=name))


def split_run_dir(run_dir: str) -> tuple[str, str]:
    """(storage_path, name) of a run's folder; a URI's options after ``?`` stay with the storage path."""
    base, mark, options = run_dir.partition("?") if "://" in run_dir else (os.path.abspath(run_dir), "", "")
    parent, _, name = base.rstrip("/").rpartition("/")
    if not name or not parent:
        raise ConfigError(f"{run_dir} is not the folder of a run: write <storage_path>/<name>")
    return f"{parent}{mark}{options}", name


def load_job_or_run(path: str, overrides: Sequence[str] = ()) -> JobConfig:
    """The configuration of a job file, or of a run when ``path`` is its folder."""
    is_file = path.endswith((".yaml", ".yml")) and "://" not in path and not os.path.isdir(path)
    return load_config(path, overrides) if is_file or os.path.isfile(path) else read_run_config(path, overrides)
