"""Nothing of a manager grows with the turns that it has served: objects are counted, since time tells nothing here."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from kvcache_factory.load.statistics import BUILT_IN
from kvcache_factory.load.users import Shape, User
from kvcache_factory.testing import Opener, SmallCache, open_cache  # noqa: F401  a fixture

USERS, WINDOW = 8, 150
SHAPE = Shape(vocabulary=4096, context=384, scale=384 / BUILT_IN.context_tokens)


def serve(cache: SmallCache, users: list[User], turns: int, first: int) -> None:
    """What an adapter does for so many turns, with sessions that come and go."""
    space, engine, manager = cache.space, cache.engine, cache.manager
    for turn in range(first, first + turns):
        user = users[turn % len(users)]
        before, question = user.session, user.ask()
        if question.new_session:
            manager.destroy_session(before)
            manager.create_session(user.session, labels={"tenant": user.tenant})
        conversation = np.concatenate((question.prompt, np.full(question.answer_tokens, 7)))
        prompt, whole = space.chain(question.prompt), space.chain(conversation[:-1])
        match = space.match(prompt, f"r{turn}", session=user.session)
        positions = engine.positions(min(whole.num_blocks, 32))
        space.load(match, engine.region, positions[: match.blocks])
        space.save(whole, engine.region, positions, session=user.session)
        space.release(f"r{turn}")
        user.heard(conversation)


@pytest.mark.parametrize("blocks", [(150,), (40, 200)])
def test_a_manager_has_no_more_objects_after_more_turns(open_cache: Opener, blocks: tuple[int, ...]) -> None:  # noqa: F811
    """Once everything that there is room for is there: sessions, evictions, write-behind and metrics included."""
    cache = open_cache(*blocks)
    users = [User(number, BUILT_IN, SHAPE, 1) for number in range(USERS)]
    counted = []
    for window in range(5):
        serve(cache, users, WINDOW, window * WINDOW)
        cache.manager.wait()
        cache.manager.state()
        gc.collect()
        counted.append(sys.getallocatedblocks())
    assert cache.manager.state()["tiers"][-1]["held_blocks"] > 100
    assert counted[-1] - counted[1] < WINDOW, counted  # an object a turn would be three times as much
