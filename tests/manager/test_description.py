"""A manager is a description until it is used, and can be turned into data and back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcache_factory import (
    CacheManager,
    CapacityError,
    ClosedError,
    ConfigError,
    CPUBackend,
    DeviceError,
    FIFOEvictionPolicy,
    GPUBackend,
    HierarchicalBackend,
    LRUEvictionPolicy,
)
from kvcache_factory.backend import GIB
from kvcache_factory.testing import Opener, sized_level, tiny_identity, tiny_spec

PURE = """
import sys, threading
import kvcache_factory as k
names = k.CacheManager, k.HierarchicalBackend, k.GPUBackend, k.CPUBackend, k.LRUEvictionPolicy
before = open("/proc/self/statm").read().split()[0] if sys.platform == "linux" else "0"
manager = k.CacheManager(
    k.HierarchicalBackend([k.GPUBackend(device="no-such-device", size_gb=900), k.CPUBackend(size_gb=90000)]),
    k.LRUEvictionPolicy(),
)
manager.create_session("s")
manager.state(), manager.check(), manager.to_config(), repr(manager)
after = open("/proc/self/statm").read().split()[0] if sys.platform == "linux" else "0"
assert "torch" not in sys.modules, "torch was imported"
assert "numba" not in sys.modules, "numba was imported"
assert threading.active_count() == 1, threading.enumerate()
assert int(after) - int(before) < 64 * 256, f"{int(after) - int(before)} pages were reserved"
manager.close()
"""


def test_constructing_allocates_nothing_and_starts_nothing() -> None:
    """90 TB on a device that is not there: fine, as long as nobody opens it."""
    done = subprocess.run([sys.executable, "-c", PURE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def budgets(manager: CacheManager) -> list[float]:
    """Bytes of each tier in GiB."""
    return [tier["budget_bytes"] / GIB for tier in manager.state()["tiers"]]


@pytest.mark.parametrize(
    ("size", "cap", "expected"),
    [(None, None, 10), (4, None, 4), (None, 3, 3), (4, 3, 3), (3, 4, 3), (0.5, 10, 0.5)],
)
def test_the_smaller_cap_wins_and_ten_is_the_default(size: float | None, cap: float | None, expected: float) -> None:
    """The backend's size_gb and the policy's max_size_gb are both caps, in GiB."""
    for backend in (
        CPUBackend(size_gb=size),
        GPUBackend(size_gb=size),
        HierarchicalBackend([CPUBackend(size_gb=size)]),
    ):
        assert budgets(CacheManager(backend, LRUEvictionPolicy(max_size_gb=cap))) == [expected]


def test_a_cap_over_several_levels_is_cut_from_the_slowest() -> None:
    """max_size_gb is a cap on everything that the manager keeps."""
    levels = HierarchicalBackend([GPUBackend(size_gb=2), CPUBackend(size_gb=8)])
    assert budgets(CacheManager(levels)) == [2, 8]
    assert budgets(CacheManager(levels, LRUEvictionPolicy(max_size_gb=5))) == [2, 3]
    with pytest.raises(CapacityError, match="max_size_gb"):
        CacheManager(levels, LRUEvictionPolicy(max_size_gb=2))


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf"), "4", True])
def test_sizes_that_are_none_are_refused(size: float) -> None:
    """Zero, negative, endless and other non-sizes say so at once, by name."""
    for make in (
        lambda: CPUBackend(size_gb=size),
        lambda: GPUBackend(size_gb=size),
        lambda: LRUEvictionPolicy(max_size_gb=size),
    ):
        with pytest.raises(CapacityError, match="above 0"):
            make()


def test_a_size_too_small_for_one_block_says_how_much_is_needed() -> None:
    """The error comes when the first model is known, names the need, and does not use the manager up."""
    manager = CacheManager(CPUBackend(size_gb=1 / GIB))
    with pytest.raises(CapacityError, match="give it at least"):
        manager.register(tiny_spec(), tiny_identity(tiny_spec()))
    assert manager.state()["open"] is False
    manager.close()


def test_a_device_that_is_not_there_is_an_error_at_registration_and_leaves_nothing_open() -> None:
    """Typed, by name; the levels that could be opened are closed again."""
    manager = CacheManager(HierarchicalBackend([sized_level(4, tiny_spec()), GPUBackend(device="cuda:77")]))
    for _ in range(2):
        with pytest.raises(DeviceError, match="cuda:77"):
            manager.register(tiny_spec(), tiny_identity(tiny_spec()))
    assert not any(tier.is_open for tier in manager._chain.tiers)
    manager.close()


@pytest.mark.parametrize(
    "manager",
    [
        CacheManager(),
        CacheManager(GPUBackend(device="cpu", size_gb=1), FIFOEvictionPolicy(max_size_gb=2), enable_metrics=True),
        CacheManager(
            HierarchicalBackend([GPUBackend(), CPUBackend(size_gb=3, huge_pages=False)], demote_at=0.8, demote_to=0.5),
            name="n",
            integrity="sample",
            key_builder="RAW",
            lease_max_age_s=5,
            io_threads=3,
        ),
    ],
    ids=["default", "device", "levels"],
)
def test_a_manager_goes_through_json_and_back(manager: CacheManager) -> None:
    """to_config() is plain data, and from_config() makes the same description of it."""
    data = json.loads(json.dumps(manager.to_config()))
    again = CacheManager.from_config(data)
    assert again.config == manager.config
    assert again.to_config() == data


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ({"nmae": "x"}, "nmae"),
        ({"backend": {"type": "cpu", "size": 3}}, r"size.*\$\.backend"),
        ({"backend": {"type": "tape"}}, "tape"),
        ({"io_threads": "many"}, r"\$\.io_threads"),
        ({"integrity": "maybe"}, "integrity"),
        ({"key_builder": "MD5"}, "key_builder"),
        ({"backend": {"type": "hierarchical", "levels": []}}, "level"),
        ({"eviction_policy": {"name": "lur"}}, "lru"),
        ({"eviction_policy": {"name": "lru", "options": {"size": 3}}}, "size"),
    ],
)
def test_a_knob_that_does_not_exist_is_an_error_that_names_it(data: dict[str, object], path: str) -> None:
    """No setting is silently ignored; the message says where."""
    with pytest.raises(ConfigError, match=path):
        CacheManager.from_config(data)


def test_a_second_geometry_needs_a_manager_of_its_own(open_cache: Opener) -> None:
    """Models of equal blocks share a manager, others are told why not; the first is not disturbed."""
    cache = open_cache(16)
    cache.save(list(range(8)))
    for other in (tiny_spec(block_tokens=8), tiny_spec(num_layers=3)):
        with pytest.raises(ConfigError, match="needs its own"):
            cache.manager.register(other, tiny_identity(other))
    second = cache.manager.register(tiny_spec(), tiny_identity(tiny_spec(), "second-model"))
    assert second.match(second.chain(list(range(8))), "r").blocks == 0
    assert cache.load(list(range(8))) == [0, 0]


def test_spec_and_identity_must_be_of_one_model(open_cache: Opener) -> None:
    """A mix-up of two models is found at registration."""
    with pytest.raises(ConfigError, match="both from the same model"):
        open_cache(4).manager.register(tiny_spec(8), tiny_identity(tiny_spec(4)))


def test_wrong_parts_are_refused_by_name() -> None:
    """Each argument of the constructor says what it takes."""
    for arguments in (
        {"backend": "cpu"},
        {"lease_max_age_s": "long"},
        {"profiling_server": 5},
        {"sessions": {"ttl_s": 5}},
        {"eviction_policy": "lru"},
        {"compression_policy": object()},
        {"io_threads": -1},
    ):
        with pytest.raises(ConfigError, match=next(iter(arguments))):
            CacheManager(**arguments)  # type: ignore[arg-type]


def test_a_closed_manager_answers_with_misses_and_takes_no_models(open_cache: Opener) -> None:
    """close() is idempotent; in the engine's path it is a miss, for a person it is an error."""
    cache = open_cache(16)
    tokens = list(range(8))
    cache.save(tokens)
    match = cache.space.match(cache.space.chain(tokens), "r")
    cache.manager.close()
    cache.manager.close()
    positions = cache.engine.positions(2)
    assert cache.space.load(match, cache.engine.region, positions) == 0
    assert cache.space.match(cache.space.chain(tokens), "s").reason == "closed"
    assert cache.space.save(cache.space.chain(tokens), cache.engine.region, positions) == 0
    assert cache.space.peek(cache.space.chain(tokens)) == 0
    assert cache.space.drop(cache.space.chain(tokens)) == 0
    assert cache.space.prefetch(cache.space.chain(tokens)) is None
    assert cache.space.release("r") is False
    assert cache.manager.evict(3) == 0
    assert cache.manager.destroy_session("nobody") is False
    assert cache.manager.check() == []
    cache.manager.reset()
    with pytest.raises(ClosedError):
        cache.manager.register(tiny_spec(), tiny_identity(tiny_spec()))


def test_a_manager_lives_as_long_as_its_key_space() -> None:
    """Whoever keeps only the key space must not lose the memory under it; afterwards it goes by itself."""
    spec = tiny_spec()
    manager = CacheManager(sized_level(8, spec))
    space, chain = manager.register(spec, tiny_identity(spec)), manager._chain
    del manager
    assert chain.is_open
    del space
    assert not chain.is_open


def test_the_default_policy_is_the_one_that_the_documentation_names() -> None:
    """Leaf-first LRU: the decision and the figures behind it are in docs/design/0005."""
    docs = Path(__file__).parents[2] / "docs"
    assert repr(CacheManager().policy) == "LRUEvictionPolicy()"
    assert "The default is `LRUEvictionPolicy()`" in (docs / "design" / "0005-the-default-policy.md").read_text()
    assert "| `eviction_policy` | `LRUEvictionPolicy()` |" in (docs / "configuration.md").read_text()
    assert "The default is leaf-first LRU" in (docs / "policies.md").read_text()
