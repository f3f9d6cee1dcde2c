"""Facts about this machine: cores, memory, limits of the container, huge pages, NUMA.  Read from files, cheap."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a huge number


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cgroup_directories(root: Path, controller: str) -> list[Path]:
    """Directories of this process's control group and of its ancestors, for v2 and for v1's *controller*."""
    found: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        base = root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            base = base / controller
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return found


def cpu_model(root: Path = Path("/")) -> str:
    """Name of the processor as the system gives it."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def cpu_limit(root: Path = Path("/")) -> float | None:
    """Cores granted by the control group, or None without a limit."""
    limits: list[float] = []
    for directory in _cgroup_directories(root, "cpu"):
        quota, period = [*_read(directory / "cpu.max").split(), "", ""][:2]
        if not quota:
            quota, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits) if limits else None


def memory_bytes(root: Path = Path("/")) -> int | None:
    """Physical memory in bytes, or None where the system does not say."""
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The tightest memory limit of the control group and its ancestors in bytes, or None without one."""
    limits: list[int] = []
    for directory in _cgroup_directories(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(directory / name)
            if text.isdigit() and int(text) < _NO_LIMIT:
                limits.append(int(text))
    return min(limits) if limits else None


def huge_pages(root: Path = Path("/")) -> str | None:
    """Mode of transparent huge pages (``always``, ``madvise``, ``never``), or None where there are none."""
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = [word.strip("[]") for word in text.split() if word.startswith("[")]
    return chosen[0] if chosen else None


def numa_nodes(root: Path = Path("/")) -> int:
    """Number of NUMA nodes; 1 where the system does not say."""
    directory = root / "sys/devices/system/node"
    if not directory.is_dir():
        return 1
    return max(1, sum(1 for entry in directory.iterdir() if entry.name[4:].isdigit() and entry.name.startswith("node")))


def summary(root: Path = Path("/")) -> dict[str, str | int | float | None]:
    """The flat description that every JSON output carries."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "architecture": platform.machine(),
        "cpu": cpu_model(root),
        "cores": cores(),
        "cpu_limit": cpu_limit(root),
        "memory_bytes": memory_bytes(root),
        "memory_limit_bytes": memory_limit_bytes(root),
        "huge_pages": huge_pages(root),
        "numa_nodes": numa_nodes(root),
        "python": platform.python_version(),
        "numpy": version_of("numpy"),
        "torch": version_of("torch"),
        "numba": version_of("numba"),
        "transformers": version_of("transformers"),
    }
