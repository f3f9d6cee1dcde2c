"""ETCD: the membership in a key of etcd, by way of its JSON gateway."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ..errors import ConfigError, MissingDependencyError, StoreError
from .meta_service import TIMEOUT_S, MetaService

if TYPE_CHECKING:
    import httpx


class EtcdMetaService(MetaService):
    """An etcd, 3.4 or later: https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/"""

    def __init__(self, client: httpx.Client, user: tuple[str, str] | None = None) -> None:
        self._client = client
        self._user = user
        self._token = ""

    @classmethod
    def at(cls, url: str) -> Callable[[], EtcdMetaService]:
        """What opens the service at ``http[s]://[user:password@]host[:port]``.

        Raises ConfigError for another URL, MissingDependencyError without httpx.
        """
        try:
            import httpx
        except ImportError:
            raise MissingDependencyError.of("httpx", "etcd", "the meta service ETCD") from None
        base, user = etcd_place(url)
        return lambda: cls(httpx.Client(base_url=base, timeout=TIMEOUT_S, trust_env=False), user)

    def get(self, key: str) -> bytes | None:
        found = self._call("/v3/kv/range", {"key": _text(key)}).get("kvs", [])
        return b64decode(found[0].get("value", "")) if found else None

    def replace(self, key: str, old: bytes | None, new: bytes) -> bool:
        # A key that was never written, or was deleted, has version 0.
        same = {"target": "VERSION", "version": "0"} if old is None else {"target": "VALUE", "value": _text(old)}
        compare = [{"key": _text(key), "result": "EQUAL", **same}]
        change = [{"requestPut": {"key": _text(key), "value": _text(new)}}]
        return bool(self._call("/v3/kv/txn", {"compare": compare, "success": change}).get("succeeded", False))

    def put(self, key: str, value: bytes, ttl_s: int | None = None) -> None:
        entry = {"key": _text(key), "value": _text(value)}
        if ttl_s is not None:
            entry["lease"] = self._call("/v3/lease/grant", {"TTL": str(ttl_s)})["ID"]
        self._call("/v3/kv/put", entry)

    def delete(self, key: str) -> None:
        self._call("/v3/kv/deleterange", {"key": _text(key)})

    def close(self) -> None:
        self._client.close()

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        import httpx

        try:
            answer = self._post(path, body)
            if answer.status_code == 401 and self._user is not None:  # the token is missing, or too old
                self._token = self._post("/v3/auth/authenticate", self._credentials()).json().get("token", "")
                answer = self._post(path, body)
            answer.raise_for_status()
            return answer.json()
        except (httpx.HTTPError, ValueError) as error:
            where = f"the meta service ETCD at {self._client.base_url}"
            raise StoreError(f"{where} did not answer: {error or type(error).__name__}", "unavailable") from error

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self._client.post(path, json=body, headers={"Authorization": self._token} if self._token else {})

    def _credentials(self) -> dict[str, Any]:
        assert self._user is not None
        return {"name": self._user[0], "password": self._user[1]}


def _text(value: str | bytes) -> str:
    return b64encode(value.encode() if isinstance(value, str) else value).decode()


def etcd_place(url: str) -> tuple[str, tuple[str, str] | None]:
    """Where etcd is, and the user and password to say there; a ConfigError shows nothing of either."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 2379
    except ValueError:  # whose message quotes what may be the end of a password
        parts, host, port = urlsplit(""), "", 0
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError("the URL of the meta service ETCD must be like http://host:2379")
    user = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}", user
