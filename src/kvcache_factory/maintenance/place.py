"""Facts about the place of a disk tier: file system, free space, direct I/O, locks, modes.  For ``doctor --disk``."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

import msgspec

from ..errors import ConfigError, KVCacheError
from ..store.disk.aio import probe_direct
from ..store.disk.directory import MARKER, Directory, fcntl, try_lock
from .survey import open_directory

NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre", "afs"})
MEMORY = frozenset({"tmpfs", "ramfs"})


class Place(msgspec.Struct, frozen=True):
    """What a directory offers a disk tier.

    Attributes:
        state: ``ours`` (a disk tier's), ``empty``, ``absent`` (it would be made), or why it cannot be used.
        usable: whether a disk tier could open it.
        nearest: the directory that was looked at: itself, or the nearest one above that exists.
        writable: whether a file can be made, by trying where a disk tier could be.
        free_bytes: free for this user; used_bytes: what the directory's own files take now.
        file_system: its type as the system names it, empty where it does not say.
        direct: whether O_DIRECT works there, by doing it once; locks: whether file locks do.
        numa_node: of the device, None where there is none to tell.
        mode: permission bits of the directory, None where it is absent; open_files: files others may read or write.
    """

    state: str
    usable: bool
    nearest: Path
    writable: bool
    free_bytes: int
    used_bytes: int
    file_system: str
    direct: bool
    locks: bool
    numa_node: int | None
    mode: int | None
    open_files: int


def look_at(path: Path, root: Path = Path("/")) -> Place:
    """Examine the place of a disk tier at *path*; leaves nothing behind.  Raises OSError."""
    path = path.absolute()
    nearest = next(p for p in (path, *path.parents) if p.exists())
    state, usable = _state(path)
    writable = direct = locks = False
    if usable:
        writable, locks = _try_a_file(nearest)
        direct = writable and probe_direct(nearest, f"kvcache-factory.probe-{secrets.token_hex(4)}")
    space = os.statvfs(nearest) if hasattr(os, "statvfs") else None
    return Place(
        state=state,
        usable=usable and writable,
        nearest=nearest,
        writable=writable,
        free_bytes=space.f_bavail * space.f_frsize if space else 0,
        used_bytes=Directory(path).list().used_bytes if state == "ours" else 0,
        file_system=file_system_of(nearest, root),
        direct=direct,
        locks=locks,
        numa_node=numa_node_of(nearest, root),
        mode=stat.S_IMODE(path.stat().st_mode) if path.is_dir() else None,
        open_files=_open_files(path) if state == "ours" else 0,
    )


def _state(path: Path) -> tuple[str, bool]:
    if not path.exists():
        above = next(p for p in path.parents if p.exists())
        return ("absent", True) if above.is_dir() else (f"{above} is a file", False)
    if not path.is_dir():
        return "a file", False
    try:
        if not any(path.iterdir()):
            return "empty", True
        if not (path / MARKER).exists():
            return "holds files of something else", False
        open_directory(path)
    except PermissionError:
        return "no permission to read it", False
    except (ConfigError, KVCacheError) as error:
        return str(error), False
    return "ours", True


def _try_a_file(directory: Path) -> tuple[bool, bool]:
    """Whether a file can be made in *directory*, and whether it can be locked."""
    try:
        with tempfile.NamedTemporaryFile(prefix="kvcache-factory.probe-", dir=directory) as file:
            return True, fcntl is not None and try_lock(file.fileno())
    except OSError:
        return False, False


def _open_files(directory: Path) -> int:
    return sum(1 for p in directory.rglob("*") if not p.is_symlink() and p.stat().st_mode & 0o077)


def file_system_of(path: Path, root: Path = Path("/")) -> str:
    """The type of the file system that *path* is on, empty where the system does not say."""
    best, kind = "", ""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        if len(words) < 5 or not rest:
            continue
        point = words[4].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, rest.split()[0]
    return kind


def numa_node_of(path: Path, root: Path = Path("/")) -> int | None:
    """The NUMA node of the device that *path* is on; None where there is none to tell."""
    device = path.stat().st_dev
    link = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}" if hasattr(os, "major") else None
    if link is None or not link.exists():
        return None
    for folder in (link.resolve(), *link.resolve().parents):
        text = _read(folder / "numa_node") or _read(folder / "device/numa_node")
        if text.lstrip("-").isdigit():
            return int(text) if int(text) >= 0 else None
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
