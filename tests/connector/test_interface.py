"""The Connector interface is the documented one, to the letter: classes written against it run unchanged."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import subprocess
import sys
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, ClassVar, Generic

import numpy as np
import pytest

import kvcache_factory.connector as door
from kvcache_factory.connector import (
    Connector,
    ConnectorConfig,
    ConnectorFeature,
    ConnectorOptions,
    ConnectorRegisterDescriptor,
    MemoryRegion,
    Status,
    StatusCodes,
    connector_class,
    create_connector,
    known_connectors,
    options_from_env,
    register_connector,
)
from kvcache_factory.connector.base import ENV_PREFIX, Secret, make_options
from kvcache_factory.connector.mock import MockConnector
from kvcache_factory.errors import ConfigError

SIGNATURES = {
    "from_envs": "(conn_id: 'str', executor: 'Executor', **kwargs: 'Any') -> 'Connector[K, V]'",
    "open": "(self) -> 'Status[Any]'",
    "close": "(self) -> 'Status[Any]'",
    "exists": "(self, key: 'K') -> 'Status[Any]'",
    "get": "(self, key: 'K', mr: 'MemoryRegion | Sequence[MemoryRegion]') -> 'Status[Any]'",
    "put": "(self, key: 'K', mr: 'MemoryRegion | Sequence[MemoryRegion]') -> 'Status[Any]'",
    "delete": "(self, key: 'K') -> 'Status[Any]'",
    "prefetch": "(self, keys: 'Sequence[K]') -> 'None'",
    "register_slabs": "(self, slabs: 'list[torch.Tensor]') -> 'Status[Any]'",
}
PARAMETERS = {
    "get_batches": ["self", "keys", "mrs", "batch_size"],
    "mget": ["self", "keys", "mrs"],
    "mput": ["self", "keys", "mrs"],
}
ABSTRACT = {"from_envs", "name", "feature", "open", "close", "exists", "get", "put", "delete"}
COROUTINES = {"exists", "get", "put", "delete", "prefetch", "mget", "mput"}
DOCUMENTED = {*ABSTRACT, "prefetch", "register_slabs", "get_batches", "mget", "mput"}


def run(coroutine: Any) -> Any:
    return asyncio.run(coroutine)


def test_features_are_flags_that_default_to_no() -> None:
    """The five documented ones in their order, and zero_copy."""
    fields = dataclasses.fields(ConnectorFeature)
    assert [f.name for f in fields] == ["mput_mget", "prefetch", "rdma", "gdr_put", "gdr_get", "zero_copy"]
    assert all(f.default is False for f in fields)
    assert ConnectorFeature(True) == ConnectorFeature(mput_mget=True)


def test_the_configuration_has_the_documented_fields() -> None:
    """Four that are required, three signatures that are empty by default."""
    fields = {f.name: f.default for f in dataclasses.fields(ConnectorConfig)}
    assert list(fields)[:4] == ["backend_name", "namespace", "partition_id", "executor"]
    assert {name: value for name, value in fields.items() if value is not dataclasses.MISSING} == {
        "block_spec_signature": "",
        "key_builder_signature": "",
        "layout_signature": "",
    }
    assert dataclasses.is_dataclass(ConnectorRegisterDescriptor)
    assert dataclasses.fields(ConnectorRegisterDescriptor) == ()


def test_exactly_nine_members_are_abstract() -> None:
    """A plain generic class of two parameters, whose abstract members are marked and nothing else is."""
    marked = {n for n in dir(Connector) if getattr(inspect.getattr_static(Connector, n), "__isabstractmethod__", False)}
    assert marked == ABSTRACT
    assert issubclass(Connector, Generic)
    assert type(Connector) is type
    assert len(Connector.__parameters__) == 2
    assert isinstance(inspect.getattr_static(Connector, "from_envs"), classmethod)
    assert all(isinstance(inspect.getattr_static(Connector, name), property) for name in ("name", "feature"))


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signatures_are_as_documented(name: str) -> None:
    """Names, order and kinds of parameters."""
    assert str(inspect.signature(getattr(Connector, name))) == SIGNATURES[name]


def test_batch_calls_and_coroutines_are_as_documented() -> None:
    """Which are coroutines, and how the batch calls name their parameters."""
    for name, parameters in PARAMETERS.items():
        assert list(inspect.signature(getattr(Connector, name)).parameters) == parameters
    found = {name for name in DOCUMENTED if inspect.iscoroutinefunction(inspect.getattr_static(Connector, name))}
    assert found == COROUTINES


class Documented(Connector[str, Any]):
    """A connector as a user of AIBrix would have written it: the documentation's names and nothing of ours."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    @classmethod
    def from_envs(cls, conn_id: str, executor: Executor, **kwargs: Any) -> Documented:
        made = cls()
        made.values.update(kwargs)
        return made

    @property
    def name(self) -> str:
        return "documented"

    @property
    def feature(self) -> ConnectorFeature:
        return ConnectorFeature()

    def open(self) -> Status[Any]:
        return Status(StatusCodes.OK)

    def close(self) -> Status[Any]:
        return Status()

    async def exists(self, key: str) -> Status[Any]:
        return Status(StatusCodes.OK if key in self.values else StatusCodes.NOT_FOUND)

    async def get(self, key: str, mr: Any) -> Status[Any]:
        if key not in self.values:
            return Status(StatusCodes.NOT_FOUND)
        mr.fill(self.values[key])
        return Status()

    async def put(self, key: str, mr: Any) -> Status[Any]:
        self.values[key] = mr.tobytes()
        return Status()

    async def delete(self, key: str) -> Status[Any]:
        self.values.pop(key, None)
        return Status()


def test_a_connector_of_the_documentation_works() -> None:
    """The nine members suffice; what it does not offer has the documented defaults."""
    connector = Documented.from_envs("id", ThreadPoolExecutor(1))
    region = MemoryRegion(np.arange(16, dtype=np.uint8), 4, 8)
    assert run(connector.put("key", region)).is_ok()
    region.fill(bytes(8))
    assert run(connector.get("key", region)).is_ok()
    assert region.tobytes() == bytes(range(4, 12))
    assert run(connector.prefetch(["key"])) is None
    with pytest.raises(NotImplementedError):
        connector.register_slabs([])
    with pytest.raises(NotImplementedError):
        connector.get_batches([], [], 1)
    for batch in (connector.mget, connector.mput):
        with pytest.raises(NotImplementedError):
            run(batch([], []))


# -- status -----------------------------------------------------------------------------------------------------------


def test_status_codes_are_the_documented_ones() -> None:
    """Eight codes; a predicate for each."""
    names = ["OK", "ERROR", "NOT_FOUND", "INVALID", "OUT_OF_MEMORY", "TIMEOUT", "DENIED", "CANCELLED"]
    assert [code.name for code in StatusCodes] == names
    for code in StatusCodes:
        told = [name for name in names if getattr(Status(code), f"is_{name.lower()}")()]
        assert told == [code.name]


def test_a_status_gives_its_value_or_says_why_not() -> None:
    """get() returns, falls back, or raises what explains the failure."""
    assert Status(value=3).get() == Status.ok(3).get(9) == 3
    assert Status(StatusCodes.TIMEOUT).get(9) == 9
    with pytest.raises(OSError, match="gone"):
        Status(StatusCodes.ERROR, OSError("gone")).get()
    with pytest.raises(RuntimeError, match="NOT_FOUND"):
        Status(StatusCodes.NOT_FOUND).get()
    Status(StatusCodes.ERROR, "words").raise_if_has_exception()
    assert Status(Status(StatusCodes.DENIED, "why")) == Status(StatusCodes.DENIED, "why")
    assert Status() != Status(StatusCodes.ERROR)
    assert Status().error_code is StatusCodes.OK


def test_a_status_is_not_taken_for_a_truth_value() -> None:
    """`if await connector.exists(key):` would be true for a miss."""
    with pytest.raises(TypeError, match="is_ok"):
        bool(Status(StatusCodes.NOT_FOUND))


# -- regions ----------------------------------------------------------------------------------------------------------


def test_a_region_is_its_bytes_and_no_others() -> None:
    """View, tensor, address and copies are of the same memory; a fill of another length is refused."""
    slab = np.arange(32, dtype=np.uint8)
    region = MemoryRegion(slab, 8, 4)
    assert region.length == 4
    assert region.data_ptr() == slab.ctypes.data + 8
    assert region.to_tensor().data_ptr() == region.data_ptr()
    region.view[0] = 99
    assert slab[8] == 99
    assert int(region.to_tensor()[0]) == 99
    region.fill(b"abcd")
    assert region.tobytes() == b"abcd"
    with pytest.raises(ValueError, match="5 bytes"):
        region.fill(b"abcde")
    assert slab[12] == 12
    assert MemoryRegion(region.slab, 8, 4).tobytes() == b"abcd"
    for addr, length in ((0, 33), (-1, 2), (32, 1)):
        with pytest.raises(AssertionError):
            MemoryRegion(slab, addr, length)


# -- options ----------------------------------------------------------------------------------------------------------


class Remembered(ConnectorOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of no connector."""

    env_prefix: ClassVar[str] = "SOME_"
    env_older: ClassVar[tuple[str, ...]] = ("OLD_",)

    host: str = "127.0.0.1"
    port: int = 1
    fast: bool = False
    password: Secret = ""


def test_options_come_from_variables_of_their_own_names() -> None:
    """Typed by their fields, defaults for the rest; older names count where the new one is not there; words stay."""
    environ = {
        ENV_PREFIX + "SOME_PORT": "7",
        ENV_PREFIX + "OLD_PORT": "8",
        ENV_PREFIX + "OLD_HOST": "no",
        ENV_PREFIX + "SOME_FAST": "Yes",
    }
    assert options_from_env(Remembered, environ) == Remembered(host="no", port=7, fast=True)
    assert options_from_env(Remembered, environ, port=9).port == 9
    for word in ("1", "true", "TRUE", "on"):
        assert options_from_env(Remembered, {ENV_PREFIX + "SOME_FAST": word}).fast is True
    for word in ("0", "False", "no", "off"):
        assert options_from_env(Remembered, {ENV_PREFIX + "SOME_FAST": word}).fast is False


def test_wrong_options_say_which_and_what_is_allowed() -> None:
    """A ConfigError names the variable and its value."""
    with pytest.raises(ConfigError, match=r"SOME_PORT='many'.*int"):
        options_from_env(Remembered, {ENV_PREFIX + "SOME_PORT": "many"})
    with pytest.raises(ConfigError, match=r"SOME_FAST='perhaps'.*yes or on"):
        options_from_env(Remembered, {ENV_PREFIX + "SOME_FAST": "perhaps"})
    with pytest.raises(ConfigError, match=r"unknown field `prot`; there are .*port"):
        make_options(Remembered, {"prot": 1})


def test_secrets_are_not_shown() -> None:
    """Neither a repr nor an error gives a password away."""
    shown = repr(Remembered(password="hunter2"))
    assert "hunter2" not in shown
    assert "password=***" in shown
    assert "port=1" in shown


# -- names ------------------------------------------------------------------------------------------------------------


def test_connectors_are_found_by_name_and_by_place() -> None:
    """Any case; a class elsewhere by module:Class."""
    assert connector_class("mock") is connector_class("MOCK") is MockConnector
    assert connector_class("kvcache_factory.connector.mock:MockConnector") is MockConnector


def test_a_class_can_be_given_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered class is found; a taken name is refused."""
    monkeypatch.setattr("kvcache_factory.connector.names._registered", {})
    register_connector("documented", Documented)
    register_connector("Documented", Documented)
    assert connector_class("DOCUMENTED") is Documented
    with pytest.raises(ConfigError, match="taken"):
        register_connector("MOCK", Documented)
    with pytest.raises(ConfigError, match="module:Class"):
        register_connector("another", "no colon")


def test_installed_packages_bring_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an entry point of our group, imported only when it is asked for."""

    class Entry:
        name, value = "theirs", "kvcache_factory.connector.mock:MockConnector"

    monkeypatch.setattr("kvcache_factory.connector.names.entry_points", lambda group: [Entry])
    assert "THEIRS" in known_connectors()
    assert connector_class("theirs") is MockConnector


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MOCKED", "did you mean MOCK"),
        ("TAPE", "use one of EIC, .*, SHFS .*module:Class"),
        ("no_such_module:Thing", "no module 'no_such_module'"),
        ("kvcache_factory.connector.mock:Thing", "has no 'Thing'"),
        ("kvcache_factory.status:Status", "no subclass"),
    ],
)
def test_what_is_no_connector_is_a_config_error(name: str, said: str) -> None:
    """Each says what is wrong with the name."""
    with pytest.raises(ConfigError, match=said):
        connector_class(name)


def test_a_configuration_becomes_a_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed options for ours, keyword arguments for others, the environment where nothing is given."""
    with ThreadPoolExecutor(1) as executor:
        config = ConnectorConfig("MOCK", "space", "0", executor)
        assert config.conn_id == "space_0"
        made = create_connector(config, {"use_mput_mget": True})
        assert made.feature.mput_mget
        monkeypatch.setenv(ENV_PREFIX + "MOCK_USE_RDMA", "on")
        assert create_connector(config).feature == ConnectorFeature(rdma=True)
        with pytest.raises(ConfigError, match="use_everything"):
            create_connector(config, {"use_everything": True})
        monkeypatch.setattr("kvcache_factory.connector.names._registered", {"DOC": Documented})
        theirs = create_connector(ConnectorConfig("doc", "space", "0", executor), {"one": b"1"})
        assert isinstance(theirs, Documented)
        assert theirs.values == {"one": b"1"}


# -- door -------------------------------------------------------------------------------------------------------------


def test_the_door_has_every_documented_name() -> None:
    """All of it from one place, each name leading to the thing of that name."""
    documented = {"Connector", "ConnectorFeature", "ConnectorConfig", "ConnectorRegisterDescriptor", "MemoryRegion"}
    assert documented | {"Status", "StatusCodes"} <= set(door.__all__) <= set(dir(door))
    assert all(getattr(door, name).__name__ == name for name in door.__all__)
    with pytest.raises(AttributeError, match="Conector"):
        door.Conector  # noqa: B018


def test_the_interface_does_not_import_torch() -> None:
    """Describing a connector costs what numpy costs."""
    script = "import sys; from kvcache_factory.connector import Connector, MemoryRegion; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
