"""An identity says whose KV a block is; nothing that differs may look alike."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.block import Identity
from kvcache_factory.errors import ConfigError

FIELDS = ("model", "kv_scales", "lora", "salt", "namespace")
texts = st.text(max_size=4)
identities = st.builds(
    Identity,
    model=st.text(min_size=1, max_size=4),
    kv_dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    block_tokens=st.integers(1, 2**32 - 1),
    kv_scales=texts,
    lora=texts,
    salt=texts,
    namespace=texts,
)


@given(identities, identities)
def test_records_are_equal_exactly_when_identities_are(a: Identity, b: Identity) -> None:
    """Two identities share a record, and so keys, only if every part is the same."""
    assert (a == b) == (a.record() == b.record()) == (a.digest == b.digest)


def test_text_cannot_move_from_one_part_to_the_next() -> None:
    """("ab", "c") and ("a", "bc") are two identities: every part carries its length."""
    for first, second in itertools.combinations(FIELDS[1:], 2):
        a = Identity(model="m", kv_dtype="float32", block_tokens=4, **{first: "ab", second: "c"})
        b = Identity(model="m", kv_dtype="float32", block_tokens=4, **{first: "a", second: "bc"})
        assert a.digest != b.digest
    assert (
        Identity(model="m\0", kv_dtype="float32", block_tokens=4).digest
        != Identity(model="m", kv_dtype="float32", block_tokens=4, kv_scales="\0").digest
    )


def test_spellings_of_one_dtype_are_one_identity() -> None:
    """Engines name dtypes differently and still share."""
    digests = {Identity(model="m", kv_dtype=d, block_tokens=4).digest for d in ("bf16", "bfloat16", "torch.bfloat16")}
    assert len(digests) == 1


def test_a_salt_is_not_shown() -> None:
    """A salt in a log would undo what it is for."""
    shown = repr(Identity(model="m", kv_dtype="bf16", block_tokens=4, salt="secret"))
    assert "secret" not in shown
    assert "***" in shown


def test_an_identity_is_a_value() -> None:
    """Frozen, hashable, and the digest does not depend on when it was asked for."""
    a, b = (Identity(model="m", kv_dtype="bf16", block_tokens=4) for _ in range(2))
    assert a.digest == b.digest
    assert len({a, b}) == 1
    with pytest.raises(AttributeError):
        a.model = "n"  # type: ignore[misc]
    salted = msgspec.structs.replace(a, salt="s")
    assert salted.digest != a.digest
    assert msgspec.json.decode(msgspec.json.encode(a), type=Identity).digest == a.digest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"salt": 7}, "salt"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": True}, "block_tokens"),
        ({"block_tokens": 16.0}, "block_tokens"),
        ({"kv_dtype": "int3"}, "int3"),
    ],
)
def test_impossible_identities_are_refused(change: dict[str, Any], says: str) -> None:
    """The error names the part that cannot be."""
    with pytest.raises(ConfigError, match=says):
        Identity(**{"model": "m", "kv_dtype": "bf16", "block_tokens": 4, **change})
