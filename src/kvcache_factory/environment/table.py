"""The one table of environment variables: each is a field here, with its type, default, meaning and place.

The variable of a field is the prefix and the field's name in capitals.  Names, defaults and meanings are those of the
AIBrix KV cache offloading documentation; ``docs/compatibility.md`` says where a meaning differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from ..codec.names import named_codec
from ..policy.names import known_policies

PREFIX = "AIBRIX_KV_CACHE_OL_"

Check = Callable[[Any], bool]


def at(
    place: str,
    meaning: str,
    allowed: str = "",
    ok: Check | None = None,
    secret: bool = False,
    older: tuple[str, ...] = (),
    **bounds: Any,
) -> msgspec.Meta:
    """A row of the table: where the value goes, what it means, and what is allowed beyond its type.

    *place* is ``config.x``, ``policy.x``, ``memory.x``, ``remote.x``, ``meta.x``, or ``NAME.x``, which is an option of
    a connector; empty where several places are meant (see ``compose``).  *older*: former names.  *bounds*: ge, gt, le,
    lt.
    """
    extra = {"place": place, "allowed": allowed, "ok": ok, "secret": secret, "older": older}
    return msgspec.Meta(description=meaning, extra=extra, **bounds)


def pair(text: str) -> tuple[int, float]:
    """A DOUBLE_GET_THRESHOLD as (blocks, share); a single number leaves the share at 0; ValueError for other text."""
    blocks, _, share = text.partition(",")
    found = int(blocks), float(share) if share.strip() else 0.0
    if found[0] < 0 or not 0 <= found[1] <= 1:
        raise ValueError(text)
    return found


def _passes(reads: Callable[..., object], *given: Any) -> bool:
    """Whether what *reads* a value takes it; ConfigError is a ValueError."""
    try:
        reads(*given)
    except ValueError:
        return False
    return True


def _is_pair(text: str) -> bool:
    return _passes(pair, text)


def _is_cidr(text: str) -> bool:
    import ipaddress

    return _passes(ipaddress.ip_network, text, False)


def _is_policy(text: str) -> bool:
    return text.lower() in known_policies()


def _is_redis_url(text: str) -> bool:
    from ..connector.redis import RedisOptions, redis_access

    return _passes(redis_access, RedisOptions(url=text))


def _is_device_list(text: str) -> bool:
    from ..connector.rdma import parse_devices

    return _passes(parse_devices, text)


def _is_meta_url(text: str) -> bool:
    from ..cluster.etcd_meta import etcd_place

    return not text or _passes(etcd_place, text) or _is_redis_url(text)


def _is_limit(value: int) -> bool:
    return value == -1 or value > 0


def _is_codec(text: str) -> bool:
    return _passes(named_codec, text)


_CODEC = {
    "allowed": "a codec, such as bf16x, int8 or int8:max_rel_error=0.01; ZSTD, LZ4 and the like mean bf16x, lossless",
    "ok": _is_codec,
}
_LIMIT = {"allowed": "-1 or a whole number above 0", "ok": _is_limit}
_CIDR = {"allowed": "an address range in CIDR notation, such as 0.0.0.0/0", "ok": _is_cidr}
_PAIR = {"allowed": "a number of blocks, or blocks and a share from 0 to 1, such as 4,0.1", "ok": _is_pair}
_POLICY = {"allowed": ", ".join(sorted(known_policies())).upper(), "ok": _is_policy}
_URL = {
    "allowed": "an address that begins with http:// or https://",
    "ok": lambda t: t.startswith(("http://", "https://")),
}
_META_URL = {"allowed": "redis://host:port, or http://host:port of etcd", "ok": _is_meta_url}
_REDIS_URL = {"allowed": "redis://host:port, rediss:// for TLS, or unix:///path", "ok": _is_redis_url}
_DEVICES = {"allowed": "names of devices, each with :gidINDEX or not, with commas between", "ok": _is_device_list}
_TEXT: dict[str, Any] = {"allowed": "text that is not empty", "ok": bool}
_SECONDS: dict[str, Any] = {"gt": 0, "le": 86_400}
_BYTES: dict[str, Any] = {"le": 1_000_000_000_000}
_PORT: dict[str, Any] = {"ge": 1, "le": 65535}

_TIMEOUT = "seconds that a batch may take before its helper process is killed"
_START = "seconds that the helper process may take to start and connect"
_COPY = "MiB for memory that cannot be shared with the helper process"


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every variable that is read, as a typed value; the defaults are the documented ones."""

    chunk_size: Annotated[
        int,
        at(
            "config.chunk_tokens",
            "tokens per operation chunk; rounded down to a block multiple, at least 4 blocks",
            ge=1,
        ),
    ] = 512
    block_size: Annotated[int, at("config.block_tokens", "tokens per cache block; -1 = the engine's", **_LIMIT)] = -1
    max_seq_len: Annotated[
        int, at("config.max_tokens", "tokens past this are ignored, rounded down to a block; -1 = no limit", **_LIMIT)
    ] = -1
    time_measurement_enabled: Annotated[bool, at("config.enable_metrics", "measure time per operation")] = True
    breakdown_measurement_enabled: Annotated[
        bool, at("config.measure_stages", "measure time per stage of an operation")
    ] = True
    double_get_threshold: Annotated[
        str,
        at("", "ask L2 for the rest only if at least this many blocks and at least this share are missing", **_PAIR),
    ] = "4,0.1"
    token_validation_enabled: Annotated[bool, at("", "tokens of every hit are compared, whatever this says")] = False
    transport_rdma_addr_range: Annotated[str, at("INFINISTORE.rdma_addr_range", "valid GID range, CIDR", **_CIDR)] = (
        "::/0"
    )
    profiling_enabled: Annotated[bool, at("", "continuous profiling on")] = False
    profiling_server_address: Annotated[str, at("", "Pyroscope server", **_URL)] = "http://0.0.0.0:4040"

    l1_cache_enabled: Annotated[bool, at("", "DRAM tier on")] = True
    l1_cache_eviction_policy: Annotated[str, at("policy.name", "who leaves the DRAM tier", **_POLICY)] = "S3FIFO"
    l1_cache_capacity_gb: Annotated[
        float, at("memory.size_gb", "capacity of the DRAM tier in GiB, per manager", gt=0, le=1_000_000)
    ] = 10.0
    device: Annotated[Literal["cpu", "cuda"], at("", "where L1 rests")] = "cpu"
    s3fifo_small_to_main_promo_threshold: Annotated[
        int, at("policy.threshold", "hits before promotion", ge=1, le=3)
    ] = 1
    s3fifo_small_fifo_capacity_ratio: Annotated[
        float, at("policy.small_ratio", "share of the small queue", gt=0, lt=1)
    ] = 0.3

    l2_cache_backend: Annotated[
        str, at("remote.connector", "connector of the remote tier, by name or module:Class; empty = none")
    ] = ""
    l2_cache_namespace: Annotated[
        str, at("remote.namespace", "first part of every key", "a name that is not empty", bool)
    ] = "aibrix"
    l2_cache_compression: Annotated[str, at("remote.codec", "codec for L2 values; empty = none", **_CODEC)] = ""
    l2_cache_op_batch: Annotated[int, at("remote.op_batch", "blocks per batch", ge=1, le=4096)] = 32
    l2_cache_per_token_timeout_ms: Annotated[
        float, at("remote.per_token_timeout_ms", "deadline of an L2 call = tokens × this", gt=0)
    ] = 20.0
    l2_cache_key_builder: Annotated[
        Literal["RAW", "ROLLING_HASH", "SIMPLE_HASH"], at("config.key_builder", "how keys are made")
    ] = "ROLLING_HASH"
    l2_cache_ingestion_type: Annotated[
        Literal["ALL", "HOT", "EVICTED"],
        at("remote.ingestion", "what is written to L2: all that is put, what becomes hot, or what leaves L1"),
    ] = "HOT"
    l2_cache_ingestion_max_inflight_tokens: Annotated[
        int,
        at(
            "remote.max_inflight_tokens",
            "cap on tokens being written in the background; 0 = one batch per worker",
            ge=0,
        ),
    ] = 0
    l2_cache_num_async_workers: Annotated[int, at("remote.workers", "I/O workers", ge=1, le=256)] = 8
    l2_cache_placement_policy: Annotated[Literal["SIMPLE"], at("meta.placement", "placement, with a meta service")] = (
        "SIMPLE"
    )

    meta_service_backend: Annotated[
        Literal["", "REDIS", "ETCD"], at("meta.backend", "where the membership is kept; empty = direct mode")
    ] = ""
    meta_service_refresh_interval_s: Annotated[
        float, at("meta.refresh_interval_s", "seconds between two looks at the membership; 0 = read once", ge=0)
    ] = 30.0
    meta_service_url: Annotated[
        str, at("meta.url", "the meta service, such as redis://host:6379", secret=True, **_META_URL)
    ] = ""
    meta_service_cluster_meta_key: Annotated[str, at("meta.key", "key that holds the membership JSON")] = ""

    infinistore_host_addr: Annotated[str, at("INFINISTORE.host_addr", "server", **_TEXT)] = "127.0.0.1"
    infinistore_service_port: Annotated[int, at("INFINISTORE.service_port", "server", **_PORT)] = 12345
    infinistore_connection_type: Annotated[Literal["RDMA", "TCP"], at("INFINISTORE.connection_type", "transport")] = (
        "RDMA"
    )
    infinistore_ib_port: Annotated[int, at("INFINISTORE.ib_port", "port of the device", ge=0)] = 1
    infinistore_link_type: Annotated[Literal["Ethernet", "IB"], at("INFINISTORE.link_type", "link")] = "Ethernet"
    infinistore_visible_dev_list: Annotated[
        str,
        at(
            "INFINISTORE.visible_dev_list",
            "devices, each optionally with a GID index: mlx5_0:gid0,mlx5_1:gid1",
            **_DEVICES,
        ),
    ] = ""
    infinistore_use_gdr: Annotated[bool, at("INFINISTORE.use_gdr", "GDR where available")] = True

    infinistore_local_rank: Annotated[
        int, at("INFINISTORE.local_rank", "which of the devices this process uses", ge=0)
    ] = 0
    infinistore_timeout_s: Annotated[float, at("INFINISTORE.timeout_s", _TIMEOUT, **_SECONDS)] = 5.0
    infinistore_start_timeout_s: Annotated[float, at("INFINISTORE.start_timeout_s", _START, **_SECONDS)] = 8.0
    infinistore_copy_mb: Annotated[int, at("INFINISTORE.copy_mb", _COPY, ge=1, le=1_000_000)] = 128

    hpkv_remote_addr: Annotated[str, at("HPKV.remote_addr", "server", **_TEXT)] = "127.0.0.1"
    hpkv_remote_port: Annotated[int, at("HPKV.remote_port", "server", **_PORT)] = 12346
    hpkv_local_addr: Annotated[str, at("HPKV.local_addr", "client side", **_TEXT)] = "127.0.0.1"
    hpkv_local_port: Annotated[int, at("HPKV.local_port", "client side", **_PORT)] = 12345
    hpkv_use_gdr: Annotated[bool, at("HPKV.use_gdr", "GDR where available")] = True

    priskv_remote_addr: Annotated[str, at("PRISKV.remote_addr", "server", older=("pris_remote_addr",), **_TEXT)] = (
        "127.0.0.1"
    )
    priskv_remote_port: Annotated[int, at("PRISKV.remote_port", "server", older=("pris_remote_port",), **_PORT)] = 6379
    priskv_password: Annotated[
        str, at("PRISKV.password", "password of the server", older=("pris_password",), secret=True)
    ] = ""
    priskv_use_mput_mget: Annotated[bool, at("PRISKV.use_mput_mget", "batch calls", older=("pris_use_mput_mget",))] = (
        False
    )
    priskv_use_zero_copy: Annotated[
        bool, at("PRISKV.use_zero_copy", "memory that the store owns", older=("pris_use_zero_copy",))
    ] = False

    priskv_timeout_s: Annotated[float, at("PRISKV.timeout_s", _TIMEOUT, **_SECONDS)] = 5.0
    priskv_start_timeout_s: Annotated[float, at("PRISKV.start_timeout_s", _START, **_SECONDS)] = 8.0
    priskv_copy_mb: Annotated[int, at("PRISKV.copy_mb", _COPY, ge=1, le=1_000_000)] = 128

    eic_config_file: Annotated[
        str,
        at(
            "EIC.config_file",
            "YAML file with remote_url, eic_instance_id and the other settings of the SDK",
        ),
    ] = ""

    mock_use_rdma: Annotated[bool, at("MOCK.use_rdma", "ask for registered memory")] = False
    mock_use_mput_mget: Annotated[bool, at("MOCK.use_mput_mget", "batch calls")] = False
    mock_use_noop: Annotated[bool, at("MOCK.use_noop", "every get misses, every put is accepted")] = False
    mock_use_gdr_put: Annotated[bool, at("MOCK.use_gdr_put", "take device memory on put")] = False
    mock_use_gdr_get: Annotated[bool, at("MOCK.use_gdr_get", "take device memory on get")] = False

    rocksdb_root: Annotated[str, at("ROCKSDB.root", "directory", **_TEXT)] = "~/.kv_cache_ol/rocksdb"
    rocksdb_ttl_s: Annotated[int, at("ROCKSDB.ttl_s", "time to live in seconds", ge=0, le=1_000_000_000)] = 600
    rocksdb_write_buffer_size: Annotated[
        int, at("ROCKSDB.write_buffer_size", "bytes of a write buffer", ge=1, **_BYTES)
    ] = 67108864
    rocksdb_target_file_size_base: Annotated[
        int, at("ROCKSDB.target_file_size_base", "bytes of a file of the first level", ge=1, **_BYTES)
    ] = 67108864
    rocksdb_max_write_buffer_number: Annotated[
        int, at("ROCKSDB.max_write_buffer_number", "write buffers", ge=1, le=1000)
    ] = 3
    rocksdb_max_total_wal_size: Annotated[
        int, at("ROCKSDB.max_total_wal_size", "bytes of write-ahead log", ge=0, **_BYTES)
    ] = 134217728
    rocksdb_max_background_jobs: Annotated[
        int, at("ROCKSDB.max_background_jobs", "background threads", ge=1, le=1000)
    ] = 8

    shfs_root: Annotated[str, at("SHFS.root", "shared file system directory", **_TEXT)] = "~/.kv_cache_ol/shfs"

    shfs_min_free_gb: Annotated[float, at("SHFS.min_free_gb", "GiB that stay free in the file system", ge=0)] = 1.0

    redis_url: Annotated[str, at("REDIS.url", "the server, or servers of one cluster", secret=True, **_REDIS_URL)] = (
        "redis://127.0.0.1:6379"
    )
    redis_username: Annotated[str, at("REDIS.username", "user, where the address names none")] = ""
    redis_password: Annotated[str, at("REDIS.password", "password, where the address has none", secret=True)] = ""
    redis_tls_ca: Annotated[str, at("REDIS.tls_ca", "file with the certificates to trust")] = ""
    redis_tls_cert: Annotated[str, at("REDIS.tls_cert", "file with the client's certificate")] = ""
    redis_tls_key: Annotated[str, at("REDIS.tls_key", "file with its key")] = ""
    redis_tls_check_hostname: Annotated[
        bool, at("REDIS.tls_check_hostname", "the server's certificate must name the host")
    ] = True
    redis_ttl_s: Annotated[
        int, at("REDIS.ttl_s", "seconds that a value is kept; 0 = as the server likes", ge=0, le=1_000_000_000)
    ] = 0
    redis_timeout_s: Annotated[
        float, at("REDIS.timeout_s", "longest that one value may take, in seconds", **_SECONDS)
    ] = 2.0
    redis_connect_timeout_s: Annotated[
        float, at("REDIS.connect_timeout_s", "longest that a connection may take, in seconds", **_SECONDS)
    ] = 1.0

    def __post_init__(self) -> None:
        for row in ROWS:
            value = getattr(self, row.field)
            if row.ok is not None and value != row.default and not row.ok(value):
                raise ValueError(f"{row.field}: use {row.allowed}")

    def __repr__(self) -> str:
        return f"Environment({', '.join(f'{row.field}={row.shown(getattr(self, row.field))!r}' for row in ROWS)})"


class Row(msgspec.Struct, frozen=True):
    """A variable, as the table says."""

    field: str
    type: Any
    default: Any
    meaning: str
    place: str
    allowed: str
    """What may be given, in words."""
    ok: Check | None
    secret: bool
    older: tuple[str, ...]
    """Fields that were its names."""

    @property
    def name(self) -> str:
        """The variable."""
        return PREFIX + self.field.upper()

    def shown(self, value: Any) -> Any:
        """*value* as it may be printed: no passwords, alone or in an address."""
        if not self.secret or not value:
            return value
        return re.sub(r"//.*@", "//***@", str(value)) if "://" in str(value) else "***"


def _rows() -> tuple[Row, ...]:
    types = {f.name: f.type for f in msgspec.inspect.type_info(Environment).fields}  # type: ignore[attr-defined]
    rows = []
    for field in msgspec.structs.fields(Environment):
        plain, meta = field.type.__origin__, field.type.__metadata__[0]
        extra = meta.extra
        rows.append(
            Row(
                field=field.name,
                type=plain,
                default=field.default,
                meaning=meta.description,
                place=extra["place"],
                allowed=extra["allowed"] or _in_words(types[field.name].type),
                ok=extra["ok"],
                secret=extra["secret"],
                older=extra["older"],
            )
        )
    return tuple(rows)


def _in_words(kind: Any) -> str:
    """What a type allows."""
    if isinstance(kind, msgspec.inspect.BoolType):
        return "1, true, yes or on; 0, false, no or off"
    if isinstance(kind, msgspec.inspect.LiteralType):
        return ", ".join(value or "nothing" for value in sorted(map(str, kind.values)))
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
        bounds = [f"{word} {getattr(kind, b):g}" for b, word in words.items() if getattr(kind, b) is not None]
        number = "a whole number" if isinstance(kind, msgspec.inspect.IntType) else "a number"
        return " ".join([number, " and ".join(bounds)]).strip()
    return "text"


ROWS = _rows()
ROW_OF = {row.field: row for row in ROWS}
