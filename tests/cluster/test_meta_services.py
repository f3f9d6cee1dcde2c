"""Meta services over real servers: a redis-server and an etcd; what they do when the server does not."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.servers import Server, etcd_server, free_port, redis_server, until

from kvcache_factory import ConfigError, StoreError
from kvcache_factory.cluster.administration import Administration
from kvcache_factory.cluster.membership import Membership
from kvcache_factory.cluster.meta_service import MetaService, meta_service
from kvcache_factory.connector.resp import Access

BACKENDS = ("REDIS", "ETCD")


def url_of(backend: str, server: Server) -> str:
    return server.url if backend == "REDIS" else f"http://127.0.0.1:{server.port}"


@pytest.fixture(params=BACKENDS, scope="module")
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Backend and URL of a real server."""
    with redis_server() if request.param == "REDIS" else etcd_server() as server:
        yield request.param, url_of(request.param, server)


@pytest.fixture
def meta(place: tuple[str, str], request: pytest.FixtureRequest) -> Iterator[MetaService]:
    with closing(meta_service(*place)()) as service:
        yield service


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key of this test's own."""
    return f"nodes-{request.node.name}"


def test_values_are_kept_replaced_and_removed(meta: MetaService, key: str) -> None:
    """Bytes come back as they were, and an absent key is None."""
    assert meta.get(key) is None
    meta.put(key, b"\x00\xff{}")
    assert meta.get(key) == b"\x00\xff{}"
    meta.put(key, b"")
    assert meta.get(key) == b""
    meta.delete(key)
    meta.delete(key)
    assert meta.get(key) is None


def test_compare_and_set_lets_one_through(meta: MetaService, key: str) -> None:
    """Neither an older value nor none at all replaces what somebody else has written meanwhile."""
    assert meta.replace(key, None, b"1")
    assert not meta.replace(key, None, b"2")
    assert not meta.replace(key, b"0", b"2")
    assert meta.replace(key, b"1", b"2")
    assert meta.get(key) == b"2"
    meta.delete(key)
    assert not meta.replace(key, b"2", b"3")
    assert meta.replace(key, None, b"3")


def test_a_value_with_a_time_to_live_vanishes(meta: MetaService, key: str) -> None:
    """By itself, so that a process that was killed cannot leave it behind."""
    meta.put(key, b"here", ttl_s=1)
    assert meta.get(key) == b"here"
    until(lambda: meta.get(key) is None, "the value has vanished")


def test_many_join_at_once_and_nobody_is_lost(place: tuple[str, str], key: str) -> None:
    """Twelve servers change the same value; every slot has one owner and everybody has his share."""

    def join(number: int) -> None:
        with closing(meta_service(*place)()) as service:
            Administration(service, key, slots=64).join(f"host{number}", 1000 + number)

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(join, range(12)))
    with closing(meta_service(*place)()) as service:
        membership = Administration(service, key).read()
    assert sorted(node.addr for node in membership.nodes) == sorted(f"host{n}" for n in range(12))
    shares = [sum(r.end - r.start + 1 for r in node.slots) for node in membership.nodes]
    assert sum(shares) == membership.total_slots == 64
    assert max(shares) - min(shares) <= 1
    assert membership.version == 12
    assert (membership.owners() >= 0).all()


def test_a_server_whose_heart_stops_is_taken_out(meta: MetaService, key: str) -> None:
    """Its slots go to the others; one that joined without a heartbeat is left alone."""
    cluster = Administration(meta, key, slots=30)
    for port in (1, 2, 3):
        cluster.join("h", port)
    cluster.beat("h", 1, 60)
    cluster.beat("h", 2, 1)
    assert cluster.heartbeats() == {"h:1": True, "h:2": True, "h:3": None}
    until(lambda: cluster.heartbeats()["h:2"] is False, "the heartbeat is over")
    membership, dead = cluster.rebalance()
    assert dead == ["h:2"]
    assert [(n.port, sum(r.end - r.start + 1 for r in n.slots)) for n in membership.nodes] == [(1, 15), (3, 15)]
    assert cluster.read() == membership
    assert cluster.rebalance() == (membership, [])  # nothing to do: nothing is written
    cluster.join("h", 2)  # started again, and nothing is left of its heartbeat that would have it taken out again
    assert cluster.heartbeats()["h:2"] is None
    membership = cluster.leave("h", 2)
    cluster.leave("h", 1)
    assert meta.get(f"{key}:alive:h:1") is None
    assert cluster.leave("h", 3) == Membership((), membership.version + 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dead_server_is_unavailable_and_comes_back(backend: str) -> None:
    """The same service object works again when its server does."""
    started = redis_server() if backend == "REDIS" else etcd_server()
    with started as server, closing(meta_service(backend, url_of(backend, server))()) as service:
        service.put("k", b"1")
        server.kill()
        for _ in range(2):
            with pytest.raises(StoreError, match=f"meta service {backend}") as caught:
                service.get("k")
            assert caught.value.reason == "unavailable"
        server.start()

        def answers() -> bool:
            try:
                service.put("k", b"2")
            except StoreError:
                return False
            return True

        until(answers, "the server answers again")
        assert service.get("k") == b"2"


def test_redis_with_a_password(request: pytest.FixtureRequest) -> None:
    """It is in the URL, and in no message; a wrong one is said."""
    access = Access(password="hush")
    with redis_server("--requirepass", "hush", access=access) as server:
        with closing(meta_service("REDIS", f"redis://:hush@127.0.0.1:{server.port}/2")()) as service:
            service.put("k", b"1")
            assert service.get("k") == b"1"
        with closing(meta_service("REDIS", f"redis://:wrong@127.0.0.1:{server.port}")()) as service:
            with pytest.raises(StoreError, match="REDIS") as caught:
                service.get("k")
            assert "wrong@" not in str(caught.value)


def test_of_several_addresses_the_first_that_answers_is_used() -> None:
    """A host that is gone costs one refused connection."""
    with redis_server() as server:
        url = f"redis://127.0.0.1:{free_port()},127.0.0.1:{server.port}"
        with closing(meta_service("REDIS", url)()) as service:
            service.put("k", b"1")
            assert service.get("k") == b"1"


@contextmanager
def gateway(*answers: tuple[int, Any]) -> Iterator[tuple[str, list[tuple[str, Any, str]]]]:
    """An HTTP server that gives these answers in turn, the last one for ever; and what it was asked."""
    asked: list[tuple[str, Any, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = answers[min(len(asked), len(answers) - 1)]
            asked.append((self.path, body, self.headers.get("Authorization", "")))
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("answer", [(500, {}), (200, b"no json"), (404, b"")])
def test_a_gateway_that_answers_nonsense_is_unavailable(answer: tuple[int, Any]) -> None:
    """Stand-in for etcd: whatever is wrong with an answer, it is one kind of error."""
    with gateway(answer) as (place, _), closing(meta_service("ETCD", f"http://{place}")()) as service:
        with pytest.raises(StoreError) as caught:
            service.get("k")
        assert caught.value.reason == "unavailable"


def test_etcd_with_a_user_asks_for_a_token_when_it_needs_one() -> None:
    """Stand-in for etcd with authentication: refused once, then with the token, which is kept."""
    value = {"kvs": [{"value": base64.b64encode(b"1").decode()}]}
    answers = (401, {}), (200, {"token": "T"}), (200, value)
    with gateway(*answers) as (place, asked), closing(meta_service("ETCD", f"http://me:p%40ss@{place}")()) as service:
        assert service.get("k") == b"1"
        assert service.get("k") == b"1"
    assert [path for path, *_ in asked] == ["/v3/kv/range", "/v3/auth/authenticate", "/v3/kv/range", "/v3/kv/range"]
    assert asked[1][1] == {"name": "me", "password": "p@ss"}
    assert [token for *_, token in asked] == ["", "", "T", "T"]


@pytest.mark.parametrize(
    ("backend", "url", "message"),
    [
        ("ZOOKEEPER", "http://h", "use REDIS or ETCD"),
        ("ETCD", "redis://h", "http://host:2379"),
        ("ETCD", "http://", "http://host:2379"),
        ("ETCD", "http://me:hu/sh@h:1", "must be like http://host:2379$"),
        ("REDIS", "http://h", "redis"),
    ],
)
def test_wrong_descriptions_are_config_errors(backend: str, url: str, message: str) -> None:
    """Before anything is connected."""
    with pytest.raises(ConfigError, match=message):
        meta_service(backend, url)
