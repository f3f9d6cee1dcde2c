"""Range coding of small integers by asymmetric numeral systems (rANS, arXiv 1311.2540), one lane for each token.

All lanes code the same component in the same step, with the same table, so that numpy can do a step for all of them at
once; the words of all lanes share one stream.  States are 32 bits, words 16, frequencies add up to 4096.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..jit import late_kernel as kernel

BITS = 12
TOTAL = 1 << BITS
SYMBOLS = 256
_LOW = 1 << 16

Words = npt.NDArray[np.uint16]
States = npt.NDArray[np.uint32]


def cumulate(frequencies: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Where each symbol's share begins: ``uint16 [tables, SYMBOLS + 1]`` for frequencies ``[tables, SYMBOLS]``."""
    starts = np.zeros((len(frequencies), SYMBOLS + 1), np.uint16)
    starts[:, 1:] = np.cumsum(frequencies, axis=1)
    return starts


def invert(starts: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """The symbol of each of the 4096 numbers: ``uint8 [tables, TOTAL]``."""
    counts = np.diff(starts.astype(np.int64), axis=1)
    return np.stack([np.repeat(np.arange(SYMBOLS, dtype=np.uint8), row) for row in counts])


def encode(symbols: npt.NDArray[np.uint8], tables: npt.NDArray[np.int64], starts: Any) -> tuple[States, Words]:
    """Code *symbols* ``[components, lanes]``, component i by table ``tables[i]``, each with a frequency above zero.

    Returns the final states ``[lanes]`` and the words in the order in which they are read.
    """
    states = np.full(symbols.shape[1], _LOW, np.uint32)
    words = np.empty(symbols.size + 1, np.uint16)
    used = _encode(symbols, tables, starts, states, words)
    return states, words[: int(used)][::-1].copy()


def decode(states: Any, words: Any, tables: Any, starts: Any, symbol_of: Any, lanes: int) -> Any:
    """The symbols ``uint8 [components, lanes]`` again; None where the stream is none that :func:`encode` has made."""
    out = np.empty((len(tables), lanes), np.uint8)
    states = states.astype(np.uint32)
    used = _decode(states, words, tables, starts, symbol_of, out)
    return out if used == len(words) and bool((states == _LOW).all()) else None


def _encode_numpy(symbols: Any, tables: Any, starts: Any, states: Any, words: Any) -> int:
    used, x = 0, states.astype(np.uint64)
    for i in range(len(symbols) - 1, -1, -1):
        row = starts[tables[i]].astype(np.uint64)
        begin = row[symbols[i]]
        share = row[symbols[i].astype(np.int64) + 1] - begin
        full = x >= share << np.uint64(32 - BITS)
        out = x[full][::-1]
        words[used : used + len(out)] = (out & np.uint64(0xFFFF)).astype(np.uint16)
        used += len(out)
        x[full] >>= np.uint64(16)
        x = ((x // share) << np.uint64(BITS)) + x % share + begin
    states[:] = x
    return used


@kernel("i8(u1[:,::1], i8[::1], u2[:,::1], u4[::1], u2[::1])", fallback=_encode_numpy)
def _encode(symbols: Any, tables: Any, starts: Any, states: Any, words: Any) -> int:
    components, lanes = symbols.shape
    used = 0
    for i in range(components - 1, -1, -1):
        row = starts[tables[i]]
        for lane in range(lanes - 1, -1, -1):
            symbol = np.int64(symbols[i, lane])
            begin = np.uint32(row[symbol])
            share = np.uint32(np.uint32(row[symbol + 1]) - begin)
            x = states[lane]
            if np.uint64(x) >= np.uint64(share) << np.uint64(20):
                words[used] = np.uint16(x & np.uint32(0xFFFF))
                used += 1
                x = np.uint32(x >> np.uint32(16))
            high = np.uint32(x // share)
            states[lane] = np.uint32(np.uint32(high << np.uint32(12)) + np.uint32(np.uint32(x - high * share) + begin))
    return used


def _decode_numpy(states: Any, words: Any, tables: Any, starts: Any, symbol_of: Any, out: Any) -> int:
    used, x = 0, states.astype(np.uint64)
    for i in range(len(out)):
        row = starts[tables[i]].astype(np.uint64)
        number = x & np.uint64(TOTAL - 1)
        symbol = symbol_of[tables[i]][number.astype(np.int64)]
        out[i] = symbol
        begin = row[symbol]
        x = (row[symbol.astype(np.int64) + 1] - begin) * (x >> np.uint64(BITS)) + number - begin
        hungry = x < _LOW
        count = int(hungry.sum())
        if used + count > len(words):
            return -1
        x[hungry] = (x[hungry] << np.uint64(16)) | words[used : used + count]
        used += count
    states[:] = x
    return used


@kernel("i8(u4[::1], u2[::1], i8[::1], u2[:,::1], u1[:,::1], u1[:,::1])", fallback=_decode_numpy)
def _decode(states: Any, words: Any, tables: Any, starts: Any, symbol_of: Any, out: Any) -> int:
    components, lanes = out.shape
    used, most = 0, len(words)
    for i in range(components):
        row, symbols = starts[tables[i]], symbol_of[tables[i]]
        for lane in range(lanes):
            x = states[lane]
            number = np.uint32(x & np.uint32(4095))
            symbol = symbols[np.int64(number)]
            begin = np.uint32(row[np.int64(symbol)])
            share = np.uint32(np.uint32(row[np.int64(symbol) + 1]) - begin)
            x = np.uint32(share * np.uint32(x >> np.uint32(12)) + np.uint32(number - begin))
            if x < np.uint32(65536):
                if used >= most:
                    return -1
                x = np.uint32(np.uint32(x << np.uint32(16)) | np.uint32(words[used]))
                used += 1
            out[i, lane] = symbol
            states[lane] = x
    return used
