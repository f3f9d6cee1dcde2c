"""Keys: from the tokens of one sequence to one 128-bit name per full block.

``key[i]`` hashes the key before it, the tokens of block *i*, and the digest of whatever media touch the block; the key
before the first is the digest of the identity.  So a key names a whole prefix, equal prefixes have equal keys in every
process (there is no seed), and a growing conversation hashes only what it adds.  ``docs/format.md`` has the derivation
and test vectors.  A key never decides alone: whoever looks one up compares tokens and extras as well.
"""

from __future__ import annotations

import reprlib
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import ConfigError, TokenError
from .digest import digest128
from .identity import Identity

KEY_BUILDERS = ("ROLLING_HASH", "SIMPLE_HASH", "RAW")
KEY_BYTES = 16
MAX_TOKEN = 2**32 - 1

Tokens = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]
T = TypeVar("T", np.uint32, np.uint64)

hash128 = xxhash.xxh3_128_digest
"""The hash behind every key, bytes -> 16 bytes.  Replace it here (and only here) to plant collisions in tests."""

# A code of four bytes on every platform CPython builds for; the name of the type is what varies.
_U32 = "I" if array("I").itemsize == 4 else "L"

# Blocks hashed before their keys go to the buffer: the bytes objects of one run are memory that the next one reuses.
_RUN = 512


class MediaSpan(msgspec.Struct, frozen=True):
    """Tokens ``start .. start + length`` stand for a picture, sound or other input with this content *identifier*.

    The identifier must be a full digest of the content as the model sees it: two inputs with one identifier share KV.
    """

    start: int
    length: int
    identifier: bytes

    def __post_init__(self) -> None:
        if self.start < 0 or self.length <= 0:
            raise ConfigError(f"a media span needs start >= 0 and length > 0, not {self.start} and {self.length}")
        if not isinstance(self.identifier, bytes) or not self.identifier:
            raise ConfigError("a media span needs the digest of its content as non-empty bytes")


def normalise_tokens(tokens: Any) -> Tokens:
    """Token ids of one sequence as ``uint32 [n]``, whatever integers they came as.

    Takes lists, tuples, ranges and other sequences of integers, numpy arrays of any integer type, and torch tensors on
    any device.  The result may share memory with the argument.  Raises :class:`TokenError` for negative ids, ids above
    32 bits, floats, booleans, text, and anything that is not one-dimensional.
    """
    if isinstance(tokens, np.ndarray):
        return _from_array(tokens)
    if hasattr(tokens, "detach") and hasattr(tokens, "cpu"):
        return _from_tensor(tokens)
    if isinstance(tokens, Sequence) and not isinstance(tokens, (str, bytes, bytearray, memoryview)):
        return _from_sequence(tokens)
    if hasattr(tokens, "__array__") or isinstance(tokens, memoryview):
        return _from_array(np.asarray(tokens))
    raise TokenError(f"tokens must be a sequence, an array or a tensor of integers, not {type(tokens).__name__}")


def _from_sequence(tokens: Sequence[Any]) -> Tokens:
    try:
        ids = np.frombuffer(array(_U32, tokens), dtype=np.uint32)
    except (TypeError, OverflowError, ValueError) as error:
        raise _first_bad(tokens, error) from None
    # Python counts booleans as integers; only ids 0 and 1 can be one, so only those are looked at.
    for at in np.flatnonzero(ids <= 1).tolist():
        if type(tokens[at]) is not int and "bool" in str(getattr(tokens[at], "dtype", type(tokens[at]))):
            raise TokenError(f"token {at} is {tokens[at]!r}, a boolean; pass token ids")
    return ids


def _first_bad(tokens: Sequence[Any], error: Exception) -> TokenError:
    """The error for a sequence that did not convert, naming its first bad element."""
    for at, token in enumerate(tokens):
        try:
            array(_U32, (token,))
        except OverflowError:
            return TokenError(f"token {at} is {reprlib.repr(token)}; ids must be between 0 and {MAX_TOKEN}")
        except (TypeError, ValueError):
            hint = "; pass one sequence at a time" if hasattr(token, "__len__") else ""
            return TokenError(f"token {at} is {reprlib.repr(token)} ({type(token).__name__}), not an integer{hint}")
    return TokenError(f"tokens cannot be read as integers: {error}")


def _from_tensor(tokens: Any) -> Tokens:
    kind = str(tokens.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise TokenError(f"tokens are a tensor of {kind}; token ids must be integers")
    try:
        ids = np.asarray(tokens.detach().cpu().numpy())
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise TokenError(f"tokens are a tensor that cannot be read: {error}") from None
    return _from_array(ids)


def _from_array(tokens: npt.NDArray[Any]) -> Tokens:
    if tokens.dtype.kind not in "iu":
        raise TokenError(f"tokens are an array of {tokens.dtype}; token ids must be integers")
    if tokens.ndim != 1:
        raise TokenError(f"tokens have shape {list(tokens.shape)}; pass one sequence at a time, shape [n]")
    signed, wide = tokens.dtype.kind == "i", tokens.dtype.itemsize > 4
    if tokens.size and ((signed and tokens.min() < 0) or (wide and tokens.max() > MAX_TOKEN)):
        at = int(np.flatnonzero((tokens < 0) | (tokens > MAX_TOKEN))[0])
        raise TokenError(f"token {at} is {tokens[at]}; ids must be between 0 and {MAX_TOKEN}")
    return np.ascontiguousarray(tokens, dtype=np.uint32)


class KeyChain:
    """The keys of one token sequence, computed once per block and extended as the sequence grows.

    Arrays handed out are snapshots: extending, truncating or syncing later never changes them.  Only full blocks have
    keys; the tokens of a last partial block wait.  A chain belongs to one thread at a time.

    Args:
        identity: whose KV the keys name; also gives the number of tokens of a block.
        builder: one of :data:`KEY_BUILDERS`; each gives different keys.
        media: spans of tokens that stand for media, positions counted in tokens from 0.
        max_tokens: blocks that end behind this many tokens have no keys, as if the sequence were shorter; -1: no limit.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        builder: str = "ROLLING_HASH",
        media: Sequence[MediaSpan] = (),
        max_tokens: int = -1,
    ) -> None:
        if builder not in KEY_BUILDERS:
            raise ConfigError(f"unknown key builder {builder!r}; use one of {', '.join(KEY_BUILDERS)}")
        self.identity = identity
        self.builder = builder
        self._most_blocks = max_tokens // identity.block_tokens if max_tokens >= 0 else sys.maxsize
        self.memo: dict[int, object] = {}
        self.found_fidelity = 0
        """The worst fidelity of what was found of it: what is computed behind that is no better."""
        """Free for indexes: what one remembers of its last match, by its own number.  Emptied when blocks change."""
        self.root = root_key(identity, builder)
        """16 bytes: the key before the first block."""
        self._media: tuple[MediaSpan, ...] = _ordered(media)
        self._token_buffer = np.empty(0, np.uint32)
        self._key_buffer = np.empty((0, 2), np.uint64)
        self._extra_buffer = np.zeros((0, 2), np.uint64)
        self._num_tokens = 0
        self._num_blocks = 0
        self._last = self.root
        self._stream: Any = xxhash.xxh3_128(self.root) if builder == "SIMPLE_HASH" else None

    @property
    def num_tokens(self) -> int:
        """Tokens in the chain, those of a partial last block included."""
        return self._num_tokens

    @property
    def num_blocks(self) -> int:
        """Full blocks in the chain."""
        return self._num_blocks

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """Every span that was stated, ordered by position."""
        return self._media

    @property
    def tokens(self) -> Tokens:
        """All token ids, ``uint32 [num_tokens]``, read-only."""
        return _sealed(self._token_buffer[: self._num_tokens])

    @property
    def token_blocks(self) -> Tokens:
        """Token ids of the full blocks, ``uint32 [num_blocks, block_tokens]``, read-only, no copy."""
        size = self.identity.block_tokens
        return _sealed(self._token_buffer[: self._num_blocks * size].reshape(-1, size))

    @property
    def keys(self) -> Words:
        """Keys of the full blocks, ``uint64 [num_blocks, 2]``: the 16 bytes of a digest as two little-endian words."""
        return self._key_buffer[: self._num_blocks]

    @property
    def extras(self) -> Words:
        """Digests of the media of each full block, ``uint64 [num_blocks, 2]``; zeros where none touches it."""
        return self._extra_buffer[: self._num_blocks]

    def key_bytes(self, block: int) -> bytes:
        """The 16 bytes of a block's key; -1 gives the root."""
        assert -1 <= block < self._num_blocks
        return self.root if block < 0 else _as_bytes(self._key_buffer[block])

    def name(self, block: int) -> bytes:
        """The name of a block in a store outside: its key, or for RAW the whole record of the prefix."""
        assert 0 <= block < self._num_blocks
        if self.builder != "RAW":
            return self.key_bytes(block)
        count = (block + 1) * self.identity.block_tokens
        return raw_name(self.identity.digest, self._token_buffer[:count], self._extra_buffer[: block + 1])

    def extend(self, tokens: Any, media: Sequence[MediaSpan] = ()) -> int:
        """Append *tokens* (and state the *media* among them, positions from 0); returns the number of full blocks.

        Blocks that have keys already are not hashed again, so media that touch one are a :class:`ConfigError`.
        """
        new = normalise_tokens(tokens)
        if media:
            self._state_media(media)
        self._append(new)
        return self._num_blocks

    def sync(self, tokens: Any, media: Sequence[MediaSpan] | None = None) -> int:
        """Make the chain equal to *tokens*, hashing only what follows the longest common run of full blocks.

        With *media* the spans become exactly these; without, those stated before stay.  Returns the blocks kept.
        """
        new = normalise_tokens(tokens)
        common = _common_run(self._token_buffer[: self._num_tokens], new)
        if media is not None:
            stated = _ordered(media)
            changed = set(stated).symmetric_difference(self._media)
            # A partial block has no key yet, so media that changed there cost nothing.
            common = min([common, *(span.start for span in changed)])
            self._cut(common)
            self._media = stated
        else:
            self._cut(common)
        kept = self._num_blocks
        self._append(new[common:])
        return kept

    def truncate(self, tokens: int) -> None:
        """Keep the first *tokens* tokens.  Media stay stated: positions that come back still carry them."""
        if tokens < 0:
            raise TokenError(f"cannot keep {tokens} tokens")
        self._cut(min(tokens, self._num_tokens))

    def _cut(self, tokens: int) -> None:
        if tokens == self._num_tokens:
            return
        # Whoever holds a slice keeps the old buffer; what follows is written to a new one.
        self._token_buffer = _moved(self._token_buffer, tokens, tokens)
        self._num_tokens = tokens
        blocks = min(tokens // self.identity.block_tokens, self._most_blocks)
        if blocks == self._num_blocks:
            return
        self._key_buffer = _moved(self._key_buffer, blocks, blocks)
        self._extra_buffer = _moved(self._extra_buffer, blocks, blocks)
        self._num_blocks = blocks
        self._last = self.key_bytes(blocks - 1)
        self.memo.clear()
        if self._stream is not None:
            self._restart_stream()

    def _state_media(self, media: Sequence[MediaSpan]) -> None:
        done = self._num_blocks * self.identity.block_tokens
        fresh = set(media).difference(self._media)
        for span in fresh:
            if span.start < done:
                raise ConfigError(f"media at token {span.start} touch blocks with keys (up to {done} tokens); use sync")
        self._media = _ordered([*self._media, *fresh])

    def _append(self, new: Tokens) -> None:
        size = self.identity.block_tokens
        before, total = self._num_tokens, self._num_tokens + len(new)
        self._token_buffer = _grown(self._token_buffer, before, total)
        self._token_buffer[before:total] = new
        self._num_tokens = total
        first, last = self._num_blocks, min(total // size, self._most_blocks)
        if first == last:
            return
        self._key_buffer = _grown(self._key_buffer, first, last)
        self._extra_buffer = _grown(self._extra_buffer, first, last)
        touched = self._touched(first, last)
        for i, digest in touched.items():
            self._extra_buffer[i] = np.frombuffer(digest, "<u8")
        for begin in range(first, last, _RUN):
            end = min(begin + _RUN, last)
            keys = self._hash(begin, end, touched)
            self._key_buffer[begin:end] = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2)
            self._last, self._num_blocks = keys[-1], end

    def _hash(self, first: int, last: int, touched: dict[int, bytes]) -> list[bytes]:
        size = self.identity.block_tokens
        data = _little(self._token_buffer[first * size : last * size])
        pieces: Iterator[tuple[bytes]] = struct.iter_unpack(f"{4 * size}s", data)
        if self._stream is not None:
            return self._hash_stream(pieces, first, touched)
        if touched:
            pieces = ((piece + touched.get(i, b""),) for i, (piece,) in enumerate(pieces, first))
        digest, key = hash128, self._last
        return [key := digest(key + piece) for (piece,) in pieces]  # this line is the cost of a cold prompt

    def _hash_stream(self, pieces: Iterator[tuple[bytes]], first: int, touched: dict[int, bytes]) -> list[bytes]:
        digest, stream, keys = hash128, self._stream.copy(), []
        for i, (piece,) in enumerate(pieces, first):
            stream.update(piece)
            if touched and i in touched:
                # Inside the stream the extras could be mistaken for tokens; as a new beginning they cannot.
                keys.append(digest(stream.digest() + touched[i]))
                stream = xxhash.xxh3_128(keys[-1])
            else:
                keys.append(digest(stream.digest()))
        self._stream = stream
        return keys

    def _restart_stream(self) -> None:
        size, blocks = self.identity.block_tokens, self._num_blocks
        touched = np.flatnonzero(self._extra_buffer[:blocks].any(axis=1))
        base = int(touched[-1]) if len(touched) else -1
        self._stream = xxhash.xxh3_128(self.key_bytes(base))
        self._stream.update(_little(self._token_buffer[(base + 1) * size : blocks * size]))

    def _touched(self, first: int, last: int) -> dict[int, bytes]:
        """Digest of the media of each block from *first* to *last* that media touch."""
        if not self._media:
            return {}
        size = self.identity.block_tokens
        found: dict[int, list[bytes]] = {}
        for span in self._media:
            low, high = max(span.start // size, first), min((span.start + span.length - 1) // size, last - 1)
            for i in range(low, high + 1):
                found.setdefault(i, []).append(_extra_record(span, i * size))
        return {i: extras_digest(records) for i, records in found.items()}


def root_key(identity: Identity, builder: str = "ROLLING_HASH") -> bytes:
    """The 16 bytes before the first key: the identity's digest, in a domain of its own for each other builder."""
    return identity.digest if builder == "ROLLING_HASH" else digest128(b"root", builder.encode(), identity.digest)


def raw_name(identity_digest: bytes, tokens: Tokens, extras: Words) -> bytes:
    """The name of a block by its record: *tokens* and *extras* of its whole prefix, its own included."""
    parts = [identity_digest, struct.pack("<I", len(tokens)), _little(tokens).tobytes()]
    for i in np.flatnonzero(extras.any(axis=1)).tolist():
        parts.append(struct.pack("<I", i) + _as_bytes(extras[i]))
    return b"".join(parts)


def extras_digest(records: Sequence[bytes]) -> bytes:
    """16 bytes for the media of one block.

    Cryptographic, unlike the keys: tokens are compared on every hit, media only through this digest.
    """
    return digest128(b"extras", *records)


def _extra_record(span: MediaSpan, block_start: int) -> bytes:
    return struct.pack("<qQ", block_start - span.start, span.length) + span.identifier


def _ordered(media: Iterable[MediaSpan]) -> tuple[MediaSpan, ...]:
    return tuple(sorted(set(media), key=lambda span: (span.start, span.length, span.identifier)))


def _common_run(a: Tokens, b: Tokens) -> int:
    """Number of leading elements that *a* and *b* share."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    at = int(different.argmax()) if n else 0
    return at if n and different[at] else n


def _grown(buffer: npt.NDArray[T], used: int, needed: int) -> npt.NDArray[T]:
    """*buffer*, or a larger copy of its first *used* rows when *needed* rows do not fit; new rows are zero."""
    return buffer if needed <= len(buffer) else _moved(buffer, used, needed)


def _moved(buffer: npt.NDArray[T], used: int, needed: int) -> npt.NDArray[T]:
    larger = np.zeros((needed + needed // 2, *buffer.shape[1:]), buffer.dtype)
    larger[:used] = buffer[:used]
    return larger


def _sealed(view: Tokens) -> Tokens:
    view.flags.writeable = False
    return view


def _little(tokens: Tokens) -> npt.NDArray[Any]:
    return tokens.astype("<u4", copy=False)


def _as_bytes(words: Words) -> bytes:
    return words.astype("<u8", copy=False).tobytes()
