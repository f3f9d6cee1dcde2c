"""``inspect``: whose blocks a directory holds, how many, how old, who owns them, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..store.disk.identities import Note
from .survey import SegmentView, Survey, identities_in

Row = dict[str, Any]


def inspect_rows(seen: Survey) -> list[Row]:
    """Flat rows, of which ``kind`` says what they describe: the directory, an identity, a segment, a process.

    Ages are in seconds by the wall clock, never negative; sizes are whole slots or whole files.
    """
    return [directory_row(seen), *identity_rows(seen), *segment_rows(seen), *process_rows(seen)]


def directory_row(seen: Survey) -> Row:
    """The directory in one row."""
    return {
        "kind": "directory",
        "path": str(seen.directory.path),
        "blocks": sum(len(one.records) for one in seen.whole),
        "used_bytes": seen.used_bytes,
        "segments": len(seen.segments),
        "live_processes": len(seen.processes),
        "damaged_records": sum(one.damaged for one in seen.segments),
        "unreadable_segments": sum(one.header is None for one in seen.segments),
    }


def identity_rows(seen: Survey) -> Iterator[Row]:
    """One row for each identity that has blocks, the largest first."""
    found: dict[str, Row] = {}
    for one in seen.whole:
        names, number = identities_in(one.records)
        for i, name in enumerate(names):
            mine = one.records["time_ns"][number == i]
            row = found.setdefault(name, {**name_parts(name, seen.notes.get(name)), "blocks": 0, "bytes": 0})
            row["blocks"] += len(mine)
            row["bytes"] += len(mine) * one.slot_bytes
            oldest, newest = (age_s(seen.now_ns, int(t)) for t in (mine.min(), mine.max()))
            row["oldest_s"] = max(row.get("oldest_s", 0.0), oldest)
            row["newest_s"] = min(row.get("newest_s", newest), newest)
    yield from sorted(found.values(), key=lambda row: (-row["bytes"], row["identity"]))


def name_parts(identity: str, note: Note | None) -> Row:
    """What is known about an identity; None for what no note says."""
    return {
        "kind": "identity",
        "identity": identity,
        "model": printable(note.model) if note else None,
        "namespace": printable(note.namespace) if note else None,
        "kv_dtype": printable(note.kv_dtype) if note else None,
        "block_tokens": note.block_tokens if note else None,
        "adapter": printable(note.lora) if note else None,
        "salted": note.salted if note else None,
    }


def segment_rows(seen: Survey) -> Iterator[Row]:
    """One row for each segment."""
    for one in seen.segments:
        yield {
            "kind": "segment",
            "segment": one.name,
            "owner": "live" if one.live else "dead",
            "owner_pid": one.owner_pid or None,
            "slot_bytes": one.slot_bytes or None,
            "slots": one.header.slots if one.header else None,
            "blocks": len(one.records),
            "bytes": one.file_bytes,
            "oldest_s": _oldest(seen, one),
            "health": health(one),
        }


def process_rows(seen: Survey) -> Iterator[Row]:
    """One row for each process that uses the directory now."""
    for one in seen.processes:
        yield {
            "kind": "process",
            "pid": one.pid or None,
            "owned_bytes": one.owned_bytes,
            "wants_room": one.wants_room,
        }


def health(one: SegmentView) -> str:
    """``ok``, or what is wrong with a segment in a few words."""
    if one.trouble:
        return one.trouble
    return f"{one.damaged} damaged records" if one.damaged else "ok"


def age_s(now_ns: int, then_ns: int) -> float:
    """Seconds from then to now; a clock that moved backwards makes nothing younger than new."""
    return max(0.0, (now_ns - then_ns) / 1e9)


def printable(text: str) -> str:
    """*text* without anything that a terminal would obey."""
    return text if text.isprintable() else ascii(text)


def _oldest(seen: Survey, one: SegmentView) -> float | None:
    return age_s(seen.now_ns, int(np.min(one.records["time_ns"]))) if len(one.records) else None
