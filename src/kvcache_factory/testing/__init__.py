"""The shipped test kit: what every store, connector and policy, built in or not, has to pass.

Subclass :class:`StoreTests`, :class:`ConnectorTests` or :class:`PolicyTests` in a module that pytest collects, say how
to make the thing under test, and inherit the whole suite.  :class:`FaultyStore` and :class:`FaultyConnector` fail on
schedule, :class:`FakeEngine` is an engine without a model, and ``open_cache`` a fixture that opens caches of a few
blocks.  Needs ``pip install 'kvcache-factory[test]'``.
"""

from __future__ import annotations

import pytest

# The kit's own assertions deserve the same messages as those of a test module.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in ("stores", "connectors", "policies", "forest")))

from .caches import Opener, SmallCache, open_cache, sized_level, small_cache  # noqa: E402
from .connectors import ConnectorTests  # noqa: E402
from .engines import FakeEngine, tiny_identity, tiny_spec  # noqa: E402
from .faults import Fail, Fault, FaultyStore, Flip, Schedule, Short, Slow, at, rate  # noqa: E402
from .faulty_connector import Answer, FaultyConnector, Hang  # noqa: E402
from .forest import Forest  # noqa: E402
from .policies import PolicyTests  # noqa: E402
from .stores import StoreTests  # noqa: E402

__all__ = [
    "Answer",
    "ConnectorTests",
    "Fail",
    "FakeEngine",
    "Fault",
    "FaultyConnector",
    "FaultyStore",
    "Flip",
    "Forest",
    "Hang",
    "Opener",
    "PolicyTests",
    "Schedule",
    "Short",
    "Slow",
    "SmallCache",
    "StoreTests",
    "at",
    "open_cache",
    "rate",
    "sized_level",
    "small_cache",
    "tiny_identity",
    "tiny_spec",
]
