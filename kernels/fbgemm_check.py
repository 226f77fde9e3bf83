"""Which FBGEMM goes with which torch, checked before FBGEMM's library is loaded.

A mismatched pair fails at import with an undefined symbol, or later with a missing operator, and neither says what is
wrong. Whatever imports ``fbgemm_gpu`` calls ``require_fbgemm`` instead; Shoal itself trains without FBGEMM.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from types import ModuleType

from shoal.kernels.errors import DependencyError

#: FBGEMM release -> the torch release it is built for (the table in ``fbgemm_gpu/__init__.py``, and for 1.9 its wheel).
TORCH_OF_FBGEMM = {
    "1.9": "2.14",
    "1.8": "2.13",
    "1.7": "2.12",
    "1.6": "2.11",
    "1.5": "2.10",
    "1.4": "2.9",
    "1.3": "2.8",
    "1.2": "2.7",
    "1.1": "2.6",
    "1.0": "2.5",
}

#: The pair that this release of Shoal is tested with.
TESTED_TORCH, TESTED_FBGEMM = "2.13", "1.8"

_PACKAGES = ("fbgemm-gpu-cpu", "fbgemm-gpu")


def installed_version(package: str) -> str | None:
    """The installed version of a distribution, without importing it; None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pair_problem(torch_version: str | None, fbgemm: dict[str, str]) -> str:
    """What is wrong with a pair of versions, in one line that names the pair that works; empty when nothing is.

    ``fbgemm``: installed FBGEMM distributions, name -> version. Nightly and local builds are taken at their word.
    """
    if torch_version is None:
        return f"torch is not installed: pip install 'torch=={TESTED_TORCH}.*'"
    torch_release = _release(torch_version)
    if not fbgemm:
        return f"fbgemm is not installed: {_remedy(torch_release)}"
    if len(fbgemm) > 1:
        return f"{' and '.join(sorted(fbgemm))} are both installed and overwrite each other: uninstall one"
    (package, version), *_ = fbgemm.items()
    if re.match(r"\d{4}\.\d", version) or "+git" in version:
        return ""
    if TORCH_OF_FBGEMM.get(_release(version)) == torch_release:
        return ""
    return f"{package} {version} does not fit torch {torch_version}: {_remedy(torch_release, package)}"


def installed_problem() -> str:
    """``pair_problem`` of what is installed here."""
    found = {package: installed_version(package) for package in _PACKAGES}
    return pair_problem(installed_version("torch"), {name: version for name, version in found.items() if version})


def require_fbgemm() -> ModuleType:
    """The module ``fbgemm_gpu``, with its operators registered. Raises DependencyError in one line otherwise."""
    problem = installed_problem()
    if problem:
        raise DependencyError(problem)
    try:
        return importlib.import_module("fbgemm_gpu")
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        remedy = _remedy(_release(installed_version("torch") or ""))
        raise DependencyError(f"fbgemm does not load ({reason}): {remedy}") from error


def _release(version: str) -> str:
    return ".".join(re.split(r"[.+]", version)[:2])


def _remedy(torch_release: str, package: str = "fbgemm-gpu-cpu") -> str:
    fitting = [fbgemm for fbgemm, torch in TORCH_OF_FBGEMM.items() if torch == torch_release]
    if fitting:
        return f"pip install '{package}=={fitting[0]}.*' goes with torch {torch_release}"
    return (
        f"no fbgemm for torch {torch_release} is known; "
        f"pip install 'torch=={TESTED_TORCH}.*' '{package}=={TESTED_FBGEMM}.*' is the pair that works"
    )
