"""What commands share that talk to a running process: where it is, and the token."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ..errors import ConfigError, UnknownSessionError

PORT = 9095
TIMEOUT_S = 30.0
Command = TypeVar("Command", bound=Callable[..., Any])


class Control:
    """The control port of a process.

    Parameters
    ----------
    token_file:
        Where the token is; None: the environment or where the server has put it.
    """

    def __init__(self, host: str, port: int, token_file: Path | None) -> None:
        self.host, self.port = host, port
        self._token_file = token_file

    def state(self) -> list[dict[str, Any]]:
        """The managers there, as in ``/state``."""
        managers: list[dict[str, Any]] = self._ask("GET", "/state")["managers"]
        return managers

    def act(self, action: dict[str, Any], manager: str | None) -> Any:
        """Carry out an action there; returns its result."""
        return self._ask("POST", "/actions", {"do": action, "manager": manager})["result"]

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        where = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(where + path, data, method=method)
        if body is not None:
            request.add_header("Authorization", f"Bearer {self._token()}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a token is for this server only
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise self._refused(error) from None
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"nobody answers at {where} as a control port ({error}); is the process running, with "
                "CacheManager(enable_metrics=True, metrics_port=...) and the extra installed: "
                "pip install 'kvcache-factory[server]'?"
            ) from error

    def _refused(self, error: urllib.error.HTTPError) -> Exception:
        try:
            said = str(json.loads(error.read())["error"])
        except (ValueError, KeyError, TypeError):
            said = f"status {error.code}"
        if error.code == 401:
            return ConfigError(
                f"{said}; set KVCACHE_FACTORY_TOKEN to that of the process, give --token-file, or run this as its user"
            )
        return UnknownSessionError(said) if error.code == 404 else ConfigError(said)

    def _token(self) -> str:
        from ..server import token

        try:
            return token.read(self.port, self._token_file)
        except OSError as error:
            raise ConfigError(f"the token cannot be read: {error}") from error


def control_options(command: Command) -> Command:
    """The options of every such command: ``--host``, ``--port``, ``--token-file``."""
    for option in (
        click.option(
            "--token-file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            metavar="FILE",
            help="Where the token is; by default where the process has put it.",
        ),
        click.option(
            "--port", type=click.IntRange(1, 65535), default=PORT, show_default=True, help="Its metrics_port."
        ),
        click.option("--host", default="127.0.0.1", show_default=True, help="Where the process is."),
    ):
        command = option(command)
    return command


def parts_of(manager: dict[str, Any]) -> list[dict[str, Any]]:
    """A manager's own state, or those of the engines' processes where it is only their client."""
    engines = [engine for engine in manager.get("engines", ()) if engine]
    return engines if engines and not manager["open"] else [manager, *engines]
