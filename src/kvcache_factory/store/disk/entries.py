"""From what a look at the directory has found to columns of entries and rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..base import Entries, Slots
from . import log, segment
from .pool import Seen
from .rows import places
from .segment import Segment


def to_entries(seen: Seen) -> Entries:
    """The blocks that are new, as columns."""
    pieces = [np.empty(0, log.RECORD), *(records for _, records in seen.fresh)]

    def column(name: str) -> npt.NDArray[Any]:
        return np.concatenate([records[name] for records in pieces])

    owned = [np.full(len(records), one.owned) for one, records in seen.fresh]
    at = [places(one.number, records["slot"].astype(np.int64)) for one, records in seen.fresh]
    return Entries(
        keys=column("key"),
        parents=column("parent"),
        identities=column("identity"),
        extras=column("extras"),
        depth=column("depth"),
        time_ns=column("time_ns"),
        fidelity=column("fidelity"),
        layout=column("layout"),
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
