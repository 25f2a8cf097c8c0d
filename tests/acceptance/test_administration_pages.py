"""Keys, quotas and models in a real browser, as the operator and as a tenant."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

import tinkex
from tests.support.chromium import PATIENCE_MS, open_chromium, record_complaints
from tests.support.real_server import RealServer, start_server
from tinkex.models import TINY_FOLDER

HOSTILE = '"><script>document.title="owned"</script>'
PAGES = ("playground", "models", "usage", "keys", "cluster")
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server with two worker groups, which has a page of its cluster."""
    server = start_server(tmp_path_factory.mktemp("administration"), {"workers": 2})
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
    return record_complaints(context)


def is_accepted(server: RealServer, key: str) -> bool:
    config = tinkex.Config(base_url=server.url, api_key=key)
    try:
        with tinkex.ServiceClient(config=config) as service:
            service.get_server_capabilities().result()
    except tinkex.AuthenticationError:
        return False
    return True


def test_key_is_shown_once_and_can_be_revoked(
    server: RealServer, context: BrowserContext, complaints: list[str]
) -> None:
    page = context.new_page()
    page.goto(f"{server.url}/keys")
    page.get_by_label("Tenant", exact=True).fill(HOSTILE)
    page.get_by_label("Name").fill("laptop")
    page.get_by_role("button", name="Create key").click()
    key = page.locator("#new-key").text_content() or ""
    assert is_accepted(server, key)

    page.get_by_role("button", name="I have saved it").click()
    row = page.get_by_role("row", name="laptop")
    expect(row).to_contain_text(HOSTILE)
    assert key not in page.content()

    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(row).to_contain_text("active")
    row.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("revoked")
    assert not is_accepted(server, key)
    assert complaints == []


def test_operator_sets_limits(
    server: RealServer, context: BrowserContext, complaints: list[str]
) -> None:
    server.new_key("limited")
    page = context.new_page()
    page.goto(f"{server.url}/usage")
    page.get_by_role("link", name="limited").click()
    row = page.get_by_role("row", name="Tokens per hour")
    expect(row).to_contain_text("unlimited")

    page.get_by_text("Change the limits").click()
    page.get_by_label("Tokens per hour", exact=True).fill("5000")
    page.get_by_role("button", name="Set limits").click()

    expect(row).to_contain_text("5,000")
    expect(row).to_contain_text("the operator")
    assert complaints == []


def log_in(server: RealServer, context: BrowserContext, key: str) -> Page:
    page = context.new_page()
    page.goto(f"{server.url}/login")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button").last.click()
    return page


def test_tenant_sees_own_pages_only(
    server: RealServer, context: BrowserContext, complaints: list[str]
) -> None:
    server.new_key("somebody-else")
    page = log_in(server, context, server.new_key("visitor"))
    for name in ("models", "usage", "keys"):
        page.goto(f"{server.url}/{name}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert "somebody-else" not in page.content()
        assert page.locator("[data-action]").count() == 0
    assert page.get_by_role("link", name="Cluster").count() == 0
    page.goto(f"{server.url}/cluster")
    expect(page.get_by_role("alert")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_small_screen(server: RealServer, chromium: Browser, scheme: str) -> None:
    server.new_key("a-tenant-with-a-name-that-is-long-enough-to-need-more-than-one-line")
    with chromium.new_context(viewport=PHONE, color_scheme=scheme) as context:
        complaints = record_complaints(context)
        page = context.new_page()
        for name in PAGES:
            page.goto(f"{server.url}/{name}")
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
        assert complaints == []


def test_cluster_page_lists_groups(server: RealServer, context: BrowserContext) -> None:
    page = context.new_page()
    page.goto(server.url)
    page.get_by_role("link", name="Cluster").click()

    expect(page.locator("section").first.locator("tbody tr")).to_have_count(2)
    expect(page.locator("tbody .pill").first).to_have_text("ready")


@pytest.mark.slow
def test_operator_adds_model_from_allowed_folder(
    tmp_path: Path, context: BrowserContext, complaints: list[str]
) -> None:
    allowed = tmp_path / "models"
    shutil.copytree(TINY_FOLDER, allowed / "my-tiny")
    server = start_server(tmp_path / "home", {"model_folders": [str(allowed)]}, engine="local")
    try:
        page = context.new_page()
        page.goto(f"{server.url}/models")
        page.get_by_label("Model").select_option(index=1)
        page.get_by_role("button", name="Add model").click()

        expect(page.get_by_text("my-tiny was added")).to_be_visible()
        row = page.get_by_role("row", name="my-tiny")
        expect(row).to_contain_text("training, sampling")
        row.get_by_role("link", name="Playground").click()
        page.get_by_role("textbox", name="Message").fill("Tell me a story.")
        page.keyboard.press("Enter")
        expect(page.locator("#play-status")).to_have_text("The answer is complete.")
        assert complaints == []
    finally:
        server.stop()
