"""Notes on identities: for people, checked where they can be, without secrets, and bounded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.maintenance.conftest import SPEC, Writer, identity

from kvcache_factory.backend import CPUBackend, DiskBackend, HierarchicalBackend
from kvcache_factory.manager import CacheManager
from kvcache_factory.store.disk import identities
from kvcache_factory.store.disk.identities import leave_note, note_path, read_notes


def test_a_manager_leaves_a_note_on_each_model(directory: Path) -> None:
    """Registering is enough; modes are those of the directory, and the file is what the format page says."""
    backend = HierarchicalBackend([CPUBackend(size_gb=0.01), DiskBackend(str(directory), 0.01, 1)])
    whose = identity("model-a", namespace="staging", lora="adapter")
    with CacheManager(backend) as manager:
        manager.register(SPEC, whose)
        manager.register(SPEC, whose)
    path = note_path(directory, whose.digest.hex())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(path.read_text()) == {
        "identity": whose.digest.hex(),
        "model": "model-a",
        "kv_dtype": "float32",
        "block_tokens": 16,
        "kv_scales": "",
        "lora": "adapter",
        "namespace": "staging",
        "salted": False,
    }
    assert list(path.parent.iterdir()) == [path]


def test_a_salt_is_never_written_down(directory: Path) -> None:
    """The note says that there is one."""
    directory.mkdir()
    whose = identity(salt="open sesame")
    leave_note(directory, whose)
    text = note_path(directory, whose.digest.hex()).read_text()
    assert "sesame" not in text
    assert read_notes(directory)[whose.digest.hex()].salted


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"identity": 3}', "\xff"])
def test_what_is_no_note_is_passed_over(directory: Path, content: str) -> None:
    """Anybody may have written anything."""
    directory.mkdir()
    leave_note(directory, identity())
    (directory / identities.FOLDER / f"{'0' * 32}.json").write_bytes(content.encode("latin-1"))
    assert list(read_notes(directory)) == [identity().digest.hex()]


def test_a_note_that_contradicts_its_digest_names_nothing(directory: Path) -> None:
    """Otherwise a purge of one model could remove the blocks of another."""
    directory.mkdir()
    leave_note(directory, identity("model-a"))
    path = note_path(directory, identity("model-a").digest.hex())
    path.write_text(path.read_text().replace("model-a", "model-b"))
    assert read_notes(directory) == {}


def test_the_oldest_notes_make_room(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A salt for each tenant must not fill a directory with notes."""
    import os

    monkeypatch.setattr(identities, "_MOST_NOTES", 3)
    directory.mkdir()
    for number in range(5):
        leave_note(directory, identity(f"model-{number}"))
        os.utime(note_path(directory, identity(f"model-{number}").digest.hex()), (number, number))
    assert {note.model for note in read_notes(directory).values()} == {"model-2", "model-3", "model-4"}


def test_a_store_reads_a_directory_with_notes(directory: Path, writer: Callable[[], Writer]) -> None:
    """They are in nobody's way."""
    one = writer()
    one.write(identity(), 3)
    one.close()
    assert len(read_notes(directory)) == 1
    writer().write(identity(), 3, seed=1)
