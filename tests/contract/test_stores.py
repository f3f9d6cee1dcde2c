"""The built-in stores pass the shipped suite, also behind a wrapper that does nothing."""

from pathlib import Path

from kvcache_factory.store.base import Store
from kvcache_factory.store.memory import MemoryStore
from kvcache_factory.testing import FaultyStore, StoreTests


class TestHostMemory(StoreTests):
    """Slot images in host DRAM."""

    def make_store(self, directory: Path) -> Store:
        return MemoryStore(huge_pages=False)


class TestDeviceMemory(StoreTests):
    """Payloads on a torch device."""

    def make_store(self, directory: Path) -> Store:
        return MemoryStore("cpu")


class TestFaultyWithoutFaults(StoreTests):
    """A wrapper with an empty schedule is the store that it wraps."""

    def make_store(self, directory: Path) -> Store:
        return FaultyStore(MemoryStore(huge_pages=False))
