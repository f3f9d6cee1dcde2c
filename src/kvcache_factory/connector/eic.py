"""EIC: the Elastic Instant Cache of Volcano Engine, with the package ``eic`` of its vendor and a YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ..errors import ConfigError
from ..status import Status, StatusCodes
from .base import ConnectorFeature, ConnectorOptions, MemoryRegion
from .blocking import BlockingConnector, Call, Statuses, found, sdk, text_key

if TYPE_CHECKING:
    import torch

_MOST_BYTES = 1 << 20  # of a configuration file


class EICOptions(ConnectorOptions, frozen=True, kw_only=True):
    """Attributes:
    config_file: YAML file with the settings of :class:`EICSettings`.
    """

    env_prefix: ClassVar[str] = "EIC_"

    config_file: str = ""


class EICSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the YAML file says: the server, the client's logs and transport, and how values are kept.

    ``eic_thread_num`` is accepted as in AIBrix; the client has no setting for it.
    """

    remote_url: str
    eic_instance_id: str
    eic_thread_num: int = 6
    eic_log_dir: str | None = None
    eic_log_level: int = 1
    eic_trans_type: int = 3
    eic_kv_ttl: int = -1
    eic_kv_ns: str = ""
    eic_flag_file: str | None = None


class EICConnector(BlockingConnector):
    """EIC; memory is registered first.  ``delete`` is DENIED: the client has no such call, values leave by their time.

    Raises ConfigError for a file that cannot be read or says something unknown.
    """

    Options: ClassVar[type[ConnectorOptions]] = EICOptions

    def __init__(self, conn_id: str, executor: Executor, options: EICOptions) -> None:
        super().__init__(conn_id, executor, options)
        self.settings = read_settings(options.config_file)
        self._sdk: Any = None
        self._client: Any = None

    @property
    def name(self) -> str:
        return f"EIC {self.settings.remote_url}"

    @property
    def feature(self) -> ConnectorFeature:
        return ConnectorFeature(mput_mget=True, rdma=True)

    def connect(self) -> None:
        self._sdk = sdk("eic", "EIC", "pip install eic  (the wheel that comes with the service)")
        settings, option = self.settings, self._sdk.InitOption()
        if settings.eic_log_dir is not None:
            Path(settings.eic_log_dir).mkdir(parents=True, exist_ok=True)
        option.log_dir = settings.eic_log_dir
        option.log_level = self._sdk.LogLevel(settings.eic_log_level)
        option.transport_type = self._sdk.TransportType(settings.eic_trans_type)
        option.flag_file = settings.eic_flag_file
        client = self._sdk.Client()
        code = client.init(settings.eic_instance_id, settings.remote_url.removeprefix("eic://"), option)
        if code != 0:
            raise ConnectionError(f"eic could not be initialised (code {code})")
        self._client = client

    def disconnect(self) -> None:
        self._client = None  # the client has no call for it

    def register_slabs(self, slabs: list[torch.Tensor]) -> Status[Any]:
        buffers, info = self._sdk.IOBuffers(), self._sdk.MemoryInfo()
        info.type = self._sdk.MemoryType.MEMORY_DEFAULT
        for slab in slabs:
            if slab.is_cuda:
                info.type, info.cuda_id = self._sdk.MemoryType.MEMORY_CUDA, slab.device.index
            buffers.append(int(slab.data_ptr()), int(slab.numel() * slab.element_size()), True)
        if not self._client.register_memory(buffers, info):
            return Status(StatusCodes.INVALID, "eic refused to register memory")
        return Status()

    def exists_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        return [found(there) for there in self._there([text_key(key) for key in keys])]

    def get_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        names, option = [text_key(key) for key in keys], self._sdk.GetOption()
        option.ns = self.settings.eic_kv_ns
        _, _, outcome = self._client.mget(self._vector(names), option, self._buffers(mrs, True))
        failed = [name for name, good in zip(names, self._good(outcome, names), strict=True) if not good]
        # Codes of single keys are not documented: what is not there is told from what failed by asking.
        there = dict(zip(failed, self._there(failed), strict=True)) if failed else {}
        error: Status[Any] = Status(StatusCodes.ERROR, "eic could not read the value")
        return [Status() if name not in there else error if there[name] else found(False) for name in names]

    def put_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        names, option = [text_key(key) for key in keys], self._sdk.SetOption()
        option.ns, option.ttl_second = self.settings.eic_kv_ns, self.settings.eic_kv_ttl
        _, outcome = self._client.mset(self._vector(names), self._buffers(mrs, False), option)
        error: Status[Any] = Status(StatusCodes.ERROR, "eic could not store the value")
        return [Status() if good else error for good in self._good(outcome, names)]

    def delete_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        return [Status(StatusCodes.DENIED, "eic has no call to delete; values leave by eic_kv_ttl") for _ in keys]

    def _there(self, names: Sequence[str]) -> list[bool]:
        _, outcome = self._client.mexist(self._vector(names), self._sdk.ExistOption())
        return self._good(outcome, names)

    def _good(self, outcome: Any, names: Sequence[str]) -> list[bool]:
        good = [code == self._sdk.StatusCode.SUCCESS for code in outcome.status_codes]
        return good if len(good) == len(names) else [False] * len(names)

    def _vector(self, names: Sequence[str]) -> Any:
        vector = self._sdk.StringVector()
        for name in names:
            vector.append(name)
        return vector

    def _buffers(self, mrs: Sequence[MemoryRegion], receive: bool) -> Any:
        buffers = self._sdk.IOBuffers()
        for mr in mrs:
            buffers.append(mr.data_ptr(), mr.length, receive)
        return buffers


def read_settings(path: str) -> EICSettings:
    """The settings in a YAML file; ConfigError naming the file and what is wrong with it."""
    yaml = sdk("yaml", "EIC", "pip install pyyaml")
    if not path:
        raise ConfigError("the EIC connector needs its YAML file: set config_file (AIBRIX_KV_CACHE_OL_EIC_CONFIG_FILE)")
    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.safe_load(file.read(_MOST_BYTES))
        return msgspec.convert(data, EICSettings)
    except OSError as error:
        raise ConfigError(f"the EIC connector cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from None
