"""The page in a real browser: it shows what there is, follows what changes, and fits a phone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.conftest import TOKEN, Site

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
PATIENCE_MS = 60_000
A, B = list(range(16)), list(range(100, 116))

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed (make setup-system)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all tests."""
    with playwright.sync_playwright() as made:
        started = made.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, site: Site) -> Iterator[Any]:
    """The page, loaded; anything that went wrong in it fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened, problems = context.new_page(), []
    opened.set_default_timeout(PATIENCE_MS)
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console", lambda said: problems.append(said.text) if said.type == "error" and "401" not in said.text else None
    )
    opened.on(
        "request", lambda asked: None if asked.url.startswith((site.url, "data:")) else problems.append(asked.url)
    )
    opened.goto(site.url)
    playwright.expect(opened.locator("#status")).to_have_text("live", timeout=PATIENCE_MS)
    yield opened
    context.close()
    assert problems == []


def see(locator: Any) -> Any:
    """What is expected of an element, with patience."""
    playwright.expect.set_options(timeout=PATIENCE_MS)
    return playwright.expect(locator)


def test_it_shows_tiers_figures_and_policies(page: Any, site: Site) -> None:
    """The hit rate is the ledger's; bars are as full as the tiers."""
    site.cache.save(A)
    site.cache.load(A)
    see(page.locator("#hit-rate")).to_have_text("100.0 %")
    see(page.locator("#saved")).to_have_text("16")
    see(page.locator(".tier")).to_have_count(2)
    see(page.locator(".tier").first).to_contain_text("policy lru")
    see(page.locator(".tier").first).to_contain_text("(25.0 %)")
    see(page.locator("#warnings")).to_contain_text("none")


def test_a_session_appears_and_vanishes(page: Any, site: Site) -> None:
    """Within a look or two, with what it holds; its name is text, whatever it contains."""
    name = "<img src=x onerror=alert(1)>"
    see(page.locator("#sessions tbody tr")).to_have_count(0)
    site.cache.manager.create_session(name, quota_gb=1)
    site.cache.save(A, session=name)
    row = page.locator("#sessions tbody tr")
    see(row).to_have_count(1)
    see(row).to_contain_text(name)
    see(row.locator("td").nth(2)).to_have_text("2.0 GiB")  # in two tiers
    assert page.locator("#sessions img").count() == 0
    site.cache.manager.destroy_session(name)
    see(row).to_have_count(0)


def test_charts_grow(page: Any, site: Site) -> None:
    """Samples come by themselves and are drawn."""
    site.cache.save(A)
    site.cache.space.first_token(0.25)
    site.cache.load(A)
    see(page.locator("#chart-hit polyline")).to_have_attribute("points", re.compile(","))
    see(page.locator("#chart-ttft polyline")).to_have_attribute("points", re.compile(","))
    see(page.locator("#ttft")).to_have_text("250 ms")


def test_warnings_and_bypass_are_seen(page: Any, site: Site) -> None:
    """A failure of the cache, and a cache that serves nothing."""
    site.cache.manager._context.failed("match", RuntimeError("injected"))
    see(page.locator("#warnings")).to_contain_text("match failed and is answered as a miss")
    see(page.locator("#bypassed")).to_be_hidden()
    site.cache.manager.bypass()
    see(page.locator("#bypassed")).to_be_visible()


def test_actions_ask_and_need_the_token(page: Any, site: Site) -> None:
    """Without it nothing happens and the page says why; with it the session goes."""
    page.on("dialog", lambda dialog: dialog.accept())
    site.cache.manager.create_session("ada")
    site.cache.save(A, session="ada")
    page.locator("#sessions button.danger").click()
    see(page.locator("#outcome")).to_contain_text("needs the token")
    assert site.cache.manager.session("ada")
    page.locator("#token").fill(TOKEN)
    page.locator("#sessions button.danger").click()
    see(page.locator("#sessions tbody tr")).to_have_count(0)
    site.cache.manager.wait()
    assert site.cache.manager.state()["sessions"] == []


def test_it_fits_a_phone(page: Any, site: Site) -> None:
    """Nothing is wider than the screen, but for the table, which scrolls by itself."""
    site.cache.manager.create_session("a session with a rather long name, such as " + "x" * 60)
    page.set_viewport_size({"width": 360, "height": 740})
    see(page.locator("#sessions tbody tr")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_dark_mode_follows_the_system(page: Any) -> None:
    """The ground is dark where the system says so, and light where not."""
    ground = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    page.emulate_media(color_scheme="light")
    assert min(page.evaluate(ground)) > 200
    page.emulate_media(color_scheme="dark")
    assert max(page.evaluate(ground)) < 60
