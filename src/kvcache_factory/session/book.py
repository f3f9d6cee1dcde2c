"""The sessions of one manager, what they reference, and what quotas let them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ..engine.table import KeyCounts, Keys
from ..engine.tree import NO_KEYS
from ..errors import ConfigError, SessionExistsError, UnknownSessionError
from .holdings import UNLIMITED, Group, Quota, leading_that_fit
from .model import PRUNE_AT, Session, SessionOptions, forked
from .settings import EVERY, SessionSettings, Size, is_name

if TYPE_CHECKING:
    from ..engine.tier import Tier

ENDED = 1024
"""Destroyed sessions that are remembered, the latest ones, for the requests that were running meanwhile."""

Holds = Callable[[Keys], npt.NDArray[np.bool_]]


class Charge(NamedTuple):
    """What became of a wish to reference blocks: how many leading ones are, and what nobody references any more."""

    session: Session | None
    blocks: int
    freed: Keys = NO_KEYS
    stamp: int = 0


class SessionBook:
    """Who references what; every method takes the lock, which is held for microseconds and never across I/O.

    Parameters
    ----------
    settings:
        Rules for sessions that are given none of their own.
    clock:
        Seconds.
    """

    def __init__(self, settings: SessionSettings, clock: Callable[[], float]) -> None:
        self.settings = settings
        self.clock = clock
        self.block_bytes: Mapping[str, int] = {}
        """Bytes of a block by tier, once that is known."""
        self.next_due = float("inf")
        """No session is overdue before this time."""
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, bool] = {}
        self._all = Group("total", settings.total_gb)
        self._labelled: dict[tuple[str, str], Group] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._sessions

    def __iter__(self) -> Iterator[Session]:
        with self._lock:
            return iter(list(self._sessions.values()))

    # -- coming and going ---------------------------------------------------------------------------------------------

    def create(self, session_id: str, options: SessionOptions | None = None) -> Session:
        """A new session; SessionExistsError when the id is taken."""
        if not is_name(session_id):
            raise ConfigError(f"a session id must be a non-empty string of Unicode text, not {session_id!r}")
        rules, given = self.settings, options or SessionOptions()
        options = msgspec.structs.replace(
            given,
            quota_gb=given.quota_gb if given.quota_gb is not None else rules.quota_gb,
            ttl_s=given.ttl_s if given.ttl_s is not None else rules.ttl_s,
            on_quota=given.on_quota or rules.on_quota,
        )
        with self._lock:
            if session_id in self._sessions:
                raise SessionExistsError(f"session {session_id!r} exists already; destroy it first, or use another id")
            session = Session(session_id, options, self.clock)
            session.groups = (*self._groups_of(session.labels), self._all)
            self._sessions[session_id] = session
            self._ended.pop(session_id, None)
            if session.ttl_s is not None:
                self.next_due = min(self.next_due, session.used_at + session.ttl_s)
            return session

    def _groups_of(self, labels: Mapping[str, str]) -> Iterator[Group]:
        for label, value in labels.items():
            sizes = self.settings.label_gb.get(label, {})
            size = sizes.get(value, sizes.get(EVERY))
            if size is not None:
                yield self._labelled.setdefault((label, value), Group(f"{label}={value}", size))

    def fork(
        self,
        source_id: str,
        session_id: str,
        options: SessionOptions | None = None,
        also: Callable[[Session, Keys], int] | None = None,
    ) -> Session:
        """A new session that references what another does, as far as its quotas let it, the latest first.

        Raises UnknownSessionError and SessionExistsError.
        """
        with self._lock:
            source = self.get(source_id)
            session = self.create(session_id, options or SessionOptions(labels=source.labels))
            session.data = forked(source.data)
            keys = source.held.oldest(source.stamp + 1)[::-1]  # so that what is cut off is the ends of the oldest
            keys = keys[: self._fitting(session, keys)]
            keys = keys if also is None else keys[: also(session, keys)]
            session.held.copy_from(source.held, keys)
            session.stamp = source.stamp
            for group in session.groups:
                group.held.add(keys)
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

    def clear(self, session_id: str) -> Keys:
        """Forget what a session said and references; returns the keys that no other session references."""
        with self._lock:
            session = self.get(session_id)
            session.data.clear()
            return self._let_go(session, session.held.keys)

    def destroy(self, session_id: str, purge: bool = False, *, expired: bool = False) -> Keys:
        """Remove a session; returns the keys that no other session references, none when there was no session.

        Unless it *expired*, nothing is stored for it any more.
        """
        with self._lock:
            if session_id not in self._sessions:
                return np.empty((0, 2), np.uint64)
            keys = self.clear(session_id)
            session = self._sessions[session_id]
            self._remove(session)
            session.purged = purge
            if not expired:
                self._ended[session_id] = purge
            while len(self._ended) > ENDED:
                del self._ended[next(iter(self._ended))]
            return keys

    def ended(self, session_id: str) -> bool | None:
        """Of a session that was destroyed and not made again, whether its bytes were overwritten; None of any other."""
        return self._ended.get(session_id)

    def dismiss(self, session_id: str) -> bool:
        """Remove a session and leave its blocks to whoever else finds them; False when there is none."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None:
                self.clear(session_id)
                session.pinned = False
                self._remove(session)
            return session is not None

    def _remove(self, session: Session) -> None:
        del self._sessions[session.id]
        for name in [name for name, group in self._labelled.items() if group in session.groups]:
            if not any(self._labelled[name] in other.groups for other in self._sessions.values()):
                del self._labelled[name]

    def overdue(self) -> list[Session]:
        """Sessions that have been idle for their time to live; the time of the next look is set anew."""
        with self._lock:
            mortal = [s for s in self._sessions.values() if s.ttl_s is not None and not s.pinned]
            due = [s for s in mortal if s.ttl_s is not None and not s.inside and s.idle_s >= s.ttl_s]
            rest = [s.used_at + (s.ttl_s or 0.0) if not s.inside else self.clock() + (s.ttl_s or 0.0) for s in mortal]
            gone = set(due)
            late = [at for s, at in zip(mortal, rest, strict=True) if s not in gone]
            self.next_due = min(late, default=float("inf"))
            return due

    # -- who references what ------------------------------------------------------------------------------------------

    def charge(
        self,
        session_id: str,
        keys: Keys,
        holds: Holds,
        storing: bool = False,
        also: Callable[[Session, Keys], int] | None = None,
    ) -> Charge:
        """Let a session reference the blocks of a chain, as many leading *keys* ``[n, 2]`` as its quotas let it.

        At a quota, its own oldest ends of chains are let go first, then those of the longest idle session that shares
        the quota.  References to blocks that no tier *holds* any more are forgotten whenever their number may have
        doubled, and at a quota.  *storing*: they are stored next, and :meth:`stored` follows; nothing is for a
        session that was destroyed.  *also* tells how many may be referenced for other reasons.
        """
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:  # what requests of a destroyed one still compute would be left by it for ever
                return Charge(None, 0 if storing and session_id in self._ended else len(keys))
            session.touch()
            if len(session.held) > session.prune_at:  # before, for the new ones may not be stored yet
                self._prune(session, holds)
            session.stamp += 1
            if storing:
                session.storing.add(session.stamp)
            if session.held.use(keys, session.stamp) == len(keys):
                return Charge(session, len(keys), NO_KEYS, session.stamp)
            return self._charge_new(session, keys, holds, also)

    def _charge_new(
        self, session: Session, keys: Keys, holds: Holds, also: Callable[[Session, Keys], int] | None
    ) -> Charge:
        """As :meth:`charge`, where *keys* are not all referenced yet."""
        freed, blocks = [], len(keys)
        for held, quota in self._limits_of(session):
            if quota.size is not None:
                freed += self._make_room(session, held, quota, keys, holds)
                blocks = min(blocks, self._leading(held, quota, keys))
        if also is not None:
            blocks = also(session, keys[:blocks])
        new = session.held.missing(keys[:blocks])
        session.held.add(new)
        for group in session.groups:
            group.held.add(new)
        session.held.use(keys[:blocks], session.stamp)
        session.refused_blocks += len(keys) - blocks
        return Charge(session, blocks, np.concatenate(freed) if freed else NO_KEYS, session.stamp)

    def stored(self, charge: Charge, blocks: int) -> None:
        """What was charged is stored now, or never will be."""
        session = charge.session
        if session is not None:
            with self._lock:
                session.storing.discard(charge.stamp)
                session.stored_blocks += blocks

    def _limits_of(self, session: Session) -> Iterator[tuple[KeyCounts, Quota]]:
        yield session.held, session.quota
        for group in session.groups:
            yield group.held, group.quota

    def _leading(self, held: KeyCounts, quota: Quota, keys: Keys) -> int:
        limit = quota.blocks(self.block_bytes)
        return len(keys) if limit == UNLIMITED else leading_that_fit(held, keys, limit - len(held))

    def _fitting(self, session: Session, keys: Keys) -> int:
        return min(self._leading(held, quota, keys) for held, quota in self._limits_of(session))

    def _make_room(self, session: Session, held: KeyCounts, quota: Quota, keys: Keys, holds: Holds) -> list[Keys]:
        """Let references go until *keys* fit into *quota*, as far as they may; returns what nobody references then."""
        limit = quota.blocks(self.block_bytes)
        if limit == UNLIMITED:
            return []
        freed = []
        for other in self._who_gives(session, held):
            short = len(held) + len(held.missing(keys)) - limit
            if short <= 0:
                break
            self._prune(other, holds)
            short = len(held) + len(held.missing(keys)) - limit
            if short > 0 and not other.pinned and other.on_quota == "evict":
                leaving = self._that_free(other, session, held, short)
                other.dropped_blocks += len(leaving)
                freed.append(self._let_go(other, leaving))
        return freed

    def _who_gives(self, session: Session, held: KeyCounts) -> Iterable[Session]:
        """The session itself; then, where the quota is shared, the others that share it, the longest idle first."""
        yield session
        if held is not session.held and session.on_quota == "evict":
            sharing = [s for s in self._sessions.values() if any(g.held is held for g in s.groups) and s is not session]
            yield from sorted(sharing, key=lambda other: other.used_at)

    @staticmethod
    def _that_free(giver: Session, asker: Session, held: KeyCounts, count: int) -> Keys:
        """The oldest references of *giver* without which *held* has *count* blocks less, or as many as there are."""
        keys = giver.held.oldest(giver.stamp if giver is asker else giver.stamp + 1)
        fewer = np.cumsum(held.only_one(keys))
        return keys[: int(np.searchsorted(fewer, count, side="left")) + 1]

    def _let_go(self, session: Session, keys: Keys) -> Keys:
        """Session *session* references *keys* no more; returns those that nobody does now."""
        session.held.remove(keys)
        freed = keys
        for group in session.groups:
            freed = group.held.remove(keys)
        return freed

    def _prune(self, session: Session, holds: Holds) -> None:
        keys = session.held.oldest(min(session.storing, default=session.stamp + 1))
        self._let_go(session, keys[~holds(keys)])
        session.prune_at = max(2 * len(session.held), PRUNE_AT)

    def unheld(self, keys: Keys) -> Keys:
        """Those of *keys* ``[n, 2]`` that no session references."""
        with self._lock:
            return self._all.held.missing(keys)

    def held_by(self, session: Session) -> Keys:
        """Keys ``[n, 2]`` that *session* references."""
        with self._lock:
            return session.held.keys

    def swap_pins(self, session: Session, pins: list[tuple[Tier, int]]) -> list[tuple[Tier, int]]:
        """Note what is pinned for *session*; returns what must be given back."""
        with self._lock:
            if pins and (session.purged is not None or not session.pinned):  # it ended, or was let loose, meanwhile
                before, session.pins = session.pins + pins, []
            else:
                before, session.pins = session.pins, pins
            return before

    def used(self, session: Session, asked_tokens: int, reused_tokens: int) -> None:
        """Note a request of a session."""
        with self._lock:
            session.requests += 1
            session.asked_tokens += asked_tokens
            session.reused_tokens += reused_tokens

    def locked(self) -> AbstractContextManager[object]:
        """Nothing changes while this context is open."""
        return self._lock

    def only_one(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of *keys* ``[n, 2]`` exactly one session references."""
        return self._all.held.only_one(keys)

    def sharing(self) -> Iterator[tuple[Group, list[Session]]]:
        """Each quota that sessions share, with these sessions, the longest idle first."""
        by_age = sorted(self, key=lambda session: session.used_at)
        for group in (self._all, *self._labelled.values()):
            yield group, [session for session in by_age if group in session.groups]

    def groups(self) -> list[tuple[str, Size | None, Keys]]:
        """Each quota that sessions share: its name, its size, and what is held under it."""
        with self._lock:
            shared = [self._all, *self._labelled.values()]
            return [(group.name, group.quota.size, group.held.keys) for group in shared]

    def check(self) -> Iterator[str]:
        """Violated invariants, as sentences: counts of groups are those of their sessions, and quotas hold."""
        with self._lock:
            for group in (self._all, *self._labelled.values()):
                members = [s.held.keys for s in self._sessions.values() if group in s.groups]
                union = np.unique(np.concatenate([NO_KEYS, *members]), axis=0)
                if len(union) != len(group.held) or not group.held.knows(union).all():
                    yield f"sessions of {group.name} reference {len(union)} blocks, but {len(group.held)} are counted"
            for session in self._sessions.values():
                for held, quota in self._limits_of(session):
                    if len(held) > quota.blocks(self.block_bytes):
                        yield f"session {session.id!r} or its group references {len(held)} blocks, more than its quota"
