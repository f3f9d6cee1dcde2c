"""A slab is one mapping: page aligned, zero until written, unchanged by its prefault, safe to close at any moment."""

import sys
import threading
from typing import Any

import numpy as np
import pytest

from kvcache_factory.block.spec import PAGE
from kvcache_factory.errors import CapacityError, ClosedError
from kvcache_factory.memory import Slab
from kvcache_factory.memory import slab as slab_module


def test_slots_are_rows_of_one_page_aligned_mapping() -> None:
    """Addresses are base plus slot times size; what is written through an address is seen in the view."""
    slab = Slab(4, 2 * PAGE)
    assert slab.base % PAGE == 0
    assert slab.address([3, 0]).tolist() == [slab.base + 6 * PAGE, slab.base]
    assert slab.address([3, 0]).dtype == np.uint64
    assert slab.view.shape == (4, 2 * PAGE)
    assert slab.view.ctypes.data == slab.base
    assert not slab.view.any()
    slab.close()


@pytest.mark.parametrize("bad", [-1, 4])
def test_a_slot_that_is_not_there_has_no_address(bad: int) -> None:
    """Wrong slot numbers are misuse."""
    with pytest.raises(AssertionError, match="out of range"):
        Slab(4, PAGE).address([0, bad])


@pytest.mark.parametrize(("slots", "size"), [(0, PAGE), (-1, PAGE), (4, 0), (4, -PAGE)])
def test_a_slab_without_room_is_refused(slots: int, size: int) -> None:
    """The message tells to give the tier more."""
    with pytest.raises(CapacityError, match="larger size"):
        Slab(slots, size)


def test_memory_that_the_system_refuses_is_a_capacity_error() -> None:
    """More than the address space holds: the message says how much was asked for and what to do."""
    with pytest.raises(CapacityError, match="smaller size_gb"):
        Slab(1 << 30, 1 << 30)


def test_the_prefault_touches_everything_and_changes_nothing() -> None:
    """Slots written while the job runs keep their bytes; the share ends at one."""
    slab = Slab(64, 1 << 20)
    assert slab.prefaulted == 0.0
    slab.prefault_in_background()
    for slot in range(64):
        slab.view[slot, ::4096] = slot + 1
    job = slab._prefault
    assert job is not None
    job._thread.join()
    assert slab.prefaulted == 1.0
    assert all((slab.view[slot, ::4096] == slot + 1).all() for slot in range(64))
    slab.close()


@pytest.mark.parametrize("advice", ["missing", "refused"])
def test_where_populating_is_not_possible_pages_are_read_instead(advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off Linux, and on kernels that refuse the advice, the job still ends and still alters nothing."""
    monkeypatch.setattr(slab_module, "_libc_madvise", lambda: None if advice == "missing" else lambda *_: -1)
    slab = Slab(8, 4 << 20)
    slab.view[:] = 9
    slab.prefault_in_background()
    assert slab._prefault is not None
    slab._prefault._thread.join()
    assert slab.prefaulted == 1.0
    assert (slab.view == 9).all()


def test_without_huge_page_advice_a_slab_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems that do not name the advice get ordinary pages."""
    monkeypatch.delattr(slab_module.mmap, "MADV_HUGEPAGE", raising=False)
    assert not Slab(1, PAGE).huge_pages
    assert not Slab(1, PAGE, huge_pages=False).huge_pages


def test_closing_waits_for_the_piece_in_progress_and_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job owns its memory until it has ended: close() returns after it, not before, and a second close is free."""
    inside, go_on = threading.Event(), threading.Event()
    pieces: list[int] = []

    def slow(_: Any, piece: Any) -> bool:
        pieces.append(len(piece))
        inside.set()
        go_on.wait()
        piece[::PAGE].max()  # would crash if the mapping were gone
        return True

    monkeypatch.setattr(slab_module, "_libc_madvise", lambda: slow)
    monkeypatch.setattr(slab_module, "_populate", slow)
    slab = Slab(4, slab_module._PIECE)
    slab.prefault_in_background()
    inside.wait()
    closer = threading.Thread(target=slab.close)
    closer.start()
    job = slab._prefault
    assert job is not None
    job.stopping.wait()
    assert closer.is_alive()
    go_on.set()
    closer.join()
    assert len(pieces) == 1
    slab.close()
    slab.prefault_in_background()  # after close nothing starts
    with pytest.raises(ClosedError):
        _ = slab.view


def test_a_view_that_is_still_held_outlives_the_slab() -> None:
    """Closing never pulls memory from under an array."""
    slab = Slab(2, PAGE)
    view = slab.view
    view[:] = 3
    slab.close()
    assert (view == 3).all()


def test_a_forgotten_slab_ends_its_prefault() -> None:
    """Without close(), dropping the last reference stops the job."""
    slab = Slab(512, slab_module._PIECE // 16)
    slab.prefault_in_background()
    job = slab._prefault
    assert job is not None
    assert sys.getrefcount(slab) == 2
    del slab
    job.stopping.wait()
    job._thread.join()
