"""Calibration tables: what a model's keys and values have in common, measured once, in a file named by its content.

A file is ``KVCFCALB``, u32 bytes of a JSON header, the header, and the arrays that it lists, float32 or float16 or
uint16, little endian, one after the other.  Its digest is ``D("calibration", bytes)`` of ``docs/format.md``; images
name the table that they need by that digest, and a table never changes.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..block.digest import digest128
from ..block.spec import BlockSpec
from ..errors import ConfigError, FormatError
from .rans import SYMBOLS, TOTAL
from .values import Floats

MAGIC = b"KVCFCALB"
SUFFIX = ".kvcal"
PATTERN = f"kvcache-factory.*{SUFFIX}"
"""Of the names of tables."""
_MOST_BYTES = 4 << 30
_WIDTH = 1152
"""Elements of a token in one group of layers at most, where a single layer has no more."""
ESCAPE = SYMBOLS - 1


class Part(msgspec.Struct, frozen=True):
    """Keys or values of one group of layers.

    Attributes:
        layers: which.
        mean: ``float32 [width]``, width = layers × heads × head_dim.
        basis: ``float32 [width, width]``, a principal component in each column, the one that varies most first.
        deviation: ``float32 [width]`` of the components.
    """

    layers: slice
    mean: Floats
    basis: Floats
    deviation: Floats


class Calibration(msgspec.Struct, frozen=True):
    """A loaded table.

    Attributes:
        digest: 16 bytes of the file's content.
        geometry: layers, heads and head_dim that it was made for.
        model: name of the model, for people.
        fingerprint: of configuration and weights, as identities have it; empty where it is not known.
        turns: radians a position by which each pair of channels of a key is rotated, ``float64 [head_dim / 2]``.
        units: typical size of an element of keys (rotation undone) and of values.
        keys, values: the groups.
        sizes: deviations in steps that the tables of frequencies are for, ``float32 [tables]``, rising.
        frequencies: of symbols, ``uint16 [tables, 256]``; the last symbol says that the number is elsewhere.
    """

    digest: bytes
    geometry: tuple[int, int, int]
    model: str
    fingerprint: str
    turns: npt.NDArray[np.float64]
    units: tuple[float, float]
    keys: list[Part]
    values: list[Part]
    sizes: Floats
    frequencies: npt.NDArray[np.uint16]

    def check(self, spec: BlockSpec, where: str) -> None:
        """Raises ConfigError where the table was made for another model than that of *spec*."""
        wanted = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        if self.geometry != wanted:
            raise ConfigError(
                f"the calibration {where} was made for layers, heads and head_dim {self.geometry}, the model has "
                f"{wanted}; make one for it with: kvcache-factory calibrate"
            )

    def check_model(self, fingerprint: str, where: str) -> None:
        """Raises ConfigError where the table was made for a model of another *fingerprint*."""
        if self.fingerprint and self.fingerprint != fingerprint:
            raise ConfigError(
                f"the calibration {where} was made for another model, {self.model} ({self.fingerprint}), than this one "
                f"({fingerprint}); make one for it with: kvcache-factory calibrate (--model-id, if it is "
                "registered by a name)"
            )


def tables_directory() -> Path:
    """Where tables rest by default: ``$XDG_CACHE_HOME/kvcache-factory/calibrations``, else under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvcache-factory" / "calibrations"


def rotation(turns: npt.NDArray[np.float64], position: int, tokens: int) -> tuple[Floats, Floats]:
    """Cosines and sines ``float32 [tokens, pairs]`` of the rotation of keys at *position* and after."""
    angle = np.arange(position, position + tokens)[:, None] * turns
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotate(keys: Floats, cosines: Floats, sines: Floats) -> Floats:
    """Rotate keys ``[..., tokens, head_dim]``, halves of a head in pairs; with ``-sines``, undo that."""
    half = keys.shape[-1] // 2
    a, b = keys[..., :half], keys[..., half:]
    return np.concatenate((a * cosines - b * sines, b * cosines + a * sines), axis=-1)


def group_layers(num_layers: int, width: int) -> list[slice]:
    """Layers that share a basis: as many as keep it at most 1,152 wide, or one."""
    each = max(1, min(num_layers, _WIDTH // width))
    count = -(-num_layers // each)
    cuts = np.linspace(0, num_layers, count + 1).round().astype(int).tolist()
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]


def fit(
    windows: Sequence[Floats], turns: npt.NDArray[np.float64], model: str, path: Path, fingerprint: str = ""
) -> Path:
    """Measure *windows*, each ``float32 [layers, 2, heads, tokens, head_dim]`` from position 0 on, and write the table.

    The first four tokens of a window, which nothing else looks like, are left out.  *path* is the directory; returns
    the file.  With a *fingerprint*, no other model may use it.
    """
    cleaned = []
    for window in windows:
        cosines, sines = rotation(turns, 0, window.shape[3])
        undone = window.copy()
        undone[:, 0] = rotate(window[:, 0], cosines, -sines)
        cleaned.append(undone[:, :, :, 4:])
    tokens = np.concatenate(cleaned, axis=3)
    layers, _, heads, _, dim = tokens.shape
    arrays: dict[str, Any] = {"turns": turns.astype("<f8")}
    units, scores = [], []
    for c, name in enumerate(("keys", "values")):
        units.append(float(tokens[:, c].std()))
        for i, group in enumerate(group_layers(layers, heads * dim)):
            rows = as_rows(tokens[group, c])
            mean, basis, deviation = _principal(rows)
            scores.append(((rows[::7] - mean) @ basis / np.maximum(deviation, 1e-6))[:, : len(deviation) // 2])
            arrays[f"{name}{i}.mean"] = mean.astype("<f4")
            arrays[f"{name}{i}.basis"] = basis.astype("<f2")
            arrays[f"{name}{i}.deviation"] = deviation.astype("<f4")
    sizes = np.exp2(np.arange(-3.0, 4.01, 0.25)).astype(np.float32)
    arrays["sizes"] = sizes
    arrays["frequencies"] = _frequencies(np.concatenate([s.reshape(-1) for s in scores]), sizes)
    head = {"version": 1, "model": model, "geometry": [layers, heads, dim], "units": units}
    if fingerprint:
        head["fingerprint"] = fingerprint
    return _write(head, arrays, path)


def as_rows(part: Floats) -> Floats:
    """Keys or values of a group ``[layers, heads, tokens, head_dim]`` as ``[tokens, layers × heads × head_dim]``."""
    return np.ascontiguousarray(part.transpose(2, 0, 1, 3)).reshape(part.shape[2], -1)


def from_rows(rows: Floats, heads: int, dim: int) -> Floats:
    """The inverse of :func:`as_rows`, as a view."""
    return rows.reshape(len(rows), -1, heads, dim).transpose(1, 2, 0, 3)


def _principal(rows: Floats) -> tuple[Floats, Floats, Floats]:
    mean = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
    centred = rows - mean
    covariance = (centred.T @ centred).astype(np.float64) / max(len(rows) - 1, 1)
    variance, vectors = np.linalg.eigh(covariance)
    order = np.argsort(-variance)
    return mean, vectors[:, order].astype(np.float32), np.sqrt(np.maximum(variance[order], 0)).astype(np.float32)


def _frequencies(scores: Floats, sizes: Floats) -> npt.NDArray[np.uint16]:
    """Shares of 4096 of the whole numbers from -127 to 127, as symbols 0 to 254, and of what is beyond what can occur.

    *scores* are components in units of their deviation: how they are really distributed, with the tails they have.
    """
    ordered = np.sort(scores)
    tables = np.zeros((len(sizes), SYMBOLS), np.uint16)
    for table, size in zip(tables, sizes.tolist(), strict=True):
        reach = int(min(127, np.ceil(6 * size) + 1))
        edges = (np.arange(-reach, reach + 2) - 0.5) / size
        share = np.diff(np.searchsorted(ordered, edges)) / len(ordered)
        table[127 - reach : 128 + reach] = 1
        table[ESCAPE] = 1
        left = TOTAL - int(table.sum())
        table[127 - reach : 128 + reach] += (share * left).astype(np.uint16)
        table[127] += TOTAL - int(table.sum())
    return tables


def _write(head: dict[str, Any], arrays: dict[str, Any], path: Path) -> Path:
    head["arrays"] = [[name, a.dtype.str, list(a.shape)] for name, a in arrays.items()]
    text = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
    content = b"".join((MAGIC, struct.pack("<I", len(text)), text, *(np.ascontiguousarray(a) for a in arrays.values())))
    path.mkdir(parents=True, exist_ok=True)
    file = path / file_name(digest128(b"calibration", content))
    store(content, file)
    return file


def file_name(digest: bytes) -> str:
    """The name of the table with this digest, among the files of a disk tier too."""
    return f"kvcache-factory.{digest.hex()}{SUFFIX}"


def store(content: bytes, file: Path) -> None:
    """Write a table that only its owner can read, so that nobody ever sees half of it."""
    if not file.exists():
        unfinished = file.with_name(f"{file.name}.{os.getpid()}")
        fd = os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        with open(fd, "wb") as out:
            out.write(content)
        unfinished.replace(file)


def load(file: Path) -> Calibration:
    """Read a table; FormatError where the file is damaged or none, ConfigError where it cannot be read."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise FormatError(f"the calibration {file} has {file.stat().st_size:,} bytes, which none has")
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the calibration {file} cannot be read ({error.strerror}); make it with: kvcache-factory calibrate"
        ) from error
    digest = digest128(b"calibration", content)
    if file.name != file_name(digest):
        raise FormatError(f"the calibration {file} is damaged: its content is not the one that its name says")
    try:
        head, arrays = _parse(content)
        return _assemble(digest, head, arrays)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise FormatError(f"the calibration {file} is none that this version reads: {error}") from error


def _parse(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    if content[:8] != MAGIC:
        raise ValueError("another magic")
    (size,) = struct.unpack_from("<I", content, 8)
    head = json.loads(content[12 : 12 + size])
    if head["version"] != 1:
        raise ValueError(f"version {head['version']}")
    arrays, at = {}, 12 + size
    for name, kind, shape in head["arrays"]:
        if kind not in ("<f8", "<f4", "<f2", "<u2"):
            raise ValueError(f"array of type {kind}")
        count = int(np.prod(shape))
        if count < 0 or at + count * int(kind[2]) > len(content):
            raise ValueError("truncated")
        arrays[name] = np.frombuffer(content, kind, count, at).reshape(shape)
        at += arrays[name].nbytes
    return head, arrays


def _assemble(digest: bytes, head: dict[str, Any], arrays: dict[str, Any]) -> Calibration:
    layers, heads, dim = head["geometry"]
    groups = group_layers(layers, heads * dim)

    def parts(name: str) -> list[Part]:
        made = []
        for i, group in enumerate(groups):
            width = (group.stop - group.start) * heads * dim
            fields = [arrays[f"{name}{i}.{field}"].astype(np.float32) for field in ("mean", "basis", "deviation")]
            if [f.shape for f in fields] != [(width,), (width, width), (width,)]:
                raise ValueError(f"{name} of group {i} have another shape")
            made.append(Part(group, *fields))
        return made

    frequencies = arrays["frequencies"]
    if frequencies.shape != (len(arrays["sizes"]), SYMBOLS) or (frequencies.sum(axis=1) != TOTAL).any():
        raise ValueError("frequencies that do not add up")
    if arrays["turns"].shape != (dim // 2,):
        raise ValueError("turns of another head_dim")
    unit_k, unit_v = head["units"]
    return Calibration(
        digest=digest,
        geometry=(layers, heads, dim),
        model=str(head["model"]),
        fingerprint=str(head.get("fingerprint", "")),
        turns=arrays["turns"],
        units=(float(unit_k), float(unit_v)),
        keys=parts("keys"),
        values=parts("values"),
        sizes=arrays["sizes"],
        frequencies=frequencies,
    )


def find(digest: bytes, places: Iterable[Path]) -> Path | None:
    """The file of the table with this digest, in the first directory that has it."""
    for place in places:
        file = place / file_name(digest)
        if file.is_file():
            return file
    return None
