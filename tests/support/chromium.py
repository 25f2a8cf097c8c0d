"""A real browser for tests of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

#: Pages refresh every few seconds; machines that run tests are slow.
PATIENCE_MS = 60_000


@contextlib.contextmanager
def open_chromium() -> Iterator[Browser]:
    """Start Chromium; it closes at the end."""
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


def record_complaints(context: BrowserContext) -> list[str]:
    """Errors in the browser from now on: script errors and violations of the security policy."""
    heard: list[str] = []
    context.on("weberror", lambda error: heard.append(str(error.error)))
    context.on("console", lambda said: heard.append(said.text) if said.type == "error" else None)
    context.on("dialog", lambda dialog: heard.append(dialog.message))
    return heard
