"""What people write wrong gets a typed error that says what to do, at the first moment it can be known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcache_factory import CacheManager, CPUBackend, DiskBackend, HierarchicalBackend
from kvcache_factory.errors import CapacityError, ConfigError, UnknownSessionError
from kvcache_factory.testing import tiny_identity, tiny_spec


def test_a_directory_needs_a_size_and_a_path() -> None:
    """A disk level has no default size, and no path holds a null byte."""
    with pytest.raises(CapacityError, match="no default size"):
        DiskBackend("somewhere", size_gb=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="path of a directory"):
        DiskBackend("a\0b", size_gb=1)


def test_two_levels_cannot_share_a_directory(tmp_path: Path) -> None:
    """The same directory under two names would be counted, and written, twice."""
    one, again = DiskBackend(str(tmp_path), size_gb=1), DiskBackend(f"{tmp_path}/../{tmp_path.name}", size_gb=1)
    with pytest.raises(ConfigError, match="same directory"):
        HierarchicalBackend([CPUBackend(size_gb=1), one, again])


def test_a_directory_larger_than_any_index_is_refused(tmp_path: Path) -> None:
    """An absurd size ends as a capacity error, not as whatever numpy says."""
    spec = tiny_spec()
    manager = CacheManager(HierarchicalBackend([CPUBackend(size_gb=0.01), DiskBackend(str(tmp_path), size_gb=1e12)]))
    with pytest.raises(CapacityError):
        manager.register(spec, tiny_identity(spec))
    manager.close()


@pytest.mark.parametrize("name", [5, ""])
def test_a_manager_has_a_name(name: Any) -> None:
    """The name goes into logs and figures."""
    with pytest.raises(ConfigError, match="name="):
        CacheManager(name=name)


@pytest.mark.parametrize("torn", ["\ud800", "a\udfffb"])
def test_text_that_cannot_be_sent_names_nothing(torn: str) -> None:
    """Half of a surrogate pair is no UTF-8: one such name would take the page and the metrics from everybody."""
    with pytest.raises(ConfigError, match="name="):
        CacheManager(name=torn)
    with CacheManager() as manager:
        with pytest.raises(ConfigError, match="session id"):
            manager.create_session(torn)
        for labels in ({"tenant": torn}, {torn: "acme"}):
            with pytest.raises(ConfigError, match="labels="):
                manager.create_session("ada", labels=labels)
        manager.create_session("\U0001f642 <b>\0")
        assert manager.num_sessions == 1


def test_what_is_no_id_names_no_session(caplog: pytest.LogCaptureFixture) -> None:
    """A list is no session id: using it is an unknown session, destroying it is nothing, and nothing is logged."""
    manager = CacheManager()
    with pytest.raises(UnknownSessionError):
        manager.use_session([])  # type: ignore[arg-type]
    assert manager.destroy_session([]) is False  # type: ignore[arg-type]
    assert not caplog.records
    manager.close()
