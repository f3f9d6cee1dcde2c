"""The same three verbs for the store of a connector: has it, holds it whole, or loses the blocks of a directory.

No connector can list what its store holds, so that the names come from the directory of a disk tier.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..block.envelope import HeaderError, checksum, unpack_header
from ..block.spec import HEADER_FIXED, PAGE, round_up
from ..connector.base import Connector, ConnectorConfig, MemoryRegion
from ..connector.names import create_connector
from ..errors import StoreError
from ..status import Status
from ..store.disk import log
from .survey import SegmentView, Survey, identities_in

Row = dict[str, Any]
Progress = Callable[..., None]
Mask = npt.NDArray[np.bool_]
BATCH, THREADS = 32, 8
TIMEOUT_S = 30.0
"""Seconds that a batch may take."""


class Elsewhere:
    """An open connector, from its environment variables, and the names under which blocks are there.

    Parameters
    ----------
    connector:
        Name in the registry, or ``"module:Class"``.
    namespace:
        That of the RemoteBackend which wrote them.
    """

    def __init__(self, connector: str, namespace: str) -> None:
        self.name = connector
        self._namespace = namespace.encode()
        self._threads = ThreadPoolExecutor(THREADS)
        self._connector: Connector[bytes, Any] = create_connector(
            ConnectorConfig(connector, namespace, "0", self._threads)
        )
        self._loop = asyncio.new_event_loop()  # the last, for nobody closes what could not be made

    def open(self) -> None:
        """Connect; StoreError when the store does not answer."""
        self._expect("opened", self._connector.open())
        if self._connector.feature.rdma:
            raise StoreError(f"connector {self.name} reads only into registered memory, which this command has not")

    def close(self) -> None:
        """Disconnect."""
        self._connector.close()
        self._loop.close()
        self._threads.shutdown(wait=False)

    def has(self, records: log.Records) -> Mask:
        """Which of the blocks are there."""
        answers = self._each(records, self._connector.exists)
        return np.array([self._is_there(answer) for answer in answers], np.bool_)

    def check(self, records: log.Records, slot_bytes: int) -> Counter[str]:
        """How many of the blocks are ``good``, ``absent``, or bad, each of those by its reason."""
        found: Counter[str] = Counter()
        memory = np.zeros((BATCH, slot_bytes), np.uint8)
        for start in range(0, len(records), BATCH):
            some = records[start : start + BATCH]
            regions = dict(zip(self._names(some), (MemoryRegion(slot) for slot in memory), strict=False))
            answers = self._each(some, partial(self._get, regions))
            for number, answer in enumerate(answers):
                if answer.is_invalid():  # of another length: written by another geometry or codec
                    found["size"] += 1
                elif not self._is_there(answer):
                    found["absent"] += 1
                else:
                    found[prove(memory[number].data, some[number : number + 1]) or "good"] += 1
        return found

    async def _get(self, regions: Mapping[bytes, MemoryRegion], name: bytes) -> Status[Any]:
        return await self._connector.get(name, regions[name])

    def delete(self, records: log.Records) -> int:
        """Delete the blocks; returns how many are not there any more."""
        return sum(answer.is_ok() for answer in self._each(records, self._connector.delete))

    def _each(
        self, records: log.Records, call: Callable[[bytes], Coroutine[Any, Any, Status[Any]]]
    ) -> list[Status[Any]]:
        answers: list[Status[Any]] = []
        names = self._names(records)
        for start in range(0, len(names), BATCH):
            answers += self._loop.run_until_complete(self._batch(names[start : start + BATCH], call))
        return answers

    async def _batch(
        self, names: Sequence[bytes], call: Callable[[bytes], Coroutine[Any, Any, Status[Any]]]
    ) -> list[Status[Any]]:
        try:
            return await asyncio.wait_for(asyncio.gather(*(call(name) for name in names)), TIMEOUT_S)
        except Exception as error:
            raise StoreError(f"connector {self.name}: {type(error).__name__}: {error}") from error

    def _names(self, records: log.Records) -> list[bytes]:
        pairs = zip(records["identity"], records["key"], strict=True)
        return [b"%s/%s/%s" % (self._namespace, _hex(identity), _hex(key)) for identity, key in pairs]

    def _is_there(self, answer: Status[Any]) -> bool:
        if answer.is_not_found():
            return False
        self._expect("answered", answer)
        return True

    def _expect(self, what: str, answer: Status[Any]) -> None:
        if not answer.is_ok():
            raise StoreError(
                f"connector {self.name} has not {what}: {answer}; is its server up, and its options right?"
            )


def _hex(words: npt.NDArray[np.uint64]) -> bytes:
    return words.tobytes().hex().encode()


@contextmanager
def elsewhere(connector: str, namespace: str) -> Iterator[Elsewhere]:
    """An open connector for as long as the context is open.  Raises ConfigError, MissingDependencyError, StoreError."""
    store = Elsewhere(connector, namespace)
    try:
        store.open()
        yield store
    finally:
        store.close()


def prove(image: memoryview, record: log.Records) -> str:
    """Empty where *image* is whole and the block of *record* (one), in any layout; else the reason in one word."""
    try:
        header = unpack_header(image)
    except HeaderError as error:
        return error.reason.value
    told = [record[name][0].tobytes() for name in ("identity", "key", "parent", "extras")]
    if told != [header.identity_digest, header.key, header.parent_key, header.extras]:
        return "record"
    start = round_up(HEADER_FIXED + 4 * len(header.tokens), PAGE)
    if start + header.payload_bytes > len(image):
        return "size"
    return "" if checksum(image[start : start + header.payload_bytes]) == header.payload_checksum else "payload"


def every_block(seen: Survey) -> list[tuple[SegmentView, Mask]]:
    """All blocks that the directory names."""
    return [(one, np.ones(len(one.records), np.bool_)) for one in seen.whole]


def remote_rows(
    store: Elsewhere, segments: Sequence[tuple[SegmentView, Mask]], verb: str, progress: Progress
) -> list[Row]:
    """Ask *store* about the chosen blocks of *segments*; a row for each identity.

    Rows: ``kind`` (``remote``), ``connector``, ``identity``, ``blocks`` (that the directory names), ``there``; with the
    *verb* ``verify`` also ``good``, ``bad`` and ``reasons``, with ``purge`` also ``deleted``.
    """
    sums: dict[str, Counter[str]] = {}
    for number, (one, mask) in enumerate(segments):
        progress(number, len(segments), f"asking {store.name}")
        records = one.records[mask]
        names, numbers = identities_in(records)
        for at, name in enumerate(names):
            sums.setdefault(name, Counter()).update(_ask(store, records[numbers == at], one.slot_bytes, verb))
    return [_row(store.name, name, found, verb) for name, found in sums.items()]


def _ask(store: Elsewhere, records: log.Records, slot_bytes: int, verb: str) -> Counter[str]:
    if verb == "verify":
        return Counter(blocks=len(records)) + store.check(records, slot_bytes)
    there = records[store.has(records)]
    found = Counter(blocks=len(records), there=len(there))
    if verb == "purge":
        found["deleted"] = store.delete(there)
    return found


def _row(connector: str, identity: str, found: Counter[str], verb: str) -> Row:
    row: Row = {"kind": "remote", "connector": connector, "identity": identity, "blocks": found["blocks"]}
    if verb != "verify":
        return {**row, "there": found["there"], **({"deleted": found["deleted"]} if verb == "purge" else {})}
    bad = {reason: n for reason, n in found.items() if reason not in ("blocks", "good", "absent")}
    there = found["good"] + sum(bad.values())
    told = ", ".join(f"{reason} {count}" for reason, count in sorted(bad.items()))
    return {**row, "there": there, "good": found["good"], "bad": sum(bad.values()), "reasons": told}
