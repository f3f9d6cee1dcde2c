"""Files and presets: defaults < file < environment < arguments."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvcache_factory import (
    CacheManager,
    ConfigError,
    CPUBackend,
    DiskBackend,
    FIFOEvictionPolicy,
    HierarchicalBackend,
    LRUEvictionPolicy,
    S3FIFOEvictionPolicy,
)
from kvcache_factory.environment import PREFIX, known_presets

TOML = """
name = "chat"
key_builder = "SIMPLE_HASH"
eviction_policy = {{ name = "S3FIFOEvictionPolicy", options = {{ max_size_gb = 3, threshold = 2 }} }}
compression_policy = {{ method = "int8", threshold_step = 20 }}

[[levels]]
type = "CPUBackend"
size_gb = 2

[[levels]]
type = "disk"
path = "{path}"
size_gb = 20
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cache.toml"
    path.write_text(TOML.format(path=tmp_path / "blocks"), encoding="utf-8")
    return path


def test_a_file_composes_backends_levels_policies_and_compression(file: Path, tmp_path: Path) -> None:
    """By the names of the Python classes or the registered ones; the result is that of the constructor."""
    manager = CacheManager.from_file(file, {})
    backend = HierarchicalBackend([CPUBackend(size_gb=2), DiskBackend(str(tmp_path / "blocks"), size_gb=20)])
    assert manager.config.backend == backend
    assert isinstance(manager.policy, S3FIFOEvictionPolicy)
    assert manager.policy.options()["threshold"] == 2
    assert manager.config.compression_policy is not None
    assert manager.config.compression_policy.threshold_step == 20
    assert (manager.config.name, manager.config.key_builder) == ("chat", "SIMPLE_HASH")


def test_yaml_and_json_say_the_same_as_toml(file: Path, tmp_path: Path) -> None:
    """All formats are read into the same data."""
    yaml = tmp_path / "cache.yaml"
    data = CacheManager.from_file(file, {}).to_config()
    yaml.write_bytes(msgspec.yaml.encode(data))
    assert CacheManager.from_file(yaml, {}).to_config() == data
    assert CacheManager.from_file(str(yaml), {}).to_config() == data
    json = tmp_path / "cache.json"
    json.write_bytes(msgspec.json.encode(data))
    assert CacheManager.from_file(json, {}).to_config() == data


def test_the_environment_wins_over_the_file_and_arguments_over_both(file: Path) -> None:
    """Only what is said replaces what is below it: the level's size changes, the disk and the name stay."""
    environ = {PREFIX + "L1_CACHE_CAPACITY_GB": "5", PREFIX + "L2_CACHE_KEY_BUILDER": "RAW"}
    config = CacheManager.from_file(file, environ, key_builder="ROLLING_HASH", l1_cache_eviction_policy="lru").config
    assert isinstance(config.backend, HierarchicalBackend)
    assert [level.size_gb for level in config.backend.levels] == [5, 20]
    assert (config.name, config.key_builder) == ("chat", "ROLLING_HASH")
    assert (config.eviction_policy.name, config.eviction_policy.options) == ("lru", {"max_size_gb": 3})
    assert CacheManager.from_file(file, environ).config.key_builder == "RAW"


def test_the_environment_of_the_process_is_read_unless_another_is_given(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is where a deployment has its variables."""
    monkeypatch.setenv(PREFIX + "L1_CACHE_CAPACITY_GB", "7")
    assert CacheManager.from_env().config.backend == CPUBackend(size_gb=7)
    assert CacheManager.from_env({}).config.backend == CPUBackend(size_gb=10)
    backend = CacheManager.from_file(file).config.backend
    assert isinstance(backend, HierarchicalBackend)
    assert backend.levels[0].size_gb == 7


def test_an_argument_may_be_a_whole_object() -> None:
    """Arguments of the constructor are taken as they are."""
    policy = LRUEvictionPolicy()
    manager = CacheManager.from_env({}, backend=CPUBackend(size_gb=1), eviction_policy=policy, name="mine")
    assert manager.policy is policy
    assert (manager.config.backend, manager.config.name) == (CPUBackend(size_gb=1), "mine")


@pytest.mark.parametrize("name", known_presets())
def test_presets_are_managers(name: str) -> None:
    """Each is a complete configuration that survives the way into data and back."""
    manager = CacheManager.from_file(name, {})
    assert manager.config.name == name
    assert CacheManager.from_config(manager.to_config()).to_config() == manager.to_config()


def test_there_are_two_presets_for_two_kinds_of_traffic() -> None:
    """Short turns: small blocks and no disk.  Long documents: large blocks that outlast the process."""
    assert known_presets() == ["long_document", "low_latency_chat"]
    chat, document = (CacheManager.from_file(name, {}).config for name in ("low_latency_chat", "long_document"))
    assert isinstance(chat.backend, CPUBackend)
    assert isinstance(document.backend, HierarchicalBackend)
    disk = document.backend.levels[1]
    assert isinstance(disk, DiskBackend)
    assert Path(disk.path).is_absolute()
    assert chat.storage_tokens(16) < document.storage_tokens(16)


def test_a_file_may_stand_on_a_preset(tmp_path: Path) -> None:
    """What the file says replaces what the preset says."""
    path = tmp_path / "mine.toml"
    path.write_text('preset = "low_latency_chat"\nname = "mine"\neviction_policy = "fifo"\n', encoding="utf-8")
    manager = CacheManager.from_file(path, {})
    assert isinstance(manager.policy, FIFOEvictionPolicy)
    assert (manager.config.name, manager.config.block_tokens) == ("mine", 32)
    path.write_text('preset = "low_latency_chat"\nlevels = [{type = "cpu", size_gb = 1}]\n', encoding="utf-8")
    manager = CacheManager.from_file(path, {})  # levels are a backend, too
    assert (manager.config.backend, manager.config.block_tokens) == (HierarchicalBackend([CPUBackend(size_gb=1)]), 32)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "backend = ", "a.toml is not TOML"),
        ("a.yaml", "a: [", "a.yaml is not YAML"),
        ("a.json", "{", "a.json is not JSON"),
        ("a.yaml", "- 1", "must be a table"),
        ("a.toml", "integritty = 'off'", "integritty"),
        ("a.toml", "name = 3", "name"),
        ("a.toml", "preset = 'fast'", "no preset 'fast'; there are long_document, low_latency_chat"),
        ("a.toml", "levels = []\nbackend = {type = 'cpu'}", "give backend or levels"),
        ("a.toml", "levels = []", "at least one level"),
        ("a.toml", "backend = {type = 'tape'}", "tape"),
        ("a.toml", "backend = 3", "backend"),
        ("a.toml", "eviction_policy = 'lur'", "a.toml: there is no eviction policy 'lur'; did you mean lru"),
        (
            "a.toml",
            "levels = [{type='cpu'}, {type='remote', connector='RDIS'}]",
            "a.toml: .*'RDIS'; did you mean REDIS",
        ),
        (
            "a.toml",
            "levels = [{type='cpu'}, {type='remote', connector='REDIS', options={urll=''}}]",
            "RedisOptions: .*`urll`",
        ),
        ("a.toml", "eviction_policy = 3", "eviction_policy"),
        ("a.toml", "levels = [3]", "levels"),
    ],
)
def test_what_a_file_says_wrong_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    """Each mistake is a ConfigError that a person can act on."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        CacheManager.from_file(path, {})


def test_a_file_that_is_not_there_leads_to_the_presets() -> None:
    """A misspelt preset is a file that is not there."""
    with pytest.raises(ConfigError, match="did you mean the preset 'long_document'"):
        CacheManager.from_file("long_documents", {})
    with pytest.raises(ConfigError, match=r"No such file.*presets are long_document, low_latency_chat"):
        CacheManager.from_file("nowhere/cache.toml", {})
