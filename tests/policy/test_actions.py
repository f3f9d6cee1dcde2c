"""Every target with every action works, or is refused with what is allowed; and a document's example as printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcache_factory import (
    CacheManager,
    CompressionPolicy,
    ConfigError,
    DiskBackend,
    GPUBackend,
    HybridPolicy,
    LFUEvictionPolicy,
    LRUEvictionPolicy,
    SizeAwarePolicy,
)
from kvcache_factory.backend import CPUBackend, HierarchicalBackend
from kvcache_factory.policy.base import ACTIONS, TARGETS, EvictionPolicy
from kvcache_factory.registry import known_policies, make_policy
from kvcache_factory.testing import FakeEngine, sized_level, tiny_identity, tiny_spec

SPEC = tiny_spec()
ABOVE = {"gpu": ("cpu", "disk"), "cpu": ("disk",), "disk": (), None: ("cpu", "disk"), "session": ("cpu", "disk")}
"""Kinds of the levels below those that a target means, in a hierarchy of all three."""
NEEDS: dict[str, Any] = {"hybrid": {"policies": ["lru", "fifo"]}}


def three_levels(tmp_path: Path) -> HierarchicalBackend:
    """Twelve blocks on a device, sixteen in memory, plenty on disk."""
    disk = DiskBackend(str(tmp_path), size_gb=4 / 1024, segment_mb=1)
    return HierarchicalBackend([sized_level(12, SPEC, device=True), sized_level(16, SPEC), disk])


def used(manager: CacheManager, policy: EvictionPolicy) -> list[int]:
    """Store and read back; blocks of each prompt that came back right."""
    with manager:
        space, engine = manager.register(SPEC, tiny_identity(SPEC)), FakeEngine(SPEC, 32)
        found = []
        for number in range(6):
            chain = space.chain(range(1000 * number, 1000 * number + 16))
            space.save(chain, engine.region, engine.compute(chain))
            assert manager.wait(60)
        for number in range(6):
            chain = space.chain(range(1000 * number, 1000 * number + 16))
            match = space.match(chain, "r")
            engine.erase()
            count = space.load(match, engine.region, engine.positions(match.blocks))
            space.release("r")
            assert engine.versions(chain, count, (0,)) == [0] * count
            found.append(count)
            assert manager.wait(60)
        assert manager.check() == []
        return found


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("target", [None, *TARGETS])
@pytest.mark.parametrize("name", ["lru", "size_aware", "s3fifo"])
def test_every_combination_works_or_says_what_is_allowed(tmp_path: Path, name: str, target: Any, action: Any) -> None:
    """On a device, memory and a disk, with room for everything below."""
    policy = make_policy(name, target=target, action=action)
    works = {"evict": True, "compress": target != "disk"}  # int8 gives back what the fake engine's blocks hold
    if works.get(action, action.removeprefix("swap_to_") in ABOVE[target]):
        assert used(CacheManager(three_levels(tmp_path), policy), policy) == [4] * 6
        return
    with pytest.raises(ConfigError, match="the backend has gpu, cpu, disk"):
        CacheManager(three_levels(tmp_path), policy)


@pytest.mark.parametrize("name", sorted(known_policies()))
def test_every_policy_takes_cap_target_and_action(name: str) -> None:
    """And says them again."""
    given: Any = {"max_size_gb": 1.5, "target": "session", "action": "swap_to_disk"}
    policy = make_policy(name, **given, **NEEDS.get(name, {}))
    assert given.items() <= policy.options().items()
    with pytest.raises(ConfigError, match="gpu, cpu, disk, session"):
        make_policy(name, target="tpu", **NEEDS.get(name, {}))
    with pytest.raises(ConfigError, match="evict, swap_to_cpu, swap_to_disk, compress"):
        make_policy(name, action="burn", **NEEDS.get(name, {}))


def test_the_documented_managers_are_made_as_printed() -> None:
    """Part 4.4, with the device that this machine has; both are used afterwards."""
    DEVICE = "cpu"
    # 场景A：技术问答
    tech_qna_cache_manager = CacheManager(
        backend=GPUBackend(device=DEVICE),
        eviction_policy=LFUEvictionPolicy(max_size_gb=1.5),
        compression_policy=CompressionPolicy(method="int8", threshold_step=50),  # 超过50步之前的缓存进行INT8量化
    )
    # 场景B：创意长文生成
    creative_writing_cache_manager = CacheManager(
        backend=HierarchicalBackend(
            levels=[
                GPUBackend(device=DEVICE, size_gb=1),
                CPUBackend(size_gb=4),
            ]
        ),
        eviction_policy=HybridPolicy(
            [
                SizeAwarePolicy(target="gpu"),
                LRUEvictionPolicy(target="session", action="swap_to_cpu"),
            ]
        ),
    )
    for manager in (tech_qna_cache_manager, creative_writing_cache_manager):
        assert CacheManager.from_config(manager.to_config()).to_config() == manager.to_config()
    assert tech_qna_cache_manager.state()["tiers"][0]["budget_bytes"] == int(1.5 * 2**30)
    tech_qna_cache_manager.close()
    creative_writing_cache_manager.close()


def test_the_documented_policies_work_on_small_levels() -> None:
    """The same policies where memory is short: what the example promises is what happens."""
    first = CacheManager(sized_level(40, SPEC, device=True), LFUEvictionPolicy(max_size_gb=1.5))
    assert used(first, first.policy)[-1] == 4
    policy = HybridPolicy([SizeAwarePolicy(target="gpu"), LRUEvictionPolicy(target="session", action="swap_to_cpu")])
    levels = [GPUBackend(device="cpu", size_gb=0.0002), sized_level(40, SPEC)]
    assert used(CacheManager(HierarchicalBackend(levels), policy), policy) == [4] * 6
