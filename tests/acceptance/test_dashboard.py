"""The dashboard in a real browser, with a real server that is training."""

from __future__ import annotations

import contextlib
import html
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

import tinkex
from tests.support.real_server import RealServer, start_server

HOSTILE = '<script>document.title="owned"</script><b>bold</b>'
Train: TypeAlias = "Callable[..., tinkex.TrainingClient]"
#: Pages refresh every few seconds; machines that run tests are slow.
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server for all tests; pages list the newest run first."""
    server = start_server(tmp_path_factory.mktemp("dashboard"))
    yield server
    server.stop()


@pytest.fixture
def empty_server(tmp_path: Path) -> Iterator[RealServer]:
    """A server without runs."""
    server = start_server(tmp_path / "home")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    assert executable, "Chromium is missing; run scripts/system-packages.sh, which installs it"
    # The sandbox does not work for root, the user in containers.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    # Without this, expectations time out after five seconds regardless of the context.
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=options, timeout=PATIENCE_MS
        )
        yield browser
        browser.close()


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    with chromium.new_context() as opened:
        opened.set_default_timeout(PATIENCE_MS)
        yield opened


@pytest.fixture
def complaints(context: BrowserContext) -> list[str]:
    """Errors in the browser: script errors and violations of the security policy."""
    heard: list[str] = []
    context.on("weberror", lambda error: heard.append(str(error.error)))
    context.on("console", lambda said: heard.append(said.text) if said.type == "error" else None)
    context.on("dialog", lambda dialog: heard.append(dialog.message))
    return heard


@pytest.fixture
def train(server: RealServer) -> Iterator[Train]:
    """Create a run with some steps; its client stays connected until the test ends."""
    with contextlib.ExitStack() as stack:

        def work(num_steps: int, name: str | None = None) -> tinkex.TrainingClient:
            service = stack.enter_context(
                tinkex.ServiceClient(base_url=server.url, api_key=server.key, display_name=name)
            )
            training = service.create_lora_training_client("tinkex/bigram", rank=8, seed=1)
            take_steps(training, num_steps)
            return training

        yield work


def take_steps(training: tinkex.TrainingClient, num_steps: int) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
    datum = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    for _ in range(num_steps):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=0.05)).result()


def mark(page: Page) -> None:
    """Put a marker into the page that a reload would remove."""
    page.evaluate("window.mark = 'still here'")


def is_marked(page: Page) -> bool:
    return bool(page.evaluate("window.mark === 'still here'"))


def test_first_steps_snippet_creates_run(
    empty_server: RealServer, context: BrowserContext, complaints: list[str], tmp_path: Path
) -> None:
    page = context.new_page()
    page.goto(empty_server.url)
    mark(page)
    script = tmp_path / "snippet.py"
    snippet = html.unescape(page.locator("#snippet").inner_html())
    script.write_text(snippet.replace("tml-...", empty_server.key))

    subprocess.run([sys.executable, str(script)], check=True, timeout=120)

    row = page.locator("tr", has=page.locator("a[href^='/runs/']"))
    expect(row.locator("[data-label='Steps']")).to_have_text("20")
    expect(row.locator("[data-label='Base model']")).to_have_text("tinkex/bigram")
    expect(page.locator("code.path")).to_contain_text("/weights/first")
    expect(page.locator("#snippet")).to_have_count(0)
    assert is_marked(page)
    assert complaints == []


def test_curve_updates_live(
    server: RealServer, train: Train, context: BrowserContext, complaints: list[str]
) -> None:
    training = train(3)
    page = context.new_page()
    page.goto(server.url)
    page.locator("a[href^='/runs/']").first.click()
    curve = page.locator(".curve svg[role=img]")
    expect(curve).to_have_attribute("aria-label", _ends_at(3))
    before = page.locator("polyline").get_attribute("points")
    mark(page)

    take_steps(training, 4)

    expect(curve).to_have_attribute("aria-label", _ends_at(7))
    assert page.locator("polyline").get_attribute("points") != before
    expect(page.locator("tbody tr").first.locator("td").first).to_have_text("7")
    expect(page.locator(".curve circle:not(.last)")).to_have_count(7)
    assert is_marked(page)
    assert complaints == []


def _ends_at(step: int) -> re.Pattern[str]:
    return re.compile(rf" at step {step}$")


def test_hostile_name_is_escaped(
    server: RealServer, train: Train, context: BrowserContext, complaints: list[str]
) -> None:
    train(1, HOSTILE)
    page = context.new_page()
    page.goto(server.url)

    expect(page.locator("td.main bdi.name").first).to_have_text(HOSTILE)
    page.locator("a[href^='/runs/']").first.click()
    expect(page.locator("h1 bdi")).to_have_text(HOSTILE)
    assert page.locator("b").count() == 0
    assert page.title() == f"tinkex: {HOSTILE}"
    assert complaints == []


def test_remote_visitor_logs_in(server: RealServer, chromium: Browser) -> None:
    # The header that a proxy would add.
    with chromium.new_context(extra_http_headers={"X-Forwarded-For": "203.0.113.5"}) as context:
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(server.url)
        page.get_by_label("API key").fill("tml-wrong")
        page.get_by_role("button", name="Show my runs").click()
        expect(page.get_by_role("alert")).to_have_text("This key is wrong or was revoked.")

        page.get_by_label("API key").fill(server.new_key("visitor"))
        page.get_by_role("button", name="Show my runs").click()
        expect(page.get_by_text("No model has been trained yet.")).to_be_visible()
        assert page.evaluate("document.cookie") == ""

        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("API key")).to_be_visible()


def test_page_works_without_javascript_and_fits_a_small_screen(
    server: RealServer, train: Train, chromium: Browser
) -> None:
    train(2, "a name that is long enough to need more than one line on a small screen")
    phone = {"width": 360, "height": 740}
    with chromium.new_context(java_script_enabled=False, viewport=phone) as context:
        page = context.new_page()
        page.goto(server.url)
        assert page.locator("noscript meta[http-equiv=refresh]").count() == 1
        page.locator("a[href^='/runs/']").first.click()
        expect(page.locator(".curve svg[role=img]")).to_be_visible()
    with chromium.new_context(viewport=phone) as context:
        page = context.new_page()
        for path in ("", page_of_run(server, page)):
            page.goto(server.url + path)
            assert page.evaluate("document.documentElement.scrollWidth") <= phone["width"]


def page_of_run(server: RealServer, page: Page) -> str:
    page.goto(server.url)
    href = page.locator("a[href^='/runs/']").first.get_attribute("href")
    assert href is not None
    return href


def test_page_shows_lost_connection(server: RealServer, context: BrowserContext) -> None:
    page = context.new_page()
    page.goto(server.url)
    state = page.get_by_role("status")
    expect(state).to_have_text("live")

    context.set_offline(True)
    expect(state).to_have_text("the server does not respond")

    context.set_offline(False)
    expect(state).to_have_text("live")
