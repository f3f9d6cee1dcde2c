"""Where a key comes from.  Nothing here prints, returns in an error, or keeps what it has read."""

from __future__ import annotations

import os
import re
import stat

from ..errors import ConfigError

KEY_BYTES = 32
_HEX_KEY = re.compile(rb"[0-9a-fA-F]{64}")
_HEX_HALF = re.compile(rb"[0-9a-fA-F]{32}")
_MOST = 4 * KEY_BYTES
_HOW = "it takes 32 random bytes or their 64 hex digits, as `openssl rand -hex 32` prints them"


def load_key(key_file: str | None, key_env: str | None) -> bytes:
    """The 32 bytes of the key in a file that only its owner can read, or in an environment variable.

    Raises ConfigError, which names the place and never what is in it.
    """
    if key_file is not None:
        return _parse(_read_file(key_file), f"the key file {key_file}")
    assert key_env is not None
    text = os.environ.get(key_env)
    if text is None:
        raise ConfigError(f"the environment variable {key_env}, which should hold the key, is not set")
    return _parse(os.fsencode(text), f"the environment variable {key_env}")


def _read_file(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"the key file {path} is no regular file")
        if os.name == "posix" and mode & 0o077:
            raise ConfigError(f"the key file {path} can be used by others (mode {mode & 0o777:04o}); chmod 600 it")
        return os.read(fd, _MOST)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from None
    finally:
        os.close(fd)


def _parse(data: bytes, where: str) -> bytes:
    digits = data.strip()
    if _HEX_KEY.fullmatch(digits):
        return bytes.fromhex(digits.decode("ascii"))
    if _HEX_HALF.fullmatch(digits):
        raise ConfigError(f"{where} holds a key of 128 bits in hex digits; {_HOW}")
    if len(data) != KEY_BYTES:
        raise ConfigError(f"{where} holds no key; {_HOW}")
    return data
