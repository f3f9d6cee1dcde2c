"""ROCKSDB, with the real RocksDB of the package rocksdict."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_factory.connector import Connector
from kvcache_factory.connector.rocksdb import RocksDBConnector, RocksDBOptions, private_directory
from kvcache_factory.errors import ConfigError, MissingDependencyError
from kvcache_factory.testing.connectors import PAGE, Call, ConnectorTests, Memory


def rocksdb(executor: Executor, directory: Path, **options: Any) -> RocksDBConnector:
    return RocksDBConnector.from_options("conn", executor, RocksDBOptions(root=str(directory), **options))


class TestRocksDB(ConnectorTests):
    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        return rocksdb(executor, directory)

    def test_every_option_of_the_table_is_taken(self, executor: Executor, tmp_path: Path, call: Call) -> None:
        """RocksDB opens with small buffers, without a time to live, and keeps what is more than one buffer."""
        connector = rocksdb(
            executor,
            tmp_path,
            ttl_s=0,
            write_buffer_size=1 << 20,
            target_file_size_base=1 << 20,
            max_write_buffer_number=2,
            max_total_wal_size=4 << 20,
            max_background_jobs=2,
        )
        memory = Memory(PAGE * 100)
        assert connector.open().is_ok()
        for number in range(40):
            assert call(connector.put(b"%d" % number, memory[number % 8])).is_ok()
        written = {path.suffix for path in connector.path.iterdir()}
        for number in range(40):
            assert call(connector.get(b"%d" % number, memory[0 if number % 8 else 1])).is_ok()
        connector.close()
        assert ".sst" in written  # the small buffer was full several times

    def test_a_value_is_gone_when_its_time_is_over(self, executor: Executor, tmp_path: Path, call: Call) -> None:
        """To the second, not with some later compaction; a put begins anew."""
        connector, memory, now = rocksdb(executor, tmp_path, ttl_s=10), Memory(PAGE), [1000.0]
        connector.clock = lambda: now[0]  # type: ignore[method-assign]
        assert connector.open().is_ok()
        assert call(connector.put(b"key", memory[0])).is_ok()
        for at_s, there in ((1009.5, True), (1010.0, False)):
            now[0] = at_s
            assert call(connector.exists(b"key")).is_ok() is there
            assert call(connector.get(b"key", memory[1])).is_ok() is there
        assert call(connector.put(b"key", memory[0])).is_ok()
        assert call(connector.exists(b"key")).is_ok()
        connector.close()

    def test_a_look_up_reads_no_value(self, executor: Executor, tmp_path: Path, call: Call) -> None:
        """The database is never asked for the value when only its existence is of interest."""
        connector, memory = rocksdb(executor, tmp_path), Memory(PAGE)
        assert connector.open().is_ok()
        assert call(connector.put(b"key", memory[0])).is_ok()
        database, connector._db = connector._db, None
        assert call(connector.exists(b"key")).is_ok()
        assert call(connector.exists(b"absent")).is_not_found()
        connector._db = database
        connector.close()

    def test_a_database_is_for_one(self, executor: Executor, tmp_path: Path) -> None:
        """A second connector is told what to do; the first goes on."""
        first, second = rocksdb(executor, tmp_path), rocksdb(executor, tmp_path)
        assert first.open().is_ok()
        refused = second.open()
        assert refused.is_denied()
        assert "its own root" in str(refused.value)
        first.close()
        assert second.open().is_ok()
        second.close()

    def test_the_database_is_private(self, executor: Executor, tmp_path: Path) -> None:
        """Nobody else can look into it."""
        connector = rocksdb(executor, tmp_path / "new")
        assert connector.open().is_ok()
        assert connector.path.stat().st_mode & 0o777 == 0o700
        connector.close()

    def test_a_root_that_cannot_be_made_is_a_configuration_error(self, executor: Executor, tmp_path: Path) -> None:
        """What, where, what to do."""
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="give another root"):
            rocksdb(executor, tmp_path / "file").open()

    def test_without_the_package_the_error_names_it(
        self, executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One error, with the command that mends it."""
        monkeypatch.setitem(__import__("sys").modules, "rocksdict", None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'kvcache-factory\[rocksdb\]'"):
            rocksdb(executor, tmp_path).open()


@pytest.mark.parametrize("name", ["..", ".", "", "../../etc", "/etc", "a/b", ".hidden"])
def test_no_connection_is_named_out_of_its_root(name: str, tmp_path: Path) -> None:
    """Whatever the namespace is called, its directory is one below the root."""
    path = private_directory(str(tmp_path / "root"), name)
    assert path.resolve().parent == tmp_path / "root"
    assert not path.name.startswith(".")


def test_a_database_that_is_opened_again_keeps_all_values_through_its_compactions(
    executor: Executor, tmp_path: Path, call: Call
) -> None:
    """With a time to live; the package has lost them then, where column families were not named."""
    memory, keys = Memory(PAGE), [b"%03d" % number for number in range(40)]
    for opening in range(3):
        connector = rocksdb(executor, tmp_path, ttl_s=600)
        assert connector.open().is_ok()
        connector._db.compact_range(None, None)
        connector._marks.compact_range(None, None)
        for key in keys if opening else []:
            assert call(connector.get(key, memory[1])).is_ok()
            assert memory[1].tobytes() == memory[0].tobytes()
        for key in keys:
            assert call(connector.put(key, memory[0])).is_ok()
        connector.close()


def test_a_value_that_a_crash_left_without_its_mark_is_not_there(
    executor: Executor, tmp_path: Path, call: Call
) -> None:
    """Until it is put again; an older mark stands for the newer value where their lengths agree, and else for none."""
    connector, memory = rocksdb(executor, tmp_path), Memory(PAGE)
    assert connector.open().is_ok()
    connector._db[b"key"] = memory[0].tobytes()
    assert connector_says(connector, call, b"key", memory) == (False, False)
    assert call(connector.put(b"key", memory[0])).is_ok()
    assert connector_says(connector, call, b"key", memory) == (True, True)
    connector._db[b"key"] = memory[0].tobytes()[::-1]
    assert connector_says(connector, call, b"key", memory) == (True, True)
    connector._db[b"key"] = b"shorter"
    assert connector_says(connector, call, b"key", memory) == (True, False)
    connector.close()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may become larger: a write that would fail for want of room, on any file system."""
    resource = pytest.importorskip("resource", reason="this system has no limits of this kind")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_was_full_is_written_to_again(
    executor: Executor, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB itself refuses every write after one that failed; what it had taken before stays."""
    monkeypatch.setattr("kvcache_factory.connector.rocksdb._AGAIN_S", 0.0)
    connector, memory = rocksdb(executor, tmp_path), Memory(2 << 20)
    assert connector.open().is_ok()
    assert call(connector.put(b"before", memory[0])).is_ok()
    with largest_file(1 << 20):
        assert not call(connector.put(b"key", memory[0])).is_ok()
    assert call(connector.put(b"key", memory[0])).is_ok()
    for key in (b"before", b"key"):
        assert connector_says(connector, call, key, memory) == (True, True)
    connector.close()


def test_a_database_in_use_is_not_opened_anew(
    executor: Executor, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that has no room: what can be read is read on."""
    monkeypatch.setattr("kvcache_factory.connector.rocksdb._AGAIN_S", 0.0)
    connector, memory = rocksdb(executor, tmp_path), Memory(PAGE)
    assert connector.open().is_ok()
    assert call(connector.put(b"key", memory[0])).is_ok()
    database, connector._refused = connector._db, True
    with connector._in_use():
        assert call(connector.put(b"key", memory[0])).is_ok()
        assert connector._db is database
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        assert call(connector.put(b"key", memory[0])).is_ok()
        assert connector._db is database
    assert call(connector.put(b"key", memory[0])).is_ok()
    assert connector._db is not database
    assert connector_says(connector, call, b"key", memory) == (True, True)
    connector.close()


def test_a_value_that_cannot_be_read_spoils_none_before_it(
    executor: Executor, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged block of a file is a failure of its own values only."""
    connector, memory, keys = rocksdb(executor, tmp_path), Memory(PAGE), [b"0", b"1", b"2"]
    assert connector.open().is_ok()
    assert all(s.is_ok() for s in call(connector.mput(keys, [memory[0]] * 3)))
    get = connector._get

    def damaged(key: bytes, mr: Any, length: int) -> Any:
        if key == b"1":
            raise RuntimeError("Corruption: block checksum mismatch")
        return get(key, mr, length)

    monkeypatch.setattr(connector, "_get", damaged)
    statuses = call(connector.mget(keys, [memory[1], memory[2], memory[3]]))
    assert [status.is_ok() for status in statuses] == [True, False, True]
    assert "checksum mismatch" in str(statuses[1])
    connector.close()


def connector_says(connector: RocksDBConnector, call: Call, key: bytes, memory: Memory) -> tuple[bool, bool]:
    """Whether it says that a value is there, and whether it gives it."""
    return call(connector.exists(key)).is_ok(), call(connector.get(key, memory[1])).is_ok()
