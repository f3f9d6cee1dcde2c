"""What codecs promise: bounds that hold for every block, the same bytes from both paths, words instead of crashes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_factory import jit
from kvcache_factory.block.spec import BlockSpec, KVDtype, Layout
from kvcache_factory.codec import calibration, rans
from kvcache_factory.codec.base import BOUND_EXCEEDED, DOES_NOT_PAY, NOT_FINITE, BlockCodec, Encoded
from kvcache_factory.codec.coder import Coder
from kvcache_factory.codec.int4g import Int4g
from kvcache_factory.codec.lossy import measured_error, own_params
from kvcache_factory.codec.names import codec_names, make_codec, parse_codec, register_codec
from kvcache_factory.codec.values import narrow, rounded, widen
from kvcache_factory.errors import ConfigError, FormatError

DTYPES = (KVDtype.BF16, KVDtype.F16, KVDtype.F32)
PLAIN = ("int8", "fp8", "int4g", "rot4")
CALIBRATED = ("pca", "low_rank")
RATIOS = {"int8": 1.9, "fp8": 1.99, "int4g": 2.9, "rot4": 3.7}
"""Of bfloat16, in blocks of 64 tokens of 64 channels: what these bytes are does not depend on the content."""


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Compiled kernels wherever numba is allowed."""
    jit.want_late()
    assert jit.warm_up() or jit.numba_refused(), jit.status()


@contextmanager
def numpy_path() -> Iterator[None]:
    """Everything inside runs on the fallbacks."""
    compiled = [kernel.compiled for kernel in [*jit._KERNELS, *jit._LATE]]
    try:
        for kernel in [*jit._KERNELS, *jit._LATE]:
            kernel.compiled = None
        yield
    finally:
        for kernel, was in zip([*jit._KERNELS, *jit._LATE], compiled, strict=True):
            kernel.compiled = was


def make_spec(dtype: KVDtype = KVDtype.BF16, tokens: int = 64, dim: int = 32) -> BlockSpec:
    return BlockSpec(dtype, num_layers=3, num_kv_heads=2, head_dim=dim, block_tokens=tokens)


def make_tiles(spec: BlockSpec, seed: int = 0) -> Any:
    """Like keys and values: some channels are large in every token, neighbours are alike."""
    rng = np.random.default_rng(seed)
    shape = (spec.num_layers, 2, spec.num_kv_heads, spec.block_tokens, spec.head_dim)
    scale = np.exp(rng.normal(0, 1, (*shape[:3], 1, spec.head_dim)))
    shared = rng.normal(0, 1, (1, 2, 1, spec.block_tokens, spec.head_dim))
    return ((0.3 * rng.normal(0, 1, shape) + shared) * scale).astype(np.float32)


def make_payload(spec: BlockSpec, layout: Layout = Layout.LCHND, seed: int = 0) -> Any:
    out = np.empty(spec.payload_bytes, np.uint8)
    narrow(make_tiles(spec, seed), spec, layout, out)
    return out


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibration of the model that :func:`make_spec` describes."""
    windows = [make_tiles(make_spec(tokens=512), seed) for seed in (7, 8)]
    turns = 1e4 ** (-np.arange(0, 32, 2) / 32)
    return calibration.fit(windows, turns, "model", tmp_path_factory.mktemp("tables"))


def opened(name: str, spec: BlockSpec, table: Path, **options: Any) -> BlockCodec:
    codec = make_codec(name, **({"table": table, "max_rel_error": 1.0} if name in CALIBRATED else {}), **options)
    codec.open(spec)
    return codec


def encode(codec: BlockCodec, payload: Any, layout: Layout = Layout.LCHND, position: int = 128) -> Encoded:
    made = codec.encode(payload, layout, position)
    assert isinstance(made, Encoded), made
    return made


@pytest.mark.parametrize("layout", [Layout.LCND, Layout.LCHND])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLAIN + CALIBRATED)
def test_the_declared_bound_holds_and_is_measured(name: str, dtype: KVDtype, layout: Layout, table: Path) -> None:
    """What comes back is as far away as the parameters say, in every dtype and order, and in the other order too."""
    spec = make_spec(dtype)
    codec = opened(name, spec, table)
    payload = make_payload(spec, layout)
    made = encode(codec, payload, layout)
    back = np.empty_like(payload)
    assert codec.decode(made.data, made.params, layout, back) is None
    before, after = widen(payload, spec, layout), widen(back, spec, layout)
    error = np.abs(before - after).max(axis=(2, 3, 4)) / np.abs(before).max(axis=(2, 3, 4))
    found = measured_error(made.params)
    assert found is not None
    declared, measured = found
    assert error.max() == pytest.approx(measured, rel=1e-5)
    assert measured == pytest.approx(made.max_rel_error, rel=1e-6)
    assert 0 < measured <= declared
    other = Layout.LCND if layout == Layout.LCHND else Layout.LCHND
    assert codec.decode(made.data, made.params, other, back) is None
    assert np.array_equal(widen(back, spec, other), after)


@pytest.mark.skipif(jit.numba_refused(), reason="numba is refused, so there is one path only")
@pytest.mark.parametrize("dim", [32, 48])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*PLAIN, "bf16x"])
def test_both_paths_give_the_same_bytes(name: str, dtype: KVDtype, dim: int, table: Path) -> None:
    """Encoded by either, decoded by either."""
    spec = make_spec(dtype, dim=dim)
    codec = opened(name, spec, table)
    for layout in (Layout.LCND, Layout.LCHND):
        payload, results = make_payload(spec, layout, seed=3), []
        for path in (None, numpy_path):
            with path() if path else contextmanager(lambda: iter([None]))():
                made = codec.encode(payload, layout, 0)
                if isinstance(made, str):
                    results.append(made)
                    continue
                back = np.empty_like(payload)
                assert codec.decode(made.data, made.params, layout, back) is None
                results.append((made.data.tobytes(), made.params, back.tobytes()))
        assert results[0] == results[1]


@pytest.mark.skipif(jit.numba_refused(), reason="numba is refused, so there is one path only")
def test_both_paths_code_the_same_symbols(table: Path) -> None:
    """What multiplies matrices differs in the last bits; what is coded of it does not."""
    codec = opened("pca", make_spec(), table, step=0.2)
    payload = make_payload(make_spec(), seed=5)
    made = encode(codec, payload)
    with numpy_path():
        again = encode(codec, payload)
        back = np.empty_like(payload)
        assert codec.decode(made.data, made.params, Layout.LCHND, back) is None
    assert np.array_equal(made.data, again.data)


@pytest.mark.parametrize("layout", [Layout.LCND, Layout.LCHND])
@pytest.mark.parametrize("dtype", [KVDtype.BF16, KVDtype.F32])
def test_bf16x_loses_no_bit(dtype: KVDtype, layout: Layout, table: Path) -> None:
    """NaN, infinities, negative zero and subnormal numbers among them."""
    spec = make_spec(dtype)
    payload = make_payload(spec, layout)
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-39], np.float32)
    payload[: spec.dtype.itemsize * 5] = (
        (odd.view(np.uint32) >> (16 if dtype == KVDtype.BF16 else 0)).astype(f"u{spec.dtype.itemsize}").view(np.uint8)
    )
    codec = opened("bf16x", spec, table)
    made = encode(codec, payload, layout)
    back = np.empty_like(payload)
    assert codec.decode(made.data, made.params, layout, back) is None
    assert np.array_equal(back, payload)
    assert len(made.data) < 0.95 * len(payload)


def test_bf16x_keeps_its_hands_off_what_it_cannot_shrink(table: Path) -> None:
    """Bits without any structure: the payload stays as it is."""
    spec = make_spec()
    noise = np.random.default_rng(0).integers(0, 256, spec.payload_bytes).astype(np.uint8)
    assert opened("bf16x", spec, table).encode(noise, Layout.LCHND, 0) == DOES_NOT_PAY


@pytest.mark.parametrize(("name", "ratio"), RATIOS.items())
def test_ratios_of_fixed_size_codecs(name: str, ratio: float, table: Path) -> None:
    spec = make_spec(dim=64)
    made = encode(opened(name, spec, table), make_payload(spec))
    assert spec.payload_bytes / len(made.data) >= ratio


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", PLAIN + CALIBRATED)
def test_what_is_no_number_is_not_encoded(name: str, bad: float, table: Path) -> None:
    spec = make_spec()
    tiles = make_tiles(spec)
    tiles[1, 0, 1, 5, 7] = bad
    payload = (tiles.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1)
    assert opened(name, spec, table).encode(payload, Layout.LCHND, 0) == NOT_FINITE


@pytest.mark.parametrize("name", PLAIN)
def test_a_bound_that_cannot_be_kept_leaves_the_block_alone(name: str, table: Path) -> None:
    spec = make_spec()
    codec = opened(name, spec, table, max_rel_error=0.001)
    assert codec.encode(make_payload(spec), Layout.LCHND, 0) == BOUND_EXCEEDED


@pytest.mark.parametrize("name", [*PLAIN, "bf16x"])
@pytest.mark.parametrize("scale", [0.0, 1e-37, 1e30])
def test_extreme_magnitudes_are_within_the_bound_or_left_alone(name: str, scale: float, table: Path) -> None:
    """All zeros, nearly nothing, enormous: no warning, no lie."""
    spec = make_spec()
    payload = np.empty(spec.payload_bytes, np.uint8)
    narrow((make_tiles(spec) * np.float32(scale)).astype(np.float32), spec, Layout.LCHND, payload)
    codec = opened(name, spec, table)
    made = codec.encode(payload, Layout.LCHND, 0)
    if isinstance(made, Encoded):
        back = np.empty_like(payload)
        assert codec.decode(made.data, made.params, Layout.LCHND, back) is None
        before, after = (widen(p, spec, Layout.LCHND).astype(np.float64) for p in (payload, back))
        size = np.abs(before).max(axis=(2, 3, 4), keepdims=True)
        limit = made.max_rel_error * np.where(size > 0, size, 1)
        assert (np.abs(before - after) <= limit * 1.0001).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("name", [*PLAIN, *CALIBRATED, "bf16x"])
def test_damage_is_a_word_and_never_an_exception(name: str, table: Path, data: Any) -> None:
    """Cut, longer, other bytes, other parameters: a word or some numbers, because checksums are for others to check."""
    spec = make_spec()
    codec = opened(name, spec, table)
    made = encode(codec, make_payload(spec))
    body, params = made.data.copy(), bytearray(made.params)
    kind = data.draw(st.sampled_from(["cut", "grow", "byte", "params", "no params"]))
    if kind == "cut":
        body = body[: data.draw(st.integers(0, len(body) - 1))]
    elif kind == "grow":
        body = np.concatenate((body, np.zeros(data.draw(st.integers(1, 9)), np.uint8)))
    elif kind == "byte":
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "params":
        params[data.draw(st.integers(0, len(params) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        params = params[: data.draw(st.integers(0, len(params) - 1))]
    back = np.zeros(spec.payload_bytes, np.uint8)
    with np.errstate(all="ignore"):
        word = codec.decode(body, bytes(params), Layout.LCHND, back)
    assert word is None or (isinstance(word, str) and word)
    if kind in ("cut", "grow"):
        assert word


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_payloads_survive_widening(dtype: KVDtype) -> None:
    """Every element of every dtype, in both orders, is the same after a trip through float32."""
    spec = make_spec(dtype)
    for layout in (Layout.LCND, Layout.LCHND):
        payload = make_payload(spec, layout)
        again = np.empty_like(payload)
        values = widen(payload, spec, layout)
        narrow(values, spec, layout, again)
        assert np.array_equal(again, payload)
        assert np.array_equal(rounded(values, spec), values)


# -- range coding -----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), lanes=st.integers(1, 70), components=st.integers(1, 40))
def test_range_coding_gives_back_every_symbol(seed: int, lanes: int, components: int) -> None:
    """Both paths, the same words, and a stream that is cut is no stream."""
    rng = np.random.default_rng(seed)
    frequencies = np.zeros((3, rans.SYMBOLS), np.uint16)
    for row in frequencies:
        share = rng.dirichlet(np.full(rans.SYMBOLS, rng.choice([0.05, 1.0])))
        row[:] = (share * (rans.TOTAL - rans.SYMBOLS)).astype(np.uint16) + 1
        row[128] += rans.TOTAL - row.sum()
    starts = rans.cumulate(frequencies)
    tables = rng.integers(0, 3, components)
    symbols = rng.integers(0, rans.SYMBOLS, (components, lanes)).astype(np.uint8)
    states, words = rans.encode(symbols, tables, starts)
    with numpy_path():
        slow_states, slow_words = rans.encode(symbols, tables, starts)
        slow = rans.decode(states, words, tables, starts, rans.invert(starts), lanes)
    assert np.array_equal(states, slow_states)
    assert np.array_equal(words, slow_words)
    assert np.array_equal(slow, symbols)
    assert np.array_equal(rans.decode(states, words, tables, starts, rans.invert(starts), lanes), symbols)
    if len(words):
        assert rans.decode(states, words[:-1], tables, starts, rans.invert(starts), lanes) is None


# -- calibration ------------------------------------------------------------------------------------------------------


def test_a_table_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for options in ({}, {"table": tmp_path / "none.kvcal"}):
        with pytest.raises(ConfigError, match="kvcache-factory calibrate"):
            make_codec("pca", **options).open(make_spec())


def test_a_table_of_another_model_is_refused(table: Path) -> None:
    with pytest.raises(ConfigError, match="was made for"):
        make_codec("pca", table=table).open(make_spec(dim=64))


def test_a_damaged_table_is_refused(table: Path, tmp_path: Path) -> None:
    """Another byte, a name that says something else, half of it."""
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (bytes(content), table.read_bytes()[:100]):
        file = tmp_path / table.name
        file.write_bytes(damaged)
        with pytest.raises(FormatError, match="damaged"):
            make_codec("low_rank", table=file).open(make_spec())


def test_a_reader_finds_the_table_by_its_digest(table: Path, tmp_path: Path) -> None:
    """Beside the blocks, where the writer has left it; elsewhere, a word, and one line in the log."""
    spec = make_spec()
    writer = Coder(make_codec("pca", table=table, max_rel_error=1.0), [tmp_path / "store"])
    writer.open(spec)
    made = writer.encode(make_payload(spec), Layout.LCHND, 0)
    assert isinstance(made, Encoded)
    back = np.empty(spec.payload_bytes, np.uint8)
    for places, word in (([tmp_path / "store"], None), ([tmp_path / "elsewhere"], "no_calibration")):
        reader = Coder(None, places)
        reader.open(spec)
        assert reader.decode("pca", made.data, made.params, Layout.LCHND, back) == word


def test_low_rank_keeps_as_much_as_an_error_asks_for(table: Path) -> None:
    """The relative error of the block is the one asked for, but for the rounding to bfloat16."""
    spec = make_spec()
    payload, sizes = make_payload(spec), []
    before = widen(payload, spec, Layout.LCHND)
    for wanted in (0.6, 0.35):
        codec = opened("low_rank", spec, table, error=wanted)
        made = encode(codec, payload, position=0)
        back = np.empty_like(payload)
        codec.decode(made.data, made.params, Layout.LCHND, back)
        after = widen(back, spec, Layout.LCHND)
        assert np.linalg.norm(before - after) <= 1.05 * wanted * np.linalg.norm(before)
        sizes.append(len(made.data))
    assert sizes[0] < sizes[1]


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["zip", "int8:level=3", "pca:step=0", "pca:step", "low_rank:rank=2", "int4g:group=1", "int8:max_rel_error=2", ""],
)
def test_unknown_names_and_wrong_parameters_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_codec(text)


def test_blocks_that_a_codec_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 64 tokens"):
        make_codec("int4g").open(make_spec(tokens=16))
    with pytest.raises(ConfigError, match="small already"):
        make_codec("int8").open(make_spec(KVDtype.FP8_E4M3))


@pytest.mark.parametrize(
    ("group", "tokens", "dim", "allowed"),
    [(64, 64, 32, "2, 4, 8, 16, 32"), (48, 64, 32, "2, 4, 8, 16, 32"), (3, 96, 36, "2, 4, 6, 12")],
)
def test_a_group_that_does_not_divide_is_refused_with_those_that_do(
    group: int, tokens: int, dim: int, allowed: str
) -> None:
    """It used to be made smaller without a word."""
    with pytest.raises(ConfigError, match=rf"group={group} must .* use one of {allowed}$"):
        make_codec("int4g", group=group).open(make_spec(tokens=tokens, dim=dim))


@pytest.mark.parametrize(("tokens", "dim"), [(64, 80), (96, 24)])
def test_without_a_group_int4g_fits_itself_to_the_model(tokens: int, dim: int) -> None:
    """Heads of 80 channels have groups of 16; and what was written so before groups were refused is read still."""
    spec = make_spec(tokens=tokens, dim=dim)
    codec, payload = make_codec("int4g"), make_payload(spec)
    codec.open(spec)
    made = encode(codec, payload)
    reader = Int4g.that_reads(own_params(made.params))
    reader.open(spec)
    back = np.empty_like(payload)
    assert reader.decode(made.data, made.params, Layout.LCHND, back) is None
    before, after = widen(payload, spec, Layout.LCHND), widen(back, spec, Layout.LCHND)
    assert 0 < np.abs(before - after).max() < 0.08 * np.abs(before).max()


def test_codecs_are_described_by_their_options(table: Path) -> None:
    """A codec made again from its name and options writes the same bytes."""
    for name in codec_names():
        if name != "raw":
            codec = opened(name, make_spec(), table)
            again = make_codec(name, **codec.options())
            again.open(make_spec())
            assert np.array_equal(
                encode(codec, make_payload(make_spec())).data, encode(again, make_payload(make_spec())).data
            )


def test_a_name_is_taken_once() -> None:
    class Impostor(type(make_codec("raw"))):  # type: ignore[misc]
        name = "int8"

    with pytest.raises(ConfigError, match="already"):
        register_codec(Impostor)
