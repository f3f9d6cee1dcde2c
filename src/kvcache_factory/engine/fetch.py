"""Blocks on their way from a store into memory: read by background threads, proven, and handed to whoever waits.

Where a block lands is either a slot reserved in the memory tier above, which makes it a block of that tier, or a
transit slot.  Giving up waiting never takes a slot from its read: the read ends, and then lets go of what it holds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ..block.plan import ChainView
from ..errors import StoreError
from ..store.base import SlotMemory
from .images import Image, prove
from .io import IOPool, Lane
from .ledger import Event
from .table import Rows
from .tier import Tier
from .transit import Transit

READ_BYTES = 8 << 20
WINDOW = 8
ABANDONED_SHARE = 0.02


class Landing:
    """Slots of a memory tier, or of transit, that a read fills."""

    def __init__(
        self, memory: SlotMemory, payload_offset: int, slots: Rows, tier: Tier | None, pool: Transit, rows: Rows
    ) -> None:
        self.memory = memory
        self._rows = rows
        self.payload_offset = payload_offset
        self.slots = slots
        self.codes: npt.NDArray[np.uint8] = np.zeros(len(slots), np.uint8)
        self._tier = tier
        self._pool = pool
        self._pinned = -1

    def keep(self, images: Sequence[Image]) -> None:
        """The leading slots hold proven *images*: let the tier have them; give the others back."""
        good = len(images)
        self.codes[:good] = [image.layout for image in images]
        if self._tier is None:
            return
        index, rows = self._tier.index, self._rows[:good]
        index.layout[rows] = self.codes[:good]
        index.fidelity[rows] = [image.fidelity for image in images]
        index.codings[rows] = [image.generation for image in images]
        index.checksum[rows] = [image.payload_checksum for image in images]
        if good:
            self._pinned = int(rows[-1])
            index.pin(self._pinned)
            self._tier.count(Event.STORED, index.commit(rows))
            self._tier.count(Event.PROMOTED, good)
        self._tier.abort(self._rows[good:])

    def drop(self, first: int, wipe: bool) -> None:
        """The blocks from number *first* on were dropped below while they were on their way."""
        if self._tier is not None:
            rows = self._rows[first : first + 1]
            self._tier.index.wipe[rows] = wipe
            self._tier.drop(rows, "dropped_below")

    def release(self) -> None:
        """Let go of the slots: blocks of a tier may leave it again, transit slots are free."""
        if self._tier is None:
            self._pool.give_back(self.slots)
        elif self._pinned >= 0:
            self._tier.index.unpin(self._pinned)


class Fetch:
    """One read of neighbouring blocks.

    It holds what it reads until it has ended, however long after everybody has given it up: a row that was let go and
    used anew must not be blamed for what was read of its predecessor.
    """

    def __init__(self, source: Tier, rows: Rows, chain: ChainView, first: int, landing: Landing) -> None:
        self.rows = rows
        self.landing = landing
        self.good = 0
        self.abandoned = False
        self._source = source
        self._chain = chain
        self._first = first
        self._done = threading.Event()
        self._lock = threading.Lock()
        source.index.pin(int(rows[-1]))

    def run(self) -> None:
        """Read, prove and keep; what fails leaves its tier and is counted there."""
        images: list[Image] = []
        reason = "gone"
        try:
            for number in self._read():
                proven = self._prove(number)
                if isinstance(proven, Image) and proven.fidelity > self._source.index.fidelity[self.rows[number]]:
                    proven = "not_exact"
                if isinstance(proven, str):
                    reason = proven
                    break
                images.append(proven)
        except StoreError as error:
            reason = error.reason
        finally:
            try:
                self._keep(images, reason)
            finally:
                self._end()

    def _read(self) -> Iterator[int]:
        """Numbers of the blocks that were read; a store that stops early is asked again, so that it says why."""
        read = 0
        while read < len(self.rows):
            with self._source.timing("read"):
                count = self._source.store.read(self.rows[read:], self.landing.memory, self.landing.slots[read:], 0)
            yield from range(read, read + count)
            if not count:
                break
            read += count

    def cancel(self) -> None:
        """End without having begun."""
        self.landing.keep([])
        self._end()
        self.landing.release()

    def _keep(self, images: Sequence[Image], reason: str) -> None:
        self.landing.keep(images)
        self.good = len(images)
        index = self._source.index
        gone = index.gone(self.rows[: self.good])
        if gone < self.good:  # whoever dropped them could not see the copy yet
            self.landing.drop(gone, bool(index.wipe[self.rows[gone]]))
        if self.good < len(self.rows):
            self._source.reject(self.rows[self.good :], reason)

    def _end(self) -> None:
        self._source.index.unpin(int(self.rows[-1]))
        with self._lock:
            self._done.set()
            if self.abandoned:
                self.landing.release()
        self._source.settle()

    def _prove(self, number: int) -> Image | str:
        spec = self._source.spec
        assert spec is not None
        image = self.landing.memory.view[int(self.landing.slots[number])]
        codec, images = self._source.codec, getattr(self._source, "images", None)
        refused = codec.decode(spec, image) if codec is not None else None
        if refused is None and images is not None:
            refused = images.decode(image)
        return refused or prove(spec, image, self._chain, self._first + number)

    def wait(self, timeout: float) -> bool:
        """Wait for the end; when that takes too long, the read will let go by itself."""
        if self._done.wait(timeout):
            return True
        with self._lock:
            if self._done.is_set():
                return True
            self.abandoned = True
            return False

    @property
    def done(self) -> bool:
        """Whether the read has ended."""
        return self._done.is_set()


class Fetcher:
    """Reads runs of blocks out of one tier into the memory tier above it.

    Parameters
    ----------
    source:
        A tier whose store is not memory.
    above:
        The memory tier that keeps what is read.
    max_wait_s:
        Seconds that one load waits for its reads.
    """

    def __init__(self, source: Tier, above: Tier, io: IOPool, transit: Transit, max_wait_s: float) -> None:
        self.source = source
        self.above = above
        self._io = io
        self._transit = transit
        self._max_wait_s = max_wait_s
        self._abandoned: list[Fetch] = []
        self._lock = threading.Lock()

    def fetch(
        self,
        chain: ChainView,
        root: int,
        first: int,
        rows: Rows,
        use: Callable[[Fetch, int], None],
    ) -> int:
        """Read *rows*, which hold the blocks of *chain* from *first* on; returns how many leading ones were good.

        *use* is called with each read that has ended, in order, while its slots are held.
        """
        if self.out_of_service:
            self.source.count(Event.LOAD_FAILED, len(rows), "out_of_service")
            return 0
        deadline = time.monotonic() + self._max_wait_s
        waiting: deque[Fetch] = deque()
        started = good = 0
        try:
            while good < len(rows):
                while started < len(rows) and len(waiting) < WINDOW:
                    fetch = self._start(chain, root, first + started, rows[started:])
                    if fetch is None:
                        break
                    waiting.append(fetch)
                    started += len(fetch.rows)
                if not waiting:
                    break
                if not waiting[0].wait(max(deadline - time.monotonic(), 0)):
                    late = sum(len(fetch.rows) for fetch in waiting)
                    self.source.count(Event.LOAD_FAILED, late, "deadline")
                    break
                fetch = waiting.popleft()
                try:
                    use(fetch, good)
                finally:
                    fetch.landing.release()
                good += fetch.good
                if fetch.good < len(fetch.rows):
                    break
        finally:
            self._give_up(waiting)
        return good

    @property
    def out_of_service(self) -> bool:
        """Whether reads that nobody waits for hold as many slots as they may."""
        return self.abandoned > max(ABANDONED_SHARE * self.above.index.capacity, WINDOW)

    @property
    def abandoned(self) -> int:
        """Blocks whose reads nobody waits for any more, but which have not ended."""
        with self._lock:
            self._abandoned = [fetch for fetch in self._abandoned if not fetch.done]
            return sum(len(fetch.rows) for fetch in self._abandoned)

    def prepare(self, chain: ChainView, root: int, first: int, rows: Rows) -> Fetch | None:
        """A read of the leading *rows* into slots of the tier above, for the caller to run; None without such slots."""
        rows = rows[: self._read_size(rows)]
        landing = None if self.out_of_service else self._reserve(chain, root, first, rows)
        if landing is None:
            return None
        return self._make(rows[: len(landing.slots)], chain, first, landing)

    def _make(self, rows: Rows, chain: ChainView, first: int, landing: Landing) -> Fetch:
        return Fetch(self.source, rows, chain, first, landing)

    def _read_size(self, rows: Rows) -> int:
        spec = self.source.spec
        assert spec is not None
        return min(len(rows), max(READ_BYTES // spec.slot_bytes, 1))

    def _start(self, chain: ChainView, root: int, first: int, rows: Rows) -> Fetch | None:
        rows = rows[: self._read_size(rows)]
        landing = self._reserve(chain, root, first, rows) or self._borrow(len(rows))
        if landing is None:
            return None
        fetch = self._make(rows[: len(landing.slots)], chain, first, landing)
        if self._io.submit(Lane.LOAD, fetch.run) is None:  # to read it here would wait for as long as the disk likes
            fetch.cancel()
            self.source.count(Event.LOAD_FAILED, len(fetch.rows), "queue_full")
            return None
        return fetch

    def _reserve(self, chain: ChainView, root: int, first: int, rows: Rows) -> Landing | None:
        above = self.above
        if above.payload_offset == 0:  # a device keeps payloads only, a read brings whole images
            return None
        reservation = above.reserve(chain, root, first, len(rows))
        above.count_left(reservation, self.source)
        if not len(reservation.rows) or reservation.first != first:
            above.abort(reservation.rows, "not_needed")
            return None
        slots = above.slots_of(reservation.rows)
        return Landing(above.slots, above.payload_offset, slots, above, self._transit, reservation.rows)

    def _borrow(self, count: int) -> Landing | None:
        slots = self._transit.take(count)
        if not len(slots):
            return None
        return Landing(self._transit.memory, self._transit.spec.header_bytes, slots, None, self._transit, slots)

    def _give_up(self, fetches: Iterable[Fetch]) -> None:
        for fetch in fetches:
            if fetch.wait(0):
                fetch.landing.release()
            else:
                with self._lock:
                    self._abandoned.append(fetch)
