"""The dashboard in a real browser, with a real server that is training."""

from __future__ import annotations

import contextlib
import html
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect

import tinkex
from tests.support.chromium import PATIENCE_MS, open_chromium, record_complaints
from tests.support.real_server import RealServer, start_server

HOSTILE = '<script>document.title="owned"</script><b>bold</b>'
Train: TypeAlias = "Callable[..., tinkex.TrainingClient]"


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
    with open_chromium() as browser:
        yield browser


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    with chromium.new_context() as opened:
        opened.set_default_timeout(PATIENCE_MS)
        yield opened


@pytest.fixture
def complaints(context: BrowserContext) -> list[str]:
    """Errors in the browser: script errors and violations of the security policy."""
    return record_complaints(context)


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


def open_newest_run(page: Page, server: RealServer) -> None:
    page.goto(server.url)
    page.locator("a[href^='/runs/']").first.click()


def test_curves_update_live(
    server: RealServer, train: Train, context: BrowserContext, complaints: list[str]
) -> None:
    training = train(3)
    page = context.new_page()
    open_newest_run(page, server)
    curve = page.locator("[data-metric=loss] .u-wrap")
    expect(curve).to_have_attribute("aria-label", _ends_at(3))
    mark(page)
    page.evaluate("window.chart = document.querySelector('[data-metric=loss] canvas')")

    take_steps(training, 4)

    expect(curve).to_have_attribute("aria-label", _ends_at(7))
    expect(page.locator(".compact tbody tr").first.locator("td").first).to_have_text("7")
    for metric in ("learning_rate", "grad_norm", "tokens_per_second"):
        expect(page.locator(f"[data-metric={metric}] canvas")).to_be_visible()
    # The same canvas was drawn again: nothing flickers.
    assert page.evaluate("window.chart === document.querySelector('[data-metric=loss] canvas')")
    assert is_marked(page)
    assert complaints == []


def _ends_at(step: int) -> re.Pattern[str]:
    return re.compile(rf" at step {step}$")


def test_chart_is_used_by_keyboard_zoomed_and_saved(
    server: RealServer, train: Train, context: BrowserContext, complaints: list[str]
) -> None:
    train(8, "zoomed")
    page = context.new_page()
    open_newest_run(page, server)
    loss = page.locator("[data-metric=loss]")
    loss.locator(".u-wrap").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(loss.locator("[aria-live]")).to_have_text(re.compile(r"^Step 2\. zoomed: [0-9.]+$"))
    expect(loss.locator(".u-legend .u-value").first).to_have_text("2")

    page.get_by_label("From step").fill("3")
    page.get_by_label("To step").fill("5")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Reset zoom")).to_be_enabled()
    expect(loss.locator(".u-wrap")).to_have_attribute("aria-label", _ends_at(6))
    page.get_by_role("button", name="Reset zoom").click()
    expect(loss.locator(".u-wrap")).to_have_attribute("aria-label", _ends_at(8))

    page.get_by_label("Log scale").check()
    page.get_by_label("Smoothing").fill("0.6")
    expect(loss.locator(".u-legend")).to_contain_text("zoomed (not smoothed)")
    for kind, start in (("PNG", b"\x89PNG"), ("SVG", b"<svg ")):
        with page.expect_download() as saved:
            loss.get_by_role("button", name=f"as {kind}").click()
        assert Path(saved.value.path()).read_bytes().startswith(start)
        assert saved.value.suggested_filename == f"loss.{kind.lower()}"
    with page.expect_download() as saved:
        page.get_by_role("link", name="CSV").click()
    lines = Path(saved.value.path()).read_text().splitlines()
    assert lines[0].startswith("step,loss,")
    assert len(lines) == 9
    assert complaints == []


def test_drag_zooms_all_charts(server: RealServer, train: Train, context: BrowserContext) -> None:
    train(20, "dragged")
    page = context.new_page()
    open_newest_run(page, server)
    over = page.locator("[data-metric=loss] .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 40, steps=5)
    page.mouse.up()

    expect(page.get_by_label("From step")).not_to_have_value("")
    first = int(page.get_by_label("From step").input_value())
    last = int(page.get_by_label("To step").input_value())
    assert 6 <= first < last <= 16
    # Data of this range only was fetched, for all charts.
    label = re.compile(r" at step ([5-9]|1[0-5]) to .* at step 1[0-7]$")
    expect(page.locator("[data-metric=grad_norm] .u-wrap")).to_have_attribute("aria-label", label)


def test_runs_are_compared_and_renamed(
    server: RealServer, train: Train, context: BrowserContext, complaints: list[str]
) -> None:
    train(3, "first of two")
    train(5, "second of two")
    page = context.new_page()
    page.goto(server.url + "/?q=of+two")
    expect(page.locator("tbody tr", has=page.locator("[data-select]"))).to_have_count(2)
    page.get_by_label("Compare second of two").check()
    # Without a mouse.
    page.get_by_label("Compare first of two").focus()
    page.keyboard.press("Space")

    chart = page.locator("[data-metric=loss] .u-wrap")
    expect(chart).to_have_attribute("aria-label", re.compile("first of two from .*; |; first of"))
    expect(page.get_by_text("2 runs selected")).to_be_visible()
    legend = page.locator("[data-metric=loss] .u-legend")
    expect(legend).to_contain_text("second of two")

    page.get_by_role("button", name="Rename first of two").click()
    name = page.get_by_label("Name; empty removes it")
    expect(name).to_be_focused()
    name.fill(HOSTILE)
    page.keyboard.press("Enter")
    expect(page.locator("td.main bdi.name", has_text="bold")).to_have_text(HOSTILE)
    expect(page.locator("#notices")).to_contain_text("The name was saved.")
    expect(legend).to_contain_text(HOSTILE)
    page.reload()
    expect(page.get_by_text("2 runs selected")).to_be_visible()
    assert page.locator("b").count() == 0
    assert complaints == []


def test_run_and_checkpoint_actions(
    server: RealServer, train: Train, context: BrowserContext, complaints: list[str]
) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    training = train(1, "acted on")
    path = training.save_state("kept").result().path
    page = context.new_page()
    open_newest_run(page, server)

    page.get_by_role("button", name="Edit tags").click()
    page.get_by_label("Tags, separated by commas").fill("one, two words")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(page.locator(".facts .tag")).to_have_text(["one", "two words"])

    row = page.locator("tr", has_text=path)
    row.get_by_role("button", name="Copy the path").click()
    assert page.evaluate("navigator.clipboard.readText()") == path
    choose(page, path, "Publish")
    page.get_by_role("dialog").get_by_role("button", name="Publish").click()
    expect(row.locator(".pill")).to_have_text("everyone")
    choose(page, path, "Make private")
    expect(row.locator(".pill")).to_have_text("you")
    choose(page, path, "Set the expiry")
    page.get_by_label("Expires").select_option("in a week")
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    expect(row.locator("[data-label=Expires]")).to_have_text(re.compile("in [67] d"))
    with page.expect_download() as saved:
        choose(page, path, "Download")
    assert saved.value.suggested_filename == "weights-kept.tar"
    assert Path(saved.value.path()).stat().st_size > 1000
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download trace").click()
    assert b"traceEvents" in Path(saved.value.path()).read_bytes()[:2000]

    choose(page, path, "Delete")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(row).to_be_visible()
    choose(page, path, "Delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    assert complaints == []


def choose(page: Page, path: str, action: str) -> None:
    """Choose an action in the menu of a checkpoint."""
    page.get_by_label(f"More actions for {path}").click()
    page.locator("details[open]").get_by_role("button", name=action).click()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_are_accessible(
    server: RealServer, train: Train, chromium: Browser, theme: Literal["light", "dark"]
) -> None:
    training = train(2, "accessible")
    training.save_state("one").result()
    with chromium.new_context(color_scheme=theme) as context:
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.goto(server.url)
        page.locator("[data-select]").first.check()
        page.wait_for_selector(".u-legend")
        assert violations(page) == []
        open_newest_run(page, server)
        page.wait_for_selector(".u-legend")
        assert violations(page) == []
        page.get_by_role("button", name="Rename").click()
        assert violations(page) == []
        page.goto(server.url + "/login")
        assert violations(page) == []


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with a page."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {node['html'][:200]} {node['failureSummary']}"
        for each in found
        for node in each["nodes"]
    ]


def test_page_is_used_by_keyboard_and_keeps_its_theme(
    server: RealServer, train: Train, context: BrowserContext
) -> None:
    train(1)
    page = context.new_page()
    page.goto(server.url)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page.get_by_role("link", name="Runs")).to_have_attribute("aria-current", "page")

    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.get_by_role("button", name="Theme of the system").press("Enter")
    page.get_by_role("button", name="Light theme").press("Enter")
    expect(page.get_by_role("button", name="Dark theme")).to_be_visible()
    assert page.evaluate(paper) != light
    page.reload()
    assert page.evaluate(paper) != light


def test_other_site_cannot_act(server: RealServer, train: Train, context: BrowserContext) -> None:
    training = train(1, "untouched")
    run_url = f"{server.url}/api/v1/training_runs/{training.model_id}/name"
    page = context.new_page()
    page.goto(server.url)
    token = page.locator("meta[name=csrf-token]").get_attribute("content")
    # Another site in the same browser, which even knows the token.
    context.route("http://evil.example/", lambda route: route.fulfill(body="<p>evil</p>"))
    page.goto("http://evil.example/")
    outcome = page.evaluate(
        """async ([url, token]) => {
            const headers = { "X-CSRF-Token": token, "Content-Type": "application/json" };
            const body = JSON.stringify({ name: "stolen" });
            try { return (await fetch(url, { method: "PUT", headers, body })).status; }
            catch (error) { return error.name; }
        }""",
        [run_url, token],
    )
    assert outcome == "TypeError"
    page.goto(server.url)
    expect(page.locator("td.main bdi.name").first).to_have_text("untouched")


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
        expect(page.get_by_role("heading", name="Steps")).to_be_visible()
        expect(page.get_by_role("link", name="here as CSV")).to_be_visible()
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
    state = page.locator("#pulse")
    expect(state).to_have_text("live")

    context.set_offline(True)
    expect(state).to_have_text("the server does not respond")

    context.set_offline(False)
    expect(state).to_have_text("live")
