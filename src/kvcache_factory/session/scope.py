"""Being in a session: in a thread or an asyncio task, and for a while."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

from ..errors import ConfigError
from .model import Session

History = Literal["auto", "append", "none"]
"""What adapters put in front of a text prompt: the conversation so far, unless the prompt has it (auto); always; never.
"""

# By number of a manager's book: the sessions that this thread or task is in, the innermost last.  Never mutated.
_CURRENT: ContextVar[dict[int, tuple[tuple[str, History], ...]]] = ContextVar(
    "kvcache_factory_session",
    default={},  # noqa: B039
)


class SessionScope:
    """What ``use_session`` returns: inside, requests of this thread or task belong to the session.

    It keeps nothing itself, so one scope may be entered several times, and by several threads.
    """

    def __init__(self, book_number: int, session: Session, history: History = "auto") -> None:
        if history not in ("auto", "append", "none"):
            raise ConfigError(f"history={history!r}: use 'auto', 'append' or 'none'")
        self._book_number = book_number
        self._session = session
        self._history = history

    def __enter__(self) -> Session:
        current = _CURRENT.get()
        within = current.get(self._book_number, ())
        _CURRENT.set({**current, self._book_number: (*within, (self._session.id, self._history))})
        self._session.enter()
        return self._session

    def __exit__(self, *_: object) -> None:
        current = _CURRENT.get()
        _CURRENT.set({**current, self._book_number: current[self._book_number][:-1]})
        self._session.leave()


def current_session(book_number: int) -> str | None:
    """Id of the session that this thread or task is in, for one manager."""
    within = _CURRENT.get().get(book_number)
    return within[-1][0] if within else None


def current_history(book_number: int) -> History:
    """How the session that this thread or task is in wants its text prompts continued."""
    within = _CURRENT.get().get(book_number)
    return within[-1][1] if within else "auto"
