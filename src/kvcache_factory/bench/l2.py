"""``bench l2``: put and get of slot images through a connector, as a ratio to raw clients of the same store.

Ours is everything between memory and the wire, twice: the bytes moved as raw clients move them, and verified as the
manager does it, with headers sealed before and every image proven when it is back.  All sides move the same number of
bytes in batches of the same size, take turns, and what counts is the median over rounds of same-round ratios of wall
time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np

from ..block.identity import Identity
from ..block.key import KeyChain
from ..block.plan import ChainView
from ..block.spec import BlockSpec, KVDtype
from ..connector.base import Connector, ConnectorConfig, OptionsConnector, options_from_text
from ..connector.names import connector_class, create_connector
from ..engine.finding import view_of
from ..engine.images import Image, prove, seal
from ..engine.table import Rows
from ..engine.values import StoredChain
from ..errors import ConfigError, StoreError
from ..memory.slab import Slab
from ..store.base import Operation
from ..store.remote import RemoteSettings, RemoteStore
from . import measure
from .raw_clients import RawClient, raw_clients

BATCH = 32
_LAYERS = {128 << 10: 1, 2 << 20: 16}
"""Layers of 64 tokens with 8 heads of 64 elements of bfloat16 that make a block of this size."""
_DEADLINE_S = 60.0
_TOTAL_BYTES = 256 << 20
_ROUNDS = 7
_LEAST_ROUNDS = 3
_SIZE_S = 60.0
"""Beyond this no round of a size begins, once there are the least: databases write each byte several times."""
MOVED, VERIFIED = "moved", "verified"
_IN_A_DIRECTORY = ("ROCKSDB", "SHFS")


class Bed:
    """A connector that is open, a slab with images to put, and one to get them into."""

    def __init__(self, connector: str, options: dict[str, Any], block_bytes: int, blocks: int) -> None:
        self.spec = BlockSpec(KVDtype.BF16, _LAYERS[block_bytes], num_kv_heads=8, head_dim=64)
        self.images, self.target = (Slab(blocks, self.spec.slot_bytes) for _ in range(2))
        self.images.view[:] = np.random.default_rng(0).integers(0, 256, self.images.view.shape, np.uint8)
        self.target.view[:] = 0
        identity = Identity("bench", self.spec.dtype.value, self.spec.block_tokens)
        chain = KeyChain(identity)
        chain.extend(np.arange(blocks * self.spec.block_tokens, dtype=np.uint32))
        self.view: ChainView = view_of(chain, blocks)
        self.names = [b"bench/%d/%s" % (block_bytes, chain.key_bytes(i).hex().encode()) for i in range(blocks)]
        self._stored = _stored_chain(self.view)

        def make(executor: Executor) -> Connector[bytes, Any]:
            return create_connector(ConnectorConfig(connector, "bench", "0", executor), options)

        self.store = RemoteStore(make, RemoteSettings(name=connector, op_batch=BATCH))
        self.store.open(self.spec, [self.images, self.target], blocks)

    def batches(self) -> Iterable[slice]:
        """The blocks, a batch at a time."""
        return (slice(start, start + BATCH) for start in range(0, len(self.names), BATCH))

    def put(self, verified: bool = True) -> float:
        """Bytes per second of storing every block once; *verified*: and of sealing it."""
        rows, begun = self._stored.rows, time.perf_counter()
        for part in self.batches():
            blocks = rows[part]

            def prepare(piece: slice, blocks: Rows = blocks) -> None:
                seal(self.spec, self.images.view, blocks[piece], self._stored, blocks[piece].astype(np.int64))

            sealing = prepare if verified else None
            _whole(self.store.put(self.names[part], self.images, blocks, _DEADLINE_S, prepare=sealing))
        return self.images.view.nbytes / (time.perf_counter() - begun)

    def get(self, verified: bool = True) -> float:
        """Bytes per second of reading every block once; *verified*: and of proving it."""
        self.target.view[:, : self.spec.header_bytes] = 0  # what another side has read proves nothing
        rows, begun = self._stored.rows, time.perf_counter()
        for part in self.batches():
            blocks, wrong = rows[part], dict[int, str]()

            def check(piece: slice, blocks: Rows = blocks, wrong: dict[int, str] = wrong) -> None:
                for number in blocks[piece].tolist():
                    proven = prove(self.spec, self.target.view[number], self.view, number)
                    if not isinstance(proven, Image):
                        wrong[number] = proven

            proof = check if verified else None
            _whole(self.store.get(self.names[part], self.target, blocks, _DEADLINE_S, check=proof))
            if wrong:
                number, word = next(iter(wrong.items()))
                raise StoreError(f"block {number} came back wrong: {word}")
        return self.images.view.nbytes / (time.perf_counter() - begun)

    def raw(self, client: RawClient, op: str) -> float:
        """Bytes per second of the yardstick over the same memory."""
        slab = self.images if op == "put" else self.target
        views = [memoryview(slab.view[row]) for row in range(slab.slots)]
        move, begun = getattr(client, op), time.perf_counter()
        for part in self.batches():
            move([b"raw/" + name for name in self.names[part]], views[part])
        return slab.view.nbytes / (time.perf_counter() - begun)

    def close(self) -> None:
        """Delete what was stored, disconnect, and give the memory back."""
        self.store.delete(self.names, _DEADLINE_S)
        self.store.close()
        self.images.close()
        self.target.close()


def run_l2(
    connector: str,
    option: Sequence[str] = (),
    progress: measure.Progress = measure.quiet,
    quick: bool = False,
) -> list[dict[str, Any]]:
    """Rows of the table; *option*: ``name=value`` for the connector.  Raises ConfigError and StoreError."""
    options = _options(connector, option)
    rounds, total = (1, 32 << 20) if quick else (_ROUNDS, _TOTAL_BYTES)
    turns = 2 * (rounds + 1) * len(_LAYERS)
    rows: list[dict[str, Any]] = []
    for number, size in enumerate(_LAYERS):

        def began(turn: int, first: int = 2 * number * (rounds + 1), text: str = f"{size >> 10} KiB") -> None:
            progress(first + turn, turns, text)

        with tempfile.TemporaryDirectory(prefix="kvcache-factory-") as directory:
            place = {"root": directory} if connector.upper() in _IN_A_DIRECTORY else {}
            rows += _rows(connector, {**place, **options}, size, max(total // size, BATCH // 2), rounds, began)
    progress(turns, turns)
    return rows


def _rows(
    connector: str, options: dict[str, Any], size: int, blocks: int, rounds: int, began: Callable[[int], None]
) -> list[dict[str, Any]]:
    bed = Bed(connector, options, size, blocks)
    clients: dict[str, RawClient] = {}
    try:
        clients = raw_clients(connector, options)
        found = _measured(bed, clients, rounds, began)
        beside: list[str | None] = [*clients] or [None]
        return [_row(connector, op, bed, sides, client) for op, sides in found.items() for client in beside]
    finally:
        for client in clients.values():
            client.close()
        bed.close()


def _measured(
    bed: Bed, clients: dict[str, RawClient], rounds: int, began: Callable[[int], None]
) -> dict[str, list[dict[str, float]]]:
    """Bytes per second of each side in each round that counts, for each way; ours under MOVED and VERIFIED."""
    found: dict[str, list[dict[str, float]]] = {"put": [], "get": []}
    bed.put()  # sealed, so that what is put unsealed is whole too
    for number, (op, rates) in enumerate(found.items()):  # all puts first: a database works on them for a while
        ours, end = getattr(bed, op), time.perf_counter() + _SIZE_S / len(found)
        sides: dict[str, Callable[[], float]] = {VERIFIED: ours, MOVED: partial(ours, verified=False)}
        sides |= {name: partial(bed.raw, client, op) for name, client in clients.items()}
        for turn in range(rounds + 1):  # the first does not count: files and memory are new
            if turn > _LEAST_ROUNDS and time.perf_counter() > end:
                break
            began(number * (rounds + 1) + turn)
            order = list(sides) if turn % 2 else list(sides)[::-1]
            measured = {side: sides[side]() for side in order}
            if turn:
                rates.append(measured)
    return found


def _row(connector: str, op: str, bed: Bed, found: list[dict[str, float]], client: str | None) -> dict[str, Any]:
    def rate(side: str | None) -> float | None:
        return round(statistics.median(rates[side] for rates in found) / 1e9, 2) if side else None

    def ratio(side: str) -> float | None:
        return round(statistics.median(rates[side] / rates[client] for rates in found), 2) if client else None

    return {
        "op": op,
        "connector": connector.upper() if ":" not in connector else connector,
        "block_bytes": bed.spec.payload_bytes,
        "batch": BATCH,
        "rounds": len(found),
        "beside": client,
        "ratio": ratio(MOVED),
        "verified_ratio": ratio(VERIFIED),
        "gb_s": rate(MOVED),
        "verified_gb_s": rate(VERIFIED),
        "raw_gb_s": rate(client),
    }


def _options(connector: str, given: Sequence[str]) -> dict[str, Any]:
    pairs = [text.partition("=") for text in given]
    if not all(name and equals for name, equals, _ in pairs):
        raise ConfigError("give each option of the connector as name=value")
    texts = {name: value for name, _, value in pairs}
    cls = connector_class(connector)
    return options_from_text(cls.Options, texts) if issubclass(cls, OptionsConnector) else texts


def _stored_chain(view: ChainView) -> StoredChain:
    count = view.num_blocks
    return StoredChain(
        root=-2,
        root_key=view.root_key,
        identity_digest=view.identity_digest,
        rows=np.arange(count, dtype=np.int32),
        keys=view.keys,
        token_blocks=view.token_blocks,
        extras=view.extras,
        fidelity=np.zeros(count, np.uint8),
        layout=np.zeros(count, np.uint8),
        codings=np.zeros(count, np.uint8),
        memo={},
    )


def _whole(operation: Operation) -> None:
    if not operation.done or operation.count < operation.blocks:
        reason = operation.reason if operation.done else "timeout"
        raise StoreError(f"a batch ended after {operation.count} of {operation.blocks} blocks ({reason})", reason)
