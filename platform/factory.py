"""The function named by ``model.factory``, found and called with errors that say what is wrong with the name."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from shoal.kernels.errors import ConfigError
from shoal.platform.config import ModelConfig
from shoal.platform.config_fields import did_you_mean
from shoal.platform.secrets import reveal


def add_working_dir_to_path() -> None:
    """Let factories be found in the current folder: an installed command's own folder is in its place otherwise.

    It goes last, so that a folder here never shadows an installed package or the standard library.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def load_factory(path: str) -> Callable[..., Any]:
    """The callable at ``package.module:function``. Raises ConfigError that says which part does not exist."""
    if not path:
        raise ConfigError("model.factory is not set: name the function that builds the model, package.module:function")
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            message = (
                f"model.factory is {path!r}, but there is no module {error.name!r}: is its folder the current one?"
            )
            raise ConfigError(message) from None
        raise
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            known = [known for known, value in vars(target).items() if callable(value) and not known.startswith("_")]
            suggestion = did_you_mean(part, known)
            suggestion = suggestion if suggestion.startswith("; did") else ""
            raise ConfigError(f"model.factory is {path!r}, but {module_name} has no {part!r}{suggestion}")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"model.factory is {path!r}, which is not a function but {type(target).__name__}")
    return target


def build_model(config: ModelConfig) -> Any:
    """Call the factory with its arguments, secrets revealed. Raises ConfigError when the arguments do not fit."""
    factory = load_factory(config.factory)
    args = reveal(config.args, "model.args")
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        raise ConfigError(f"model.args does not fit {config.factory}: {error}") from None
    except ValueError:
        # Builtins and some extension functions have no signature; calling them tells.
        pass
    return factory(**args)
