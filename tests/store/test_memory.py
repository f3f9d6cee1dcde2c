"""The memory store's own traits: where its slots are, and what it refuses."""

import gc
import weakref

import numpy as np
import pytest

from kvcache_factory.errors import CapacityError, DeviceError
from kvcache_factory.memory import DeviceSlab, Slab
from kvcache_factory.store.memory import MemoryStore
from kvcache_factory.testing import tiny_spec


def test_host_slots_are_whole_images_and_device_slots_payloads() -> None:
    """In DRAM a slot is what a disk would hold, header first; a device keeps payloads only."""
    spec = tiny_spec()
    host, device = MemoryStore(huge_pages=False), MemoryStore("cpu")
    for store in (host, device):
        store.open(spec, 3)
    assert isinstance(host.memory, Slab)
    assert isinstance(device.memory, DeviceSlab)
    assert (host.payload_offset, device.payload_offset) == (spec.header_bytes, 0)
    assert host.slot_bytes(spec) == spec.slot_bytes > device.slot_bytes(spec)
    for store in (host, device):
        store.close()


@pytest.mark.parametrize("slots", [0, -3])
def test_no_slots_are_no_store(slots: int) -> None:
    """Nothing can be kept in nothing; the store stays closed and usable."""
    store = MemoryStore(huge_pages=False)
    with pytest.raises(CapacityError):
        store.open(tiny_spec(), slots)
    store.open(tiny_spec(), 1)
    store.close()


def test_a_device_that_is_not_there_is_named() -> None:
    """Constructing calls no device; opening does, and says which one is missing."""
    store = MemoryStore("cuda:99")
    with pytest.raises(DeviceError, match="cuda:99"):
        store.open(tiny_spec(), 1)
    store.close()


def test_memory_goes_with_the_store() -> None:
    """After close() nothing keeps the slab: neither the store nor the thread that touches its pages."""
    store = MemoryStore(huge_pages=False)
    store.open(tiny_spec(), 4)
    slab = weakref.ref(store.memory)
    store.close()
    gc.collect()
    assert slab() is None
    assert store.memory is None


def test_misuse_is_an_assertion() -> None:
    """Opening twice, writing to a closed store and slots that do not exist are bugs of the caller."""
    store, source = MemoryStore(huge_pages=False), Slab(1, tiny_spec().payload_bytes, huge_pages=False)
    one = np.zeros(1, np.int32)
    with pytest.raises(AssertionError, match="not open"):
        store.write(one, source, one, 0)
    store.open(tiny_spec(), 1)
    with pytest.raises(AssertionError, match="is open"):
        store.open(tiny_spec(), 1)
    for wrong in (1, -1):
        with pytest.raises(AssertionError, match="out of range"):
            store.write(one + wrong, source, one, 0)
    store.close()
