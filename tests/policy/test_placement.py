"""Targets and actions: who decides in which level, and where things are moved."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_factory import (
    CacheManager,
    CapacityError,
    CompressionPolicy,
    ConfigError,
    CPUBackend,
    DiskBackend,
    FIFOEvictionPolicy,
    GPUBackend,
    GREEvictionPolicy,
    HierarchicalBackend,
    HybridPolicy,
    LFUEvictionPolicy,
    LRUEvictionPolicy,
    SizeAwarePolicy,
)
from kvcache_factory.build import GIB, level_budgets
from kvcache_factory.policy.base import EvictionPolicy
from kvcache_factory.policy.placement import check_placement, policy_at, size_cap_gb, swap_level

KINDS = ["gpu", "cpu", "disk"]


def test_a_policy_decides_in_its_level_and_lru_in_the_others() -> None:
    """A level that no policy is meant for is not left without one."""
    policy = SizeAwarePolicy(target="gpu")
    assert [policy_at(policy, kind).name for kind in KINDS] == ["size_aware", "lru", "lru"]
    assert [policy_at(GREEvictionPolicy(), kind).name for kind in KINDS] == ["gre"] * 3


def test_members_decide_where_they_belong() -> None:
    """Each level gets those whose target it is, or who have none."""
    policy = HybridPolicy([SizeAwarePolicy(target="gpu"), LRUEvictionPolicy(target="session", action="swap_to_cpu")])
    assert [policy_at(policy, kind).name for kind in KINDS] == ["hybrid", "lru", "lru"]
    assert [swap_level(policy, number, KINDS) for number in range(3)] == [1, None, None]
    said = HybridPolicy([LFUEvictionPolicy(), LRUEvictionPolicy(target="cpu")], target="gpu", action="swap_to_disk")
    assert [(member.target, member.action) for member in said.policies] == [
        ("gpu", "swap_to_disk"),
        ("cpu", "swap_to_disk"),
    ]
    assert said.clone().options() == said.options()
    far = HybridPolicy([LRUEvictionPolicy(action="swap_to_disk")])
    assert [swap_level(far, number, KINDS) for number in range(3)] == [2, 2, None]


@pytest.mark.parametrize(
    ("policy", "kinds", "says"),
    [
        (LRUEvictionPolicy(target="disk"), ["gpu", "cpu"], "no such level; the backend has gpu, cpu"),
        (LRUEvictionPolicy(action="swap_to_disk"), ["gpu", "cpu"], "no level of kind disk"),
        (LRUEvictionPolicy(action="swap_to_cpu"), ["cpu", "disk"], "no level of kind cpu"),
        (HybridPolicy([FIFOEvictionPolicy(target="cpu", action="swap_to_cpu")]), KINDS, "no level of kind cpu"),
        (LFUEvictionPolicy(target="disk", action="compress"), KINDS, "only levels in memory"),
        (HybridPolicy([LRUEvictionPolicy()], target="gpu"), ["cpu"], "no such level; the backend has cpu"),
    ],
)
def test_what_a_backend_lacks_is_refused(policy: EvictionPolicy, kinds: list[str], says: str) -> None:
    """A level that is missing is found when the manager is described, not when memory runs out."""
    with pytest.raises(ConfigError, match=says):
        check_placement(policy, kinds)


@pytest.mark.parametrize("wrong", [{"target": "tpu"}, {"action": "swap_to_tape"}, {"target": 3}])
def test_unknown_values_list_what_is_allowed(wrong: dict[str, Any]) -> None:
    """A misspelt target or action says what there is."""
    with pytest.raises(ConfigError, match=r"gpu, cpu, disk, session|evict, swap_to_cpu, swap_to_disk, compress"):
        LRUEvictionPolicy(**wrong)


def test_a_cap_with_a_level_as_target_caps_that_level() -> None:
    """Others cap the memory as a whole, as ever."""
    levels = [GPUBackend(size_gb=4), CPUBackend(size_gb=8)]
    policy = HybridPolicy([SizeAwarePolicy(1.5, target="gpu"), LRUEvictionPolicy(6)])
    caps = [size_cap_gb(policy, kind) for kind in ("gpu", "cpu")]
    assert (size_cap_gb(policy, None), caps) == (6, [1.5, None])
    assert level_budgets(levels, 6, caps) == [int(1.5 * GIB), int(4.5 * GIB)]
    with pytest.raises(CapacityError):
        level_budgets(levels, 1, [None, None])


def test_configurations_of_all_of_it_make_the_trip_through_data(tmp_path: Any) -> None:
    """Nested policies, targets, actions and a compression method."""
    manager = CacheManager(
        backend=HierarchicalBackend(levels=[GPUBackend(), CPUBackend(), DiskBackend(str(tmp_path), size_gb=1)]),
        eviction_policy=HybridPolicy(
            [SizeAwarePolicy(target="gpu", mode="gdsf"), LRUEvictionPolicy(target="session", action="swap_to_disk")]
        ),
        compression_policy=CompressionPolicy(method="int8", threshold_step=50),
    )
    again = CacheManager.from_config(manager.to_config())
    assert again.to_config() == manager.to_config()
    assert again.state()["compression"] == "int8"


def test_compression_is_a_registered_name() -> None:
    """An unknown method is refused, and so is what is no policy."""
    with pytest.raises(ConfigError, match="int8"):
        CompressionPolicy(method="int3")
    with pytest.raises(ConfigError, match="CompressionPolicy"):
        CacheManager(compression_policy="int8")  # type: ignore[arg-type]
