"""Facts about the machine are read from files, so a directory can play the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache_factory.cli import machine


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_the_tightest_memory_limit_of_all_ancestors_counts(tmp_path: Path) -> None:
    """A container may be limited by a group above its own: the smallest number wins, whoever wrote it."""
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": f"{2 << 30}\n",
            "sys/fs/cgroup/memory.max": f"{4 << 30}\n",
        },
    )
    assert machine.memory_limit_bytes(root) == 2 << 30


def test_the_first_version_of_control_groups_is_understood(tmp_path: Path) -> None:
    """Version 1 has a directory for each controller and writes 'no limit' as a huge number."""
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "7:cpu,cpuacct:/box\n4:memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{1 << 30}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert machine.memory_limit_bytes(root) == 1 << 30
    assert machine.cpu_limit(root) == 1.5


def test_a_processor_quota_is_read_in_cores(tmp_path: Path) -> None:
    """Version 2 writes quota and period in one line, and 'max' for none."""
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/box\n",
            "sys/fs/cgroup/box/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    )
    assert machine.cpu_limit(root) == 2.0


@pytest.mark.parametrize("mode", ["always", "madvise", "never"])
def test_the_huge_page_mode_is_the_word_in_brackets(tmp_path: Path, mode: str) -> None:
    """The kernel lists all modes and brackets the one in force."""
    text = "always madvise never".replace(mode, f"[{mode}]")
    root = plant(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert machine.huge_pages(root) == mode


def test_numa_nodes_are_counted_by_their_directories(tmp_path: Path) -> None:
    """Only node0, node1, … count; other entries of the directory do not."""
    base = "sys/devices/system/node"
    root = plant(
        tmp_path, {f"{base}/node0/x": "", f"{base}/node1/x": "", f"{base}/power/x": "", f"{base}/online": "0-1"}
    )
    assert machine.numa_nodes(root) == 2


def test_a_machine_without_these_files_has_no_limits(tmp_path: Path) -> None:
    """macOS and Windows have none of the files; nothing fails and nothing is invented."""
    assert machine.memory_limit_bytes(tmp_path) is None
    assert machine.cpu_limit(tmp_path) is None
    assert machine.huge_pages(tmp_path) is None
    assert machine.numa_nodes(tmp_path) == 1
    assert machine.cores() >= 1


def test_an_absent_package_has_no_version() -> None:
    """Absence is a value here: doctor prints it with the command that mends it."""
    assert machine.version_of("kvcache-factory") is not None
    assert machine.version_of("no-such-distribution-anywhere") is None
