"""The Connector interface, with the names, signatures and defaults of the AIBrix documentation.

A connector moves values between memory that the caller owns and a store elsewhere.  It decides nothing, keeps no copy,
and proves nothing: whoever calls it checks what comes back.  Coroutines run on one loop that the caller owns; a call
that would block belongs on the *executor*.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

import msgspec
import msgspec.inspect
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..status import Status

if TYPE_CHECKING:
    import torch

K = TypeVar("K")
V = TypeVar("V")
Bytes = npt.NDArray[np.uint8]
ENV_PREFIX = "AIBRIX_KV_CACHE_OL_"

Secret = Annotated[str, msgspec.Meta(extra={"secret": True})]
"""Type of an option that no log and no repr may show."""


@dataclass
class ConnectorFeature:
    """What a connector offers beyond single calls on host memory; calls follow these.

    Attributes:
        mput_mget: ``mget``, ``mput`` and ``get_batches``.
        prefetch: ``prefetch`` does something.
        rdma: memory is registered with ``register_slabs`` before it is used.
        gdr_put, gdr_get: puts or gets take device memory, as a sequence of regions for one value.
        zero_copy: values can be used in memory of the store's own (``acquire``, ``release``, ``alloc``, ``seal``,
            ``drop``).
    """

    mput_mget: bool = False
    prefetch: bool = False
    rdma: bool = False
    gdr_put: bool = False
    gdr_get: bool = False
    zero_copy: bool = False


@dataclass
class ConnectorConfig:
    """What a connector is made for.

    Attributes:
        backend_name: name in the registry, or ``"module:Class"``.
        namespace: first part of every key.
        partition_id: tells apart what must not meet, such as ranks.
        executor: threads for calls that block.
        block_spec_signature, key_builder_signature, layout_signature: further parts of the connection's identifier.
    """

    backend_name: str
    namespace: str
    partition_id: str
    executor: Executor
    block_spec_signature: str = ""
    key_builder_signature: str = ""
    layout_signature: str = ""

    @property
    def conn_id(self) -> str:
        """One word for the connection: stores with a directory of their own for each name it after this."""
        parts = (
            self.namespace,
            self.partition_id,
            self.block_spec_signature,
            self.key_builder_signature,
            self.layout_signature,
        )
        return "_".join(part for part in parts if part)


@dataclass
class ConnectorRegisterDescriptor:
    """What registering memory gave; connectors of their own subclass it."""


class MemoryRegion:
    """*length* bytes of memory that the caller owns, and keeps alive and unused until the call has ended.

    Parameters
    ----------
    slab:
        The memory around the region: a flat, contiguous uint8 array (host) or torch tensor (any device).
    addr:
        Bytes from the start of the slab to the region.
    length:
        Bytes of the region; by default the rest of the slab.

    Attributes
    ----------
    least:
        Bytes that a value has at least which may be got into the region; the region's length unless it is set.
    on_wait, on_come:
        What :meth:`wait_ready` and :meth:`has_come` call, where somebody wants to work on other regions meanwhile.
    """

    __slots__ = ("_slab", "addr", "least", "length", "on_come", "on_wait")

    def __init__(self, slab: Bytes | torch.Tensor, addr: int = 0, length: int | None = None) -> None:
        size = len(slab)
        self._slab = slab
        self.addr = addr
        self.length = size - addr if length is None else length
        self.least = self.length
        self.on_wait: Callable[[], bool] | None = None
        self.on_come: Callable[[], object] | None = None
        assert 0 <= addr <= addr + self.length <= size, "the region leaves its slab"

    @property
    def is_host(self) -> bool:
        """Whether the bytes can be seen from the host."""
        return isinstance(self._slab, np.ndarray) or self._slab.device.type == "cpu"

    @property
    def slab(self) -> torch.Tensor:
        """The slab as a flat uint8 tensor over the same memory."""
        if isinstance(self._slab, np.ndarray):
            import torch

            return torch.from_numpy(self._slab)
        return self._slab

    @property
    def view(self) -> memoryview:
        """The bytes themselves, writable, without a copy; host memory only."""
        assert self.is_host, "device memory cannot be seen from the host"
        host = self._slab if isinstance(self._slab, np.ndarray) else self._slab.numpy()
        return host[self.addr : self.addr + self.length].data

    def wait_ready(self) -> bool:
        """Wait until the bytes, and their length, are those to put; False where they never will be.  May block."""
        return self.on_wait is None or self.on_wait()

    def has_come(self) -> None:
        """Say that the whole value is in the region and that the call will not touch it again."""
        if self.on_come is not None:
            self.on_come()

    def takes(self, length: int) -> bool:
        """Whether a value of *length* bytes may be got into the region, from its beginning on."""
        return self.least <= length <= self.length

    def shortened(self, length: int) -> MemoryRegion:
        """The first *length* bytes, as a region of its own."""
        return self if length == self.length else MemoryRegion(self._slab, self.addr, length)

    def data_ptr(self) -> int:
        """Address of the first byte: of the host, or of the device that the slab is on."""
        start = self._slab.ctypes.data if isinstance(self._slab, np.ndarray) else self._slab.data_ptr()
        return int(start) + self.addr

    def to_tensor(self) -> torch.Tensor:
        """The bytes as a flat uint8 tensor over the same memory."""
        return self.slab[self.addr : self.addr + self.length]

    def tobytes(self) -> bytes:
        """A copy of the bytes, from a device too."""
        return bytes(self.view) if self.is_host else self.to_tensor().cpu().numpy().tobytes()

    def fill(self, data: bytes | bytearray | memoryview) -> None:
        """Write *data* to the region, on a device too; ValueError when it has not exactly the region's length."""
        if len(data) != self.length:
            raise ValueError(f"{len(data)} bytes do not fit a region of {self.length}")
        if self.is_host:
            # Other than an assignment to a memoryview, this lets other threads run.
            np.copyto(np.frombuffer(self.view, np.uint8), np.frombuffer(data, np.uint8))
            return
        import torch

        self.to_tensor().copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def __repr__(self) -> str:
        return f"MemoryRegion(addr={self.addr}, length={self.length})"


class Connector(Generic[K, V]):
    """A store elsewhere.  Values are opaque; a region says how many bytes a value has.

    A get that is OK has filled the whole region, or its beginning where :meth:`MemoryRegion.takes` allows that.  A
    value of another length is INVALID, an absent one NOT_FOUND; a delete of an absent one is OK.  Methods report by
    status and may raise; callers expect both.
    """

    @classmethod
    @abstractmethod
    def from_envs(cls, conn_id: str, executor: Executor, **kwargs: Any) -> Connector[K, V]:
        """A connector, not yet open, configured from environment variables; *kwargs* win over them."""
        raise NotImplementedError

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in logs and figures."""
        raise NotImplementedError

    @property
    @abstractmethod
    def feature(self) -> ConnectorFeature:
        """What this connector offers; the same from :meth:`open` to :meth:`close`."""
        raise NotImplementedError

    @abstractmethod
    def open(self) -> Status[Any]:
        """Connect."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> Status[Any]:
        """Disconnect; idempotent."""
        raise NotImplementedError

    async def prefetch(self, keys: Sequence[K]) -> None:
        """Hint that *keys* will be read soon."""

    @abstractmethod
    async def exists(self, key: K) -> Status[Any]:
        """OK where the key is there, NOT_FOUND where it is not."""
        raise NotImplementedError

    @abstractmethod
    async def get(self, key: K, mr: MemoryRegion | Sequence[MemoryRegion]) -> Status[Any]:
        """Fill *mr* with the value of *key*; a sequence of regions only with the ``gdr_get`` feature."""
        raise NotImplementedError

    @abstractmethod
    async def put(self, key: K, mr: MemoryRegion | Sequence[MemoryRegion]) -> Status[Any]:
        """Store the bytes of *mr* under *key*, replacing what is there; a sequence only with ``gdr_put``."""
        raise NotImplementedError

    def register_slabs(self, slabs: list[torch.Tensor]) -> Status[Any]:
        """Register memory that regions will lie in; called once, after :meth:`open`, with the ``rdma`` feature."""
        raise NotImplementedError

    def get_batches(
        self,
        keys: Sequence[Any],
        mrs: Sequence[MemoryRegion | Sequence[MemoryRegion]],
        batch_size: int,
    ) -> Sequence[Sequence[tuple[K, MemoryRegion | Sequence[MemoryRegion]]]]:
        """Cut pairs into the batches that ``mget`` and ``mput`` take, of at most *batch_size* pairs each."""
        raise NotImplementedError

    async def mget(
        self, keys: Sequence[K], mrs: Sequence[MemoryRegion | Sequence[MemoryRegion]]
    ) -> Sequence[Status[Any]]:
        """:meth:`get` of a batch, one status for each pair."""
        raise NotImplementedError

    async def mput(
        self, keys: Sequence[K], mrs: Sequence[MemoryRegion | Sequence[MemoryRegion]]
    ) -> Sequence[Status[Any]]:
        """:meth:`put` of a batch, one status for each pair."""
        raise NotImplementedError

    @abstractmethod
    async def delete(self, key: K) -> Status[Any]:
        """Remove *key*."""
        raise NotImplementedError

    # -- beyond the documentation: only with the zero_copy feature ----------------------------------------------------

    async def acquire(self, keys: Sequence[K]) -> Sequence[Status[MemoryRegion]]:
        """Values as regions of the store's own memory, to be read until they are released."""
        raise NotImplementedError

    async def release(self, keys: Sequence[K]) -> None:
        """Give back what :meth:`acquire` lent."""
        raise NotImplementedError

    async def alloc(self, keys: Sequence[K], length: int) -> Sequence[Status[MemoryRegion]]:
        """Regions of the store's own memory, *length* bytes each, to be filled and then sealed or dropped."""
        raise NotImplementedError

    async def seal(self, keys: Sequence[K]) -> Sequence[Status[Any]]:
        """Make filled regions the values of *keys*."""
        raise NotImplementedError

    async def drop(self, keys: Sequence[K]) -> None:
        """Give regions back that will not be sealed."""
        raise NotImplementedError


class ConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the typed options of a connector; fields of type :data:`Secret` are left out of its repr.

    Class attributes: *env_prefix*, what follows ``AIBRIX_KV_CACHE_OL_`` in the names of its variables, the rest being
    the field's name in capitals; *env_older*, prefixes that are read where the first one has nothing.
    """

    env_prefix: ClassVar[str] = ""
    env_older: ClassVar[tuple[str, ...]] = ()

    def __repr__(self) -> str:
        secret = secret_fields(type(self))
        shown = (f"{f}={'***' if f in secret else repr(getattr(self, f))}" for f in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(shown)})"


_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
Options = TypeVar("Options", bound=ConnectorOptions)


def secret_fields(options: type[ConnectorOptions]) -> set[str]:
    """Names of the fields that must not be shown."""
    return {field.name for field in _fields(options) if (getattr(field.type, "extra", None) or {}).get("secret")}


def _fields(options: type[ConnectorOptions]) -> tuple[msgspec.inspect.Field, ...]:
    kind = msgspec.inspect.type_info(options)
    assert isinstance(kind, msgspec.inspect.StructType)
    return kind.fields


def options_from_env(options: type[Options], environ: Mapping[str, str], **given: Any) -> Options:
    """Options from ``AIBRIX_KV_CACHE_OL_`` variables, defaults for the rest; *given* fields win.

    Raises ConfigError naming the variable, its value unless that is a secret, and what is allowed.
    """
    read: dict[str, Any] = {}
    for field in options.__struct_fields__:
        names = [f"{ENV_PREFIX}{prefix}{field.upper()}" for prefix in (options.env_prefix, *options.env_older)]
        name = next((name for name in names if name in environ), None)
        if name is not None and field not in given:
            read[field] = _from_text(options, field, name, environ[name])
    return make_options(options, {**read, **given})


def options_from_text(options: type[ConnectorOptions], texts: Mapping[str, str]) -> dict[str, Any]:
    """Plain data from *texts*, as somebody types them; a ConfigError names an unknown option or a wrong value."""
    unknown = next((name for name in texts if name not in options.__struct_fields__), None)
    if unknown is not None:
        raise ConfigError(f"there is no option {unknown!r}; use {', '.join(options.__struct_fields__)}")
    return {name: _from_text(options, name, name, text) for name, text in texts.items()}


def make_options(options: type[Options], data: Mapping[str, Any]) -> Options:
    """Options from plain data; a ConfigError names what is wrong, and never shows a value."""
    try:
        return msgspec.convert(dict(data), options)
    except msgspec.ValidationError as error:
        known = ", ".join(options.__struct_fields__)
        raise ConfigError(f"{options.__qualname__}: {error}; there are {known}") from None


def _from_text(options: type[Options], field: str, name: str, text: str) -> Any:
    kind = next(f.type for f in _fields(options) if f.name == field)
    allowed = ""
    if isinstance(kind, msgspec.inspect.BoolType):
        word = text.strip().lower()
        text, allowed = _WORDS.get(word, word), "; use 1, true, yes or on, or 0, false, no or off"
    try:
        return getattr(msgspec.convert({field: text}, options, strict=False), field)
    except msgspec.ValidationError as error:
        shown = "***" if field in secret_fields(options) else repr(text)
        raise ConfigError(f"{name}={shown}: {str(error).partition(' - at')[0]}{allowed}") from None


class OptionsConnector(Connector[bytes, None]):
    """Base of connectors with typed options; the environment and configurations both lead to :meth:`from_options`."""

    Options: ClassVar[type[ConnectorOptions]] = ConnectorOptions
    batched_lookups: ClassVar[bool] = False
    """Whether ``mexists(keys)`` and ``mdelete(keys)`` are there: one call, and one status for each key."""
    shorter_values: bool = False
    """Whether values may have fewer bytes than the regions they are got into (``MemoryRegion.least``)."""
    region_by_region: ClassVar[bool] = False
    """Whether ``mput`` waits for each region (``wait_ready``) and ``mget`` says when each is filled (``has_come``)."""

    @classmethod
    def from_envs(cls, conn_id: str, executor: Executor, **kwargs: Any) -> OptionsConnector:
        return cls.from_options(conn_id, executor, options_from_env(cls.Options, os.environ, **kwargs))

    def members(self) -> list[dict[str, Any]]:
        """A row for each server behind it, with ``member``, ``slots``, ``usable`` and ``why`` not; none by default."""
        return []

    @classmethod
    @abstractmethod
    def from_options(cls, conn_id: str, executor: Executor, options: Any) -> OptionsConnector:
        """A connector, not yet open, with *options* of the class's own ``Options``."""
        raise NotImplementedError
