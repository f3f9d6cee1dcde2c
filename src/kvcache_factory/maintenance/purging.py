"""``purge``: remove blocks by model, namespace or age, and whatever was built on them, from segments nobody owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, FormatError, StoreError
from ..store.disk import log, segment
from ..store.disk.identities import FOLDER, note_path
from ..store.disk.images import zeros
from .inspection import name_parts
from .survey import SegmentView, Survey, identities_in, is_live

Row = dict[str, Any]
Progress = Callable[..., None]
Mask = npt.NDArray[np.bool_]
_SHORTEST_PREFIX = 8


class Wanted(msgspec.Struct, frozen=True):
    """What is to go: everything that all of the given conditions hold for, and nothing without one."""

    model: str | None = None
    namespace: str | None = None
    older_than_s: float | None = None
    everything: bool = False

    def __post_init__(self) -> None:
        given = [self.model is not None, self.namespace is not None, self.older_than_s is not None]
        if self.everything == any(given):
            raise ConfigError("say what to purge: --model, --namespace or --older-than, or --all alone")


class Plan(msgspec.Struct):
    """The blocks to remove from each segment, as masks over its records; *litter* is what can only go as a whole."""

    seen: Survey
    chosen: list[tuple[SegmentView, Mask]]
    litter: list[SegmentView]
    built_on: int

    def blocks(self, *, live: bool) -> int:
        """Blocks to remove that are owned by living processes, or by nobody."""
        return sum(int(mask.sum()) for one, mask in self.chosen if one.live == live)

    def bytes(self, *, live: bool) -> int:
        """Bytes of their slots."""
        return sum(int(mask.sum()) * one.slot_bytes for one, mask in self.chosen if one.live == live)

    def live_owners(self) -> list[int]:
        """Ids of living processes that own blocks to remove."""
        return sorted({one.owner_pid for one, mask in self.chosen if one.live and mask.any()})


def plan_purge(seen: Survey, wanted: Wanted) -> Plan:
    """Choose the blocks; ConfigError where a model or a namespace is named that the directory does not know."""
    names = _identities_meant(seen, wanted)
    chosen = []
    for one in seen.whole:
        mask = np.ones(len(one.records), np.bool_)
        if names is not None:
            found, number = identities_in(one.records)
            mask &= np.array([name in names for name in found], np.bool_)[number]
        if wanted.older_than_s is not None:
            mask &= one.records["time_ns"] < seen.now_ns - int(wanted.older_than_s * 1e9)
        chosen.append((one, mask))
    before = sum(int(mask.sum()) for _, mask in chosen)
    chosen = _with_descendants(chosen)
    after = sum(int(mask.sum()) for _, mask in chosen)
    litter = [one for one in seen.segments if _is_litter(one)] if wanted.everything else []
    return Plan(seen, chosen, litter, after - before)


def _is_litter(one: SegmentView) -> bool:
    """Whether a segment has no block that could be named, and none is about to come."""
    return one.header is None or not (one.live or len(one.records))


def _identities_meant(seen: Survey, wanted: Wanted) -> set[str] | None:
    """Identities that the model and the namespace name; None for all."""
    if wanted.model is None and wanted.namespace is None:
        return None
    there = {name for one in seen.whole for name in identities_in(one.records)[0]}
    meant = there | seen.notes.keys()
    if wanted.model is not None:
        meant = {name for name in meant if _is_model(seen, name, wanted.model)}
        _require_one(seen, meant, wanted.model)
    if wanted.namespace is not None:
        spaces = {name: note.namespace for name, note in seen.notes.items()}
        if wanted.namespace not in spaces.values():
            known = ", ".join(sorted(set(spaces.values()))) or "none"
            raise ConfigError(f"no namespace {wanted.namespace!r} in {seen.directory.path}; known: {known}")
        meant = {name for name in meant if spaces.get(name) == wanted.namespace}
    return meant


def _is_model(seen: Survey, name: str, model: str) -> bool:
    """Whether *model* is the model of an identity, or the beginning of its fingerprint or of the identity itself."""
    note = seen.notes.get(name)
    texts = [name] + ([note.model] if note else [])
    return model in texts or (len(model) >= _SHORTEST_PREFIX and any(text.startswith(model) for text in texts))


def _require_one(seen: Survey, meant: set[str], model: str) -> None:
    models = {seen.notes[name].model if name in seen.notes else name for name in meant}
    if not models:
        raise ConfigError(f"no model {model!r} in {seen.directory.path}; kvcache-factory inspect shows those there are")
    if len(models) > 1 and model not in models:
        raise ConfigError(f"{model!r} is the beginning of {len(models)} models; give more of it")


def _with_descendants(chosen: list[tuple[SegmentView, Mask]]) -> list[tuple[SegmentView, Mask]]:
    """Add the blocks that nobody can reach any more: those built on a block of which no copy stays."""
    if not chosen:
        return chosen
    records = np.concatenate([one.records for one, _ in chosen])
    marked = np.concatenate([mask for _, mask in chosen])
    if not marked.any() or marked.all():
        return chosen
    keys, node = np.unique(_as_bytes(records["key"]), return_inverse=True)
    node = node.reshape(-1)
    gone = np.ones(len(keys), np.bool_)
    gone[node[~marked]] = False
    parents = _as_bytes(records["parent"])
    at = np.minimum(np.searchsorted(keys, parents), len(keys) - 1)
    up = np.arange(len(keys))
    inner = keys[at] == parents
    up[node[inner]] = at[inner]
    while True:  # each round doubles how far up one looks
        further = up[up]
        spread = gone | gone[up]
        if np.array_equal(further, up) and np.array_equal(spread, gone):
            break
        gone, up = spread, further
    ends = np.cumsum([len(mask) for _, mask in chosen])[:-1]
    masks = np.split(marked | gone[node], ends)
    return [(one, mask) for (one, _), mask in zip(chosen, masks, strict=True)]


def _as_bytes(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.bytes_]:
    """Keys as values that sort; the trailing byte keeps zeros at the end, which numpy would cut off."""
    raw = np.ones((len(words), 17), np.uint8)
    raw[:, :16] = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 16)
    return raw.view("S17").reshape(-1)


def purge(plan: Plan, progress: Progress) -> list[Row]:
    """Carry the plan out; returns a row for each identity and outcome.

    Rows: ``identity`` with what is known of it, ``action`` (``removed``, or ``kept`` where a living process owns the
    segment or the disk failed), ``blocks``, ``bytes``, ``owner_pid`` and ``reason``.
    """
    rows: list[Row] = []
    work = [(one, mask) for one, mask in plan.chosen if mask.any()]
    for done, (one, mask) in enumerate(work):
        progress(done, len(work), f"segment {one.name}")
        reason = _remove(plan, one, mask)
        rows.extend(_rows(plan.seen, one, one.records[mask], reason))
    for one in plan.litter:
        reason = _remove_files(plan, one)
        action = "kept" if reason else "removed"
        parts = name_parts("", None) | {"identity": None}
        rows.append({**parts, "action": action, "blocks": 0, "bytes": one.file_bytes, "reason": reason or one.trouble})
    progress(1, 1, "done")
    _forget_notes(plan, rows)
    return _joined(rows)


def _remove(plan: Plan, one: SegmentView, mask: Mask) -> str:
    """Remove blocks from one segment; returns why not, or nothing."""
    directory = plan.seen.directory
    try:
        files = segment.attach(directory, one.number)
        poll = files.poll()
    except FileNotFoundError:
        return ""
    except (OSError, FormatError) as error:
        return str(error)
    try:
        if not poll.adopted:
            return "a living process owns it"
        now = log.live(poll.tail.records, files.slots)
        wanted = np.isin(_as_bytes(now["key"]), _as_bytes(one.records["key"][mask]))
        if wanted.all():
            with directory.locked():
                files.remove()
        else:
            _erase(files, now["slot"][wanted].astype(np.int64))
    except (OSError, StoreError) as error:
        return str(error)
    finally:
        files.let_go()
    return ""


def _erase(files: segment.Segment, slots: segment.SlotNumbers) -> None:
    """Overwrite blocks with zeros and free them; raises OSError."""
    slots = np.sort(slots)
    if files.move(slots, [zeros(files.slot_bytes)] * len(slots), write=True, direct=False) < len(slots):
        raise OSError("the disk took less than all of the zeros")
    files.sync()
    files.append(log.make(log.Kind.FREE, slots))


def _remove_files(plan: Plan, one: SegmentView) -> str:
    directory = plan.seen.directory
    try:
        with directory.locked():
            if is_live(directory, one.number):
                return "a living process owns it"
            directory.log_path(one.number).unlink(missing_ok=True)
            directory.data_path(one.number).unlink(missing_ok=True)
    except (OSError, StoreError) as error:
        return str(error)
    return ""


def _rows(seen: Survey, one: SegmentView, records: log.Records, reason: str) -> list[Row]:
    names, number = identities_in(records)
    return [
        {
            **name_parts(name, seen.notes.get(name)),
            "action": "kept" if reason else "removed",
            "blocks": int(count),
            "bytes": int(count) * one.slot_bytes,
            "owner_pid": one.owner_pid if reason and one.live else None,
            "reason": reason,
        }
        for name, count in zip(names, np.bincount(number, minlength=len(names)), strict=True)
    ]


def _joined(rows: list[Row]) -> list[Row]:
    """One row for each identity, action, owner and reason."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        row = {"owner_pid": None, **row}
        row.pop("kind", None)
        same = tuple(row.get(name) for name in ("identity", "action", "owner_pid", "reason"))
        if same in found:
            found[same]["blocks"] += row["blocks"]
            found[same]["bytes"] += row["bytes"]
        else:
            found[same] = row
    return list(found.values())


def _forget_notes(plan: Plan, rows: list[Row]) -> None:
    """Remove the notes on identities that have no block left; a living process may still write under its own."""
    if plan.seen.processes or not (plan.seen.directory.path / FOLDER).is_dir():
        return
    removed = {row["identity"] for row in rows if row["action"] == "removed"}
    left = {row["identity"] for row in rows if row["action"] == "kept"}
    for one, mask in plan.chosen:
        left.update(identities_in(one.records[~mask])[0])
    for identity in removed - left - {None}:
        note_path(plan.seen.directory.path, identity).unlink(missing_ok=True)
