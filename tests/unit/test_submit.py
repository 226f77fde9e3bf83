"""A submitted job's working directory may be the repository: the installed package is found all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_installed_package_is_found_from_a_working_directory_that_is_the_repository(tmp_path):
    # As Ray does it: the working directory is the first entry of PYTHONPATH. -S leaves out this environment's own
    # editable install, so that only the plain layout of a wheel is there to be found.
    package = tmp_path / "site" / "shoal"
    package.mkdir(parents=True)
    (package / "__init__.py").symlink_to(ROOT / "shoal" / "__init__.py")
    for folder in ("kernels", "actors", "platform", "jobs"):
        (package / folder).symlink_to(ROOT / folder)
    code = "import platform, shoal.jobs.cli, shoal.platform.config; print(platform.system(), shoal.jobs.cli.__file__)"
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'site'}"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert str(package) in done.stdout
