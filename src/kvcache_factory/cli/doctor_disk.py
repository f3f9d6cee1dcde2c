"""``kvcache-factory doctor --disk PATH``: whether a directory is a good place for a disk tier."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import machine

if TYPE_CHECKING:
    from ..maintenance.place import Place

GIB = 1 << 30
KEEP_FREE = 0.1
"""Part of what is free that a suggested budget leaves to others."""

OK, NOTE, BROKEN = "ok", "note", "broken"
Finding = dict[str, Any]


def check_disk(path: Path) -> Iterable[Finding]:
    """Rows about the directory at *path*, which need not exist yet."""
    from ..maintenance.place import look_at

    place = look_at(path)
    yield _row("disk", str(path))
    advice = "" if place.usable else "choose another directory, or change its owner or mode"
    state = place.state if place.usable or place.state not in ("ours", "empty", "absent") else "not writable"
    yield _row("disk directory", state, OK if place.usable else BROKEN, advice)
    yield from _file_system(place)
    yield from _space(place)
    yield from _node(place)
    yield from _modes(place)


def _file_system(place: Place) -> Iterable[Finding]:
    from ..maintenance.place import MEMORY, NETWORK

    kind, state, advice = place.file_system, OK, ""
    if kind in NETWORK:
        state, advice = NOTE, "a disk tier is for one machine's own disk: locks and caches of network disks differ"
    elif kind in MEMORY:
        state, advice = NOTE, "this is memory, not a disk: nothing survives a restart of the machine"
    yield _row("disk file system", kind or None, state, advice)
    if place.writable:
        works = "works" if place.direct else "does not work"
        advice = "" if place.direct else "reads and writes go through the page cache and compete with it for memory"
        yield _row("disk O_DIRECT", works, OK if place.direct else NOTE, advice)
        advice = "" if place.locks else "without file locks, segments have no owner: choose another file system"
        yield _row("disk file locks", "work" if place.locks else "do not work", OK if place.locks else BROKEN, advice)


def _space(place: Place) -> Iterable[Finding]:
    yield _row("disk free", f"{place.free_bytes / GIB:.1f} GiB")
    yield _row("disk used by this directory", f"{place.used_bytes / GIB:.1f} GiB")
    budget = (place.free_bytes + place.used_bytes) * (1 - KEEP_FREE) / GIB
    few = budget < 1
    advice = "little room: a segment takes 256 MiB unless segment_mb says less" if few else ""
    yield _row("disk budget", f"size_gb={budget:.1f} at most", NOTE if few else OK, advice)


def _node(place: Place) -> Iterable[Finding]:
    nodes = machine.numa_nodes()
    node = place.numa_node
    told = "not told" if node is None else str(node)
    far = nodes > 1 and node is not None
    advice = f"pin the process to node {node}, or its slabs may be far from the disk" if far else ""
    yield _row("disk NUMA node", f"{told} (of {nodes})", NOTE if far else OK, advice)


def _modes(place: Place) -> Iterable[Finding]:
    if place.mode is None or place.state != "ours":
        yield _row("disk mode", "0700, files 0600 (when it is made)")
        return
    wide = bool(place.mode & 0o077) or place.open_files > 0
    advice = "prompts can be read from blocks: chmod -R go-rwx the directory" if wide else ""
    value = f"{place.mode:04o}, {place.open_files} files that others may read or write"
    yield _row("disk mode", value, NOTE if wide else OK, advice)


def _row(check: str, value: object, state: str = OK, advice: str = "") -> Finding:
    return {"check": check, "value": "-" if value is None else str(value), "state": state, "advice": advice}
