"""Several policies that hear of the same rows; for each question, one of them answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .base import Action, EvictionPolicy, Keys, RequestHint, Rows, Target, Unlink


class Chorus(EvictionPolicy):
    """Passes every event on to all of its *voices*, and tells the others who left by the choice of one."""

    def __init__(
        self, max_size_gb: float | None = None, *, target: Target | None = None, action: Action = "evict"
    ) -> None:
        super().__init__(max_size_gb, target=target, action=action)
        self._voices: Sequence[EvictionPolicy] = ()

    def use_worker(self, defer: Callable[[Callable[[], None]], bool]) -> None:
        super().use_worker(defer)
        for voice in self._voices:
            voice.use_worker(defer)

    def bind(self, rows: int, keys: Keys) -> None:
        for voice in self._voices:
            voice.bind(rows, keys)

    def on_request(self, now: float, rows: Rows, hit_len: int, hint: RequestHint) -> None:
        for voice in self._voices:
            voice.on_request(now, rows, hit_len, hint)

    def restore(self, rows: Rows) -> None:
        for voice in self._voices:
            voice.restore(rows)

    def on_finish(self, rows: Rows, output_tokens: int) -> None:
        for voice in self._voices:
            voice.on_finish(rows, output_tokens)

    def on_evictable(self, row: int, evictable: bool) -> None:
        for voice in self._voices:
            voice.on_evictable(row, evictable)

    def forget(self, row: int) -> None:
        for voice in self._voices:
            voice.forget(row)

    def _unlink_for(self, asked: EvictionPolicy, unlink: Unlink) -> Unlink:
        """*unlink* for the choice of one, which lets the others know."""
        others = [voice for voice in self._voices if voice is not asked]
        if not others:
            return unlink

        def unlink_for_all(row: int) -> int:
            parent = unlink(row)
            for voice in others:
                voice.forget(row)
                if parent >= 0:
                    voice.on_evictable(parent, True)
            return parent

        return unlink_for_all

    def _next_of(self, asked: EvictionPolicy) -> int:
        row = asked.next_victim()
        for voice in self._voices:
            if row >= 0 and voice is not asked:
                voice.forget(row)
        return row
