"""Secrets in configurations: found, refused when written inline, referred to as ``${env:NAME}``.

A configuration never holds a secret's value, so nothing that prints, stores or sends a configuration can leak one.
Pure, but for ``reveal``, which reads the named environment variables at the place of use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.kernels.errors import ConfigError
from shoal.platform.config_fields import Problem, join_path

#: Keys whose value is a secret: the whole name or its last words.
_SECRET_KEY = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|secret_key|secret_access_key|access_key|access_key_id|api_key|apikey"
    r"|token|credentials?|private_key|connection_string)$",
    re.IGNORECASE,
)
_REFERENCE = re.compile(r"^\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}$")
_URI_USER = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^/@\s]+)@", re.IGNORECASE)
_URI_QUERY = re.compile(r"(?P<key>[?&][A-Za-z_]*(?:password|secret|token|key|signature)[A-Za-z_]*=)[^&\s'\"]+", re.I)


def is_secret_key(key: str) -> bool:
    """Whether a key names a secret (``password``, ``s3_secret_key`` ...)."""
    return _SECRET_KEY.search(key.replace("-", "_")) is not None


def is_reference(value: Any) -> bool:
    """Whether a value is a reference ``${env:NAME}``."""
    return isinstance(value, str) and _REFERENCE.match(value) is not None


def secret_problems(tree: Any, path: str = "", key: str = "") -> Iterator[Problem]:
    """Secrets in clear text, and references outside secrets, anywhere in a tree of mappings and lists."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from secret_problems(value, join_path(path, name), str(name))
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from secret_problems(value, join_path(path, i), key)
    elif is_reference(tree):
        if not is_secret_key(key):
            yield Problem(path, f"is {tree}: references are for secrets only; use -o {path}=... to vary a value")
    elif isinstance(tree, str) and "${" in tree:
        yield Problem(path, "contains '${' but is not a reference; a secret is written ${env:NAME}, alone")
    elif isinstance(tree, str) and tree != redact(tree):
        yield Problem(path, f"holds credentials in its address ({redact(tree)}): leave them to the environment")
    elif is_secret_key(key) and isinstance(tree, str | int | float) and not isinstance(tree, bool) and tree != "":
        yield Problem(path, "holds a secret in clear text: write ${env:NAME} and set that environment variable")


def redact(text: str) -> str:
    """``text`` with credentials inside URIs replaced by ``***``."""
    text = _URI_USER.sub(lambda match: f"{match['scheme']}***@", text)
    return _URI_QUERY.sub(lambda match: f"{match['key']}***", text)


def redact_tree(tree: Any, key: str = "") -> Any:
    """A copy of a tree with every secret replaced by ``***``; references stay, they say nothing."""
    if isinstance(tree, Mapping):
        return {name: redact_tree(value, str(name)) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [redact_tree(value, key) for value in tree]
    if is_reference(tree) or tree is None or isinstance(tree, bool):
        return tree
    if is_secret_key(key):
        return "***"
    return redact(tree) if isinstance(tree, str) else tree


def reveal(tree: Any, path: str = "") -> Any:
    """A copy of a tree with references replaced by the values of their environment variables.

    Called where a secret is used, never before a configuration is stored or shown. Raises ConfigError that names the
    variable when it is not set.
    """
    if isinstance(tree, Mapping):
        return {name: reveal(value, join_path(path, name)) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [reveal(value, join_path(path, i)) for i, value in enumerate(tree)]
    match = _REFERENCE.match(tree) if isinstance(tree, str) else None
    if match is None:
        return tree
    if match[1] not in os.environ:
        raise ConfigError(f"{path} refers to the environment variable {match[1]}, which is not set")
    return os.environ[match[1]]
