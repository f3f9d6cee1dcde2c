"""Keys come from a file or the environment, and no message ever shows what was found there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcache_factory.backend import CPUBackend, DiskBackend, HierarchicalBackend
from kvcache_factory.codec.keys import load_key
from kvcache_factory.errors import ConfigError
from kvcache_factory.manager import CacheManager

KEY = bytes(range(200, 232))


def key_file(directory: Path, content: bytes, mode: int = 0o600) -> str:
    path = directory / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    "content", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n", b" " + KEY.hex().encode() + b"\r\n"]
)
def test_a_file_holds_32_bytes_or_64_digits(tmp_path: Path, content: bytes) -> None:
    """Raw as a key store writes them, or as `openssl rand -hex 32` prints them."""
    assert load_key(key_file(tmp_path, content), None) == KEY


def test_a_variable_holds_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same key from the environment."""
    monkeypatch.setenv("SOME_KEY", KEY.hex())
    assert load_key(None, "SOME_KEY") == KEY


@pytest.mark.parametrize(
    "content", [b"", b"secret", KEY[:31], KEY + b"\n", KEY.hex().encode()[:63], b"ab" * 16, KEY * 9]
)
def test_what_is_no_key_is_refused_without_showing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """The message says where and what is wanted, and no part of what was there."""
    with pytest.raises(ConfigError, match="64 hex digits") as refused:
        load_key(key_file(tmp_path, content), None)
    monkeypatch.setitem(os.environb, b"SOME_KEY", content.replace(b"\0", b"\1"))
    with pytest.raises(ConfigError, match="SOME_KEY") as also_refused:
        load_key(None, "SOME_KEY")
    for error in (refused, also_refused):
        text = str(error.value).encode("utf-8", "replace")
        assert error.value.__cause__ is None
        assert not content or (content not in text and content[:6].hex() not in str(error.value))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """A key that everybody has protects nothing; the message says what to do."""
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key(key_file(tmp_path, KEY, mode), None)


def test_places_without_a_key_are_told(tmp_path: Path) -> None:
    """No file, no regular file, no variable."""
    with pytest.raises(ConfigError, match="cannot read the key file"):
        load_key(str(tmp_path / "nothing"), None)
    with pytest.raises(ConfigError, match="regular file"):
        load_key(str(tmp_path), None)
    os.mkfifo(tmp_path / "pipe", 0o600)  # must not wait for a writer
    with pytest.raises(ConfigError, match="regular file"):
        load_key(str(tmp_path / "pipe"), None)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        load_key(None, "NO_SUCH_KEY")


def test_one_place_is_enough() -> None:
    """Two places could hold two keys."""
    with pytest.raises(ConfigError, match="not both"):
        DiskBackend("/cache", key_file="/key", key_env="KEY")


@pytest.mark.parametrize("field", ["key_file", "key_env"])
@pytest.mark.parametrize("value", [KEY.hex(), KEY, "", KEY.hex()[:32]])
def test_a_key_given_in_the_place_of_its_place_is_not_repeated(field: str, value: str | bytes) -> None:
    """Whoever passes the key itself learns that it is a mistake, and does not find it in a log afterwards."""
    with pytest.raises(ConfigError, match="where the key is") as refused:
        DiskBackend("/cache", **{field: value})  # type: ignore[arg-type]
    assert KEY.hex()[:32] not in str(refused.value)
    assert repr(KEY) not in str(refused.value)


def test_a_name_that_no_variable_has_is_refused() -> None:
    """Neither spaces nor signs; the value is not repeated either."""
    with pytest.raises(ConfigError, match="no name of an environment variable"):
        DiskBackend("/cache", key_env="SOME KEY=x")


def test_configurations_hold_the_place_and_not_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed or written to a file tells where the key is, and comes back as the same description."""
    monkeypatch.setenv("SOME_KEY", KEY.hex())
    for place in ({"key_file": key_file(tmp_path, KEY)}, {"key_env": "SOME_KEY"}):
        disk = DiskBackend(str(tmp_path / "cache"), size_gb=1, **place)
        manager = CacheManager(HierarchicalBackend(levels=[CPUBackend(size_gb=0.1), disk]))
        data = manager.to_config()
        assert data["backend"]["levels"][1] | place == data["backend"]["levels"][1]
        assert CacheManager.from_config(data).config == manager.config
        for text in (repr(data), repr(manager), repr(disk), repr(manager.config), repr(manager.state())):
            assert KEY.hex() not in text
            assert repr(KEY) not in text
        manager.close()


def test_a_path_object_is_a_path(tmp_path: Path) -> None:
    """As for the directory itself."""
    assert DiskBackend("/cache", key_file=tmp_path / "key").key_file == str(tmp_path / "key")  # type: ignore[arg-type]
