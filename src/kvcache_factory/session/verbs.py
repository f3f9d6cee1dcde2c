"""The verbs about sessions that a manager has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ..engine.inside import INSIDE
from .book import SessionBook
from .keeper import Keeper
from .model import Session, SessionOptions
from .scope import History, SessionScope, current_history, current_session
from .settings import OnQuota, Size


class Later(Protocol):
    """Runs work when no thread is in the middle of a change."""

    def soon(self, work: Callable[[], object]) -> None:
        """Run *work* now, or when the next verb has ended."""


class SessionVerbs:
    """Base of ``CacheManager``: sessions come and go here."""

    _number: int
    _sessions: SessionBook
    _keeper: Keeper
    _later: Later

    def create_session(
        self,
        session_id: str,
        *,
        quota_gb: Size | None = None,
        ttl_s: float | None = None,
        labels: dict[str, str] | None = None,
        pin: bool = False,
        on_quota: OnQuota | None = None,
    ) -> Session:
        """A new session.

        *quota_gb*: GiB that it may hold in each tier, or a dict of them by names of tiers; *ttl_s*: seconds without use
        after which it is destroyed; *labels*: what it is counted under, such as ``{"tenant": "acme"}``; *pin*: see
        :meth:`pin_session`; *on_quota*: ``"evict"`` own blocks, the oldest ends of chains first, or ``"refuse"`` to
        store more.  What is not given is as :class:`SessionSettings` say.

        Raises SessionExistsError when the id is taken, ClosedError after :meth:`close`, ConfigError.
        """
        options = SessionOptions(quota_gb=quota_gb, ttl_s=ttl_s, labels=labels or {}, pin=pin, on_quota=on_quota)
        with INSIDE:
            return self._keeper.create(session_id, options)

    def fork_session(self, source_id: str, session_id: str, **options: Any) -> Session:
        """A new session that goes on from where *source_id* is: its history, and references to all of its blocks.

        No block is copied, and neither sees what the other adds.  *options* as for :meth:`create_session`; labels are
        those of the source unless given.  Raises UnknownSessionError, SessionExistsError, ClosedError, ConfigError.
        """
        with INSIDE:
            options.setdefault("labels", dict(self._sessions.get(source_id).labels))
            return self._keeper.fork(source_id, session_id, SessionOptions(**options))

    def pin_session(self, session_id: str, pinned: bool = True) -> None:
        """Keep the blocks of a session in the tiers where they are, whatever the policy says; or do not any more.

        A pinned session does not expire, and at its quota nothing of it is let go.  Raises UnknownSessionError and
        ClosedError.
        """
        with INSIDE:
            self._keeper.pin(session_id, pinned)

    def use_session(self, session_id: str, history: History = "auto") -> SessionScope:
        """A context manager: requests inside belong to the session, in this thread or asyncio task only.

        *history*: what adapters of engines without conversations of their own put in front of a text prompt; the
        session's tokens unless the prompt contains them (``"auto"``), always (``"append"``), or never (``"none"``).
        """
        return SessionScope(self._number, self._sessions.get(session_id), history)

    @property
    def current(self) -> tuple[Session | None, History]:
        """The session that this thread or task is in, and how it wants text prompts continued."""
        session_id = current_session(self._number)
        session = self._sessions.find(session_id) if session_id is not None else None
        return session, current_history(self._number)

    def session(self, session_id: str) -> Session:
        """The session of this id; UnknownSessionError when there is none."""
        return self._sessions.get(session_id)

    def has_session(self, session_id: object) -> bool:
        """Whether there is a session of this id."""
        return isinstance(session_id, str) and session_id in self._sessions

    @property
    def num_sessions(self) -> int:
        """How many sessions there are."""
        return len(self._sessions)

    def clear_session(self, session_id: str) -> int:
        """Forget a session's history and drop the blocks that only it references; the id stays valid.

        Returns how many blocks were dropped.  UnknownSessionError when there is no such session.
        """
        with INSIDE:
            dropped = self._keeper.clear(session_id)
        return dropped + sum(remote.call("clear_session", session_id) or 0 for remote in self._keeper.remotes)

    def destroy_session(self, session_id: str, purge: bool = False) -> bool:
        """End a session and drop the blocks that only it references; False when there is none.  Never raises.

        With *purge*, stores overwrite the bytes of these blocks, also of those that are being written now.
        """
        known = self.has_session(session_id) or self._keeper.only_elsewhere(session_id)
        # Called from __del__ too, in the middle of anything, and at exit, where half of the world may be gone.
        if known:
            self._later.soon(partial(self._keeper.end, session_id, purge))
        return known

    def dismiss_session(self, session_id: str) -> bool:
        """Stop accounting for a session; its blocks stay, charged to nobody.  False when there is none."""
        return self._keeper.dismiss(session_id)
