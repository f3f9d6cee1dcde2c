"""Small caches behind a control port with a token, and compiled kernels wherever numba is allowed."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import deque
from typing import Any, NamedTuple

import pytest

from kvcache_factory import jit
from kvcache_factory.observe import log
from kvcache_factory.testing import Opener, SmallCache, open_cache  # noqa: F401  a fixture

TOKEN = "a-token-for-tests"
PATIENCE_S = 60.0

pytest.importorskip("starlette", reason="the extra server is not installed")
pytest.importorskip("uvicorn", reason="the extra server is not installed")


@pytest.fixture(scope="session", autouse=True)
def warm() -> None:
    """Compile before the first test."""
    assert jit.warm_up() or jit.numba_refused(), jit.status()


@pytest.fixture(autouse=True)
def no_earlier_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process have warned about managers of the same name is not shown here."""
    monkeypatch.setattr(log, "_recent", deque(maxlen=log.KEPT))


class Answer(NamedTuple):
    """Status, headers and body of one answer."""

    status: int
    headers: dict[str, str]
    body: str

    @property
    def data(self) -> Any:
        return json.loads(self.body)


class Site:
    """A cache and the control port in front of it."""

    def __init__(self, cache: SmallCache) -> None:
        self.cache = cache
        assert cache.manager.metrics_address is not None
        self.host, self.port = cache.manager.metrics_address
        self.url = f"http://{self.host}:{self.port}"

    def get(self, path: str, **headers: str) -> Answer:
        """One answer to a GET."""
        return self._send(urllib.request.Request(self.url + path, headers=headers))

    def act(self, do: dict[str, Any], token: str | None = TOKEN, manager: str | None = None) -> Answer:
        """One answer to an action."""
        return self.post(json.dumps({"do": do, "manager": manager}).encode(), token)

    def post(self, body: bytes, token: str | None = TOKEN) -> Answer:
        """One answer to a POST to the actions."""
        request = urllib.request.Request(self.url + "/actions", body, method="POST")
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        return self._send(request)

    @staticmethod
    def _send(request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return Answer(answer.status, _lower(answer.headers), answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, _lower(error.headers), error.read().decode())


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


@pytest.fixture
def site(open_cache: Opener, monkeypatch: pytest.MonkeyPatch) -> Site:  # noqa: F811
    """A cache of two tiers with metrics, and its port."""
    monkeypatch.setenv("KVCACHE_FACTORY_TOKEN", TOKEN)
    return Site(open_cache(16, 16, enable_metrics=True, metrics_port=0))
