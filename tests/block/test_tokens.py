"""Token ids come as lists, arrays and tensors of any integer type, and mean the same thing in all of them."""

from __future__ import annotations

from collections import UserList
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory.block import Identity, KeyChain, normalise_tokens
from kvcache_factory.errors import TokenError

INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64)


def holding(tokens: list[int]) -> list[Any]:
    """The same tokens in every container that can hold them."""
    largest = max(tokens, default=0)
    arrays = [np.array(tokens, kind) for kind in INTEGERS if largest <= np.iinfo(kind).max]
    tensors = [torch.from_numpy(array) for array in arrays if array.dtype.kind == "i"]
    swapped = np.array(tokens, ">i8")
    strided = np.repeat(np.array(tokens, np.int64), 2)[::2]
    loose = [np.int64(t) for t in tokens]
    return [tokens, tuple(tokens), UserList(tokens), loose, *arrays, *tensors, swapped, strided]


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 127), max_size=40))
def test_any_integer_type_gives_the_same_tokens_and_keys(tokens: list[int]) -> None:
    """int64 and int32 prompts share blocks: what a container is never reaches the key."""
    identity = Identity(model="m", kv_dtype="bfloat16", block_tokens=4)
    expected = KeyChain(identity)
    expected.extend(tokens)
    for same in holding(tokens):
        ids = normalise_tokens(same)
        assert ids.dtype == np.uint32
        assert ids.tolist() == tokens
        chain = KeyChain(identity)
        chain.extend(same)
        assert chain.keys.tobytes() == expected.keys.tobytes()


def test_small_integer_types_hold_every_value_they_can() -> None:
    """The range check of a wide type does not overflow in a narrow one."""
    for kind in INTEGERS:
        top = min(int(np.iinfo(kind).max), 2**32 - 1)
        assert normalise_tokens(np.array([0, 1, top], kind)).tolist() == [0, 1, top]
    assert normalise_tokens(range(5, 8)).tolist() == [5, 6, 7]
    assert normalise_tokens(torch.empty(0, dtype=torch.int64)).tolist() == []


BAD = {
    "negative in a list": ([5, -1], "token 1 is -1"),
    "too large in a list": ([2**32], "token 0 is 4294967296"),
    "negative in an array": (np.array([5, 6, -7]), "token 2 is -7"),
    "too large in an array": (np.array([1, 2**32], np.int64), "token 1 is 4294967296"),
    "too large and unsigned": (np.array([2**63 + 1], np.uint64), "between 0 and"),
    "negative in a tensor": (torch.tensor([-1]), "token 0 is -1"),
    "floats in a list": ([1, 2.0], "token 1 is 2.0 (float)"),
    "floats in an array": (np.array([1.0]), "array of float64"),
    "floats in a tensor": (torch.tensor([1.0], dtype=torch.bfloat16), "tensor of bfloat16"),
    "booleans in a list": ([3, 1, True], "token 2 is True, a boolean"),
    "False in a list": ([False], "a boolean"),
    "numpy booleans in a list": ([np.True_], "not an integer"),
    "torch booleans in a list": ([torch.tensor(True)], "a boolean"),
    "booleans in an array": (np.array([True]), "array of bool"),
    "booleans in a tensor": (torch.tensor([True]), "tensor of bool"),
    "a batch in a list": ([[1, 2], [3]], "one sequence at a time"),
    "a batch in an array": (np.ones((1, 4), np.int64), "shape [1, 4]"),
    "a batch in a tensor": (torch.ones((2, 4), dtype=torch.int64), "shape [2, 4]"),
    "a scalar array": (np.array(3), "shape []"),
    "a scalar": (3, "not int"),
    "text": ("12", "not str"),
    "bytes": (b"12", "not bytes"),
    "words": (["1"], "token 0 is '1' (str)"),
    "objects in an array": (np.array([1], object), "array of object"),
    "a set": ({1, 2}, "not set"),
    "nothing": (None, "not NoneType"),
    "a tensor without data": (torch.empty(2, dtype=torch.int64, device="meta"), "cannot be read"),
}


@pytest.mark.parametrize(("tokens", "says"), BAD.values(), ids=BAD.keys())
def test_what_is_not_a_sequence_of_token_ids_is_refused(tokens: Any, says: str) -> None:
    """The error says which token, what it is, and what is allowed; and the chain is as it was."""
    with pytest.raises(TokenError) as error:
        normalise_tokens(tokens)
    assert says in str(error.value)
    chain = KeyChain(Identity(model="m", kv_dtype="bfloat16", block_tokens=2))
    chain.extend([1, 2, 3])
    for act in (chain.extend, chain.sync):
        with pytest.raises(TokenError):
            act(tokens)
    assert chain.tokens.tolist() == [1, 2, 3]


def test_an_error_stays_short_when_the_tokens_are_not() -> None:
    """A batch of long prompts is not printed back."""
    with pytest.raises(TokenError) as error:
        normalise_tokens([list(range(100_000))])
    assert len(str(error.value)) < 200
