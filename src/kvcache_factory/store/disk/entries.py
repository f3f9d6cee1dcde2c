"""From what a look at the directory has found to columns of entries and rows."""

from __future__ import annotations

import numpy as np

from ..base import Entries, Slots
from . import log, segment
from .pool import Seen
from .rows import places
from .segment import Segment


def to_entries(seen: Seen) -> Entries:
    """The blocks that are new, as columns."""
    records = np.concatenate([np.empty(0, log.RECORD), *(r for _, r in seen.fresh)])
    owned = [np.full(len(r), one.owned) for one, r in seen.fresh]
    at = [places(one.number, r["slot"].astype(np.int64)) for one, r in seen.fresh]
    return Entries(
        keys=np.ascontiguousarray(records["key"]),
        parents=np.ascontiguousarray(records["parent"]),
        identities=np.ascontiguousarray(records["identity"]),
        extras=np.ascontiguousarray(records["extras"]),
        depth=np.ascontiguousarray(records["depth"]),
        time_ns=np.ascontiguousarray(records["time_ns"]),
        fidelity=np.ascontiguousarray(records["fidelity"]),
        layout=np.ascontiguousarray(records["layout"]),
        owned=np.concatenate([np.empty(0, np.bool_), *owned]),
        places=np.concatenate([np.empty(0, np.int64), *at]),
    )


def rows_gone(seen: Seen) -> Slots:
    """The rows whose block is no longer there, which are taken from their slots; hold the pool's lock."""
    gone = []
    for one, slots in seen.gone:
        rows = one.rows[slots]
        one.rows[slots] = -1
        gone.append(rows[rows >= 0])
    return joined(gone)


def rows_in(one: Segment) -> Slots:
    """The rows of one segment; hold the pool's lock."""
    rows: Slots = one.rows[(one.state == segment.USED) & (one.rows >= 0)]
    return rows


def joined(rows: list[Slots]) -> Slots:
    """Rows as one array, also when there are none."""
    return np.concatenate([np.empty(0, np.int32), *rows])
