"""Encrypted images: nothing of the text or the KV can be read, nothing that was changed is ever decrypted."""

from __future__ import annotations

import builtins
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.disk.blocks import fill

from kvcache_factory.block.envelope import HeaderError, checksum, pack_header, seal_header, unpack_header
from kvcache_factory.block.spec import BlockSpec, KVDtype
from kvcache_factory.codec.aesgcm import AesGcm
from kvcache_factory.codec.base import AES_GCM, NOT_AUTHENTIC, WRONG_KEY
from kvcache_factory.errors import MissingDependencyError
from kvcache_factory.memory.slab import Slab

Bytes = npt.NDArray[np.uint8]
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
SPECS = [
    BlockSpec(KVDtype.F16, num_layers=1, num_kv_heads=2, head_dim=32, block_tokens=16),
    BlockSpec(KVDtype.F16, num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=896),  # tokens fill the header
    BlockSpec(KVDtype.FP8_E4M3, num_layers=1, num_kv_heads=1, head_dim=12, block_tokens=1000),  # a header of two pages
]
SPEC = SPECS[0]
END = SPEC.header_bytes + SPEC.payload_bytes


def codec_with(key: bytes = KEY, **options: Any) -> AesGcm:
    codec = AesGcm(lambda: key, **options)
    codec.open()
    return codec


def plain_image(number: int = 3, spec: BlockSpec = SPEC) -> Bytes:
    slab = Slab(1, spec.slot_bytes, huge_pages=False)
    fill(slab, [0], [number], spec)
    image = slab.view[0].copy()
    slab.close()
    return image


def encoded(codec: AesGcm, image: Bytes, spec: BlockSpec = SPEC) -> Bytes:
    out = np.full(spec.slot_bytes, 0xAA, np.uint8)
    codec.encode(spec, image, out)
    return out


@pytest.fixture
def codec() -> Iterator[AesGcm]:
    codec = codec_with()
    yield codec
    codec.close()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.block_tokens}-tokens")
def test_an_image_comes_back_byte_for_byte(codec: AesGcm, spec: BlockSpec) -> None:
    """Header included, so that whoever proves it sees what was sealed; the source is not touched."""
    image = plain_image(3, spec)
    before = image.copy()
    out = encoded(codec, image, spec)
    assert np.array_equal(image, before)
    assert codec.decode(spec, out) is None
    assert np.array_equal(out, image)


def test_an_encrypted_image_is_an_image(codec: AesGcm) -> None:
    """Header and checksums are right as stored: it can be found, ordered and verified by those without the key."""
    image = plain_image()
    out = encoded(codec, image)
    plain, header = unpack_header(image), unpack_header(out)
    assert header.codec == AES_GCM
    assert header.payload_checksum == checksum(out[SPEC.header_bytes : END].data)
    for name in ("identity_digest", "key", "parent_key", "extras", "layout", "fidelity", "generation", "payload_bytes"):
        assert getattr(header, name) == getattr(plain, name)
    assert not np.array_equal(header.tokens, plain.tokens)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.block_tokens}-tokens")
def test_nothing_secret_is_left_readable(codec: AesGcm, spec: BlockSpec) -> None:
    """Neither tokens nor payload, nor a checksum of them that could confirm a guess, nor what stood there before."""
    image = plain_image(3, spec)
    data = encoded(codec, image, spec).tobytes()
    header, payload = unpack_header(image), image[spec.header_bytes :][: spec.payload_bytes].tobytes()
    assert all(header.tokens[i : i + 4].tobytes() not in data for i in range(0, len(header.tokens), 4))
    assert all(payload[i : i + 16] not in data for i in range(0, len(payload) - 15, 16))
    assert image[16:24].tobytes() not in data
    assert struct.pack("<Q", header.payload_checksum) not in data
    assert not any(data[spec.header_bytes + spec.payload_bytes :])


def test_every_image_has_a_nonce_of_its_own(codec: AesGcm) -> None:
    """The same block written again is another ciphertext; nobody sees that it is the same but by its key."""
    image = plain_image()
    images = [encoded(codec, image) for _ in range(500)]
    nonces = {unpack_header(one).codec_params[8:20] for one in images}
    assert len(nonces) == 500
    assert len({one[512:END].tobytes() for one in images}) == 500


def test_one_piece_of_randomness_per_image_and_no_more() -> None:
    """The nonce is what the source of randomness gave, asked for 12 bytes each time."""
    asked: list[int] = []

    def random(count: int) -> bytes:
        asked.append(count)
        return bytes([len(asked)]) * count

    codec = codec_with(random=random)
    assert [unpack_header(encoded(codec, plain_image())).codec_params[8:20] for _ in range(2)] == [
        b"\1" * 12,
        b"\2" * 12,
    ]
    assert asked == [12, 12]


def test_another_key_is_told_before_anything_is_decrypted(codec: AesGcm) -> None:
    """The id of the key decides; the image stays as it was for whoever has the right one."""
    out = encoded(codec, plain_image())
    before = out.copy()
    assert codec_with(OTHER_KEY).decode(SPEC, out) == WRONG_KEY
    assert np.array_equal(out, before)
    assert codec.decode(SPEC, out) is None


def test_a_key_that_claims_to_be_the_right_one_decrypts_nothing(codec: AesGcm) -> None:
    """Should two keys have one id: the tag decides, and no byte of the attempt remains."""
    out = encoded(codec, plain_image())
    other = codec_with(OTHER_KEY)
    out[200:208] = np.frombuffer(other.key_id, np.uint8)
    seal_header(out[: SPEC.header_bytes].data)
    assert other.decode(SPEC, out) == NOT_AUTHENTIC
    assert not out[:END].any()


SECRETS = {"tag": (220, 236), "payload sum": (236, 244), "nonce": (208, 220)}
CLEAR = {
    "version": (8, 10), "header bytes": (12, 16), "token count": (24, 28), "fidelity": (28, 30),
    "generation": (30, 32), "identity": (32, 48), "key": (48, 64), "parent": (64, 80), "extras": (80, 96),
    "payload bytes": (96, 104), "reserved": (112, 128), "layout": (128, 160), "codec": (160, 192),
    "params length": (192, 194), "reserved too": (194, 200), "key id": (200, 208), "inner codec": (244, 276),
    "inner params": (276, 456), "the rest": (456, 512),
}  # fmt: skip
BODY = {"tokens": (512, 576), "rest of the header": (576, SPEC.header_bytes), "payload": (SPEC.header_bytes, END)}


@pytest.mark.parametrize(("start", "stop"), [*SECRETS.values(), *CLEAR.values(), *BODY.values()],
                         ids=[*SECRETS, *CLEAR, *BODY])  # fmt: skip
def test_a_forged_image_is_never_taken_for_the_block(codec: AesGcm, start: int, stop: int) -> None:
    """Any bit, by somebody who makes the checksums right again: refused, or at least not decrypted."""
    stored = encoded(codec, plain_image())
    for at in range(start, stop, max((stop - start) // 8, 1)):
        for bit in range(8):
            forged = stored.copy()
            forged[at] ^= 1 << bit
            forged[104:112] = np.frombuffer(struct.pack("<Q", checksum(forged[SPEC.header_bytes : END].data)), np.uint8)
            seal_header(forged[: SPEC.header_bytes].data)
            before = forged.copy()
            reason = codec.decode(SPEC, forged)
            if reason == NOT_AUTHENTIC:
                assert not forged[:END].any()
            else:  # not an image of ours any more: left for prove() to judge, which knows "raw" only
                assert np.array_equal(forged, before)
                assert reason in (None, WRONG_KEY, "codec")
                assert reason is not None or not _is_raw(forged)


def _is_raw(image: Bytes) -> bool:
    try:
        return unpack_header(image[: SPEC.header_bytes].data).codec == "raw"
    except HeaderError:
        return False


@given(at=st.integers(0, END - 1), bit=st.integers(0, 7))
def test_a_bit_that_flipped_is_noticed(at: int, bit: int) -> None:
    """Without anybody mending checksums: a damaged header is left for the prover to name, the rest fails the tag."""
    codec = codec_with()
    out = encoded(codec, plain_image())
    out[at] ^= 1 << bit
    before = out.copy()
    reason = codec.decode(SPEC, out)
    if at < SPEC.header_bytes:
        assert reason is None
        assert np.array_equal(out, before)
        with pytest.raises(HeaderError):
            unpack_header(out[: SPEC.header_bytes].data)
    else:
        assert reason == NOT_AUTHENTIC
        assert not out[:END].any()


def test_parts_of_two_images_do_not_make_a_third(codec: AesGcm) -> None:
    """The payload of one block under the header of another is refused: the header is authenticated with it."""
    one, two = encoded(codec, plain_image(1)), encoded(codec, plain_image(2))
    two[512:END] = one[512:END]
    two[104:112] = one[104:112]
    seal_header(two[: SPEC.header_bytes].data)
    assert codec.decode(SPEC, two) == NOT_AUTHENTIC


def test_plain_images_pass_untouched(codec: AesGcm) -> None:
    """A directory may hold both kinds."""
    image = plain_image()
    before = image.copy()
    assert codec.decode(SPEC, image) is None
    assert np.array_equal(image, before)


def test_it_is_the_last_codec_over_any_other(codec: AesGcm) -> None:
    """What another codec left, name and parameters included, comes back as it was."""
    image = plain_image()
    header = msgspec.structs.replace(unpack_header(image), codec="some-other", codec_params=bytes(range(180)))
    pack_header(header, SPEC.header_bytes, image.data)
    out = encoded(codec, image)
    assert codec.decode(SPEC, out) is None
    assert np.array_equal(out, image)


def test_two_threads_share_one_codec(codec: AesGcm) -> None:
    """Encoding and decoding at once disturb nobody."""
    wrong: list[int] = []

    def work(own: int) -> None:
        image = plain_image(own)
        for _ in range(100):
            out = encoded(codec, image)
            if codec.decode(SPEC, out) is not None or not np.array_equal(out, image):
                wrong.append(own)

    threads = [threading.Thread(target=work, args=(own,)) for own in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_the_package_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encryption is an extra; asking for it without is told at open, with what to install."""
    real: Callable[..., Any] = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingDependencyError, match=r"kvcache-factory\[encryption\]"):
        codec_with()


def test_the_key_shows_nowhere(codec: AesGcm) -> None:
    """No representation of the codec or of what it holds gives the key away, and images carry only its id."""
    shown = repr(codec) + str(vars(codec)) + repr(vars(codec._engine))
    assert KEY.hex() not in shown
    assert repr(KEY) not in shown
    assert KEY not in encoded(codec, plain_image()).tobytes()
    assert codec.key_id not in KEY
