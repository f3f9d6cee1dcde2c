"""The built-in policies pass the shipped suite."""

from typing import Any

from kvcache_factory.policy.base import EvictionPolicy
from kvcache_factory.policy.order import FIFOEvictionPolicy, LRUEvictionPolicy
from kvcache_factory.testing import PolicyTests


class TestLRU(PolicyTests):
    """Least recently used."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return LRUEvictionPolicy(**options)


class TestFIFO(PolicyTests):
    """First in, first out."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return FIFOEvictionPolicy(**options)
