"""What must happen to blocks when sessions come, grow, are pinned and go."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from ..engine.chain import TierChain
from ..engine.ledger import Event
from ..engine.pinning import pin_tips, unpin
from ..engine.table import Keys
from ..errors import ClosedError, UnknownSessionError
from ..observe.log import LimitedLog
from .book import Charge, SessionBook
from .gate import Gate
from .model import Session, SessionOptions
from .settings import Size, check_tiers


class Remote(Protocol):
    """A manager in another process, where an engine keeps the blocks of this one."""

    def call(self, verb: str, *args: Any) -> Any:
        """Do *verb* there; what it returned, or None when that process cannot be reached."""


class Keeper:
    """Sessions of a manager together with the tiers where their blocks are, and with engines in other processes.

    Opening and closing are logged at INFO, with ``kv_held_bytes`` in all tiers and, at the end, ``kv_freed_bytes``:
    what is free now, or as soon as running requests let go of it.
    """

    def __init__(self, manager: str, book: SessionBook, chain: TierChain) -> None:
        self.book = book
        self.remotes: list[Remote] = []
        self._log = LimitedLog(manager)
        self._chain = chain
        self._looking = False
        self._gate: Gate | None = None
        settings = book.settings
        shared = [settings.total_gb, *(size for sizes in settings.label_gb.values() for size in sizes.values())]
        for size in (settings.quota_gb, *shared):
            self._stand_guard(size)

    def opened(self) -> None:
        """The sizes of blocks are known now."""
        self.book.block_bytes = {tier.name: tier.block_bytes for tier in self._chain.tiers}
        self._set_alarm()

    def follow(self, remote: Remote) -> None:
        """Do there what is done to sessions here, and make those that are here."""
        self.remotes.append(remote)
        for session in self.book:
            remote.call("create_session", session.id, msgspec.to_builtins(session.options))
            if session.reuse_hint != "unknown":
                remote.call("session_hint", session.id, session.reuse_hint)

    def _tell(self, session: Session) -> None:
        """What was said about a session's return is said where its blocks are."""
        for remote in self.remotes if session.purged is None else ():
            remote.call("session_hint", session.id, session.reuse_hint)

    def _stand_guard(self, size: Size | None) -> None:
        """Count what comes into each tier from now on, if *size* is one by tiers."""
        if isinstance(size, Mapping) and self._gate is None:
            self._gate = Gate(self.book, self._chain.tiers)
            for tier in self._chain.tiers:
                tier.gate = self._gate.admitting

    def check(self) -> list[str]:
        """Violated invariants of references and quotas, as sentences."""
        return [*self.book.check(), *(self._gate.excess() if self._gate is not None and self._chain.is_open else ())]

    # -- coming and going ---------------------------------------------------------------------------------------------

    def create(self, session_id: str, options: SessionOptions) -> Session:
        """See ``CacheManager.create_session``."""
        self._require_open()
        check_tiers("quota_gb", options.quota_gb, [tier.name for tier in self._chain.tiers])
        self._stand_guard(options.quota_gb)
        self.expire_if_due()
        return self._begun(self.book.create(session_id, options), "create_session", session_id, options)

    def fork(self, source_id: str, session_id: str, options: SessionOptions | None) -> Session:
        """See ``CacheManager.fork_session``."""
        self._require_open()
        if options is not None:
            check_tiers("quota_gb", options.quota_gb, [tier.name for tier in self._chain.tiers])
            self._stand_guard(options.quota_gb)
        also = self._gate.referencing if self._gate is not None and self._chain.is_open else None
        session = self.book.fork(source_id, session_id, options, also)
        self._settle()
        self.hold(session)
        return self._begun(session, "fork_session", source_id, session_id, options)

    def _begun(self, session: Session, verb: str, *args: Any) -> Session:
        session.measure, session.tell = self.measure, self._tell
        plain = [msgspec.to_builtins(a) if isinstance(a, SessionOptions) else a for a in args]
        for remote in self.remotes:
            remote.call(verb, *plain)
        self._set_alarm()
        held = sum(self.measure(session).values()) if len(session.held) else 0
        self._log.info("session_opened", f"session {session.id!r} opened", session=session.id, held_bytes=held)
        return session

    def pin(self, session_id: str, pinned: bool) -> None:
        """See ``CacheManager.pin_session``."""
        self._require_open()
        if not self.only_elsewhere(session_id):
            session = self.book.get(session_id)
            session.pinned = pinned
            session.touch()
            self.hold(session)
            if not pinned and session.ttl_s is not None:
                self.book.next_due = min(self.book.next_due, session.used_at + session.ttl_s)
        for remote in self.remotes:
            remote.call("pin_session", session_id, pinned)

    def clear(self, session_id: str, reason: str = "session_cleared") -> int:
        """Forget what a session said, and drop what only it references; returns how many blocks were dropped."""
        if self.only_elsewhere(session_id):
            return 0
        keys = self.book.clear(session_id)
        self.hold(self.book.get(session_id))
        return self._chain.drop_unshared(keys, reason).blocks

    def only_elsewhere(self, session_id: str) -> bool:
        """Whether a session is not known here, but in an engine's process: by a request that named it."""
        if not isinstance(session_id, str) or session_id in self.book:
            return False
        return any(remote.call("session_idle_s", session_id) is not None for remote in self.remotes)

    def dismiss(self, session_id: str) -> bool:
        """Stop accounting for a session; its blocks stay, charged to nobody.  False when there is none."""
        session = self.book.find(session_id)
        known = self.book.dismiss(session_id)
        if session is not None:
            self.hold(session)
        return known

    def end(self, session_id: str, purge: bool = False, reason: str = "destroyed") -> None:
        """Remove a session, and drop what only it references; nothing when there is no such session."""
        session = self.book.find(session_id)
        if session is None:
            self._end_elsewhere(session_id, purge)
            return
        held = sum(self.measure(session).values())
        alone = self.book.destroy(session_id, purge, expired=reason == "expired")
        self.hold(session)
        gone = self._chain.drop_unshared(alone, "session_destroyed", wipe=purge)
        text = f"session {session_id!r} closed ({reason}): it held {held:,} bytes, {gone.nbytes:,} were freed"
        fields = {"held_bytes": held, "freed_bytes": gone.nbytes, "freed_blocks": gone.blocks, "reason": reason}
        self._log.info("session_closed", text, session=session_id, **fields, requests=session.requests, purged=purge)
        self._end_elsewhere(session_id, purge)

    def _end_elsewhere(self, session_id: str, purge: bool) -> None:
        for remote in self.remotes:
            remote.call("destroy_session", session_id, purge)

    def expire_if_due(self) -> None:
        """In the engine's path: have overdue sessions destroyed in the background, where there may be any."""
        if self.book.clock() >= self.book.next_due and not self._looking:
            self._looking = True
            if not self._chain.is_open or self._chain.in_background(self.expire) is None:
                self.expire()

    def expire(self) -> None:
        """Destroy the sessions that have been idle for their time to live, here and in the engines."""
        try:
            for session in self.book.overdue():
                elsewhere = [remote.call("session_idle_s", session.id) for remote in self.remotes]
                idle = min((s for s in elsewhere if s is not None), default=session.idle_s)
                if session.ttl_s is not None and idle < session.ttl_s:
                    session.used_at = self.book.clock() - idle
                    self.book.next_due = min(self.book.next_due, session.used_at + session.ttl_s)
                else:
                    self.end(session.id, reason="expired")
        finally:
            self._looking = False
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._chain.is_open and self.book.next_due < float("inf"):
            self._chain.wake_in(max(self.book.next_due - self.book.clock(), 0.0), self.expire)

    # -- what they hold -----------------------------------------------------------------------------------------------

    def charge(self, session_id: str, keys: Keys, *, storing: bool = False) -> Charge:
        """Let a session reference the leading *keys* ``[n, 2]`` that its quotas let it; drops what must go for them.

        *storing*: they are about to be stored; what is more than the quotas let is counted as not stored.
        """
        also = self._gate.referencing if self._gate is not None else None
        charge = self.book.charge(session_id, keys, self._chain.holds, storing, also)
        self._settle()
        if len(charge.freed):
            self._chain.drop_unshared(charge.freed, "quota")
        if storing and charge.blocks < len(keys):
            reason = "quota" if charge.session is not None else "session_destroyed"
            self._chain.tiers[0].count(Event.NOT_STORED, len(keys) - charge.blocks, reason)
        return charge

    def _settle(self) -> None:
        """Free what left single tiers while a lock was held."""
        if self._gate is not None and self._chain.is_open:
            for tier in self._chain.tiers:
                tier.settle()

    def stored(self, charge: Charge, keys: Keys, blocks: int) -> None:
        """Of *keys*, which were charged, *blocks* were stored: pin them for a pinned session, drop them if it ended.

        Whoever destroyed it meanwhile could not see them yet.
        """
        session = charge.session
        if session is None:
            return
        self.book.stored(charge, blocks)
        if session.purged is not None:
            self._chain.drop_unshared(self.book.unheld(keys), "session_destroyed", wipe=session.purged)
        elif session.pinned:
            self.hold(session)

    def finished(self, session_id: str, keys: Keys) -> None:
        """*keys*, for which slots were reserved, are stored: as :meth:`stored`, for the session of this id."""
        purged, session = self.book.ended(session_id), self.book.find(session_id)
        if purged is not None:
            self._chain.drop_unshared(self.book.unheld(keys), "session_destroyed", wipe=purged)
        elif session is not None:
            self.hold(session)

    def hold(self, session: Session) -> None:
        """Pin what a pinned session references, wherever it is now, and nothing else of it any more."""
        if not session.pinned and not session.pins:
            return
        wanted = session.pinned and session.purged is None and self._chain.is_open
        pins = pin_tips(self._chain.tiers, self.book.held_by(session)) if wanted else []
        unpin(self.book.swap_pins(session, pins))

    def measure(self, session: Session) -> dict[str, int]:
        """Bytes in each tier of the blocks that *session* references."""
        return self._chain_bytes(self.book.held_by(session))

    def groups(self) -> list[dict[str, Any]]:
        """Each quota that sessions share, with the bytes in each tier that are held under it."""
        shared = self.book.groups()
        return [{"group": name, "quota_gb": size, "tier_bytes": self._chain_bytes(keys)} for name, size, keys in shared]

    def _chain_bytes(self, keys: Keys) -> dict[str, int]:
        tiers = self._chain.tiers if self._chain.is_open else []
        return {tier.name: int(tier.index.knows(keys).sum()) * tier.block_bytes for tier in tiers}

    def _require_open(self) -> None:
        if self._chain.closed:
            raise ClosedError("this manager is closed; make a new one")

    def reset(self) -> None:
        """Every session forgets what it said and references."""
        for session in self.book:
            with contextlib.suppress(UnknownSessionError):  # destroyed by somebody else meanwhile
                self.book.clear(session.id)
                self.hold(session)
