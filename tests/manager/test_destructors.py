"""Destructors run wherever they like, also in the middle of a change to an index or a session."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache_factory import CacheManager, CPUBackend
from kvcache_factory.engine.inside import HERE
from kvcache_factory.engine.ledger import Entry, Event
from kvcache_factory.testing import FakeEngine, tiny_identity, tiny_spec


def test_a_session_that_ends_inside_a_verb_ends_right_after_it() -> None:
    """destroy_session() in the middle of another verb waits for that verb's end, and nothing is half changed."""
    spec = tiny_spec()
    manager = CacheManager(CPUBackend(size_gb=0.01, huge_pages=False))
    space = manager.register(spec, tiny_identity(spec))
    region = FakeEngine(spec).region
    everywhere = region.positions(np.zeros(8, int), np.arange(8) * spec.block_tokens)
    manager.create_session("s")
    chain = space.chain(np.arange(4 * space.block_tokens))
    with manager.use_session("s"):
        assert space.save(chain, region, everywhere) == 4
    HERE.depth += 1
    try:
        assert manager.destroy_session("s")
        assert space.peek(chain) == 4
    finally:
        HERE.depth -= 1
    manager.state()
    assert space.peek(chain) == 0
    assert manager.check() == []
    manager.close()


def test_what_a_destructor_asks_while_counts_are_summed_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads figures has the ledger's lock: work that may want an index's, whose owners count, must not run."""
    manager = CacheManager(CPUBackend(size_gb=0.01, huge_pages=False))
    done: list[str] = []
    add = Entry._add

    def collected(entry: Entry, some: list[tuple[int, int]]) -> None:
        manager._context.soon(lambda: done.append("asked"))
        assert done == []
        add(entry, some)

    manager.ledger.add("cpu", Event.STORED, 1)
    with monkeypatch.context() as patched:
        patched.setattr(Entry, "_add", collected)
        assert manager.ledger.total(Event.STORED).blocks == 1
    assert done == []
    manager.state()
    assert done == ["asked"]
    manager.close()


def test_a_session_forgets_blocks_that_nobody_holds_any_more() -> None:
    """What a session references stays bounded by what is stored, however long the session lives."""
    spec = tiny_spec()
    manager = CacheManager(CPUBackend(size_gb=0.01, huge_pages=False))
    space = manager.register(spec, tiny_identity(spec))
    region = FakeEngine(spec).region
    everywhere = region.positions(np.zeros(8, int), np.arange(8) * spec.block_tokens)
    session = manager.create_session("s")
    session.prune_at = 64
    with manager.use_session("s"):
        for turn in range(40):
            chain = space.chain(np.arange(8 * space.block_tokens) + 1000 * turn)
            assert space.save(chain, region, everywhere) == 8
            space.drop(chain)
    assert len(session.held) <= 4096
    session.prune_at = 64
    with manager.use_session("s"):
        space.save(space.chain(np.arange(8 * space.block_tokens)), region, everywhere)
    assert len(session.held) == 8
    manager.close()
