"""Sessions: whose blocks they are.

A session references the blocks that its requests used or stored.  A block that several sessions reference is charged to
each and kept until the last of them lets it go; what only one references goes with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .engine.table import KeyCounts, Keys
from .errors import ConfigError, SessionExistsError, UnknownSessionError
from .policy.base import RequestHint, ReuseHint

History = Literal["auto", "append", "none"]
"""What adapters put in front of a text prompt: the conversation so far, unless the prompt has it (auto); always; never.
"""

# By number of a manager's book: the sessions that this thread or task is in, the innermost last.  Never mutated.
_CURRENT: ContextVar[dict[int, tuple[tuple[str, History], ...]]] = ContextVar(
    "kvcache_factory_session",
    default={},  # noqa: B039
)

PRUNE_AT = 4096
"""References of a session at which those to lost blocks are first looked for."""


class Session:
    """One conversation, user or job whose blocks are accounted together.

    Attributes
    ----------
    id:
        Name, unique in its manager.
    data:
        Free for adapters: what belongs to the conversation, such as its token ids.  Emptied by ``clear_session``.
    """

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self.data: dict[str, Any] = {}
        self._reuse_hint: ReuseHint = "unknown"
        self.created_s = time.time()
        self.last_used_s = self.created_s
        self.requests = 0
        self.asked_tokens = 0
        self.reused_tokens = 0
        self.stored_blocks = 0
        self.held = KeyCounts()
        self.prune_at = PRUNE_AT
        self.purged: bool | None = None
        """None while the session lives; then whether its blocks were to be overwritten."""

    @property
    def reuse_hint(self) -> ReuseHint:
        """Whether the session will be back, for policies: ``"unknown"``, ``"returns"``, ``"tool_pending"`` (soon) or
        ``"ended"``.  Holds for the requests of the session that do not say it themselves; ConfigError for other words.
        """
        return self._reuse_hint

    @reuse_hint.setter
    def reuse_hint(self, said: ReuseHint) -> None:
        self._reuse_hint = RequestHint(reuse=said).reuse

    def __repr__(self) -> str:
        return f"Session({self.id!r}, requests={self.requests}, reused_tokens={self.reused_tokens})"


class SessionBook:
    """The sessions of one manager."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._holders = KeyCounts()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._sessions

    def create(self, session_id: str) -> Session:
        """A new session; SessionExistsError when the id is taken."""
        if not isinstance(session_id, str) or not session_id:
            raise ConfigError(f"a session id must be a non-empty string, not {session_id!r}")
        with self._lock:
            if session_id in self._sessions:
                raise SessionExistsError(f"session {session_id!r} exists already; destroy it first, or use another id")
            session = self._sessions[session_id] = Session(session_id)
            return session

    def get(self, session_id: str) -> Session:
        """The session of this id; UnknownSessionError when there is none."""
        session = self._sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            raise UnknownSessionError(f"there is no session {session_id!r}; call create_session({session_id!r}) first")
        return session

    def find(self, session_id: str) -> Session | None:
        """The session of this id, if there is one."""
        return self._sessions.get(session_id)

    def charge(self, session_id: str, keys: Keys, holds: Callable[[Keys], npt.NDArray[np.bool_]]) -> Session | None:
        """Let a session reference the blocks of distinct *keys* ``[n, 2]``; returns it, None when it is gone.

        References to blocks that no tier *holds* any more are forgotten whenever their number may have doubled.
        """
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None:
                if len(session.held) > session.prune_at:  # before, for the new ones may not be stored yet
                    self._prune(session, holds)
                new = session.held.missing(keys)
                session.held.add(new)
                self._holders.add(new)
            return session

    def _prune(self, session: Session, holds: Callable[[Keys], npt.NDArray[np.bool_]]) -> None:
        keys = session.held.keys
        lost = keys[~holds(keys)]
        session.held.remove(lost)
        self._holders.remove(lost)
        session.prune_at = max(2 * len(session.held), PRUNE_AT)

    def unheld(self, keys: Keys) -> Keys:
        """Those of *keys* ``[n, 2]`` that no session references."""
        with self._lock:
            return self._holders.missing(keys)

    def clear(self, session_id: str) -> Keys:
        """Forget what a session said and references; returns the keys that no other session references."""
        with self._lock:
            session = self.get(session_id)
            session.data.clear()
            keys, session.held = session.held.keys, KeyCounts()
            return self._holders.remove(keys)

    def destroy(self, session_id: str, purge: bool = False) -> Keys:
        """Remove a session; returns the keys that no other session references, none when there was no session."""
        with self._lock:
            if session_id not in self._sessions:
                return np.empty((0, 2), np.uint64)
            keys = self.clear(session_id)
            self._sessions.pop(session_id).purged = purge
            return keys

    def dismiss(self, session_id: str) -> bool:
        """Remove a session and leave its blocks to whoever else finds them; False when there is none."""
        with self._lock:
            known = session_id in self._sessions
            if known:
                self.clear(session_id)
                del self._sessions[session_id]
            return known

    def used(self, session_id: str, asked_tokens: int, reused_tokens: int) -> None:
        """Note a request of a session."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None:
                session.requests += 1
                session.asked_tokens += asked_tokens
                session.reused_tokens += reused_tokens
                session.last_used_s = time.time()

    def rows(self) -> list[dict[str, Any]]:
        """Each session as a flat row."""
        with self._lock:
            return [
                {
                    "session": s.id,
                    "blocks": len(s.held),
                    "requests": s.requests,
                    "asked_tokens": s.asked_tokens,
                    "reused_tokens": s.reused_tokens,
                    "idle_s": round(time.time() - s.last_used_s, 3),
                }
                for s in self._sessions.values()
            ]


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
        return self._session

    def __exit__(self, *_: object) -> None:
        current = _CURRENT.get()
        _CURRENT.set({**current, self._book_number: current[self._book_number][:-1]})


def current_session(book_number: int) -> str | None:
    """Id of the session that this thread or task is in, for one manager."""
    within = _CURRENT.get().get(book_number)
    return within[-1][0] if within else None


def current_history(book_number: int) -> History:
    """How the session that this thread or task is in wants its text prompts continued."""
    within = _CURRENT.get().get(book_number)
    return within[-1][1] if within else "auto"
