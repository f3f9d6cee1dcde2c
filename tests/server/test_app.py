"""Health, state and actions: what is said, and who may do what."""

from __future__ import annotations

import hmac
import http.client
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.server.conftest import PATIENCE_S, TOKEN, Site

from kvcache_factory import CacheManager
from kvcache_factory.errors import ConfigError
from kvcache_factory.server import token
from kvcache_factory.server.history import History
from kvcache_factory.server.hosts import is_local
from kvcache_factory.server.readiness import readiness

A, B = list(range(16)), list(range(100, 116))


def held(site: Site, tier: int = 0) -> int:
    """Blocks of one tier."""
    site.cache.manager.wait()
    return int(site.cache.manager.state()["tiers"][tier]["held_blocks"])


def test_alive_is_alive_and_ready_says_why_not(site: Site) -> None:
    """A manager without a model is alive and not ready."""
    assert site.get("/healthz").data["alive"] is True
    ready = site.get("/readyz")
    assert (ready.status, ready.data["ready"]) == (200, True)
    assert [row["tier"] for row in ready.data["managers"]["default"]["tiers"]] == ["gpu", "cpu"]
    states = {"empty": CacheManager().state()}
    assert readiness(states)["managers"]["empty"]["problems"] == ["no model is registered yet"]


@pytest.mark.parametrize(
    ("tier", "problem"),
    [
        ({"writable": False}, "takes no writes"),
        ({"self_test": False}, "could not be read back"),
        ({"breakers": {"read": True}}, "does not answer reads"),
        ({"prefaulted": 0.3}, None),
    ],
)
def test_a_tier_that_cannot_work_is_not_ready(tier: dict[str, Any], problem: str | None) -> None:
    """Pre-faulting is told, and holds nothing up."""
    state = {"open": True, "tiers": [{"tier": "disk", "prefaulted": 1.0, **tier}]}
    said = readiness({"m": state})
    assert said["ready"] is (problem is None)
    assert all(str(problem) in text for text in said["managers"]["m"]["problems"])
    assert said["managers"]["m"]["tiers"][0]["prefaulted"] == tier.get("prefaulted", 1.0)


def test_state_is_the_managers_with_what_the_page_draws(site: Site) -> None:
    """Sessions can be limited to those used last, and are counted all the same."""
    for name in ("one", "two", "three"):
        site.cache.manager.create_session(name)
        site.cache.save(A, session=name)
        site.cache.load(A) if name == "three" else None
    (manager,) = site.get("/state?sessions=1").data["managers"]
    assert (manager["manager"], manager["num_sessions"], len(manager["sessions"])) == ("default", 3, 1)
    assert manager["served_tokens"] == site.cache.manager.state()["served_tokens"] == 16
    assert isinstance(manager["history"], list)


def test_sessions_in_an_engines_process_are_shown(site: Site) -> None:
    """Of a session that both know, what it holds where the blocks are; the steering process holds none."""
    manager, there = site.cache.manager, CacheManager()
    for name in ("here", "both"):
        manager.create_session(name)
    for name in ("both", "there"):
        there.create_session(name)
    there.session("both").requests = 7
    manager.follow(type("There", (), {"call": lambda self, verb, *args: there.state() if verb == "state" else None})())
    rows = site.get("/state").data["managers"][0]["sessions"]
    assert {row["session"]: row["requests"] for row in rows} == {"here": 0, "both": 7, "there": 0}
    there.close()


def test_sessions_of_an_engines_process_can_be_steered_from_here(site: Site) -> None:
    """A request has named them there; the steering process has never heard of them, and the page shows them."""
    manager, there = site.cache.manager, CacheManager()
    there.create_session("theirs").data["said"] = [1]

    class There:
        def call(self, verb: str, *args: Any) -> Any:
            if verb == "session_idle_s":
                return there.session(args[0]).idle_s if there.has_session(args[0]) else None
            return getattr(there, verb)(*args)

    manager.follow(There())
    assert site.act({"action": "clear_session", "session": "theirs"}).data == {"result": 0}
    assert there.session("theirs").data == {}
    manager.pin_session("theirs")
    assert there.session("theirs").pinned
    assert site.act({"action": "destroy_session", "session": "theirs"}).data == {"result": True}
    there.wait()  # in one process it is done when the steering manager's own verb has ended
    assert not there.has_session("theirs")
    assert site.act({"action": "destroy_session", "session": "theirs"}).data == {"result": False}
    assert site.act({"action": "clear_session", "session": "theirs"}).status == 404
    there.close()


def test_a_scrape_that_waits_holds_up_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are gathered beside the loop: whoever asks whether the process is alive gets an answer meanwhile."""
    asked, go = threading.Event(), threading.Event()
    real = site.cache.manager.state

    def slow() -> Any:
        asked.set()
        assert go.wait(60)
        return real()

    monkeypatch.setattr(site.cache.manager, "state", slow)
    scrape = threading.Thread(target=site.get, args=("/metrics",))
    scrape.start()
    try:
        assert asked.wait(60)
        assert site.get("/healthz").status == 200
        assert scrape.is_alive()
    finally:
        go.set()
        scrape.join()


def test_pages_allow_no_foreign_content(site: Site) -> None:
    """No script, style or connection but our own; nothing of the page names another server."""
    for path in ("/", "/page.css", "/page.js"):
        page = site.get(path)
        assert page.status == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http" not in page.body.replace("http://www.w3.org/2000/svg", "")
    assert site.get("/nothing").status == 404


def test_another_name_for_this_machine_is_refused(site: Site) -> None:
    """A page of somebody else must not make a browser ask us under its own name."""
    assert site.get("/state", Host="evil.example").status == 400
    assert site.get("/state", Host=f"localhost:{site.port}").status == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_every_loopback_address_is_guarded(host: str) -> None:
    """However the server was bound, it answers to names of this machine and to no other, in any spelling."""
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with CacheManager(enable_metrics=True, metrics_port=0, metrics_host=host) as manager:
        assert manager.metrics_address is not None
        port = manager.metrics_address[1]
        for name in ("localhost", "LOCALHOST:1", "127.0.0.1", f"[::1]:{port}", "[0:0::1]", f"127.0.0.1:{port}"):
            assert asked_as(host, port, name) == 200, name
        for name in ("evil.example", f"evil.example:{port}", "", "::1", "[::2]", "localhost.evil.example", "[::1]evil"):
            assert asked_as(host, port, name) == 400, name


def asked_as(host: str, port: int, name: str) -> int:
    """Status of the answer to a request that gives *name* as its Host."""
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    try:
        connection.putrequest("GET", "/state", skip_host=True)
        connection.putheader("Host", name)
        connection.endheaders()
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("127.8.9.10", True),
        ("Localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("cache.example", False),
    ],
)
def test_what_is_bound_to_loopback_alone_is_local(name: str, local: bool) -> None:
    """Whoever opens more than loopback is reached under names that are not known here."""
    assert is_local(name) is local


@pytest.mark.parametrize("given", [None, "", "wrong", TOKEN[:-1], TOKEN + "x"])
def test_actions_need_the_token(site: Site, given: str | None) -> None:
    """Whatever is wrong with it, nothing is done."""
    site.cache.save(A)
    answer = site.act({"action": "reset"}, token=given)
    assert answer.status == 401
    assert TOKEN not in answer.body
    assert held(site) == 4


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function that is made for it; an empty token opens nothing."""
    seen: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append((a, b)) or compare(a, b))
    assert token.matches("secret", "secret")
    assert not token.matches("sécret", "secret")
    assert len(seen) == 2
    assert not token.matches("", "")


def test_actions_do_what_they_say(site: Site) -> None:
    """Each verb, with its result."""
    manager = site.cache.manager
    for name in ("one", "two"):
        manager.create_session(name)
    site.cache.save(A, session="one")
    site.cache.save(B, session="two")
    assert held(site) == 8
    assert site.act({"action": "clear_session", "session": "one"}).data == {"result": 8}
    assert site.act({"action": "evict", "blocks": 1, "tier": "cpu"}).data == {"result": 1}
    assert (held(site), held(site, 1)) == (4, 3)
    assert site.act({"action": "drop_tier", "tier": "cpu"}).data == {"result": 3}
    assert (held(site), held(site, 1)) == (4, 0)
    assert site.act({"action": "destroy_session", "session": "two", "purge": True}).data == {"result": True}
    assert [row["session"] for row in manager.state()["sessions"]] == ["one"]
    site.cache.save(A)
    assert site.act({"action": "reset"}, manager="default").data == {"result": None}
    assert held(site) == 0


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "not understood"),
        (b"\xff", 400, "not understood"),
        (b'{"do": {"action": "explode"}}', 400, "not understood"),
        (b'{"do": {"action": "reset", "more": 1}}', 400, "not understood"),
        (b'{"do": {"action": "evict", "blocks": -1}}', 400, "blocks=-1"),
        (b'{"do": {"action": "drop_tier", "tier": "tape"}}', 400, "there is no tier 'tape'"),
        (b'{"do": {"action": "clear_session", "session": "nobody"}}', 404, "there is no session"),
        (b'{"do": {"action": "reset"}, "manager": "other"}', 400, "there is no manager 'other'"),
        (b" " * 70_000, 413, "more than 65536 bytes"),
    ],
)
def test_what_is_not_understood_is_refused_with_a_reason(site: Site, body: bytes, status: int, said: str) -> None:
    """A typed error of ours, never a traceback."""
    answer = site.post(body)
    assert answer.status == status
    assert said in answer.data["error"]


def test_bypass_makes_the_cache_vanish_and_come_back(site: Site) -> None:
    """What it holds stays; requests see an empty cache, and nothing is stored."""
    cache = site.cache
    cache.save(A)
    chain = cache.space.chain(A)
    promised = cache.space.match(chain, "before")
    assert site.act({"action": "bypass"}).status == 200
    assert cache.manager.state()["bypassed"] is True
    assert cache.space.match(chain, "r").blocks == 0
    assert (cache.space.peek(chain), cache.space.held_in_memory(chain), cache.space.prefetch(chain)) == (0, 0, None)
    assert cache.save(B) == 0
    assert cache.space.load(promised, cache.engine.region, cache.engine.positions(4)) == 4
    cache.space.release("before")
    assert site.act({"action": "bypass", "on": False}).status == 200
    assert cache.load(A) == [0] * 4
    missed = {row["reason"]: row["blocks"] for row in cache.manager.ledger.rows() if row["event"] == "miss"}
    assert missed == {"bypassed": 4}


def test_a_token_file_is_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written where only this user can read, gone with the server; a directory of anybody's is refused."""
    monkeypatch.delenv("KVCACHE_FACTORY_TOKEN", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with CacheManager(enable_metrics=True, metrics_port=0) as manager:
        assert manager.metrics_address is not None
        port = manager.metrics_address[1]
        path = token.file_of(port)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert len(token.read(port)) == 64
        os.chmod(path.parent, 0o755)
        with pytest.raises(ConfigError, match="only this user can enter"):
            token.read(port)
        os.chmod(path.parent, 0o700)
    assert not path.exists()
    assert token.read(port) == ""


def test_history_samples_rates_and_forgets_managers_that_have_gone() -> None:
    """The rate of a sample is that of the time since the last one; nothing to tell is null."""
    manager = CacheManager()
    there = {"m": manager}
    history = History(lambda: there)
    history.sample()
    assert [(row["hit_rate"], row["ttft_s"]) for row in history.of("m")] == [(None, None)]
    there.clear()
    history.sample()
    assert history.of("m") == []
    manager.close()


def test_history_outlives_a_sample_that_fails() -> None:
    """One moment is missing, not all that follow."""
    sampled, calls = threading.Event(), []

    def managers() -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("injected")
        sampled.set()
        return {}

    history = History(managers, every_s=0.001)
    history.start()
    assert sampled.wait(60)
    history.stop()


def test_threads_of_the_server_are_daemons(site: Site) -> None:
    """None can keep the process alive."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("kvcache-factory-")]
    assert {f"kvcache-factory-port-{site.port}", "kvcache-factory-history"} <= {thread.name for thread in ours}
    assert all(thread.daemon for thread in ours)
