"""``shoal doctor``: whether this machine, and the cluster and storage a job would use, can run Shoal.

Every check is a function that returns a ``Finding`` and never raises; what only slows things down is a warning. The
facts a check judges are arguments where they can be, so that tests state them.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import os
import platform
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping

from shoal.jobs.progress import format_bytes
from shoal.kernels.fbgemm_check import installed_problem, installed_version
from shoal.platform.cluster_choice import choose_cluster
from shoal.platform.ray_probe import probe_cluster, read_token_setting

#: What the x86-64-v3 baseline of the native modules needs, as /proc/cpuinfo names it.
X86_FLAGS = ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")

SHM_BYTES_MIN = 1 << 30
MEMORY_BYTES_MIN = 4 << 30
OPEN_FILES_MIN = 4096


class Level(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One check: its name, how it went, what was found and what to do."""

    name: str
    level: Level
    detail: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"name": self.name, "level": self.level.value, "detail": self.detail, "fix": self.fix}


def examine(*, address: str | None = None, storage: str | None = None) -> Iterator[Finding]:
    """All checks, in order: this machine first, then the cluster and the storage if they are named."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": check_python,
        "cpu": check_cpu,
        "native modules": check_native,
        "torch": check_torch,
        "fbgemm": check_fbgemm,
        "ray": check_ray,
        "memory": check_memory,
        "shared memory": check_shared_memory,
        "open files": check_open_files,
        "compiler": check_compilers,
        "ray token": check_token,
        "ray cluster": functools.partial(check_cluster, address),
    }
    if storage:
        checks["storage"] = functools.partial(check_storage, storage)
    for name, check in checks.items():
        try:
            yield check()
        except Exception as error:
            yield Finding(name, Level.WARN, f"could not be checked: {type(error).__name__}: {error}")


def check_python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    detail = f"{version} on {platform.system()} {platform.machine()}"
    return Finding("python", Level.OK, detail)


def check_cpu(cpuinfo: str | None = None, machine: str | None = None) -> Finding:
    """Whether the CPU has the instructions that the native modules are compiled for."""
    machine = machine or platform.machine()
    if cpuinfo is None:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            cpuinfo = file.read()
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if machine not in ("x86_64", "AMD64"):
        return Finding("cpu", Level.OK, f"{machine}, {num_cpus} CPUs")
    flags = set(re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)[1].split())  # type: ignore[index]
    missing = [flag for flag in X86_FLAGS if flag not in flags]
    if missing:
        fix = "use a machine from about 2013 on, or ask the hypervisor to pass the CPU's flags through"
        return Finding("cpu", Level.FAIL, f"lacks {', '.join(missing)} of the x86-64-v3 baseline", fix)
    return Finding("cpu", Level.OK, f"x86-64-v3, {num_cpus} CPUs")


def check_native() -> Finding:
    for module in ("_core", "_arrow", "_shm"):
        try:
            importlib.import_module(f"shoal.kernels.{module}")
        except ImportError as error:
            fix = "build it: pip install -e . (needs a C++17 compiler)"
            return Finding("native modules", Level.FAIL, f"shoal.kernels.{module}: {error}", fix)
    return Finding("native modules", Level.OK, "_core, _arrow, _shm load")


def check_torch() -> Finding:
    version = installed_version("torch")
    if version is None:
        return Finding("torch", Level.FAIL, "not installed", "pip install 'torch>=2.13,<2.14'")
    if not version.startswith("2.13."):
        return Finding("torch", Level.FAIL, version, "Shoal needs torch 2.13: pip install 'torch>=2.13,<2.14'")
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return Finding("torch", Level.FAIL, f"{version} does not load: {error}", "reinstall torch")
    if torch.cuda.is_available():
        return Finding("torch", Level.OK, f"{version}, {torch.cuda.device_count()} GPU(s)")
    return Finding("torch", Level.OK, f"{version}, no GPU (scaling.use_gpu must be false)")


def check_fbgemm(problem: str | None = None) -> Finding:
    problem = installed_problem() if problem is None else problem
    if problem:
        # Training does not need it: serving formats and the parity tests do.
        return Finding("fbgemm", Level.WARN, *problem.split(": ", 1))
    versions = (installed_version("fbgemm-gpu-cpu") or installed_version("fbgemm-gpu"), installed_version("torch"))
    return Finding("fbgemm", Level.OK, f"{versions[0]} goes with torch {versions[1]}")


def check_ray() -> Finding:
    version = installed_version("ray")
    if version is None:
        return Finding("ray", Level.FAIL, "not installed", "pip install 'ray[train,data,default]>=2.60,<2.61'")
    if not version.startswith("2.60."):
        return Finding("ray", Level.FAIL, version, "Shoal needs Ray 2.60: pip install 'ray[default]>=2.60,<2.61'")
    return Finding("ray", Level.OK, version)


def check_token(environ: Mapping[str, str] | None = None) -> Finding:
    """What this process would present to a cluster that asks for a token."""
    setting = read_token_setting(os.environ if environ is None else environ)
    if setting.mode not in ("token", "disabled"):
        fix = "set RAY_AUTH_MODE to token or disabled"
        return Finding("ray token", Level.FAIL, f"RAY_AUTH_MODE is {setting.mode!r}", fix)
    if setting.is_token_mode and not setting.token:
        fix = "set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or RAY_AUTH_MODE=disabled where the network is trusted"
        return Finding("ray token", Level.FAIL, f"mode is token, but {setting.source} holds none: token missing", fix)
    if setting.is_token_mode:
        return Finding("ray token", Level.OK, f"mode token, from {setting.source}")
    return Finding("ray token", Level.OK, "mode off: fine for a local cluster")


def check_cluster(address: str | None, environ: Mapping[str, str] | None = None) -> Finding:
    environ = os.environ if environ is None else environ
    choice = choose_cluster(address, environ)
    if choice.is_local:
        return Finding("ray cluster", Level.OK, f"local, started per run ({choice.reason})")
    result = probe_cluster(choice.address, environ)
    if not result.is_ok:
        return Finding("ray cluster", Level.FAIL, f"{result.detail} ({choice.reason})", result.fix)
    own = installed_version("ray") or ""
    if result.ray_version and result.ray_version != own:
        fix = f"install ray=={result.ray_version} here, or {own} there"
        return Finding("ray cluster", Level.FAIL, f"it runs Ray {result.ray_version}, this machine {own}", fix)
    return Finding("ray cluster", Level.OK, f"{result.detail} ({choice.reason})")


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of memory for this process: the machine's, or its cgroup's limit if that is lower."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if line.split()[1].isdigit()}
    total, available = info["MemTotal"], info["MemAvailable"]
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, used = _read_number(limit_path), _read_number(used_path)
        if limit is not None and limit < total:
            total = limit
            available = min(available, max(0, limit - (used or 0)))
    return total, available


def check_memory() -> Finding:
    total, available = memory_bytes()
    detail = f"{format_bytes(available)} of {format_bytes(total)} available"
    if available < MEMORY_BYTES_MIN:
        return Finding("memory", Level.WARN, detail, "Ray and two workers want about 4 GiB besides the tables")
    return Finding("memory", Level.OK, detail)


def check_shared_memory(path: str = "/dev/shm") -> Finding:
    """Room for Ray's object store and the exchange among the ranks of a host."""
    if not os.path.isdir(path):
        return Finding("shared memory", Level.WARN, f"{path} does not exist", "set scaling.transport to gloo")
    usage = shutil.disk_usage(path)
    detail = f"{path}: {format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    if usage.free < SHM_BYTES_MIN:
        fix = "give the container more (docker run --shm-size=4g; in Kubernetes an emptyDir with medium Memory)"
        return Finding("shared memory", Level.WARN, detail, fix)
    return Finding("shared memory", Level.OK, detail)


def check_open_files() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES_MIN:
        return Finding("open files", Level.WARN, f"limit {soft} (hard {hard})", f"ulimit -n {OPEN_FILES_MIN} or more")
    return Finding("open files", Level.OK, f"limit {soft}")


def check_compilers() -> Finding:
    compiler = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    if compiler is None:
        return Finding("compiler", Level.WARN, "no C++ compiler on PATH", "needed only to build from source")
    return Finding("compiler", Level.OK, compiler)


def check_storage(uri: str) -> Finding:
    """Write, list, read and delete a small object where a run would live."""
    from shoal.platform.storage import Storage, shown

    storage = Storage(uri)
    name = f"doctor-{uuid.uuid4().hex}"
    try:
        storage.write_bytes(f"{name}/probe", b"shoal")
        is_same = storage.read_bytes(f"{name}/probe") == b"shoal"
        is_listed = any(entry.name == "probe" for entry in storage.list_dir(name))
        storage.delete_dir(name)
    except Exception as error:
        return Finding("storage", Level.FAIL, f"{shown(uri)}: {error}", "check the path, permissions and credentials")
    if not (is_same and is_listed):
        return Finding("storage", Level.FAIL, f"{shown(uri)}: what was written cannot be read or listed at once")
    return Finding("storage", Level.OK, f"{shown(uri)}: write, list, read, delete work")


def _read_number(path: str) -> int | None:
    try:
        with open(path, encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
