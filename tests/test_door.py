"""The door: exactly these names, and nothing heavy behind it until a name is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvcache_factory

NOUNS = {
    "ARCEvictionPolicy",
    "AdaptivePolicy",
    "BlockHandle",
    "BlockSpec",
    "CPUBackend",
    "CacheManager",
    "CompressionPolicy",
    "DiskBackend",
    "EvictionPolicy",
    "FIFOEvictionPolicy",
    "GDSFEvictionPolicy",
    "GPUBackend",
    "GREEvictionPolicy",
    "HeuristicEvictionPolicy",
    "HierarchicalBackend",
    "HybridPolicy",
    "LFUEvictionPolicy",
    "LRUEvictionPolicy",
    "MQEvictionPolicy",
    "OffloadingManager",
    "RemoteBackend",
    "S3FIFOEvictionPolicy",
    "SIEVEEvictionPolicy",
    "Session",
    "SessionSettings",
    "SizeAwarePolicy",
    "TTLEvictionPolicy",
}
ERRORS = {
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "FormatError",
    "KVCacheError",
    "LayoutError",
    "MissingDependencyError",
    "SessionError",
    "SessionExistsError",
    "StoreError",
    "TokenError",
    "UnknownSessionError",
    "UnsupportedGenerationError",
}


def test_exactly_these_names_are_public() -> None:
    """A name that is added or lost is a decision, so it is written here too."""
    assert set(kvcache_factory.__all__) == NOUNS | ERRORS | {"__version__"}
    assert len(kvcache_factory.__all__) == len(set(kvcache_factory.__all__))
    assert set(kvcache_factory.__all__) <= set(dir(kvcache_factory))


@pytest.mark.parametrize("name", sorted(NOUNS | ERRORS))
def test_every_name_leads_to_the_thing_of_that_name(name: str) -> None:
    """Each lazy name is found where the door says it is."""
    assert getattr(kvcache_factory, name).__name__ == name


def test_every_error_is_ours() -> None:
    """One `except KVCacheError` catches all that the library raises on purpose."""
    assert all(issubclass(getattr(kvcache_factory, name), kvcache_factory.KVCacheError) for name in ERRORS)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt import fails like that of any module."""
    with pytest.raises(AttributeError, match="CacheManger"):
        kvcache_factory.CacheManger  # noqa: B018


def loaded_after(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has imported after *code*."""
    heavy = "{'torch', 'numpy', 'numba', 'transformers', 'rich', 'click'}"
    script = f"import sys; {code}; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Programs that only might use a cache do not pay for torch, nor even for numpy."""
    assert loaded_after("import kvcache_factory") == set()


def test_describing_a_manager_does_not_import_torch() -> None:
    """Configuration is checked in places where no model will ever run."""
    assert "torch" not in loaded_after(
        "import kvcache_factory as k; "
        "k.CacheManager(backend=k.HierarchicalBackend(levels=[k.GPUBackend(), k.CPUBackend()]), "
        "eviction_policy=k.LRUEvictionPolicy()).close(); k.BlockSpec; k.Session; k.TokenError"
    )


def test_describing_a_manager_starts_no_thread() -> None:
    """Constructing is pure description: threads come with the first model."""
    script = (
        "import threading; from kvcache_factory import CacheManager; m = CacheManager(); n = threading.active_count();"
        "assert n == 1, n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
