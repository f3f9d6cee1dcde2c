"""The segments of one directory as one process sees them: which there are, whose they are, and who may grow."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from ...block.spec import PAGE, BlockSpec, round_up
from ...errors import ConfigError, FormatError, StoreError
from . import log, segment
from .directory import Directory
from .health import Health
from .presence import Presence, Process, others, remove_dead
from .segment import Segment, SlotNumbers

_STEPS = 64


class SizeClass(msgspec.Struct, frozen=True):
    """The segments that this process makes: *slots* slots of *slot_bytes*, *bytes* with everything."""

    slot_bytes: int
    slots: int
    block_tokens: int

    @classmethod
    def within(cls, slot_bytes: int, block_tokens: int, segment_bytes: int) -> SizeClass:
        """The largest that takes at most *segment_bytes*, or one slot."""
        fixed = 2 * (log.HEADER_BYTES + 64 * log.RECORD_BYTES)
        slots = (segment_bytes - fixed) // (slot_bytes + 2 * 4 * log.RECORD_BYTES)
        return cls(slot_bytes, max(1, slots), block_tokens)

    @property
    def bytes(self) -> int:
        """Bytes of one segment, as they count against the budget."""
        return self.slots * self.slot_bytes + 2 * self.header(0, 0).file_bytes

    def refusal(self, budget: int) -> str:
        """Why *budget* bytes are too few."""
        return (
            f"a disk tier of {budget:,} bytes has no room for one segment of {self.slots} blocks; "
            f"give it at least {self.bytes:,} bytes ({self.bytes / 2**30:.3f} GiB), or smaller segments"
        )

    def header(self, number: int, now_ns: int) -> log.LogHeader:
        """The header of the log of a new segment."""
        return log.LogHeader(number, self.slot_bytes, self.slots, self.block_tokens, now_ns)


def smaller_classes(spec: BlockSpec, segment_bytes: int) -> list[SizeClass]:
    """Classes for encoded images: a header, and a payload in steps of a 64th of a whole one."""
    steps = {round_up(spec.payload_bytes * k // _STEPS, PAGE) for k in range(1, _STEPS)}
    sizes = sorted(spec.header_bytes + step for step in steps)
    return [SizeClass.within(size, spec.block_tokens, segment_bytes) for size in sizes if size < spec.slot_bytes]


class Seen(msgspec.Struct):
    """What a look at the directory has found."""

    gone: list[tuple[Segment, SlotNumbers]]
    fresh: list[tuple[Segment, log.Records]]
    adopted: list[Segment]


class Pool:
    """All segments of a directory.

    ``lock`` guards columns and is held for microseconds; looking, growing and removing have a lock of their own.
    *size* is that of whole images, *smaller* are those of encoded ones.
    """

    def __init__(
        self,
        directory: Directory,
        size: SizeClass,
        budget: int,
        health: Health,
        now: Callable[[], int],
        smaller: Sequence[SizeClass] = (),
    ):
        self.directory = directory
        self.sizes = {one.slot_bytes: one for one in (*smaller, size)}
        self.whole = size
        self.size = size
        """The class that was written last: where nothing else is known, the next images will be like it."""
        self.budget = budget
        self.health = health
        self.segments: dict[int, Segment] = {}
        self.lock = threading.Lock()
        self.used_bytes = 0
        self.others: list[Process] = []
        self._now_ns = now
        self._files_lock = threading.Lock()
        self._refused: set[int] = set()
        self._starved = False
        with directory.locked():
            self.presence = Presence(directory)
            directory.sweep()
            listing = directory.list()
            remove_dead(directory, listing.processes, self.presence.name)
        self.used_bytes = listing.used_bytes

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self) -> Seen:
        """Take in what others have done, and take over what the dead have left; raises OSError."""
        with self._files_lock:
            listing = self.directory.list()
            self.used_bytes = listing.used_bytes
            self.others = others(self.directory, listing.processes, self.presence.name)
            seen = Seen([], [], [])
            for number in [n for n in self.segments if n not in listing.logs or n not in listing.data]:
                self._forget(number, seen)
            self._refused &= listing.logs.keys()
            for number in listing.logs:
                if number in listing.data and number not in self._refused:
                    self._look_at(number, seen)
            with contextlib.suppress(OSError):  # a full disk: the others go on believing what we said last
                self.presence.say(self._wants_room(), self.owned_bytes)
            return seen

    def _look_at(self, number: int, seen: Seen) -> None:
        known = self.segments.get(number)
        if known is not None and known.owned:
            return
        try:
            one = known or segment.attach(self.directory, number)
            poll = one.poll()
        except FileNotFoundError:  # removed since it was listed
            if known is not None:
                self._forget(number, seen)
            return
        except (OSError, FormatError) as error:
            self._refuse(number, error)
            return
        with self.lock:
            gone, fresh = one.apply(poll)
            self.segments[number] = one
        self.health.count("damaged_record", poll.tail.damaged)
        if len(gone):
            seen.gone.append((one, gone))
        if len(fresh):
            seen.fresh.append((one, fresh))
        if poll.adopted:
            seen.adopted.append(one)

    def _refuse(self, number: int, error: OSError | FormatError) -> None:
        if isinstance(error, FormatError):  # it will not get better
            self._refused.add(number)
            self.health.count("bad_segment")
        else:
            self.health.count("segment_unreadable")

    def _forget(self, number: int, seen: Seen) -> None:
        with self.lock:
            one = self.segments.pop(number)
            used = np.flatnonzero(one.state == segment.USED)
            one.state[:] = segment.BAD
            one.num_free = 0
        seen.gone.append((one, used))
        one.let_go()

    def lose_all(self) -> Seen:
        """The directory itself is gone: so is everything in it."""
        with self._files_lock:
            seen = Seen([], [], [])
            for number in list(self.segments):
                self._forget(number, seen)
            self.used_bytes = 0
            return seen

    # -- growing and shrinking ----------------------------------------------------------------------------------------

    @property
    def owned_bytes(self) -> int:
        """Bytes of this process's segments."""
        return sum(s.bytes for s in self.own())

    def own(self) -> list[Segment]:
        """This process's segments."""
        return [s for s in list(self.segments.values()) if s.owned]

    def ours(self) -> list[Segment]:
        """This process's segments of sizes that it writes."""
        return [s for s in self.own() if s.slot_bytes in self.sizes]

    def of_other_sizes(self, size: SizeClass | None = None) -> list[Segment]:
        """This process's segments of another size than *size*, those of sizes that it does not write first."""
        wanted = (size or self.size).slot_bytes
        return sorted((s for s in self.own() if s.slot_bytes != wanted), key=lambda s: s.slot_bytes in self.sizes)

    def class_of(self, image_bytes: int) -> SizeClass:
        """The smallest class that has room for an image of so many bytes."""
        return self.sizes[min(slot for slot in self.sizes if slot >= image_bytes)]

    @property
    def may_grow(self) -> int:
        """How many segments the budget has room for, as of the last look."""
        return max(0, (self.budget - self.used_bytes) // self.size.bytes)

    def grow(self, size: SizeClass) -> bool:
        """Make one more segment; False when the budget does not allow it, or the disk does not."""
        if not self.may_grow or self.health.growing.error is not None:
            self._starved = True
            return False
        try:
            with self._files_lock:
                self._come_back()
                with self.directory.locked():
                    return self._grow(size)
        except (OSError, StoreError, ConfigError) as error:
            self.health.growing.begin(self.health.failed(f"cannot make a segment in {self.directory.path}", error))
            return False

    def _come_back(self) -> None:
        """Where the directory was removed, or replaced by another, begin anew in what is there."""
        if not self.presence.is_there():
            self.directory.prepare()
            self.presence.let_go()
            with self.directory.locked():
                self.presence = Presence(self.directory)

    def _grow(self, size: SizeClass) -> bool:
        self.directory.sweep()
        self.used_bytes = self.directory.list().used_bytes
        self._starved = not self.may_grow
        if self._starved:
            return False
        one = segment.create(self.directory, size.header(self._unused_number(), self._now_ns()))
        with self.lock:
            self.segments[one.number] = one
        self.used_bytes += one.bytes
        return True

    def _unused_number(self) -> int:
        """A number at random: those of removed segments, which rows elsewhere may still name, do not come back."""
        while True:
            number = secrets.randbelow(2**31 - 1) + 1
            if not self.directory.log_path(number).exists() and not self.directory.data_path(number).exists():
                return number

    def remove_empty(self, candidates: Iterable[Segment], *, grow: SizeClass | None = None) -> bool:
        """Remove the first own segment of *candidates* that is empty, and *grow* one in its place at once."""
        candidates = list(candidates)
        if not candidates:  # the lock is a file, and the directory may be somebody else's by now
            return False
        with self._files_lock, self.directory.locked():
            for one in candidates:
                with self.lock:
                    empty = one.owned and one.is_empty
                    if empty:
                        del self.segments[one.number]
                        one.state[:] = segment.BAD
                        one.num_free = 0
                if empty:
                    one.remove()
                    self.used_bytes -= one.bytes
                    return self._grow(grow) if grow is not None else True
        return False

    def shrink(self) -> int:
        """Remove own segments, the oldest blocks first, until the budget holds; returns how many.  For the start."""
        removed = 0
        with self._files_lock, self.directory.locked():
            self.used_bytes = self.directory.list().used_bytes
            for one in sorted(self.own(), key=lambda s: s.mean_time_ns):
                if self.used_bytes <= self.budget:
                    break
                with self.lock:
                    del self.segments[one.number]
                one.remove()
                self.used_bytes -= one.bytes
                removed += 1
        return removed

    # -- fairness -----------------------------------------------------------------------------------------------------

    @property
    def fair_share(self) -> int:
        """Bytes that each of the live processes could have."""
        return self.budget // (1 + len(self.others))

    def _wants_room(self) -> bool:
        return self._starved and not self.may_grow and self.owned_bytes + self.size.bytes <= self.fair_share

    def must_yield(self) -> bool:
        """Whether to give a segment up: the budget is exceeded, or we have more than our share and another needs it."""
        owned = self.owned_bytes
        if self.used_bytes > self.budget:
            return owned > 0
        return owned > max(self.fair_share, self.size.bytes) and any(p.wants_room for p in self.others)

    def choose_leaving(self) -> Segment | None:
        """The own segment to empty, the one with the oldest blocks, which takes no new ones; None to keep all."""
        own = self.own()
        if not own or not self.must_yield():
            for one in own:
                one.leaving = False
            return None
        coldest = min(own, key=lambda s: (not s.leaving, s.mean_time_ns))
        coldest.leaving = True
        return coldest

    # -- slots --------------------------------------------------------------------------------------------------------

    def room(self, size: SizeClass | None = None) -> int:
        """Blocks, of *size* or like the last ones, that can be placed without freeing any."""
        fits = self.ours() if size is None else [s for s in self.own() if s.slot_bytes == size.slot_bytes]
        free = sum(s.num_free for s in fits if not s.leaving)
        if not free and not self.may_grow:  # who asks and hears "none" does not come to grow
            self._starved = True
        return free + (0 if self.health.growing.error else self.may_grow * (size or self.size).slots)

    def take(self, count: int, size: SizeClass | None = None) -> tuple[Segment, SlotNumbers] | None:
        """Take up to *count* free slots of one segment of *size* (or of whole images), growing where that is needed and
        allowed.

        Neighbours are worth more than a full segment: one that has room for all of them is preferred.
        """
        size = size or self.whole
        self.size = size
        while True:
            with self.lock:
                free = [s for s in self.own() if s.slot_bytes == size.slot_bytes and s.num_free and not s.leaving]
                if free:
                    enough = [s for s in free if s.num_free >= count]
                    one = enough[0] if enough else max(free, key=lambda s: s.num_free)
                    return one, one.take(count)
            if not self.grow(size):
                return None

    @property
    def stored_bytes(self) -> int:
        """Bytes of the slots that hold a block, whoever's."""
        return sum(s.num_used * s.slot_bytes for s in list(self.segments.values()))

    def stats(self) -> dict[str, int]:
        """Counts and bytes of segments."""
        return {
            "budget_bytes": self.budget,
            "used_bytes": self.used_bytes,
            "owned_bytes": self.owned_bytes,
            "segments": len(self.segments),
            "owned_segments": len(self.own()),
            "stored_bytes": self.stored_bytes,
            "used_slots": sum(s.num_used for s in list(self.segments.values())),
            "free_slots": sum(s.num_free for s in self.ours()),
        }

    def lost_bytes(self) -> dict[int, int]:
        """By size of a slot: bytes of own slots that are bad, or free and of another size than ours."""
        lost: dict[int, int] = {}
        for one in self.own():
            slots = int(np.count_nonzero(one.state == segment.BAD))
            slots += one.num_free if one.slot_bytes != self.size.slot_bytes else 0
            lost[one.slot_bytes] = lost.get(one.slot_bytes, 0) + slots * one.slot_bytes
        return lost

    def close(self) -> None:
        """Let go of everything; idempotent."""
        with self.lock:
            segments, self.segments = list(self.segments.values()), {}
        for one in segments:
            one.let_go()
        self.presence.close()
