"""The port: none unless asked for, shared by those who name the same, gone with the last of them."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from tests.servers import prometheus

from kvcache_factory import CacheManager, ConfigError
from kvcache_factory.observe import port as port_module
from kvcache_factory.testing import Opener, small_cache

PATIENCE_S = 60.0
TOKENS = list(range(16))


@pytest.fixture(params=["metrics only", "page"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A plain install, and one with the extra."""
    if request.param == "page" and not port_module.has_page():
        pytest.skip("starlette and uvicorn are not installed (extra: server)")
    monkeypatch.setattr(port_module, "has_page", lambda: request.param == "page")
    return str(request.param)


def read(manager: CacheManager, path: str = "/metrics") -> str:
    """What the manager's port says."""
    assert manager.metrics_address is not None
    host, number = manager.metrics_address
    with urllib.request.urlopen(f"http://{host}:{number}{path}", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def is_open(host: str, number: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex((host, number)) == 0


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_no_port_is_opened_unless_one_is_given() -> None:
    """Measuring alone opens nothing and starts no thread."""
    before = threading.active_count()
    with CacheManager(enable_metrics=True) as manager:
        assert manager.metrics_address is None
        assert threading.active_count() == before


def test_metrics_are_served_on_loopback(either: str, open_cache: Opener) -> None:
    """The documented example: a port and nothing else; figures are there before a model is, and after."""
    with CacheManager(enable_metrics=True, metrics_port=0) as empty:
        assert 'kvcache_factory_up{manager="default"} 0.0' in read(empty)
    cache = open_cache(8, enable_metrics=True, metrics_port=0)
    assert cache.manager.metrics_address is not None
    assert cache.manager.metrics_address[0] == "127.0.0.1"
    cache.save(TOKENS)
    cache.load(TOKENS)
    assert 'kvcache_factory_served_tokens_total{manager="default"} 16.0' in read(cache.manager)


def test_managers_share_a_port_and_the_last_one_closes_it(either: str) -> None:
    """Whoever leaves is no longer shown; the number is free when all have left, and can be had again."""
    number = free_port()
    one, two = (CacheManager(enable_metrics=True, metrics_port=number, name=name) for name in ("one", "two"))
    assert one.metrics_address == two.metrics_address == ("127.0.0.1", number)
    assert all(f'up{{manager="{name}"}}' in read(one) for name in ("one", "two"))
    one.close()
    assert 'manager="one"' not in read(two)
    two.close()
    two.close()
    assert not is_open("127.0.0.1", number)
    with CacheManager(enable_metrics=True, metrics_port=number) as again:
        assert 'up{manager="default"}' in read(again)


def test_a_port_that_was_free_is_joined_by_its_number(either: str) -> None:
    """Who let the system choose can tell others where."""
    with CacheManager(enable_metrics=True, metrics_port=0, name="one") as one:
        assert one.metrics_address is not None
        with CacheManager(enable_metrics=True, metrics_port=one.metrics_address[1], name="two") as two:
            assert two.metrics_address == one.metrics_address
            assert all(f'up{{manager="{name}"}}' in read(one) for name in ("one", "two"))
        with CacheManager(enable_metrics=True, metrics_port=0) as other:
            assert other.metrics_address != one.metrics_address


def test_a_manager_that_nobody_holds_leaves(either: str) -> None:
    """The port does not keep a manager alive."""
    manager = CacheManager(enable_metrics=True, metrics_port=0)
    address = manager.metrics_address
    assert address is not None
    assert is_open(*address)
    del manager
    gc.collect()
    assert not is_open(*address)


def test_a_port_that_is_taken_is_a_typed_error(either: str) -> None:
    """It names the port and what to do; nothing is left open."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"metrics_port={number} cannot be opened on 127.0.0.1"):
            CacheManager(enable_metrics=True, metrics_port=number)


@pytest.mark.parametrize(
    "options",
    [
        {"metrics_port": 9095},
        {"metrics_port": 70_000, "enable_metrics": True},
        {"metrics_port": "9095", "enable_metrics": True},
        {"metrics_port": True, "enable_metrics": True},
        {"metrics_host": ""},
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    """A port without metrics would serve nothing true."""
    with pytest.raises(ConfigError, match="metrics_"):
        CacheManager(**options)


def test_a_port_is_part_of_the_description() -> None:
    """A manager made from a configuration opens it, too."""
    number = free_port()
    with CacheManager(enable_metrics=True, metrics_port=number, metrics_host="localhost") as manager:
        data = manager.to_config()
    assert (data["metrics_port"], data["metrics_host"]) == (number, "localhost")
    with CacheManager.from_config(data) as manager:
        assert manager.metrics_address == ("localhost", number)


def test_the_port_does_not_keep_the_process_alive(either: str) -> None:
    """A program that forgets to close its manager ends all the same."""
    code = "from kvcache_factory import CacheManager; from kvcache_factory.observe import port\n"
    code += f"port.has_page = lambda: {either == 'page'}\n"
    code += "m = CacheManager(enable_metrics=True, metrics_port=0); print(m.metrics_address[1])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert int(done.stdout) > 0
    assert done.stderr == ""


class HeldScrape:
    """A scrape of *manager*'s port that stands still in the middle until it is let go."""

    def __init__(self, manager: CacheManager, monkeypatch: pytest.MonkeyPatch) -> None:
        inside, self._go, state = threading.Event(), threading.Event(), CacheManager.state
        self.answers: list[str | Exception] = []
        assert manager.metrics_address is not None
        connection = http.client.HTTPConnection(*manager.metrics_address, timeout=PATIENCE_S)

        def slow(manager: CacheManager) -> dict[str, Any]:
            if threading.current_thread().name not in ("MainThread", "kvcache-factory-history"):
                inside.set()
                assert self._go.wait(PATIENCE_S)
            return state(manager)

        def ask() -> None:
            try:
                connection.request("GET", "/metrics")
                with connection.getresponse() as answer:
                    self.answers.append(answer.read().decode())
            except (OSError, http.client.HTTPException) as error:
                self.answers.append(error)
            finally:
                connection.close()

        monkeypatch.setattr(CacheManager, "state", slow)
        self._thread = threading.Thread(target=ask)
        self._thread.start()
        assert inside.wait(PATIENCE_S)

    def let_go(self) -> str | Exception:
        """What came of it."""
        self._go.set()
        self._thread.join(PATIENCE_S)
        assert len(self.answers) == 1
        return self.answers[0]


def test_a_manager_may_close_during_a_scrape(either: str, open_cache: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scrape is answered, with the others on the port; the next one shows only these."""
    cache = open_cache(8, enable_metrics=True, metrics_port=0)
    cache.save(TOKENS)
    assert cache.manager.metrics_address is not None
    with CacheManager(enable_metrics=True, metrics_port=cache.manager.metrics_address[1], name="other") as other:
        scrape = HeldScrape(cache.manager, monkeypatch)
        cache.manager.close()
        answer = scrape.let_go()
        assert 'kvcache_factory_up{manager="other"} 0.0' in str(answer)
        assert 'manager="default"' not in read(other)


def test_the_last_manager_may_close_during_a_scrape(
    either: str, open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody hangs: the manager closes, whoever asked hears something or is cut off, and the port is gone."""
    cache = open_cache(8, enable_metrics=True, metrics_port=0)
    cache.save(TOKENS)
    address = cache.manager.metrics_address
    assert address is not None
    scrape = HeldScrape(cache.manager, monkeypatch)
    cache.manager.close()
    assert not is_open(*address)
    scrape.let_go()


def test_scraping_never_fails_while_managers_close() -> None:
    """Whatever moment of a manager's life it meets: before a model, at work, closing, closed."""
    registries, failures, ended = list[Any](), list[BaseException](), threading.Event()

    def scrape() -> None:
        try:
            while not ended.is_set():
                for registry in list(registries[-2:]):
                    assert b"kvcache_factory_up" in generate_latest(registry)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    for _ in range(25):
        cache = small_cache(4, 8, prepare=lambda manager: registries.append(manager.registry), enable_metrics=True)
        cache.save(TOKENS)
        cache.manager.close()
    ended.set()
    thread.join()
    assert failures == []


def query(number: int, expression: str) -> list[Any]:
    """The result of an instant query, empty while there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", number, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/api/v1/query?query=" + urllib.request.quote(expression))  # type: ignore[attr-defined]
        return list(json.loads(connection.getresponse().read())["data"]["result"])
    except (OSError, KeyError, ValueError, http.client.HTTPException):
        return []
    finally:
        connection.close()


def test_a_real_prometheus_scrapes_it(open_cache: Opener, tmp_path: Path) -> None:
    """Its hit rate is the manager's, to the token, and it takes every type."""
    cache = open_cache(8, enable_metrics=True, metrics_port=0)
    assert cache.manager.metrics_address is not None
    cache.save(TOKENS)
    cache.load(TOKENS)
    cache.manager.evict(1)
    cache.load(TOKENS)
    host, port = cache.manager.metrics_address
    with prometheus(tmp_path, f"{host}:{port}") as number:
        ended = time.monotonic() + PATIENCE_S
        served: list[Any] = []
        while not served and time.monotonic() < ended:
            time.sleep(0.2)
            served = query(number, "kvcache_factory_served_tokens_total")
        assert served, (tmp_path / "log").read_text()
        assert served[0]["value"][1] == "28"
        assert query(number, "kvcache_factory_hit_ratio")[0]["value"][1] == "0.875"
        durations = query(number, 'kvcache_factory_operation_duration_seconds_count{operation="load"}')
        assert [(row["metric"]["tier"], row["value"][1]) for row in durations] == [("cpu", "2")]
        assert query(number, "up")[0]["value"][1] == "1"
