"""Fingerprints of a model: its configuration as far as it shapes keys and values, and the content of its weights.

An engine that holds a live model and a program that sees only its directory get the same fingerprint.  Where the two
cannot be reconciled the fingerprints differ, which costs a miss and never an answer.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from ..errors import ConfigError, FormatError
from .digest import digest128
from .spec import RopeParameters

if TYPE_CHECKING:
    from collections.abc import Buffer

Progress = Callable[[int, int], None]
"""Called with bytes hashed and bytes in all."""

_CHUNK = 4 << 20
_MAX_SAFETENSORS_HEADER = 100_000_000  # the format's own limit

# Names, bookkeeping, training and generation settings: none of them reaches a key or a value.
_IGNORED = frozenset((
    "architectures", "auto_map", "attn_implementation", "dtype", "torch_dtype", "transformers_version",
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "return_dict", "output_attentions",
    "output_hidden_states", "torchscript", "problem_type", "id2label", "label2id", "task_specific_params",
    "tokenizer_class", "finetuning_task", "num_labels", "tie_word_embeddings", "tie_encoder_decoder",
    "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "dropout", "gradient_checkpointing", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor",
))  # fmt: skip
# Values that a live configuration states and an old file leaves out.
_DEFAULTS: Mapping[str, Any] = {"hidden_act": "silu", "pretraining_tp": 1, "chunk_size_feed_forward": 0}

# Two tensors that are one in memory are one on disk: which name survives is the writer's choice, and only the output
# head is tied in the models we serve.  No key or value depends on a head, so leaving a tied one out is safe.
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
# Computed from the configuration; older files store it.
_DERIVED = (".rotary_emb.inv_freq",)

_SAFETENSORS_DTYPES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f8_e4m3": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8",
    "u16": "uint16", "u32": "uint32", "u64": "uint64",
}  # fmt: skip


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def config_fingerprint(config: Mapping[str, Any]) -> str:
    """32 hex digits for what a configuration (``config.json`` or ``config.to_dict()``) says about keys and values.

    Bookkeeping is left out and defaults are filled in, so that a file and the live object agree.  A value that has no
    stable text is a :class:`ConfigError`.
    """
    text = json.dumps(_canonical(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return digest128(b"config", text.encode()).hex()


def weights_fingerprint(tensors: Iterable[tuple[str, str, Sequence[int], Buffer]]) -> str:
    """32 hex digits for a set of tensors, each ``(name, dtype, shape, its bytes)``, in any order.

    The bytes are those of the contiguous tensor; they are hashed as they come, so the iterable may produce and free one
    tensor at a time.  A tied output head counts once.  XXH3 guards against accidents; whoever serves weights or
    adapters that strangers upload should name them by a cryptographic digest of the file instead.
    """
    return _weights_digest((name, dtype, shape, xxhash.xxh3_128_digest(data)) for name, dtype, shape, data in tensors)


def model_fingerprint(config: Mapping[str, Any] | None, weights_digest: str, model_id: str | None = None) -> str:
    """32 hex digits for a model: its configuration (RoPE parameters included) and its weights.

    A *model_id* replaces the fingerprint of both by a name that the user vouches for; RoPE parameters still count,
    because engines override them at run time under an unchanged name.
    """
    if model_id is not None:
        if not model_id:
            raise ConfigError("model_id is empty; leave it out to fingerprint the weights")
        rope = json.dumps(_rope(config or {}), sort_keys=True)
        return digest128(b"model id", model_id.encode(), rope.encode()).hex()
    if config is None or not weights_digest:
        raise ConfigError("a model needs its configuration and the digest of its weights, or a model_id")
    return digest128(b"model", config_fingerprint(config).encode(), weights_digest.encode()).hex()


def fingerprint_directory(
    path: str | os.PathLike[str], progress: Progress | None = None, config: Mapping[str, Any] | None = None
) -> str:
    """The model fingerprint of a directory with ``config.json`` and safetensors files.

    An engine that overrides parts of the file passes the *config* that it runs with.

    Reads all weights once, at the speed of the disk, and remembers the digest in the user's cache directory until a
    file's path, size, time or inode changes.  Raises :class:`ConfigError` where files are missing and
    :class:`FormatError` where one is damaged.
    """
    directory = Path(path)
    if config is None:
        config = _read_config(directory / "config.json")
    return model_fingerprint(config, _directory_weights(directory, progress))


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no config.json; name a model directory, or pass model_id")
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise FormatError(f"{path} does not hold a JSON object")
    return parsed


def _canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that shape keys and values, defaults filled in, in types whose JSON is unique."""
    kept = {str(k): v for k, v in config.items() if str(k) not in _IGNORED and not str(k).startswith("_")}
    nested = kept.pop("text_config", None)
    if kept.get("use_sliding_window") is False:
        kept.pop("sliding_window", None)
    if kept.get("sliding_window") is None:
        kept.pop("max_window_layers", None)
    if set(kept.get("layer_types") or ()) == {"full_attention"}:
        del kept["layer_types"]
    clean: dict[str, Any] = {k: v for k, v in _plain(kept).items() if k not in _DEFAULTS or v != _DEFAULTS[k]}
    heads, hidden = clean.get("num_attention_heads"), clean.get("hidden_size")
    if heads:
        clean.setdefault("num_key_value_heads", heads)
    if heads and isinstance(heads, int) and isinstance(hidden, int):
        clean.setdefault("head_dim", hidden // heads)
    clean["rope"] = _rope(config)
    if isinstance(nested, Mapping):
        clean["text_config"] = _canonical(nested)
    return clean


def _rope(config: Mapping[str, Any]) -> list[Any]:
    """RoPE parameters with equal numbers written equally, wherever this configuration keeps them."""
    names = ("rope_theta", "rope_scaling", "rope_parameters")
    found = {name: _plain(config[name]) for name in names if config.get(name) is not None}
    rope = RopeParameters.from_config(found)
    parameters = dict(rope.parameters)
    if config.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", repr(_plain(config["partial_rotary_factor"])))
    return [rope.theta, sorted(parameters.items())]


def _plain(value: Any) -> Any:
    """*value* in JSON's own types: entries that say nothing dropped, 8.0 as 8, enumerations by value."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if isinstance(value, Mapping):
        pairs = ((str(k), _plain(v)) for k, v in value.items())
        return {k: v for k, v in pairs if v is not None and v is not False and v != {} and v != []}
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(v) for v in value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if str(value).startswith("torch."):  # a dtype, seen from where torch is not imported
        return str(value)
    raise ConfigError(f"the configuration holds a {type(value).__name__}, which has no stable text; pass plain values")


def _weights_digest(entries: Iterable[tuple[str, str, Sequence[int], bytes]]) -> str:
    tensors: dict[str, tuple[str, str, bytes]] = {}
    for name, dtype, shape, content in entries:
        if name in tensors:
            raise ConfigError(f"two tensors are named {name!r}; pass each tensor of one model once")
        if not name.endswith(_DERIVED):
            spelled = dtype.removeprefix("torch.").lower()
            sizes = ",".join(str(int(size)) for size in shape)
            tensors[name] = (_SAFETENSORS_DTYPES.get(spelled, spelled), sizes, content)
    if not tensors:
        raise ConfigError("no tensors to fingerprint; pass the weights of the model, or a model_id")
    bodies = {record for name, record in tensors.items() if name not in _HEADS}
    parts = []
    for name, record in sorted(tensors.items()):
        if name not in _HEADS or record not in bodies:
            dtype, sizes, content = record
            parts += [name.encode("utf-8", "surrogatepass"), dtype.encode(), sizes.encode(), content]
    return digest128(b"weights", *parts).hex()


def _directory_weights(directory: Path, progress: Progress | None) -> str:
    files = _weight_files(directory)
    before = _stamp(files)
    remembered = _cache_file(before)
    with suppress(OSError, ValueError):
        text = remembered.read_text(encoding="ascii")
        if len(text) == 32 and int(text, 16) >= 0:
            return text
    total, done = sum(file.stat().st_size for file in files), 0

    def count(hashed: int) -> None:
        nonlocal done
        done += hashed
        if progress is not None:
            progress(done, total)

    digest = _weights_digest(entry for file in files for entry in _read_safetensors(file, count))
    if _stamp(files) == before:
        with suppress(OSError):  # a home that cannot be written only costs the time again
            _remember(remembered, digest)
    return digest


def _weight_files(directory: Path) -> list[Path]:
    """The files of the model itself, where a directory also holds other formats or adapters."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{index} is not an index of safetensors files: {error}") from None
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise FormatError(f"{index} names files outside its directory")
        files = [directory / name for name in names]
    else:
        files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        what = f"lacks {', '.join(missing)}" if missing else "has no safetensors files"
        raise ConfigError(f"{directory} {what}; complete it, or pass model_id")
    return files


def _read_safetensors(path: Path, count: Callable[[int], None]) -> Iterator[tuple[str, str, Sequence[int], bytes]]:
    """Name, dtype, shape and digest of each tensor, read in the order of the file in bounded memory."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _MAX_SAFETENSORS_HEADER):
            raise FormatError(f"{path} is not a safetensors file: its header would have {length} bytes")
        try:
            table = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            table.pop("__metadata__", None)
            entries = [(name, msgspec.json.decode(raw, type=_Tensor)) for name, raw in table.items()]
        except msgspec.MsgspecError as error:
            raise FormatError(f"{path} is not a safetensors file: {error}") from None
        start, buffer = 8 + length, bytearray(_CHUNK)
        for name, tensor in sorted(entries, key=lambda entry: entry[1].data_offsets):
            begin, end = tensor.data_offsets
            if not 0 <= begin <= end <= size - start:
                raise FormatError(f"{path}: tensor {name!r} lies outside the file; it may be truncated")
            file.seek(start + begin)
            yield name, tensor.dtype, tensor.shape, _hash_range(file, end - begin, memoryview(buffer), count)


def _hash_range(file: FileIO, length: int, buffer: memoryview, count: Callable[[int], None]) -> bytes:
    state = xxhash.xxh3_128()
    while length > 0:
        got = file.readinto(buffer[: min(length, len(buffer))])
        if not got:
            raise FormatError("a weights file became shorter while it was read")
        state.update(buffer[:got])
        length -= got
        count(got)
    return state.digest()


def _stamp(files: Sequence[Path]) -> list[str]:
    stats = [(file.resolve(), file.stat()) for file in files]
    return [f"{path}\0{s.st_size}\0{s.st_mtime_ns}\0{s.st_ino}" for path, s in stats]


def _cache_file(stamp: Sequence[str]) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = digest128(b"weights files 1", *(line.encode("utf-8", "surrogateescape") for line in stamp)).hex()
    return base / "kvcache-factory" / "fingerprints" / name


def _remember(path: Path, digest: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)  # 0600, and never half written under its final name
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(digest)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
