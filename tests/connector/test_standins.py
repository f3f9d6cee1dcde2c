"""Connectors to systems that cannot run here, with STAND-INS for their packages: the kit, and what each promises."""

from __future__ import annotations

import sys
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvcache_factory.connector import Connector, MemoryRegion, connector_class
from kvcache_factory.connector.base import OptionsConnector, make_options
from kvcache_factory.connector.eic import EICConnector, read_settings
from kvcache_factory.errors import ConfigError, MissingDependencyError
from kvcache_factory.testing.connectors import PAGE, Call, ConnectorTests, Memory


def connector(name: str, executor: Executor, **options: Any) -> Any:
    cls = connector_class(name)
    assert issubclass(cls, OptionsConnector)
    return cls.from_options("conn", executor, make_options(cls.Options, options))


@pytest.mark.usefixtures("standins")
class WithStandin(ConnectorTests):
    """A connector by its name, with options."""

    name: ClassVar[str] = ""
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def size(self) -> int:
        """One block of a small model; a helper process takes a while to start."""
        return 2 << 20

    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        return connector(self.name, executor, **self.options)


class TestInfiniStoreTCPStandin(WithStandin):
    name = "INFINISTORE"
    options: ClassVar[dict[str, Any]] = {"connection_type": "TCP"}


class TestInfiniStoreRDMAStandin(WithStandin):
    name = "INFINISTORE"
    options: ClassVar[dict[str, Any]] = {"visible_dev_list": "mlx5_0:gid3,mlx5_1:gid1", "local_rank": 3}

    def test_device_gid_and_link_reach_the_client(self, executor: Executor, tmp_path: Path) -> None:
        """The fourth process takes the second of two devices."""
        opened = connector(self.name, executor, ib_port=2, link_type="IB", **self.options)
        assert opened.open().is_ok()
        config = sys.modules["infinistore"].ClientConfig.last
        assert (config.dev_name, config.hint_gid_index, config.ib_port, config.link_type) == ("mlx5_1", 1, 2, "IB")
        opened.close()

    def test_values_that_are_too_large_for_a_batch_travel_alone(
        self, executor: Executor, tmp_path: Path, call: Call
    ) -> None:
        """Five MiB each; small ones of one slab go together, another slab begins a batch."""
        large, other = Memory(5 << 20), Memory(PAGE)
        opened = self.opened(executor, tmp_path, large)
        opened.register_slabs([other.tensor])
        regions = [large[0], large[1], other[0], other[1], other.part(2, 512)]
        keys = [b"%d" % number for number in range(5)]
        assert [len(batch) for batch in opened.get_batches(keys, regions, 8)] == [1, 1, 2, 1]
        assert all(status.is_ok() for status in call(opened.mput(keys, regions)))
        assert call(opened.get(b"1", large[4])).is_ok()
        assert np.array_equal(large.row(large.bytes, 4), large.original(1))
        opened.close()

    def test_a_missing_key_spoils_no_neighbour(self, executor: Executor, tmp_path: Path, call: Call) -> None:
        """The client says that some are missing, not which."""
        memory = Memory(PAGE)
        opened = self.opened(executor, tmp_path, memory)
        assert call(opened.mput([b"a", b"c"], [memory[0], memory[1]]))[1].is_ok()
        done = call(opened.mget([b"a", b"b", b"c"], [memory[4], memory[5], memory[6]]))
        assert [status.is_ok() for status in done] == [True, False, True]
        assert done[1].is_not_found()
        opened.close()


class TestPrisKVStandin(WithStandin):
    name = "PRIS"


class TestPrisKVBatchesStandin(WithStandin):
    name = "PRISKV"
    options: ClassVar[dict[str, Any]] = {"use_mput_mget": True}


class TestPrisKVZeroCopyStandin(WithStandin):
    name = "PRISKV"
    options: ClassVar[dict[str, Any]] = {"use_zero_copy": True}

    def test_values_are_used_in_memory_that_the_client_lends(
        self, executor: Executor, tmp_path: Path, call: Call
    ) -> None:
        """alloc, fill, seal; acquire, read, release; everything lent is given back, also what is dropped."""
        opened = self.opened(executor, tmp_path, Memory(PAGE))
        assert opened.feature.zero_copy
        first, second = (status.get() for status in call(opened.alloc([b"a", b"b"], 100)))
        first.view[:] = b"x" * 100
        assert all(status.is_ok() for status in call(opened.seal([b"a"])))
        call(opened.drop([b"b"]))
        there, absent = call(opened.acquire([b"a", b"b"]))
        assert absent.is_not_found()
        assert isinstance(second, MemoryRegion)
        assert bytes(there.get().view) == b"x" * 100
        call(opened.release([b"a"]))
        assert call(opened.seal([b"never lent"]))[0].is_invalid()
        assert opened._client.lent == 0
        opened.close()


class TestHPKVStandin(WithStandin):
    name = "HPKV"


class TestEICStandin(WithStandin):
    name = "EIC"

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.file = tmp_path / "eic.yaml"
        self.file.write_text(
            f"remote_url: eic://10.0.0.1:9000\neic_instance_id: one\neic_kv_ns: space\neic_kv_ttl: 60\n"
            f"eic_log_dir: {tmp_path / 'logs'}\n"
        )

    def make_connector(self, executor: Executor, directory: Path) -> Connector[bytes, Any]:
        return connector(self.name, executor, config_file=str(self.file))

    def test_what_is_deleted_is_gone(self, connector: Connector[bytes, Any], call: Call, memory: Memory) -> None:
        """Not here: the client has no such call.  The connector says so instead of claiming it."""
        assert call(connector.put(b"key", memory[0])).is_ok()
        assert call(connector.delete(b"key")).is_denied()
        assert call(connector.exists(b"key")).is_ok()

    def test_keys_with_a_common_beginning_are_different_keys(
        self, connector: Connector[bytes, Any], call: Call, memory: Memory
    ) -> None:
        """As in the kit, without its delete."""
        for source, key in enumerate((b"a", b"a/b", b"a/b\0")):
            assert call(connector.put(key, memory[source])).is_ok()
        for source, key in enumerate((b"a", b"a/b", b"a/b\0")):
            assert call(connector.get(key, memory[3])).is_ok()
            assert np.array_equal(memory.row(memory.bytes, 3), memory.row(memory.bytes, source))

    def test_the_file_reaches_the_client(self, connector: Connector[bytes, Any], call: Call, memory: Memory) -> None:
        """Server, instance, defaults, and how values are kept."""
        assert call(connector.put(b"key", memory[0])).is_ok()
        client = sys.modules["eic"].Client.last
        instance, endpoint, option = client.said
        assert (instance, endpoint) == ("one", "10.0.0.1:9000")
        assert (option.log_level, option.transport_type, option.flag_file) == (1, 3, None)
        assert client.stored == ("space", 60)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("remote_url: x", "eic_instance_id"),
        ("remote_url: x\neic_instance_id: y\neic_threads: 3", "eic_threads"),
        ("remote_url: [", "eic.yaml"),
        ("remote_url: x\neic_instance_id: y\neic_kv_ttl: soon", "eic_kv_ttl"),
        ("!!python/object/apply:os.system ['true']", "eic.yaml"),
    ],
)
def test_a_wrong_file_of_eic_says_what_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    """Unknown settings are errors; nothing in the file is run."""
    file = tmp_path / "eic.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_settings(str(file))


@pytest.mark.parametrize("path", ["", "/nonexistent/eic.yaml"])
def test_no_file_of_eic_is_a_configuration_error(path: str) -> None:
    """Said when the connector is made."""
    with pytest.raises(ConfigError, match=r"YAML file|cannot read"):
        read_settings(path)


@pytest.mark.parametrize(
    ("name", "package", "options"),
    [
        ("INFINISTORE", "infinistore", {"connection_type": "TCP"}),
        ("INFINISTORE", "infinistore", {"visible_dev_list": "mlx5_0"}),
        ("PRISKV", "priskv", {}),
        ("PRISKV", "priskv", {"use_zero_copy": True}),
        ("HPKV", "hpkv", {}),
    ],
)
def test_a_missing_package_is_one_error_that_names_it(
    executor: Executor,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    package: str,
    options: dict[str, Any],
) -> None:
    """From this process and from a helper alike."""
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('no {package}', name='{package}')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(MissingDependencyError, match=f"needs the package '{package}'; install it with: pip install"):
        connector(name, executor, **options).open()


def test_a_missing_package_of_eic_is_one_error_that_names_it(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, with its file."""
    file = tmp_path / "eic.yaml"
    file.write_text("remote_url: x\neic_instance_id: y")
    monkeypatch.setitem(sys.modules, "eic", None)
    opened = connector("EIC", executor, config_file=str(file))
    assert isinstance(opened, EICConnector)
    with pytest.raises(MissingDependencyError, match=r"'eic'.*pip install"):
        opened.open()


@pytest.mark.usefixtures("standins")
@pytest.mark.parametrize("name", ["INFINISTORE", "PRISKV", "HPKV"])
def test_a_server_that_is_not_there_is_a_failure_to_open(executor: Executor, standins: Path, name: str) -> None:
    """A status, not a hang and not a crash."""
    (standins / "DOWN").touch()
    options = {"visible_dev_list": "mlx5_0"} if name == "INFINISTORE" else {}
    assert connector(name, executor, **options).open().is_error()
