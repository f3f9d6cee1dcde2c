"""The routes: a page, metrics, health, state and actions, over the managers of this process."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import Any

import msgspec
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .. import __version__
from ..errors import ConfigError, KVCacheError, UnknownSessionError
from ..manager import CacheManager
from ..observe.metrics import registry_of_all
from .actions import MAX_BODY, carry_out
from .history import History
from .hosts import LocalNames
from .readiness import readiness
from .token import matches

Managers = Callable[[], dict[str, CacheManager]]

PAGES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app(managers: Managers, history: History, token: Callable[[], str], local_names: bool = False) -> Starlette:
    """An ASGI application over *managers* (by label).

    *token* gives what actions must bring, empty where none are allowed; with *local_names* it may be asked under names
    of this machine's loopback interface only.
    """
    look = _Look(managers, history, token)
    pages = [Route(path, _file(*entry), methods=["GET"]) for path, entry in PAGES.items()]
    return Starlette(
        routes=[
            *pages,
            Route("/healthz", look.healthz, methods=["GET"]),
            Route("/readyz", look.readyz, methods=["GET"]),
            Route("/state", look.state, methods=["GET"]),
            Route("/actions", look.act, methods=["POST"]),
            Route("/metrics", look.metrics, methods=["GET"]),
            Route("/metrics/", look.metrics, methods=["GET"]),
        ],
        middleware=[Middleware(LocalNames)] if local_names else [],
    )


class _Look:
    """The endpoints; work that waits for locks is done in threads, never on the loop."""

    def __init__(self, managers: Managers, history: History, token: Callable[[], str]) -> None:
        self._managers = managers
        self._history = history
        self._token = token
        self._registry = registry_of_all(managers)

    async def healthz(self, request: Request) -> Response:
        return _json({"alive": True, "version": __version__})

    async def readyz(self, request: Request) -> Response:
        said = await run_in_threadpool(lambda: readiness(self._states()))
        return _json(said, 200 if said["ready"] else 503)

    async def state(self, request: Request) -> Response:
        text = request.query_params.get("sessions", "")
        limit = int(text) if text.isascii() and text.isdigit() else None
        return _json(await run_in_threadpool(self._describe, limit))

    async def metrics(self, request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(await run_in_threadpool(encode, self._registry), headers={**HEADERS, "Content-Type": kind})

    async def act(self, request: Request) -> Response:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        try:
            expected = self._token()
        except ConfigError as error:
            return _json({"error": str(error)}, 403)
        if scheme.lower() != "bearer" or not matches(given.strip(), expected):
            return _json({"error": "this needs the token of this server: Authorization: Bearer <token>"}, 401)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return _json({"error": f"more than {MAX_BODY} bytes"}, 413)
        try:
            return _json({"result": await run_in_threadpool(carry_out, body, self._managers)})
        except UnknownSessionError as error:
            return _json({"error": str(error)}, 404)
        except KVCacheError as error:
            return _json({"error": str(error)}, 400)

    def _states(self) -> dict[str, dict[str, Any]]:
        return {label: manager.state() for label, manager in self._managers().items()}

    def _describe(self, limit: int | None) -> dict[str, Any]:
        rows = []
        for label, state in self._states().items():
            sessions = sorted(_sessions(state), key=lambda row: row["idle_s"])
            shown = sessions if limit is None else sessions[:limit]
            rows.append(
                {
                    **state,
                    "manager": label,
                    "sessions": shown,
                    "num_sessions": len(sessions),
                    "history": self._history.of(label),
                }
            )
        return {"version": __version__, "managers": rows}


def _file(name: str, kind: str) -> Callable[[Request], Any]:
    content = resources.files(__package__).joinpath(name).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, media_type=kind, headers=HEADERS)

    return serve


def _sessions(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Sessions of a manager; where an engine's process has them, too, what they hold there."""
    rows = {row["session"]: row for row in state["sessions"]}
    for engine in state.get("engines", ()):
        rows.update({row["session"]: row for row in (engine or {}).get("sessions", ())})
    return list(rows.values())


def _json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, HEADERS, "application/json")
