"""What one storage block is: dtype, geometry, and the order of its bytes.  No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from ..errors import ConfigError

PAGE = 4096
"""Alignment of slot images in bytes: what O_DIRECT asks for on every file system we met."""

DEFAULT_BLOCK_TOKENS = 64


class KVDtype(StrEnum):
    """Element types of stored keys and values."""

    F32 = "float32"
    BF16 = "bfloat16"
    F16 = "float16"
    FP8_E4M3 = "float8_e4m3fn"
    FP8_E5M2 = "float8_e5m2"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {"float32": 4, "bfloat16": 2, "float16": 2}.get(self.value, 1)

    @classmethod
    def of(cls, name: object) -> KVDtype:
        """The member for a torch dtype or its name (``torch.float32``, ``"float32"``, ``"fp8"``)."""
        text = str(name).removeprefix("torch.")
        text = {"fp8": "float8_e4m3fn", "half": "float16", "float": "float32", "bf16": "bfloat16"}.get(text, text)
        try:
            return cls(text)
        except ValueError:
            allowed = ", ".join(d.value for d in cls)
            raise ConfigError(f"KV dtype {text!r} is not supported; use one of {allowed}") from None


class Layout(StrEnum):
    """Order of the bytes in a payload: L layer, C key or value, N token, H head, D element of a head.

    ``LCND`` keeps the heads of one token together (N, then H and D), as paged engines do; ``LCHND`` keeps the tokens of
    one head together, as Transformers does.  ``VLLM_CPU_n`` is the packing of vLLM's CPU backend in engine blocks of n
    tokens: [layer][engine block][head], and there the keys transposed [D][n] before the values [n][D].  Any other name
    is a private packing that only its writer can read.
    """

    LCND = "LCND"
    LCHND = "LCHND"
    VLLM_CPU_32 = "VLLM_CPU_32"
    VLLM_CPU_64 = "VLLM_CPU_64"
    VLLM_CPU_128 = "VLLM_CPU_128"
    VLLM_CPU_256 = "VLLM_CPU_256"

    @property
    def code(self) -> int:
        """The number that columns and logs keep for this order; never given to another one."""
        return _LAYOUT_CODES[self]

    @classmethod
    def of_code(cls, code: int) -> Layout:
        """The order with this number; KeyError when this version has none."""
        return _LAYOUTS[code]

    @classmethod
    def named(cls, name: str) -> Layout | None:
        """The order of this name; None for a private packing."""
        return cls.__members__.get(name)

    @classmethod
    def vllm_cpu(cls, engine_tokens: int) -> Layout | None:
        """The packing of vLLM's CPU backend for engine blocks of this size, if it has a name."""
        return _PACKINGS.get(engine_tokens)

    @property
    def packed_tokens(self) -> int:
        """Tokens of an engine block where this is a packing, which holds whole engine blocks; 0 where it is plain."""
        return _PACKED_TOKENS.get(self, 0)

    def fits(self, spec: BlockSpec) -> bool:
        """Whether a payload of *spec* can be in this order."""
        return self.packed_tokens == 0 or spec.block_tokens % self.packed_tokens == 0


_LAYOUT_CODES = {
    Layout.LCND: 0,
    Layout.LCHND: 1,
    Layout.VLLM_CPU_32: 2,
    Layout.VLLM_CPU_64: 3,
    Layout.VLLM_CPU_128: 4,
    Layout.VLLM_CPU_256: 5,
}
_LAYOUTS = {code: layout for layout, code in _LAYOUT_CODES.items()}
_PACKED_TOKENS = {
    Layout.VLLM_CPU_32: 32,
    Layout.VLLM_CPU_64: 64,
    Layout.VLLM_CPU_128: 128,
    Layout.VLLM_CPU_256: 256,
}
_PACKINGS = {tokens: layout for layout, tokens in _PACKED_TOKENS.items()}
PLAIN_LAYOUTS = (Layout.LCND, Layout.LCHND)
"""The orders that are axes in a row, which descriptors can turn into each other."""


class RopeParameters(msgspec.Struct, frozen=True):
    """Rotary position embedding of a model, as it enters the identity: KV is stored after rotation."""

    theta: float = 10000.0
    parameters: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RopeParameters:
        """Read ``rope_theta`` and ``rope_scaling`` (or ``rope_parameters``) from a model's configuration."""
        nested = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = config.get("rope_theta", nested.pop("rope_theta", 10000.0))
        nested.pop("rope_theta", None)
        kind = nested.get("rope_type", nested.get("type", "default"))
        nested.pop("type", None)
        nested.pop("rope_type", None)
        pairs = [("rope_type", str(kind)), *((str(k), repr(v)) for k, v in nested.items())]
        return cls(theta=float(theta), parameters=tuple(sorted(pairs)))


class BlockSpec(msgspec.Struct, frozen=True):
    """Geometry of one storage block.

    A payload holds ``num_layers × {K, V} × block_tokens × num_kv_heads × head_dim`` elements of ``dtype``.
    """

    dtype: KVDtype
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    rope: RopeParameters = RopeParameters()

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ConfigError(f"BlockSpec.{name} must be a positive integer, not {value!r}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def payload_bytes(self) -> int:
        """Bytes of keys and values of one block, without padding."""
        return self.block_tokens * self.bytes_per_token

    @property
    def header_bytes(self) -> int:
        """Bytes of a slot's header: fixed fields and four bytes a token, in whole pages."""
        return round_up(HEADER_FIXED + 4 * self.block_tokens, PAGE)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot image: header, then payload padded to a page."""
        return self.header_bytes + round_up(self.payload_bytes, PAGE)


HEADER_FIXED = 512
"""Bytes reserved in a header for everything but the tokens; see ``docs/format.md``."""


def round_up(value: int, step: int) -> int:
    """The smallest multiple of *step* that is at least *value*."""
    return -(-value // step) * step


def storage_block_tokens(engine_block_tokens: int) -> int:
    """The smallest multiple of an engine's block that has at least the default number of tokens."""
    if engine_block_tokens <= 0:
        raise ConfigError(f"an engine block must have at least one token, not {engine_block_tokens}")
    return round_up(DEFAULT_BLOCK_TOKENS, engine_block_tokens)
