"""The policy that looks at how much leaves together."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..errors import ConfigError
from ..jit import kernel
from .base import Action, Keys, RequestHint, Rows, Target, Unlink
from .scored import ScoredPolicy

_LARGEST, _GDSF = "largest_first", "gdsf"


@kernel("i8(i4[::1], i4[::1], i8)")
def _run_length(parent: Any, children: Any, row: int) -> int:
    """Rows that can leave one after the other, from leaf *row* up to where something else hangs from the chain."""
    length = 1
    above = parent[row]
    while above >= 0 and children[above] == 1:
        length += 1
        above = parent[above]
    return length


class SizeAwarePolicy(ScoredPolicy):
    """Evicts from the longest (or, by mode, the least valuable) evictable run.

    The size of a leaf is the number of blocks that leave with it: its branch, up to where another branch shares what is
    before.  A level's blocks are of one size, so blocks say what bytes would.

    ``mode="largest_first"`` (SIZE in Williams et al., "Removal Policies in Network Caches", SIGCOMM 1996) frees the
    most with the fewest sessions hurt; ``mode="gdsf"`` is Greedy-Dual-Size-Frequency (Cherkasova, HP Labs 1998) over
    runs.
    Deviation: a run is cut from its end as far as needed, not removed whole.
    """

    name: ClassVar[str] = "size_aware"
    bytes_per_row: int = 216

    def __init__(
        self,
        max_size_gb: float | None = None,
        mode: str = _LARGEST,
        *,
        target: Target | None = None,
        action: Action = "evict",
    ) -> None:
        super().__init__(max_size_gb, target=target, action=action)
        if mode not in (_LARGEST, _GDSF):
            raise ConfigError(f"SizeAwarePolicy(mode={mode!r}): use one of {_LARGEST}, {_GDSF}")
        self.mode = mode

    def options(self) -> dict[str, Any]:
        return {**super().options(), "mode": self.mode}

    def bind(self, rows: int, keys: Keys) -> None:
        super().bind(rows, keys)
        self._parent = np.full(rows, -1, np.int32)
        self._children = np.zeros(rows, np.int32)
        self._here = np.zeros(rows, np.bool_)
        self._uses = np.zeros(rows, np.int64)
        self._inflation = 0.0

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        new = rows[hit_len:]
        self._uses[rows[:hit_len]] += 1
        if len(new):
            for row in new[self._here[new]].tolist():
                self._remove(row)
            self._uses[new] = 1
            self._here[new] = True
            self._children[new] = 1
            self._children[new[-1]] = 0
            self._parent[new[1:]] = new[:-1]
            above = int(rows[hit_len - 1]) if hit_len else hint.tip
            self._parent[new[0]] = above
            if above >= 0:
                self._children[above] += 1
        self._touch(now, rows)

    def _push(self, row: int) -> None:
        size = int(_run_length(self._parent, self._children, row))
        self._score_at[row] = -size if self.mode == _LARGEST else self._inflation + float(self._uses[row]) / size
        super()._push(row)

    def next_victim(self) -> int:
        row = super().next_victim()
        if row >= 0:
            self._inflation = max(self._inflation, float(self._score[row]))
            self._remove(row)
        return row

    def victims(self, count: int, unlink: Unlink) -> list[int]:
        leaving: list[int] = []
        while len(leaving) < count:
            row = self.next_victim()
            if row < 0:
                break
            leaving.append(row)
            parent = unlink(row)
            # The rest of the largest run is the next in any case, until another is larger: no walk for each row.
            size = -float(self._score[row]) - 1
            while parent >= 0 and len(leaving) < count and self._is_largest(size):
                row, size = parent, size - 1
                self._remove(row)
                leaving.append(row)
                parent = unlink(row)
            if parent >= 0:
                self.on_evictable(parent, True)
        return leaving

    def _is_largest(self, size: float) -> bool:
        return self.mode == _LARGEST and size > 0 and (not self._heap or -size <= self._heap[0][0])

    def on_evictable(self, row: int, evictable: bool) -> None:
        if evictable and not self._here[row]:  # chosen, but used before it had left
            self._here[row], self._children[row] = True, 0
            if self._parent[row] >= 0:
                self._children[self._parent[row]] += 1
        super().on_evictable(row, evictable)

    def forget(self, row: int) -> None:
        super().forget(row)
        if self._here[row]:
            self._remove(row)

    def _remove(self, row: int) -> None:
        self._here[row] = False
        above = int(self._parent[row])
        if above >= 0 and self._here[above]:
            self._children[above] -= 1
