"""Render the pictures of the pages in docs/assets: a real server, a real run, a real browser.

make screenshots                                       # all; about two minutes, needs chromium
.venv/bin/python scripts/screenshots.py playground     # those whose name contains a word
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "assets"
RUN_NAME = "pirate"
READY = "tinkex server ready at "
DESKTOP = {"width": 1000, "height": 700}
PHONE = {"width": 390, "height": 760}
#: The pages wait for a model, which may not be loaded yet.
TIMEOUT_MS = 120_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of a page."""

    name: str
    prepare: Callable[[Page, str], None]
    """Opens the page of a server and does what the picture shows."""
    scheme: str = "light"
    size: tuple[int, int] = (DESKTOP["width"], DESKTOP["height"])


def open_run(page: Page, url: str) -> None:
    """Open the page of the training run."""
    page.goto(url)
    page.get_by_role("link", name=RUN_NAME).first.click()
    page.locator("main canvas, main svg").first.wait_for()


def open_playground(page: Page, url: str) -> None:
    """Compare the trained model with its base model, with the probabilities of the tokens."""
    page.goto(f"{url}/playground")
    page.locator("#play-settings").evaluate("element => { element.open = true; }")
    checkpoint = page.locator("#play-model-0 option", has_text=RUN_NAME).first
    page.locator("#play-model-0").select_option(checkpoint.get_attribute("value"))
    page.get_by_label("Max tokens").fill("40")
    page.get_by_label("Seed").fill("1")
    page.get_by_label("Show tokens").check()
    page.get_by_label("Compare").check()
    page.locator("#play-settings").evaluate("element => { element.open = false; }")
    page.get_by_role("textbox", name="Message").fill("What is 3 plus 4?")
    page.keyboard.press("Enter")
    expect(page.locator("#play-status")).to_have_text("The answer is complete.", timeout=TIMEOUT_MS)
    tokens = page.locator(".token-list:visible").first
    if tokens.count():
        tokens.focus()
        for _ in range(3):
            page.keyboard.press("ArrowRight")
    page.locator("#main").evaluate("() => scrollTo(0, 0)")


def open_page(path: str) -> Callable[[Page, str], None]:
    """Open a page by its path."""
    return lambda page, url: page.goto(url + path) and None


def add_tenants(page: Page, url: str) -> None:
    """Open the page of keys, after some were created."""
    page.goto(f"{url}/keys")
    for tenant, name in (("alice@example.com", "laptop"), ("research", "cluster")):
        page.get_by_label("Tenant", exact=True).fill(tenant)
        page.get_by_label("Name").fill(name)
        page.get_by_role("button", name="Create key").click()
        page.get_by_role("button", name="I have saved it").click()
    expect(page.get_by_role("row", name="research")).to_be_visible()


PICTURES_TO_TAKE = (
    Picture(name="dashboard", prepare=open_run),
    Picture(name="dashboard-dark", prepare=open_run, scheme="dark"),
    Picture(name="dashboard-phone", prepare=open_run, size=(PHONE["width"], PHONE["height"])),
    Picture(name="runs", prepare=open_page("/")),
    Picture(name="playground", prepare=open_playground),
    Picture(name="playground-dark", prepare=open_playground, scheme="dark"),
    Picture(
        name="playground-phone", prepare=open_playground, size=(PHONE["width"], PHONE["height"])
    ),
    Picture(name="models", prepare=open_page("/models")),
    Picture(name="usage", prepare=open_page("/usage")),
    Picture(name="keys", prepare=add_tenants),
)


def main() -> int:
    """Start the server, train, take the pictures, stop the server."""
    words = sys.argv[1:]
    wanted = [each for each in PICTURES_TO_TAKE if not words or any(w in each.name for w in words)]
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as (url, environment):
        train(environment, Path(folder))
        with open_browser() as browser:
            for picture in wanted:
                take(browser, picture, url)
    return 0


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Run a server with a temporary home, without settings of the user's own server."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("TINKE")}
    environment = inherited | {"TINKEX_HOME": str(folder / "home"), "TINKEX_LOG": "error"}
    command = [sys.executable, "-m", "tinkex", "serve", "--port", "0"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip().removeprefix(READY), environment
        finally:
            server.terminate()


def train(environment: dict[str, str], folder: Path) -> None:
    """Fine-tune the built-in model, as a user would."""
    data = ROOT / "examples" / "data" / "pirate_tiny.jsonl"
    command = [sys.executable, "-m", "tinkex", "train", "sft", str(data), "--name", RUN_NAME]
    options = ["--base-model", "tinkex/tiny", "--steps", "60", "--learning-rate", "1e-3"]
    subprocess.run([*command, *options], env=environment, cwd=folder, check=True)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium; its sandbox does not work for root, the user in containers."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def take(browser: Browser, picture: Picture, url: str) -> None:
    """Take one picture, without animations and the blinking cursor."""
    width, height = picture.size
    viewport = {"width": width, "height": height}
    with browser.new_context(viewport=viewport, color_scheme=picture.scheme) as context:  # type: ignore[arg-type]
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        picture.prepare(page, url)
        page.wait_for_timeout(1000)
        file = PICTURES / f"{picture.name}.png"
        page.screenshot(path=file, animations="disabled")
    sys.stdout.write(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    sys.exit(main())
