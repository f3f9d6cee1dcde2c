"""The membership JSON: what is read, what is refused, and how slots are spread."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcache_factory import ConfigError, FormatError
from kvcache_factory.cluster.membership import (
    Membership,
    Node,
    SlotRange,
    dump_membership,
    parse_membership,
    ranges_of,
    spread,
)
from kvcache_factory.cluster.placement import SimplePlacement, placement_class

DOCUMENTED = (
    '{"nodes": [{"addr": "10.0.0.1", "port": 12345, "slots": [{"start": 0, "end": 1023}], "x": 1}], "version": 7}'
)


def test_the_documented_membership_is_read_and_written() -> None:
    """`end` is included; every other field of a node is kept for its connector."""
    membership = parse_membership(DOCUMENTED)
    assert membership == Membership((Node("10.0.0.1", 12345, (SlotRange(0, 1023),), (("x", 1),)),), 7)
    assert membership.total_slots == 1024
    assert membership.nodes[0].options == {"x": 1}
    assert json.loads(dump_membership(membership)) == json.loads(DOCUMENTED)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (b"\xff", "cannot be read"),
        ('{"version": 1}', "nodes"),
        ('{"nodes": [{"port": 1}]}', "addr"),
        ('{"nodes": [{"addr": "a", "port": "1"}]}', "port"),
        ('{"nodes": [{"addr": "a", "port": 0}]}', "no address and port"),
        ('{"nodes": [{"addr": "", "port": 1}]}', "no address and port"),
        ('{"nodes": [{"addr": "a", "port": 1, "slots": [{"start": 2, "end": 1}]}]}', "slots 2 to 1"),
        ('{"nodes": [{"addr": "a", "port": 1, "slots": [{"start": -1, "end": 1}]}]}', "slots -1 to 1"),
        ('{"nodes": [{"addr": "a", "port": 1, "slots": [{"start": 0, "end": 99999999999}]}]}', "a:1 has slots"),
        ('{"nodes": [{"addr": "a", "port": 1, "slots": [{"start": 0}]}]}', "end"),
        ('{"nodes": [{"addr": "a", "port": 1}, {"addr": "a", "port": 1}]}', "a:1 twice"),
        (
            '{"nodes": [{"addr": "a", "port": 1, "slots": [{"start": 0, "end": 9}]},'
            ' {"addr": "b", "port": 1, "slots": [{"start": 9, "end": 10}]}]}',
            "slots 9 to 10 of b:1 belong to a:1",
        ),
    ],
)
def test_what_is_no_membership_is_a_format_error(text: str | bytes, message: str) -> None:
    """Broken JSON, missing parts, sizes that would fill memory, and slots with two owners."""
    with pytest.raises(FormatError, match=message):
        parse_membership(text)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_membership_or_a_format_error(text: bytes) -> None:
    """Whoever can write the key cannot do more than make it unreadable."""
    try:
        assert isinstance(parse_membership(text), Membership)
    except FormatError:
        return


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=60), st.integers(0, 8))
def test_slots_are_spread_evenly_with_few_moves(before: list[int], members: int) -> None:
    """All have an owner, none has two more than another, and only what must move moves."""
    owners = np.array(before, np.int32)
    after = spread(owners, members)
    if not members:
        assert (after == -1).all()
        return
    counts = np.bincount(after, minlength=members)
    assert counts.sum() == len(before)
    assert counts.max() - counts.min() <= 1
    kept = np.minimum(np.bincount(owners[(owners >= 0) & (owners < members)], minlength=members), counts).sum()
    assert (after == owners).sum() == kept


@given(st.sets(st.integers(0, 50)))
def test_ranges_say_the_same_slots(slots: set[int]) -> None:
    """Written as ranges and read again, it is the same set, in as few ranges as there are runs."""
    ranges = ranges_of(sorted(slots))
    assert {slot for r in ranges for slot in range(r.start, r.end + 1)} == slots
    assert all(a.end + 1 < b.start for a, b in itertools.pairwise(ranges))


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=20), st.integers(1, 40))
def test_simple_placement_is_hash_modulo_slots(names: list[bytes], total: int) -> None:
    """The rule can be written down in one line, so that other programs can follow it."""
    owned = tuple(Node(f"n{i}", 1, (SlotRange(i, i),)) for i in range(total) if i % 3 or i == total - 1)
    placement = SimplePlacement(Membership(owned))
    slots = [xxhash.xxh64_intdigest(name) % total for name in names]
    expected = [next((i for i, n in enumerate(owned) if n.slots[0].start == slot), -1) for slot in slots]
    assert placement.owners_of(names).tolist() == expected


def test_an_empty_cluster_owns_nothing_and_an_unknown_rule_is_none() -> None:
    """No division by zero slots."""
    assert SimplePlacement(Membership()).owners_of([b"a"]).tolist() == [-1]
    with pytest.raises(ConfigError, match="use SIMPLE"):
        placement_class("RANDOM")
