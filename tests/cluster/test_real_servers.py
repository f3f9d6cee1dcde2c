"""The whole way: managers over a cluster of real redis-servers, one of which is killed and another one added."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from tests.servers import Server, etcd_server, redis_server, until

from kvcache_factory import CacheManager, ConfigError
from kvcache_factory.cluster.administration import Administration
from kvcache_factory.cluster.membership import Node
from kvcache_factory.cluster.meta_service import meta_service
from kvcache_factory.cluster.opening import MetaServiceBackend, member_options
from kvcache_factory.connector.resp import Access, Address, RespConnection
from kvcache_factory.environment import PREFIX
from kvcache_factory.testing import FakeEngine, SmallCache, tiny_identity, tiny_spec

TOKENS = range(100)  # 25 blocks


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(redis_server()) for _ in range(3)]


def count(server: Server) -> int:
    """Values on a server."""
    with closing(RespConnection(Address(port=server.port), Access())) as connection:
        return int(connection.ask("DBSIZE"))


def open_cache(etcd: Server) -> SmallCache:
    """A manager configured by the environment, over the cluster."""
    environ = {
        "L1_CACHE_CAPACITY_GB": "0.01",
        "L2_CACHE_BACKEND": "REDIS",
        "L2_CACHE_INGESTION_TYPE": "ALL",
        "DOUBLE_GET_THRESHOLD": "1,0",
        "META_SERVICE_BACKEND": "ETCD",
        "META_SERVICE_URL": f"http://127.0.0.1:{etcd.port}",
        "META_SERVICE_CLUSTER_META_KEY": "nodes",
        "META_SERVICE_REFRESH_INTERVAL_S": "0.05",
    }
    manager = CacheManager.from_env({PREFIX + name: value for name, value in environ.items()})
    spec = tiny_spec()
    return SmallCache(manager, manager.register(spec, tiny_identity(spec)), FakeEngine(spec, 32))


def read(etcd: Server) -> int:
    """Leading blocks that another manager, with nothing in memory, finds and reads back as they were."""
    cache = open_cache(etcd)
    with cache.manager:
        ticket = cache.space.prefetch(cache.space.chain(TOKENS))
        if ticket is not None:
            assert ticket.wait(60)
        versions = cache.load(TOKENS)
        assert set(versions) <= {0}
        return len(versions)


def test_a_cluster_of_redis_servers(servers: list[Server]) -> None:
    """All members hold a part; one is killed, blocks are still never wrong; it is replaced, and all is there again."""
    with etcd_server() as etcd, closing(meta_service("ETCD", f"http://127.0.0.1:{etcd.port}")()) as meta:
        cluster = Administration(meta, "nodes")
        for server in servers[:2]:
            cluster.join("127.0.0.1", server.port)
        with open_cache(etcd).manager as manager:
            spec = tiny_spec()
            cache = SmallCache(manager, manager.register(spec, tiny_identity(spec)), FakeEngine(spec, 32))
            assert cache.save(TOKENS) == 25
            assert manager.wait(60)
            assert count(servers[0]) + count(servers[1]) == 25
            assert min(count(servers[0]), count(servers[1])) > 0
            assert read(etcd) == 25
            members = manager.state()["remote"]["members"]
            assert {row["member"] for row in members} == {f"127.0.0.1:{server.port}" for server in servers[:2]}
            assert all(row["usable"] and row["slots"] == 2048 and row["why"] == "" for row in members)
            servers[1].kill()
            assert read(etcd) < 25
            cluster.leave("127.0.0.1", servers[1].port)
            cluster.join("127.0.0.1", servers[2].port)

            def all_there() -> bool:
                manager.reset()
                cache.save(TOKENS)
                manager.wait(60)
                return read(etcd) == 25

            until(all_there, "what was on the dead server is on another one")
            assert count(servers[0]) + count(servers[2]) >= 25


def test_options_of_members_come_from_all_and_from_their_entry() -> None:
    """Where a server is, in the words of its connector; credentials and further options are those of all."""
    node = Node("10.0.0.1", 7, fields=(("ttl_s", 5), ("zone", "north")))
    assert member_options("REDIS", {"url": "rediss://me:pw@any:1,other:2/3", "ttl_s": 1}, node) == {
        "url": "rediss://me:pw@10.0.0.1:7/3",
        "ttl_s": 5,
    }
    assert member_options("REDIS", {}, Node("::1", 7))["url"] == "redis://[::1]:7"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"backend": "ZK", "url": "u"}, "use 'REDIS' or 'ETCD'"),
        ({"backend": "REDIS", "url": ""}, "say where REDIS is, as redis://host:port"),
        ({"backend": "ETCD", "url": "redis://:hush@h"}, "say where ETCD is, as http://host:port"),
        ({"backend": "REDIS", "url": "redis://u", "refresh_interval_s": -1}, "seconds"),
        ({"backend": "REDIS", "url": "redis://u", "placement": "X"}, "placement"),
    ],
)
def test_wrong_descriptions_are_named(wrong: dict[str, object], message: str) -> None:
    """At construction: nothing is asked for."""
    with pytest.raises(ConfigError, match=message):
        MetaServiceBackend(**wrong)  # type: ignore[arg-type]
