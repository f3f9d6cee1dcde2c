"""Values in their places: tiers, policies, connectors and clusters as the variables say, and what cannot work."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from kvcache_factory import (
    CacheManager,
    ConfigError,
    CPUBackend,
    DeviceError,
    FIFOEvictionPolicy,
    GPUBackend,
    HierarchicalBackend,
    S3FIFOEvictionPolicy,
)
from kvcache_factory.backend import RemoteBackend
from kvcache_factory.cluster.opening import MetaServiceBackend
from kvcache_factory.connector import ConnectorOptions
from kvcache_factory.connector.mock import MockConnector
from kvcache_factory.environment import PREFIX, ROWS, Environment, compose, explain
from kvcache_factory.environment.compose import DOCUMENTED, Draft
from kvcache_factory.testing import tiny_identity, tiny_spec


def manager(file: Any = None, **values: str) -> CacheManager:
    """A manager of these variables, names without the prefix."""
    environ = {PREFIX + name: value for name, value in values.items()}
    return CacheManager.from_env(environ) if file is None else CacheManager.from_file(file, environ)


def remote(made: CacheManager) -> RemoteBackend:
    backend = made.config.backend
    assert isinstance(backend, HierarchicalBackend)
    assert isinstance(backend.levels[-1], RemoteBackend)
    return backend.levels[-1]


def test_without_any_variable_the_documented_defaults_hold() -> None:
    """10 GiB of DRAM, S3FIFO with its documented parameters, the engine's block, time measured."""
    made = manager()
    assert made.config.backend == CPUBackend(size_gb=10)
    assert isinstance(made.policy, S3FIFOEvictionPolicy)
    assert (made.policy.threshold, made.policy.small_ratio) == (1, 0.3)
    config = made.config
    assert (config.block_tokens, config.chunk_tokens, config.max_tokens) == (-1, 512, -1)
    assert (config.enable_metrics, config.measure_stages, config.profiling_server) == (True, True, "")
    assert config.key_builder == "ROLLING_HASH"


def test_saying_every_default_changes_nothing() -> None:
    """The table and the configuration below it agree: no value is lost or put elsewhere."""
    values = {
        row.field.upper(): str(int(row.default) if isinstance(row.default, bool) else row.default) for row in ROWS
    }
    assert manager(**values).to_config() == manager().to_config()
    with_remote = values | {"L2_CACHE_BACKEND": "MOCK"}
    said, unsaid = (remote(manager(**v)) for v in (with_remote, {"L2_CACHE_BACKEND": "MOCK"}))
    assert said.options == {
        name.removeprefix("mock_"): False for name in Environment.__struct_fields__ if "mock" in name
    }
    for field in RemoteBackend.__struct_fields__:
        if field != "options":
            assert getattr(said, field) == getattr(unsaid, field), field


VALUES = {  # of each variable another value than the default, with what makes it count
    "CHUNK_SIZE": "1024",
    "BLOCK_SIZE": "32",
    "MAX_SEQ_LEN": "4096",
    "TIME_MEASUREMENT_ENABLED": "0",
    "BREAKDOWN_MEASUREMENT_ENABLED": "0",
    "DOUBLE_GET_THRESHOLD": "3,0.5",
    "PROFILING_ENABLED": "1",
    "PROFILING_SERVER_ADDRESS": "http://pyroscope:4040",
    "L1_CACHE_CAPACITY_GB": "2.5",
    "L1_CACHE_EVICTION_POLICY": "LRU",
    "DEVICE": "cuda",
    "S3FIFO_SMALL_TO_MAIN_PROMO_THRESHOLD": "3",
    "S3FIFO_SMALL_FIFO_CAPACITY_RATIO": "0.5",
    "L2_CACHE_BACKEND": "REDIS",
    "L2_CACHE_NAMESPACE": "team",
    "L2_CACHE_OP_BATCH": "8",
    "L2_CACHE_PER_TOKEN_TIMEOUT_MS": "5",
    "L2_CACHE_COMPRESSION": "int8",
    "L2_CACHE_KEY_BUILDER": "RAW",
    "L2_CACHE_INGESTION_TYPE": "EVICTED",
    "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS": "100",
    "L2_CACHE_NUM_ASYNC_WORKERS": "2",
    "META_SERVICE_BACKEND": "ETCD",
    "META_SERVICE_REFRESH_INTERVAL_S": "0",
    "META_SERVICE_URL": "http://etcd:2379",
    "META_SERVICE_CLUSTER_META_KEY": "nodes",
}
NOWHERE = {"TOKEN_VALIDATION_ENABLED", "L2_CACHE_PLACEMENT_POLICY", "L1_CACHE_ENABLED"}


@pytest.mark.parametrize("name", sorted(VALUES))
def test_each_variable_changes_the_configuration(name: str) -> None:
    """No knob does nothing: leaving one out of all others changes what comes out."""
    values = dict(VALUES)
    if name.startswith("S3FIFO"):
        values |= {"L1_CACHE_EVICTION_POLICY": "S3FIFO"}
    if name in ("META_SERVICE_URL", "META_SERVICE_CLUSTER_META_KEY"):
        with pytest.raises(ConfigError, match=f"META_SERVICE_BACKEND='ETCD' needs {PREFIX}{name}"):
            manager(**{k: v for k, v in values.items() if k != name})
        return
    if name == "META_SERVICE_BACKEND" or name == "L2_CACHE_BACKEND":
        less = {k: v for k, v in values.items() if not k.startswith("META") and k != name}
    else:
        less = {k: v for k, v in values.items() if k != name}
    assert manager(**values).to_config() != manager(**less).to_config()


def test_the_others_are_options_of_connectors_or_change_nothing() -> None:
    """Every variable of the table is in one of three groups, so none is forgotten here."""
    options = {row.field.upper() for row in ROWS if row.place.split(".")[0].isupper()}
    assert {row.field.upper() for row in ROWS} == set(VALUES) | NOWHERE | options


@pytest.mark.parametrize("row", [row for row in ROWS if row.place.split(".")[0].isupper()], ids=lambda row: row.field)
def test_options_reach_their_connector_only(row: Any) -> None:
    """With its connector a variable becomes an option; with another one, a note says that it has no effect."""
    connector, _, option = row.place.partition(".")
    draft = Draft(DOCUMENTED)
    draft.apply({"l2_cache_backend": connector, row.field: row.default})
    assert draft.remote is not None
    assert draft.remote["options"] == {option: row.default}
    assert draft.notes == []
    draft = Draft(DOCUMENTED)
    draft.apply({"l2_cache_backend": "OTHER", row.field: row.default})
    assert draft.notes == [f"{row.name} has no effect: {PREFIX}L2_CACHE_BACKEND is 'OTHER'"]


def test_the_alias_of_a_connector_is_that_connector() -> None:
    """PRIS was the name of PRISKV."""
    draft = Draft(DOCUMENTED)
    draft.apply({"l2_cache_backend": "pris", "priskv_remote_port": 7})
    assert draft.remote == {"type": "remote", "connector": "PRISKV", "options": {"remote_port": 7}}


def test_both_tiers_off_is_an_error() -> None:
    """There would be no cache."""
    with pytest.raises(ConfigError, match=r"L1_CACHE_ENABLED is off and .*L2_CACHE_BACKEND names nothing"):
        manager(L1_CACHE_ENABLED="0")


@pytest.mark.parametrize("ingestion", ["HOT", "EVICTED", None])
def test_hot_and_evicted_need_the_first_tier(ingestion: str | None) -> None:
    """Also where HOT is only the default: nothing would ever be written."""
    more = {} if ingestion is None else {"L2_CACHE_INGESTION_TYPE": ingestion}
    with pytest.raises(
        ConfigError, match=f"L2_CACHE_INGESTION_TYPE='{ingestion or 'HOT'}' needs the DRAM tier.* use ALL"
    ):
        manager(L1_CACHE_ENABLED="0", L2_CACHE_BACKEND="MOCK", **more)


def test_without_the_first_tier_blocks_pass_through_a_bounded_area() -> None:
    """L1 off: the remote tier alone serves what was saved."""
    made = manager(L1_CACHE_ENABLED="0", L2_CACHE_BACKEND="MOCK", L2_CACHE_INGESTION_TYPE="ALL")
    assert isinstance(made.policy, FIFOEvictionPolicy)
    backend = made.config.backend
    assert isinstance(backend, HierarchicalBackend)
    assert backend.levels[0] == CPUBackend(staging=True)
    assert made.state()["tiers"][0]["budget_bytes"] <= 64 << 20


def test_cuda_without_cuda_is_an_error_when_a_model_comes() -> None:
    """And not before: a deployment may be checked on another machine."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with manager(DEVICE="cuda", L1_CACHE_CAPACITY_GB="1") as made:
        assert made.config.backend == GPUBackend(device="cuda", size_gb=1)
        with pytest.raises(DeviceError, match="cuda"):
            made.register(tiny_spec(), tiny_identity(tiny_spec()))


def test_an_unknown_connector_is_named_with_the_nearest() -> None:
    """In the environment as in Python."""
    with pytest.raises(ConfigError, match=r"L2_CACHE_BACKEND='REDDIS': there is no connector .*; did you mean REDIS"):
        manager(L2_CACHE_BACKEND="reddis")


def test_a_policy_that_needs_more_than_its_name_is_told() -> None:
    """HYBRID is a policy, but one of policies that only Python or a file can name."""
    with pytest.raises(ConfigError, match="L1_CACHE_EVICTION_POLICY='HYBRID': HybridPolicy"):
        manager(L1_CACHE_EVICTION_POLICY="HYBRID")


def test_a_meta_service_makes_a_cluster() -> None:
    """All META_SERVICE_* values, and the password in none of the representations."""
    made = manager(
        L2_CACHE_BACKEND="REDIS",
        META_SERVICE_BACKEND="redis",
        META_SERVICE_URL="redis://:hush@meta:6379",
        META_SERVICE_CLUSTER_META_KEY="nodes",
        META_SERVICE_REFRESH_INTERVAL_S="0",
    )
    service = remote(made).meta_service
    assert service == MetaServiceBackend(
        backend="REDIS", url="redis://:hush@meta:6379", key="nodes", refresh_interval_s=0
    )
    assert "hush" not in repr(service) + repr(made)


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("ZSTD", "bf16x"),
        ("lz4", "bf16x"),
        ("BF16X", "bf16x"),
        ("Int8", "int8"),
        ("INT8:max_rel_error=0.01", "int8:max_rel_error=0.01"),
        ("NONE", None),
        ("", None),
    ],
)
def test_names_of_codecs(text: str, codec: str | None) -> None:
    """General compressors mean the lossless codec; ours are taken in any case, with parameters."""
    assert remote(manager(L2_CACHE_BACKEND="MOCK", L2_CACHE_COMPRESSION=text)).codec == codec


def test_a_codec_that_is_none_is_an_error() -> None:
    """Variable, value and what is allowed."""
    with pytest.raises(ConfigError, match=r"L2_CACHE_COMPRESSION='mp3'.*bf16x"):
        manager(L2_CACHE_BACKEND="MOCK", L2_CACHE_COMPRESSION="mp3")


def test_what_has_no_effect_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Parameters of another policy, a remote tier's settings without one: warnings, no silence."""
    with caplog.at_level(logging.WARNING, "kvcache_factory"):
        manager(L1_CACHE_EVICTION_POLICY="LRU", S3FIFO_SMALL_TO_MAIN_PROMO_THRESHOLD="2")
        manager(L2_CACHE_BACKEND="INFINISTORE", L2_CACHE_COMPRESSION="ZSTD")
        manager(L2_CACHE_OP_BATCH="8", DOUBLE_GET_THRESHOLD="1", META_SERVICE_BACKEND="REDIS")
        manager(L2_CACHE_BACKEND="MOCK", META_SERVICE_URL="redis://h", META_SERVICE_BACKEND="")
        off = {"L1_CACHE_ENABLED": "0", "L2_CACHE_BACKEND": "MOCK", "L2_CACHE_INGESTION_TYPE": "ALL"}
        manager(**off, L1_CACHE_CAPACITY_GB="3", DEVICE="cpu")
    said = [record.getMessage().removeprefix(PREFIX) for record in caplog.records]
    assert said == [
        "S3FIFO_SMALL_TO_MAIN_PROMO_THRESHOLD has no effect: the eviction policy is LRU",
        "L2_CACHE_COMPRESSION has no effect: INFINISTORE takes values of one length only",
        f"L2_CACHE_OP_BATCH has no effect: {PREFIX}L2_CACHE_BACKEND is ''",
        f"META_SERVICE_BACKEND has no effect: {PREFIX}L2_CACHE_BACKEND is ''",
        f"DOUBLE_GET_THRESHOLD has no effect: {PREFIX}L2_CACHE_BACKEND is ''",
        f"META_SERVICE_URL has no effect: {PREFIX}META_SERVICE_BACKEND names nothing",
        f"L1_CACHE_CAPACITY_GB has no effect: {PREFIX}L1_CACHE_ENABLED is off",
    ]


TOML = """
[[levels]]
type = "GPUBackend"
device = "cpu"
size_gb = 1

[[levels]]
type = "remote"
connector = "REDIS"
op_batch = 16
options = {url = "redis://old:1"}
"""


def test_a_policy_of_the_environment_has_its_documented_parameters(tmp_path: Path) -> None:
    """Over a file with another policy too, and whatever the order in which they are said."""
    file = tmp_path / "cache.toml"
    file.write_text('eviction_policy = "lru"\n', encoding="utf-8")
    assert (
        manager(file, L1_CACHE_EVICTION_POLICY="S3FIFO").policy.options().items()
        >= {
            "threshold": 1,
            "small_ratio": 0.3,
        }.items()
    )
    environ = {PREFIX + "S3FIFO_SMALL_TO_MAIN_PROMO_THRESHOLD": "3"}
    made = CacheManager.from_file(file, environ, l1_cache_eviction_policy="s3fifo")
    assert made.policy.options()["threshold"] == 3


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"REDIS_URL": "banana"}, "REDIS_URL='***'"),
        ({"REDIS_URL": "redis://:hush@host:99999"}, "REDIS_URL='redis://***@host:99999'"),
        ({"REDIS_URL": "redis://me:hu/sh@host:1"}, "REDIS_URL='redis://***@host:1'"),
        ({"META_SERVICE_URL": "banana"}, "META_SERVICE_URL='***'"),
        ({"META_SERVICE_URL": "redis://h:port"}, "META_SERVICE_URL='redis://h:port'"),
        ({"META_SERVICE_URL": "http://me:hu/sh@h:1"}, "META_SERVICE_URL='http://***@h:1'"),
        (
            {"META_SERVICE_BACKEND": "ETCD", "META_SERVICE_URL": "redis://h"},
            "META_SERVICE_BACKEND='ETCD' needs PREFIX_META_SERVICE_URL",
        ),
        (
            {
                "L2_CACHE_BACKEND": "SHFS",
                "META_SERVICE_BACKEND": "REDIS",
                "META_SERVICE_URL": "redis://h",
                "META_SERVICE_CLUSTER_META_KEY": "k",
            },
            "SHFS goes to none by address",
        ),
        ({"L2_CACHE_OP_BATCH": "5000"}, "L2_CACHE_OP_BATCH='5000'"),
        ({"INFINISTORE_VISIBLE_DEV_LIST": "mlx5_0:x:y"}, "INFINISTORE_VISIBLE_DEV_LIST='mlx5_0:x:y'"),
        ({"L2_CACHE_BACKEND": "EIC"}, "L2_CACHE_BACKEND='EIC' needs PREFIX_EIC_CONFIG_FILE"),
        ({"SHFS_ROOT": " "}, "SHFS_ROOT=' '"),
        ({"L1_CACHE_CAPACITY_GB": "1e300"}, "L1_CACHE_CAPACITY_GB='1e300'"),
        ({"REDIS_TTL_S": "9" * 30}, f"REDIS_TTL_S='{'9' * 30}'"),
        ({"REDIS_TIMEOUT_S": "1e300"}, "REDIS_TIMEOUT_S='1e300'"),
        ({"ROCKSDB_WRITE_BUFFER_SIZE": "9" * 30}, f"ROCKSDB_WRITE_BUFFER_SIZE='{'9' * 30}'"),
    ],
    ids=str,
)
def test_what_no_connector_could_use_is_refused_before_anything_is_opened(values: dict[str, str], wrong: str) -> None:
    """With the variable's name, so that ``env --check`` finds it, and without a password."""
    with pytest.raises(ConfigError) as caught:
        manager(**{"L2_CACHE_BACKEND": "REDIS", **values})
    assert wrong.replace("PREFIX_", PREFIX) in str(caught.value)
    assert "hush" not in str(caught.value)
    assert explain({PREFIX + name: value for name, value in {"L2_CACHE_BACKEND": "REDIS", **values}.items()}).errors


def test_a_system_with_a_key_of_its_own_needs_none() -> None:
    """InfiniStore's membership is where it always was."""
    made = manager(L2_CACHE_BACKEND="INFINISTORE", META_SERVICE_BACKEND="REDIS", META_SERVICE_URL="redis://meta")
    assert remote(made).meta_service == MetaServiceBackend(backend="REDIS", url="redis://meta")


def test_the_environment_changes_parts_of_a_file(tmp_path: Path) -> None:
    """Another address, another connector, another device or no remote tier at all."""
    file = tmp_path / "cache.toml"
    file.write_text(TOML, encoding="utf-8")
    assert remote(manager(file, REDIS_URL="redis://new:2")).options == {"url": "redis://new:2"}
    changed = remote(manager(file, L2_CACHE_BACKEND="MOCK", MOCK_USE_NOOP="1"))
    assert (changed.connector, changed.options, changed.op_batch) == ("MOCK", {"use_noop": True}, 16)
    same = remote(manager(file, L2_CACHE_BACKEND="redis"))
    assert (same.options, same.op_batch) == ({"url": "redis://old:1"}, 16)
    moved = manager(file, DEVICE="cpu", L2_CACHE_BACKEND="").config.backend
    assert moved == HierarchicalBackend([CPUBackend(size_gb=1)])
    file.write_text('backend = {type = "cpu", staging = true}', encoding="utf-8")
    assert manager(file, L1_CACHE_ENABLED="1", L1_CACHE_CAPACITY_GB="2").config.backend == CPUBackend(size_gb=2)


class ElsewhereOptions(ConnectorOptions, frozen=True, kw_only=True):
    """Options of a connector that this library knows nothing of."""

    env_prefix: ClassVar[str] = "ELSEWHERE_"

    depth: int = 1


class ElsewhereConnector(MockConnector):
    Options: ClassVar[type[ConnectorOptions]] = ElsewhereOptions


def test_a_connector_from_outside_reads_its_own_variables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the prefix that its options name; they are known then, and checked."""
    module = ModuleType("elsewhere")
    module.Connector = ElsewhereConnector  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    with caplog.at_level(logging.WARNING, "kvcache_factory"):
        made = remote(manager(L2_CACHE_BACKEND="elsewhere:Connector", ELSEWHERE_DEPTH="7"))
    assert (made.connector, made.options) == ("elsewhere:Connector", {"depth": 7})
    assert caplog.records == []
    with pytest.raises(ConfigError, match=f"{PREFIX}ELSEWHERE_DEPTH='x'"):
        manager(L2_CACHE_BACKEND="elsewhere:Connector", ELSEWHERE_DEPTH="x")


def test_wrong_arguments_are_named_with_the_nearest() -> None:
    """A misspelt keyword is no silent default."""
    with pytest.raises(ConfigError, match="l1_cache_capcity_gb is no argument; did you mean l1_cache_capacity_gb"):
        CacheManager.from_env({}, l1_cache_capcity_gb=4)
    with pytest.raises(ConfigError, match=r"^xyz is no argument$"):
        CacheManager.from_env({}, xyz=4)
    with pytest.raises(ConfigError, match="l1_cache_capacity_gb='much'"):
        CacheManager.from_env({}, l1_cache_capacity_gb="much")
    config, own = compose({PREFIX + "DEVICE": "tpu"}, None, {"device": "cpu", "name": "n"})  # the argument mends it
    assert (config.backend, own) == (CPUBackend(size_gb=10), {"name": "n"})
