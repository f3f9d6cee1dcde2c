"""Settings of the connector, the control socket and the conversations: what needs no engine."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_factory.backend import CPUBackend, DiskBackend, GPUBackend, HierarchicalBackend, RemoteBackend
from kvcache_factory.config import ManagerConfig
from kvcache_factory.errors import ConfigError
from kvcache_factory.integration.vllm.control import Client, Door, Server
from kvcache_factory.integration.vllm.conversation import Talk, continued
from kvcache_factory.integration.vllm.requests import reuse_hint_of
from kvcache_factory.integration.vllm.settings import Settings, read_settings


def test_an_engine_says_more_than_the_environment_and_that_more_than_a_file(tmp_path: Path) -> None:
    """Each setting comes from the first place that has it."""
    file = tmp_path / "kv.toml"
    file.write_text('[vllm]\nmemory_gb = 1\nnamespace = "file"\ndisk_gb = 3\n')
    environment = {"KVCACHE_FACTORY_NAMESPACE": "environment", "KVCACHE_FACTORY_DISK_GB": "2"}
    settings = read_settings({"config_file": str(file), "disk_gb": 1}, environment)
    assert (settings.memory_gb, settings.namespace, settings.disk_gb) == (1, "environment", 1)


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"memory": 1}, "memory"),
        ({"memory_gb": "much"}, "memory_gb"),
        ({"memory_gb": -1}, "memory_gb"),
        ({"load_decision": "sometimes"}, "load_decision"),
        ({"config_file": "/does/not/exist"}, "/does/not/exist"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], word: str) -> None:
    """Unknown names, wrong types, values that cannot be, and files that are not there."""
    with pytest.raises(ConfigError, match=word):
        read_settings(extra, {})


def test_variables_of_the_offloading_framework_describe_the_manager() -> None:
    """Where nothing of ours does; the engine's own block then, as documented."""
    environment = {"AIBRIX_KV_CACHE_OL_L1_CACHE_CAPACITY_GB": "3", "AIBRIX_KV_CACHE_OL_L2_CACHE_BACKEND": "MOCK"}
    settings = read_settings({"namespace": "n"}, environment)
    assert (settings.namespace, settings.block_tokens) == ("n", -1)
    backend = settings.manager_config(shared=True).backend
    assert isinstance(backend, HierarchicalBackend)
    assert backend.levels[0] == CPUBackend(size_gb=3, shared=True)
    assert isinstance(backend.levels[1], RemoteBackend)
    assert read_settings({"block_tokens": 32}, environment).block_tokens == 32
    assert read_settings({"memory_gb": 1}, environment).manager is None
    assert read_settings({}, environment | {"KVCACHE_FACTORY_DISK_PATH": "/d"}).manager is None
    assert read_settings({"manager": {"block_tokens": 96}}, environment).block_tokens == 96
    with pytest.raises(ConfigError, match="AIBRIX_KV_CACHE_OL_DEVICE='tpu'"):
        read_settings({}, {"AIBRIX_KV_CACHE_OL_DEVICE": "tpu"})


def test_a_directory_becomes_a_level_below_memory() -> None:
    """``disk_path`` makes two levels, and children get memory that they can map."""
    config = Settings(memory_gb=1, disk_path="/var/cache/kv", disk_gb=2).manager_config(shared=True)
    assert config.backend == HierarchicalBackend(
        [CPUBackend(size_gb=1, shared=True), DiskBackend("/var/cache/kv", size_gb=2)]
    )


def test_a_device_tier_becomes_memory_where_children_must_reach_it() -> None:
    """Another process cannot map a device's memory: DRAM of the same size takes its place."""
    settings = Settings(manager=ManagerConfig(backend=GPUBackend(device="cuda:0", size_gb=3)))
    assert settings.manager_config(shared=True).backend == CPUBackend(size_gb=3, shared=True)
    assert settings.manager_config(shared=False).backend == GPUBackend(device="cuda:0", size_gb=3)


def test_calls_reach_the_other_process() -> None:
    """Results come back, errors are errors here, and an unknown verb is one."""
    door = Door()
    server = Server(str(door.path), {"add": lambda a, b: a + b, "fail": lambda: 1 // 0})
    try:
        client = Client(str(door.path))
        client.wait_until_there()
        assert client.ask("add", 2, 3) == 5
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            client.ask("fail")
        with pytest.raises(ConfigError, match="unknown verb"):
            client.ask("nothing")
        assert client.call("fail") is None
    finally:
        server.close()
    assert client.call("add", 2, 3) is None


def test_nobody_else_may_call() -> None:
    """Socket, token and directory belong to this user alone, and a wrong token opens nothing."""
    door = Door()
    server = Server(str(door.path), {"add": lambda a, b: a + b})
    try:
        modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (door.path, door.path.with_name("token"))]
        assert modes == [0o600, 0o600]
        assert stat.S_IMODE(os.stat(door.path.parent).st_mode) == 0o700
        door.path.with_name("token").write_text("guessed")
        with pytest.raises(ConfigError, match="wrong token"):
            Client(str(door.path)).ask("add", 1, 1)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("history", "prompt", "expected"),
    [
        ("auto", "more", {"prompt_token_ids": [1, 2, 109]}),
        ("auto", "said and more", "said and more"),
        ("append", "said and more", {"prompt_token_ids": [1, 2, 115]}),
        ("none", "more", "more"),
        ("auto", {"prompt_token_ids": [7]}, {"prompt_token_ids": [7]}),
        ("auto", {"prompt": "more", "cache_salt": "s"}, {"prompt_token_ids": [1, 2, 109], "cache_salt": "s"}),
        (
            "auto",
            {"prompt": "more", "multi_modal_data": {"image": 1}},
            {"prompt": "more", "multi_modal_data": {"image": 1}},
        ),
    ],
)
def test_what_goes_in_front_of_a_prompt(history: Any, prompt: Any, expected: Any) -> None:
    """Only text goes on from a conversation; token ids, and what came with media, are left as they are."""
    talk = Talk([1, 2], "said")
    assert continued(talk, prompt, history, lambda text: [ord(text[0])]) == expected
    assert continued(Talk(), prompt, history, lambda text: [ord(text[0])]) == prompt


@pytest.mark.parametrize(
    ("said", "meant"),
    [(None, "unknown"), ({}, "unknown"), ({"reuse_hint": "ended"}, "ended"), ({"reuse_hint": ["?"]}, "unknown")],
)
def test_a_request_says_whether_its_session_returns(said: Any, meant: str) -> None:
    """For policies; a word that is none says nothing, for an engine's request is no place to fail."""
    assert reuse_hint_of(SimpleNamespace(kv_transfer_params=said)) == meant
