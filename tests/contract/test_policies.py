"""The built-in policies pass the shipped suite."""

from typing import Any

from kvcache_factory.policy.adaptive import AdaptivePolicy
from kvcache_factory.policy.arc import ARCEvictionPolicy, MQEvictionPolicy
from kvcache_factory.policy.base import EvictionPolicy
from kvcache_factory.policy.gre import GREEvictionPolicy
from kvcache_factory.policy.hybrid import HybridPolicy
from kvcache_factory.policy.order import FIFOEvictionPolicy, LFUEvictionPolicy, LRUEvictionPolicy, TTLEvictionPolicy
from kvcache_factory.policy.s3fifo import S3FIFOEvictionPolicy, SIEVEEvictionPolicy
from kvcache_factory.policy.scored import GDSFEvictionPolicy, HeuristicEvictionPolicy
from kvcache_factory.policy.sessions import WholeSessions
from kvcache_factory.policy.size import SizeAwarePolicy
from kvcache_factory.testing import PolicyTests


class TestLRU(PolicyTests):
    """Least recently used."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return LRUEvictionPolicy(**options)


class TestFIFO(PolicyTests):
    """First in, first out."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return FIFOEvictionPolicy(**options)


class TestLFU(PolicyTests):
    """Least frequently used."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return LFUEvictionPolicy(**options)


class TestTTL(PolicyTests):
    """Time to live."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return TTLEvictionPolicy(**options)


class TestS3FIFO(PolicyTests):
    """Small and main queue."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return S3FIFOEvictionPolicy(**options)


class TestS3FIFOOfOneUse(PolicyTests):
    """Promotion by the first use."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return S3FIFOEvictionPolicy(threshold=1, small_ratio=0.3, **options)


class TestSIEVE(PolicyTests):
    """A hand over one queue."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return SIEVEEvictionPolicy(**options)


class TestARC(PolicyTests):
    """Adaptive replacement."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return ARCEvictionPolicy(**options)


class TestMQ(PolicyTests):
    """Multi-queue."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return MQEvictionPolicy(**options)


class TestMQOfShortLives(PolicyTests):
    """Rows descend often."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return MQEvictionPolicy(lifetime=0.5, **options)


class TestGRE(PolicyTests):
    """By Gittins index."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return GREEvictionPolicy(**options)


class TestGDSF(PolicyTests):
    """Greedy-dual by uses."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return GDSFEvictionPolicy(**options)


class TestGDSFByDepth(PolicyTests):
    """Greedy-dual by what a miss costs."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return GDSFEvictionPolicy(cost="depth", **options)


class TestHeuristic(PolicyTests):
    """By importance."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return HeuristicEvictionPolicy(**options)


class TestSizeAware(PolicyTests):
    """Largest run first."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return SizeAwarePolicy(**options)


class TestSizeAwareGDSF(PolicyTests):
    """Greedy-dual over runs."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return SizeAwarePolicy(mode="gdsf", **options)


class TestHybrid(PolicyTests):
    """One that evicts, one that swaps."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return HybridPolicy([SizeAwarePolicy(), LRUEvictionPolicy(action="swap_to_cpu")], **options)


class TestHybridOfSessions(PolicyTests):
    """Members about whole sessions, and one that refuses newcomers."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return HybridPolicy([GREEvictionPolicy(), S3FIFOEvictionPolicy(target="session")], **options)


class TestAdaptive(PolicyTests):
    """By shadow hits."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return AdaptivePolicy(**options)


class TestWholeSessions(PolicyTests):
    """Leaf-first LRU about whole sessions."""

    def make_policy(self, **options: Any) -> EvictionPolicy:
        return LRUEvictionPolicy(**options) if options else OfSessions(LRUEvictionPolicy())


class OfSessions(WholeSessions):
    """As a manager makes it from `target="session"`."""

    def __init__(self, inner: EvictionPolicy | None = None, **options: Any) -> None:
        super().__init__(inner or LRUEvictionPolicy(**options))

    def clone(self) -> EvictionPolicy:
        return OfSessions(self.inner.clone())
