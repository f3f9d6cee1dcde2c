"""A chain that grows, shrinks and is corrected always has the keys of a chain made from scratch."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcache_factory.block import KEY_BUILDERS, Identity, KeyChain, MediaSpan
from kvcache_factory.block import key as key_module
from kvcache_factory.errors import ConfigError, TokenError

SIZE = 4
ME = Identity(model="m", kv_dtype="bfloat16", block_tokens=SIZE)
builders = pytest.mark.parametrize("builder", KEY_BUILDERS)

tokens_of = st.lists(st.integers(0, 3), max_size=30)
spans = st.builds(MediaSpan, st.integers(0, 25), st.integers(1, 9), st.sampled_from([b"cat", b"dog"]))


def fresh(tokens: Any, builder: str = "ROLLING_HASH", media: Any = (), identity: Identity = ME) -> KeyChain:
    """A chain made in one go."""
    chain = KeyChain(identity, builder=builder, media=media)
    chain.extend(tokens)
    return chain


def names(chain: KeyChain) -> list[bytes]:
    return [chain.name(i) for i in range(chain.num_blocks)]


def same(a: KeyChain, b: KeyChain) -> None:
    """Both chains say the same about everything."""
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.keys.tolist() == b.keys.tolist()
    assert a.extras.tolist() == b.extras.tolist()
    assert names(a) == names(b)


class ChainMachine(RuleBasedStateMachine):
    """extend, truncate and sync in any order, with media, against a chain made from scratch; snapshots never change."""

    @initialize(builder=st.sampled_from(KEY_BUILDERS), media=st.lists(spans, max_size=3))
    def begin(self, builder: str, media: list[MediaSpan]) -> None:
        self.chain = KeyChain(ME, builder=builder, media=media)
        self.media = set(media)
        self.tokens: list[int] = []
        self.snapshots: list[tuple[Any, Any]] = []

    @rule(more=tokens_of)
    def extend(self, more: list[int]) -> None:
        self.tokens += more
        assert self.chain.extend(more) == len(self.tokens) // SIZE

    @rule(more=tokens_of, identifier=st.sampled_from([b"cat", b"dog"]), length=st.integers(1, 9))
    def extend_with_media(self, more: list[int], identifier: bytes, length: int) -> None:
        span = MediaSpan(len(self.tokens), length, identifier)
        self.media.add(span)
        self.tokens += more
        self.chain.extend(more, media=[span])

    @rule(keep=st.integers(0, 40))
    def truncate(self, keep: int) -> None:
        self.tokens = self.tokens[:keep]
        self.chain.truncate(keep)

    @rule(keep=st.integers(0, 40), more=tokens_of)
    def sync(self, keep: int, more: list[int]) -> None:
        before = fresh(self.tokens, self.chain.builder, self.media)
        self.tokens = self.tokens[:keep] + more
        kept = self.chain.sync(self.tokens)
        same_run = [a == b for a, b in zip(names(before), names(self.chain), strict=False)]
        assert kept == [*same_run, False].index(False)

    @rule(more=tokens_of, media=st.lists(spans, max_size=3))
    def sync_with_media(self, more: list[int], media: list[MediaSpan]) -> None:
        before = fresh(self.tokens, self.chain.builder, self.media)
        self.tokens, self.media = self.tokens[:9] + more, set(media)
        kept = self.chain.sync(self.tokens, media=media)
        assert names(before)[:kept] == names(self.chain)[:kept]

    @rule()
    def look(self) -> None:
        for view in (self.chain.tokens, self.chain.keys, self.chain.extras, self.chain.token_blocks):
            self.snapshots.append((view, view.copy()))

    @invariant()
    def equals_a_fresh_chain(self) -> None:
        same(self.chain, fresh(self.tokens, self.chain.builder, self.media))
        assert self.chain.num_tokens == len(self.tokens)
        assert self.chain.token_blocks.tolist() == [
            self.tokens[at : at + SIZE] for at in range(0, len(self.tokens) - SIZE + 1, SIZE)
        ]

    @invariant()
    def snapshots_stay_valid(self) -> None:
        for view, copy in self.snapshots:
            assert np.array_equal(view, copy)


TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = settings(max_examples=60, stateful_step_count=15)


@builders
@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_any_split_gives_the_keys_of_one_go(builder: str, tokens: list[int], cuts: list[int]) -> None:
    """Keys are extended, never recomputed, and come out the same."""
    chain = KeyChain(ME, builder=builder)
    edges = [0, *sorted(cuts), len(tokens)]
    for a, b in pairwise(edges):
        chain.extend(tokens[a:b])
    same(chain, fresh(tokens[: edges[-1]], builder))


@builders
@given(tokens=st.lists(st.integers(0, 3), min_size=8, max_size=40), media=st.lists(spans, max_size=3), data=st.data())
def test_going_back_and_on_gives_the_keys_of_one_go(
    builder: str, tokens: list[int], media: list[MediaSpan], data: st.DataObject
) -> None:
    """A regenerated answer: the chain is cut anywhere, pictures or not, and grows again."""
    chain = fresh(tokens, builder, media)
    chain.truncate(data.draw(st.integers(0, len(tokens))))
    chain.extend(tokens[chain.num_tokens :])
    same(chain, fresh(tokens, builder, media))


@given(st.lists(spans, max_size=4))
def test_a_block_has_extras_exactly_when_one_of_its_tokens_stands_for_media(media: list[MediaSpan]) -> None:
    """A picture that ends with its block does not reach into the next one."""
    covered = {at for span in media for at in range(span.start, span.start + span.length)}
    touched = [not covered.isdisjoint(range(at, at + SIZE)) for at in range(0, 40, SIZE)]
    assert fresh([1] * 40, media=media).extras.any(axis=1).tolist() == touched


@builders
def test_long_prompts_are_hashed_in_runs_without_a_seam(builder: str) -> None:
    """A prompt longer than one internal run has the keys that one block at a time gives."""
    tokens = list(range(SIZE * (2 * key_module._RUN + 3)))
    media = [MediaSpan(SIZE * key_module._RUN - 1, 2, b"on the seam")]
    slow = KeyChain(ME, builder=builder, media=media)
    for at in range(0, len(tokens), SIZE):
        slow.extend(tokens[at : at + SIZE])
    quick = fresh(tokens, builder, media)
    assert quick.keys.tolist() == slow.keys.tolist()
    assert np.flatnonzero(quick.extras.any(axis=1)).tolist() == [key_module._RUN - 1, key_module._RUN]


def test_extending_hashes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of a long conversation costs its own blocks; sync with the grown history costs no more."""
    calls: list[int] = []

    def counting(data: bytes) -> bytes:
        calls.append(len(data))
        return real(data)

    real = key_module.hash128
    monkeypatch.setattr(key_module, "hash128", counting)
    chain = fresh(range(100))
    calls.clear()
    assert chain.extend(range(100, 108)) == 27
    assert len(calls) == 2
    assert chain.sync(range(120)) == 27
    assert len(calls) == 5


def test_what_an_index_remembers_goes_when_blocks_change_and_only_then() -> None:
    """The memo survives growth and changes in the partial block."""
    chain = fresh(range(10))
    chain.memo[7] = "rows"
    chain.extend([1])
    chain.truncate(9)
    chain.sync([*range(8), 5, 6, 7])
    assert chain.memo == {7: "rows"}
    chain.sync([*range(7), 9, 9])
    assert chain.memo == {}


def test_three_builders_have_three_key_spaces() -> None:
    """The same tokens under two builders never meet in an index, from the first block on."""
    keys = [key for builder in KEY_BUILDERS for key in map(bytes, fresh(range(40), builder).keys.view(np.uint8))]
    assert len(set(keys)) == 30


OTHERS = {
    "model": Identity(model="n", kv_dtype="bfloat16", block_tokens=SIZE),
    "dtype": Identity(model="m", kv_dtype="float16", block_tokens=SIZE),
    "scales": Identity(model="m", kv_dtype="bfloat16", block_tokens=SIZE, kv_scales="s"),
    "lora": Identity(model="m", kv_dtype="bfloat16", block_tokens=SIZE, lora="s"),
    "salt": Identity(model="m", kv_dtype="bfloat16", block_tokens=SIZE, salt="s"),
    "namespace": Identity(model="m", kv_dtype="bfloat16", block_tokens=SIZE, namespace="s"),
}


@builders
def test_identities_never_share_a_key(builder: str) -> None:
    """Model, dtype, scales, adapter, salt and namespace each keep the same tokens apart, and from each other."""
    chains = [fresh(range(20), builder, identity=identity) for identity in (ME, *OTHERS.values())]
    keys = {chain.key_bytes(i) for chain in chains for i in range(-1, 5)}
    assert len(keys) == 6 * len(chains)
    assert len({name for chain in chains for name in names(chain)}) == 5 * len(chains)


MEDIA = {
    "none": [],
    "a cat": [MediaSpan(5, 6, b"cat")],
    "a dog": [MediaSpan(5, 6, b"dog")],
    "a cat one token later": [MediaSpan(6, 6, b"cat")],
    "a longer cat": [MediaSpan(5, 7, b"cat")],
    "two halves of a cat": [MediaSpan(5, 3, b"cat"), MediaSpan(8, 3, b"cat")],
    "cat and dog": [MediaSpan(5, 6, b"cat"), MediaSpan(5, 6, b"dog")],
    "a longer name": [MediaSpan(5, 6, b"catdog")],
}


@builders
def test_pictures_never_share_a_key_though_their_tokens_are_equal(builder: str) -> None:
    """Placeholder tokens are all alike; content, place and extent of the picture tell the blocks apart."""
    chains = {what: fresh([1] * 20, builder, media) for what, media in MEDIA.items()}
    first = {chain.key_bytes(0) for chain in chains.values()}
    later = [chain.key_bytes(i) for chain in chains.values() for i in range(1, 5)]
    assert len(first) == 1  # before the picture the prompts are one
    assert len(set(later)) == len(later)
    assert len({name for chain in chains.values() for name in names(chain)[1:]}) == len(later)
    assert len({chain.extras[1].tobytes() for chain in chains.values()}) == len(chains)


@builders
def test_the_digest_of_a_picture_cannot_pose_as_tokens(builder: str) -> None:
    """Tokens that spell an extras digest do not lead to the key of the picture's prompt."""
    picture = fresh([1] * 12, builder, [MediaSpan(0, 4, b"cat")])
    spelled = np.frombuffer(picture.extras[0].tobytes(), np.uint32).tolist()
    forged = fresh([1, 1, 1, 1, *spelled, *[1] * 8], builder)
    assert not set(names(picture)) & set(names(forged))


def test_media_may_be_stated_late_but_not_too_late() -> None:
    """A picture that touches a block which has its key already would change the past: sync, do not extend."""
    chain = fresh(range(6))
    chain.extend(range(6, 9), media=[MediaSpan(5, 2, b"cat")])
    same(chain, fresh(range(9), media=[MediaSpan(5, 2, b"cat")]))
    with pytest.raises(ConfigError, match="sync"):
        chain.extend([1], media=[MediaSpan(7, 2, b"dog")])
    assert chain.num_tokens == 9
    assert chain.sync(range(9), media=[MediaSpan(7, 2, b"dog")]) == 1
    same(chain, fresh(range(9), media=[MediaSpan(7, 2, b"dog")]))


def test_truncating_does_not_forget_a_picture() -> None:
    """Forgetting it would give the same placeholder tokens the key of a prompt without a picture."""
    chain = fresh([1] * 12, media=[MediaSpan(4, 4, b"cat")])
    chain.truncate(2)
    chain.extend([1] * 10)
    same(chain, fresh([1] * 12, media=[MediaSpan(4, 4, b"cat")]))


@builders
def test_collisions_can_be_planted_in_one_place(builder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing hash128 makes keys collide; tokens and extras still tell the blocks apart."""
    monkeypatch.setattr(key_module, "hash128", lambda data: bytes(16))
    a, b = fresh([1] * 8, builder, [MediaSpan(0, 4, b"cat")]), fresh([2] * 8, builder, [MediaSpan(0, 4, b"dog")])
    assert a.keys.tolist() == b.keys.tolist()
    assert a.token_blocks.tolist() != b.token_blocks.tolist()
    assert a.extras[0].tolist() != b.extras[0].tolist()


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_processes_agree_whatever_their_hash_seed(seed: str) -> None:
    """PYTHONHASHSEED differs between the processes of a fleet; keys do not."""
    code = (
        "from kvcache_factory.block import *\n"
        "me = Identity(model='m', kv_dtype='bf16', block_tokens=4)\n"
        "c = KeyChain(me, media=[MediaSpan(2, 3, b'x'), MediaSpan(1, 3, b'y')])\n"
        "c.extend(range(8)); print(c.key_bytes(1).hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    here = fresh(range(8), media=[MediaSpan(2, 3, b"x"), MediaSpan(1, 3, b"y")])
    assert done.stdout.strip() == here.key_bytes(1).hex(), done.stderr


def test_views_of_tokens_are_read_only() -> None:
    """A caller cannot change the record that hits are verified against."""
    chain = fresh(range(8))
    for view in (chain.tokens, chain.token_blocks):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    assert chain.keys.flags.c_contiguous
    assert np.shares_memory(chain.tokens, chain.token_blocks)


def test_the_caller_keeps_its_array() -> None:
    """A chain copies what it is given: an engine reuses its buffers."""
    buffer = np.arange(8, dtype=np.uint32)
    chain = fresh(buffer)
    buffer[:] = 9
    assert chain.tokens.tolist() == list(range(8))


def test_misuse_has_typed_errors() -> None:
    """Unknown builders, impossible spans and negative lengths say what is wrong."""
    with pytest.raises(ConfigError, match="ROLLING_HASH"):
        KeyChain(ME, builder="MD5")
    for start, length, identifier in ((-1, 2, b"x"), (0, 0, b"x"), (0, 1, b"")):
        with pytest.raises(ConfigError, match="media span"):
            MediaSpan(start, length, identifier)
    with pytest.raises(TokenError):
        fresh([1]).truncate(-1)
