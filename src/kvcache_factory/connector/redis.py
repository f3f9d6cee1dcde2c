"""REDIS: a Redis or Valkey server, or a cluster of them, over TCP, TLS or a unix socket.

Needs no package: :mod:`.resp` speaks the protocol, and moves values straight to and from the caller's memory.  Whether
the server belongs to a cluster it says itself.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Annotated, Any, ClassVar
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from ..errors import ConfigError
from ..status import Status, StatusCodes
from .base import ConnectorOptions, MemoryRegion, Secret
from .blocking import BlockingConnector, Call, Statuses, found, ready_view, status_of, wrong_length
from .redis_nodes import Answer, Away, Nodes, Request
from .resp import Access, Address, ServerError, command, set_command

_SCHEMES = ("redis", "rediss", "unix")
_MEANING = {
    "OOM": StatusCodes.OUT_OF_MEMORY,
    "NOAUTH": StatusCodes.DENIED,
    "WRONGPASS": StatusCodes.DENIED,
    "NOPERM": StatusCodes.DENIED,
    "WRONGTYPE": StatusCodes.INVALID,
}

_NO_ROOM: Status[Any] = Status(StatusCodes.OUT_OF_MEMORY, "the server that owns this key is away")

Positive = Annotated[float, msgspec.Meta(gt=0)]


class RedisOptions(ConnectorOptions, frozen=True, kw_only=True):
    """How to reach the server.

    Attributes:
        url: ``redis://[user:password@]host[:port][,host:port...][/database]``, ``rediss://`` for TLS, or
            ``unix:///path``.  Several hosts are first contacts of one cluster.  Hidden, since it may hold a password.
        username, password: instead of those in the URL.
        tls_ca: file with the certificates to trust; by default the system's.
        tls_cert, tls_key: files with the client's own certificate and key.
        tls_check_hostname: whether the server's certificate must name the host; its signature is always checked.
        ttl_s: seconds that a value is kept, counted from its put; 0 leaves that to the server's ``maxmemory-policy``.
        timeout_s: longest that one value may take; callers usually set a shorter deadline for the whole batch.
        connect_timeout_s: longest that a connection may take.
    """

    env_prefix: ClassVar[str] = "REDIS_"

    url: Secret = "redis://127.0.0.1:6379"
    username: str = ""
    password: Secret = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_check_hostname: bool = True
    ttl_s: Annotated[int, msgspec.Meta(ge=0)] = 0
    timeout_s: Positive = 2.0
    connect_timeout_s: Positive = 1.0


class RedisConnector(BlockingConnector):
    """A Redis server or cluster; offers batches.

    While other servers of a cluster answer, keys of one that does not are misses, and puts of them OUT_OF_MEMORY.
    Values larger than 512 MiB are INVALID: the server refuses them.  Raises ConfigError for a URL that is none, and for
    files of certificates that cannot be read.
    """

    Options: ClassVar[type[ConnectorOptions]] = RedisOptions
    shorter_values = True
    region_by_region = True

    def __init__(self, conn_id: str, executor: Executor, options: RedisOptions) -> None:
        super().__init__(conn_id, executor, options)
        seeds, access = redis_access(options)
        self._name = f"REDIS {','.join(map(str, seeds))}"
        self._ttl_s = options.ttl_s
        self._nodes = Nodes(seeds, access)

    @property
    def name(self) -> str:
        return self._name

    def connect(self) -> None:
        """Ask the server whether it belongs to a cluster, and who owns what there."""
        self._nodes.open()

    def disconnect(self) -> None:
        self._nodes.close()

    def exists_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        return self._ask(call, [Request(key, [command("EXISTS", key)]) for key in keys], _exists_status, found(False))

    def get_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        requests = [
            Request(key, [command("GET", key)], view=mr.view, least=mr.least, came=mr.has_come)
            for key, mr in zip(keys, mrs, strict=True)
        ]
        return self._ask(call, requests, _get_status, found(False))

    def put_all(self, call: Call, keys: Sequence[bytes], mrs: Sequence[MemoryRegion]) -> Statuses:
        def setting(key: bytes, mr: MemoryRegion) -> Request:
            return Request(key, lambda: set_command(key, ready_view(mr), self._ttl_s))

        requests = [setting(key, mr) for key, mr in zip(keys, mrs, strict=True)]
        return self._ask(call, requests, _done_status, _NO_ROOM)

    def delete_all(self, call: Call, keys: Sequence[bytes]) -> Statuses:
        return self._ask(call, [Request(key, [command("UNLINK", key)]) for key in keys], _done_status, Status())

    def status_of(self, error: Exception) -> Status[Any]:
        if isinstance(error, ServerError):
            return Status(_MEANING.get(error.code, StatusCodes.ERROR), error)
        return status_of(error)

    def _ask(self, call: Call, requests: list[Request], status: Any, away: Status[Any]) -> Statuses:
        """A status for each request; *away* where its server is, while others are there: no reason to ask none."""
        statuses: Statuses = []
        for request, answer in zip(requests, self._nodes.ask(call, requests), strict=True):
            if isinstance(answer, Away):
                statuses.append(away)
            else:
                statuses.append(self.status_of(answer) if isinstance(answer, Exception) else status(request, answer))
        return statuses


def _exists_status(_: Request, answer: Answer) -> Status[Any]:
    return found(answer == 1)


def _done_status(_: Request, answer: Answer) -> Status[Any]:
    return Status()


def _get_status(request: Request, answer: Answer) -> Status[Any]:
    assert request.view is not None
    if request.least <= answer <= len(request.view):
        return Status()
    return found(False) if answer < 0 else wrong_length(request.key, answer, len(request.view))


def redis_access(options: RedisOptions) -> tuple[list[Address], Access]:
    """Where to connect first, and how.  Raises ConfigError, never showing a secret."""
    try:
        url = urlsplit(options.url)
        username, password = (
            options.username or unquote(url.username or ""),
            options.password or unquote(url.password or ""),
        )
        seeds, database = _places(url)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the URL of the Redis server cannot be read: {_safe(error)}") from None
    access = Access(
        username=username,
        password=password,
        database=database,
        tls=_tls(options) if url.scheme == "rediss" else None,
        connect_timeout_s=options.connect_timeout_s,
        timeout_s=options.timeout_s,
    )
    return seeds, access


def _places(url: SplitResult) -> tuple[list[Address], int]:
    if url.scheme not in _SCHEMES:
        raise ConfigError(f"the URL of a Redis server begins with one of {', '.join(s + '://' for s in _SCHEMES)}")
    if url.scheme == "unix":
        if not url.path:
            raise ConfigError("the URL of a unix socket is unix:///path/of/the/socket")
        return [Address(path=url.path)], 0
    hosts = url.netloc.rpartition("@")[2].split(",")
    places = [urlsplit(f"//{host}") for host in hosts]
    path = url.path.strip("/")
    if path and not path.isdigit():
        raise ConfigError("what follows the host in the URL of a Redis server is the number of a database")
    return [Address(place.hostname or "127.0.0.1", place.port or 6379) for place in places], int(path or 0)


def _safe(error: ValueError) -> str:
    """Messages of urllib quote the text they stumble over, which may be the end of a password."""
    return "the port is no number" if "port" in str(error).lower() else "it is malformed"


def _tls(options: RedisOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.tls_ca or None)
        if options.tls_cert:
            context.load_cert_chain(options.tls_cert, options.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the files of tls_ca={options.tls_ca!r}, tls_cert={options.tls_cert!r}, tls_key={options.tls_key!r} "
            f"cannot be used: {error}"
        ) from error
    context.check_hostname = options.tls_check_hostname
    return context
