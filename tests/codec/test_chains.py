"""Codecs behind codecs, and codecs of a range of layers: typed, read by anybody, and never a crash."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcache_factory import CompressionPolicy
from kvcache_factory.block.spec import BlockSpec, KVDtype, Layout
from kvcache_factory.codec.base import NOT_FINITE, Encoded
from kvcache_factory.codec.coder import Coder
from kvcache_factory.codec.lossy import measured_error
from kvcache_factory.codec.names import is_lossy, make_codec, parse_codec
from kvcache_factory.codec.values import max_rel_error, narrow, widen
from kvcache_factory.errors import ConfigError

SPEC = BlockSpec(KVDtype.BF16, num_layers=6, num_kv_heads=2, head_dim=64, block_tokens=64)


def payload(spec: BlockSpec = SPEC, seed: int = 3) -> Any:
    rng = np.random.default_rng(seed)
    shape = (spec.num_layers, 2, spec.num_kv_heads, spec.block_tokens, spec.head_dim)
    values = (rng.normal(0, 1, shape) * np.exp(rng.normal(0, 1, (*shape[:3], 1, shape[-1])))).astype(np.float32)
    out = np.empty(spec.payload_bytes, np.uint8)
    narrow(values, spec, Layout.LCND, out)
    return out


def coded(text: str, source: Any, spec: BlockSpec = SPEC, layout: Layout = Layout.LCND) -> tuple[Encoded, Any]:
    """What the codec made, and what a process without a codec of its own reads from it."""
    codec = parse_codec(text)
    codec.open(spec)
    made = codec.encode(source, layout, 0)
    assert isinstance(made, Encoded), made
    out, reader = np.full(spec.payload_bytes, 7, np.uint8), Coder()
    reader.open(spec)
    assert reader.decode(codec.name, made.data, made.params, layout, out) is None
    return made, out


@pytest.mark.parametrize("first", ["bf16x", "int8", "int4g:group=16", "fp8"])
def test_a_chain_gives_back_what_its_first_codec_does(first: str) -> None:
    """Fewer bytes or about as many, the same values, and the parameters of the first."""
    source = payload()
    alone, expected = coded(first, source)
    made, found = coded(f"{first}|zstd:level=3", source)
    assert np.array_equal(found, expected)
    assert made.params == alone.params
    assert len(made.data) < 1.01 * len(alone.data)
    assert len(coded(f"{first}|zstd", np.zeros_like(source))[0].data) < len(coded(first, np.zeros_like(source))[0].data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zstd", "takes bytes, not blocks"),
        ("zstd|int8", "takes bytes, not blocks"),
        ("int8|bf16x", "takes blocks, not the bytes"),
        ("raw|zstd", "leaves blocks as they are"),
        ("int8|mp3", "no codec 'mp3'"),
        ("int8|zstd:level=99", "from 1 to 22"),
        ("int8|zstd:speed=1", "no parameter 'speed'"),
        ("|".join(["int8", *["zstd"] * 6]), "at most 31 characters"),
    ],
)
def test_chains_that_do_not_fit_are_refused(text: str, said: str) -> None:
    """With what each takes."""
    with pytest.raises(ConfigError, match=said):
        parse_codec(text)


def test_names_of_chains_say_whether_they_are_lossy() -> None:
    """By the first codec; a policy takes them too."""
    assert is_lossy("int8|zstd")
    assert not is_lossy("bf16x|zstd")
    assert make_codec("bf16x|zstd").lossy is False
    assert CompressionPolicy("int8|zstd").method == "int8|zstd"
    assert make_codec("int8|zstd", max_rel_error=0.5).options() == {"max_rel_error": 0.5}


@pytest.mark.parametrize("damage", ["short", "long", "changed", "bomb"])
def test_damaged_chains_are_words(damage: str) -> None:
    """Also where a frame says that it holds more than a block: nothing is allocated for that."""
    import zstandard

    made, out = coded("int8|zstd", payload())
    data = {
        "short": made.data[:-9],
        "long": np.concatenate((made.data, made.data)),
        "changed": np.where(np.arange(len(made.data)) == 0, made.data ^ 255, made.data).astype(np.uint8),
        "bomb": np.frombuffer(zstandard.ZstdCompressor().compress(bytes(1 << 26)), np.uint8),
    }[damage]
    codec = parse_codec("int8|zstd")
    codec.open(SPEC)
    reason = codec.decode(data, made.params, Layout.LCND, out)
    assert reason in ("codec_data", "codec_params")


@pytest.mark.parametrize("layout", [Layout.LCND, Layout.LCHND])
@pytest.mark.parametrize("outside", ["raw", "bf16x"])
def test_layers_outside_the_range_stay_exact(layout: Layout, outside: str) -> None:
    """Those inside are as the codec alone leaves them, and the error is theirs."""
    source = payload()
    made, found = coded(f"layers:first=2,end=5,inside=int8,outside={outside}", source, layout=layout)
    before, after = widen(source, SPEC, layout), widen(found, SPEC, layout)
    assert np.array_equal(before[:2], after[:2])
    assert np.array_equal(before[5:], after[5:])
    assert 0 < max_rel_error(before[2:5], after[2:5]) <= 0.01
    assert measured_error(made.params) == (pytest.approx(0.01), pytest.approx(made.max_rel_error))
    assert len(made.params) <= 180
    alone = coded("int8", source, layout=layout)[1]
    assert np.array_equal(after[2:5], widen(alone, SPEC, layout)[2:5])


@pytest.mark.parametrize("text", ["layers:inside=int8|zstd", "layers:first=1,inside=int4g", "layers:end=1,inside=rot4"])
def test_ranges_may_be_open_and_hold_any_codec(text: str) -> None:
    """Every codec that needs no calibration."""
    if "|" in text:
        with pytest.raises(ConfigError):  # the chain is of the codec of layers: its codec of bytes is for all
            parse_codec("layers:inside=zstd")
    before, after = payload(), coded(text, payload())[1]
    assert 0 < max_rel_error(widen(before, SPEC, Layout.LCND), widen(after, SPEC, Layout.LCND)) < 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers:first=3,end=2", "no range"),
        ("layers:first=2,end=2", "no layer"),
        ("layers:first=-1", "no range"),
        ("layers:inside=pca", "whole models"),
        ("layers:inside=layers", "whole models"),
        ("layers:first=0,end=7", "not within the 6 layers"),
        ("layers:first=6", "not within the 6 layers"),
    ],
)
def test_ranges_that_are_none_are_refused(text: str, said: str) -> None:
    """When it is made, or opened for a model."""
    with pytest.raises(ConfigError, match=said):
        parse_codec(text).open(SPEC)


def test_what_is_not_finite_inside_keeps_the_block_and_outside_does_not_matter() -> None:
    """Layers that are left alone may hold anything."""
    codec = parse_codec("layers:first=2,end=5")
    codec.open(SPEC)
    each = SPEC.payload_bytes // 6
    for layer, expected in ((0, None), (3, NOT_FINITE)):
        source = payload()
        source[layer * each : layer * each + 2].view(np.uint16)[0] = 0x7FC0
        made = codec.encode(source, Layout.LCND, 0)
        assert made == expected if expected else isinstance(made, Encoded)


def test_damaged_parameters_of_layers_are_words() -> None:
    """Cut off anywhere, or of other parts than the data."""
    made, out = coded("layers:first=2,end=5", payload())
    codec = parse_codec("layers:first=2,end=5")
    codec.open(SPEC)
    for end in range(len(made.params)):
        assert codec.decode(made.data, made.params[:end], Layout.LCND, out) is not None
    assert codec.decode(made.data[:-1], made.params, Layout.LCND, out) == "codec_data"


def test_a_policy_gives_a_range_of_layers() -> None:
    """Two numbers that are a range, or an error."""
    assert CompressionPolicy("int8", layers=(1, 4)).layers == (1, 4)
    for wrong in ((4, 1), (1,), (0, 1.5), (-1, 2)):
        with pytest.raises(ConfigError, match="layers"):
            CompressionPolicy("int8", layers=wrong)  # type: ignore[arg-type]
