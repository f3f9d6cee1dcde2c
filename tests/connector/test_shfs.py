"""SHFS: a directory that several processes and machines use at once."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache_factory.connector import Connector, MemoryRegion
from kvcache_factory.connector.shfs import SharedFilesConnector, SharedFilesOptions
from kvcache_factory.testing.connectors import PAGE, Call, ConnectorTests, Memory


def shfs(executor: Executor, directory: Path, **options: Any) -> SharedFilesConnector:
    given = SharedFilesOptions(root=str(directory), **{"min_free_gb": 0.0, **options})
    return SharedFilesConnector.from_options("conn", executor, given)


class TestSharedFiles(ConnectorTests):
    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        return shfs(executor, directory)

    def test_files_and_directories_are_private(
        self, executor: Executor, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """0600 and 0700, whatever the umask."""
        before = os.umask(0)
        try:
            connector, memory = shfs(executor, tmp_path / "new" / "root"), Memory(PAGE)
            assert connector.open().is_ok()
            assert call(connector.put(b"key", memory[0])).is_ok()
        finally:
            os.umask(before)
        made = list((tmp_path / "new").rglob("*"))
        modes = [
            {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()},
            {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new", *made) if path.is_dir()},
        ]
        assert modes == [{0o600}, {0o700}]

    @pytest.mark.parametrize("key", [b"../../escape", b"/etc/passwd", b"..", b"\0", b"a" * 5000, b""])
    def test_no_key_leads_out_of_the_directory(
        self, executor: Executor, tmp_path: Path, call: Call, key: bytes
    ) -> None:
        """Every key has a file below the connection's directory."""
        connector, memory = shfs(executor, tmp_path / "root"), Memory(PAGE)
        assert connector.open().is_ok()
        assert call(connector.put(key, memory[0])).is_ok()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert files == [connector.path_of(key)]
        assert connector.path in connector.path_of(key).resolve().parents

    def test_a_link_is_not_followed(self, executor: Executor, tmp_path: Path, call: Call) -> None:
        """A file that somebody linked into the directory is no value."""
        connector, memory = shfs(executor, tmp_path / "root"), Memory(PAGE)
        assert connector.open().is_ok()
        (tmp_path / "secret").write_bytes(bytes(PAGE))
        link = connector.path_of(b"key")
        link.parent.mkdir()
        link.symlink_to(tmp_path / "secret")
        assert not call(connector.get(b"key", memory[0])).is_ok()
        assert np.array_equal(memory.row(memory.bytes, 0), memory.original(0))

    def test_readers_see_whole_values_only(self, executor: Executor, tmp_path: Path, call: Call) -> None:
        """Two writers replace one value all the time: a reader never sees a mixture, or nothing."""
        memory = Memory(64 * PAGE)
        connectors = [shfs(executor, tmp_path) for _ in range(3)]
        for connector in connectors:
            assert connector.open().is_ok()
        assert call(connectors[0].put(b"key", memory[0])).is_ok()
        stop = threading.Event()

        def write(number: int) -> None:
            while not stop.is_set():
                assert connectors[number]._put(b"key", memory[number]).is_ok()

        writers = [threading.Thread(target=write, args=(number,)) for number in (0, 1)]
        for writer in writers:
            writer.start()
        try:
            for _ in range(200):
                assert call(connectors[2].get(b"key", memory[4])).is_ok()
                got = memory.row(memory.bytes, 4)
                assert any(np.array_equal(got, memory.original(number)) for number in (0, 1))
        finally:
            stop.set()
            for writer in writers:
                writer.join()
        assert list((connectors[0].path / "tmp").iterdir()) == []

    def test_a_full_disk_leaves_nothing_behind(
        self, executor: Executor, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """OUT_OF_MEMORY; the old value stays, the unfinished file goes."""
        connector, memory = shfs(executor, tmp_path), Memory(PAGE)
        assert connector.open().is_ok()
        assert call(connector.put(b"key", memory[0])).is_ok()

        def full(fd: int, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.write", full)
            refused = connector.put_all(_call(), [b"key"], [memory[1]])[0]
        assert refused.is_out_of_memory()
        assert list((connector.path / "tmp").iterdir()) == []
        assert call(connector.get(b"key", memory[2])).is_ok()
        assert np.array_equal(memory.row(memory.bytes, 2), memory.original(0))

    def test_the_file_system_is_not_filled(self, executor: Executor, tmp_path: Path, call: Call) -> None:
        """A put that would leave less than what must stay free is refused; reads go on."""
        memory = Memory(PAGE)
        roomy, careful = shfs(executor, tmp_path), shfs(executor, tmp_path, min_free_gb=1e9)
        assert roomy.open().is_ok()
        assert careful.open().is_ok()
        assert call(roomy.put(b"key", memory[0])).is_ok()
        assert call(careful.put(b"other", memory[0])).is_out_of_memory()
        assert call(careful.get(b"key", memory[1])).is_ok()

    @pytest.mark.parametrize("min_free_gb", [0.0, 1e-6])
    def test_a_directory_that_was_removed_is_made_again(
        self, executor: Executor, tmp_path: Path, call: Call, min_free_gb: float
    ) -> None:
        """Its values are gone; the next put needs no restart."""
        connector, memory = shfs(executor, tmp_path / "root", min_free_gb=min_free_gb), Memory(PAGE)
        assert connector.open().is_ok()
        assert call(connector.put(b"key", memory[0])).is_ok()
        shutil.rmtree(tmp_path / "root")
        assert call(connector.get(b"key", memory[1])).is_not_found()
        assert call(connector.put(b"key", memory[0])).is_ok()
        assert call(connector.get(b"key", memory[1])).is_ok()
        assert stat.S_IMODE((tmp_path / "root").stat().st_mode) == 0o700

    def test_what_a_killed_writer_left_is_removed(self, executor: Executor, tmp_path: Path) -> None:
        """An hour later, by the next one that opens; what is being written now stays."""
        connector = shfs(executor, tmp_path)
        assert connector.open().is_ok()
        old, new = (connector.path / "tmp" / name for name in ("old", "new"))
        for path in (old, new):
            path.write_bytes(b"half")
        os.utime(old, (1.0, 1.0))
        assert shfs(executor, tmp_path).open().is_ok()
        assert not old.exists()
        assert new.exists()

    def test_a_truncated_file_is_no_value(self, executor: Executor, tmp_path: Path, call: Call) -> None:
        """A file system may lose the end of a file; its length says so."""
        connector, memory = shfs(executor, tmp_path), Memory(PAGE)
        assert connector.open().is_ok()
        assert call(connector.put(b"key", memory[0])).is_ok()
        os.truncate(connector.path_of(b"key"), PAGE // 2)
        assert call(connector.get(b"key", MemoryRegion(memory.bytes, 0, PAGE))).is_invalid()


def _call() -> Any:
    from kvcache_factory.connector.blocking import Call as Batch

    return Batch()
