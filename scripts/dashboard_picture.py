"""Render docs/assets/dashboard.png: a training run of tinkex/tiny on the page of a real server.

.venv/bin/python scripts/dashboard_picture.py     # about a minute; needs chromium
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "assets" / "dashboard.png"
NAME = "pirate"
READY = "tinkex server ready at "


def main() -> int:
    """Start the server, train, take the picture, stop the server."""
    with tempfile.TemporaryDirectory() as folder:
        environment = clean_environment(Path(folder))
        serve = [sys.executable, "-m", "tinkex", "serve", "--port", "0"]
        with subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip().removeprefix(READY)
            try:
                train(environment, Path(folder))
                take_picture(url)
            finally:
                server.terminate()
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes\n")
    return 0


def clean_environment(folder: Path) -> dict[str, str]:
    """The environment without settings of the user's own server, and with a temporary home."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("TINKE")}
    return inherited | {"TINKEX_HOME": str(folder / "home"), "TINKEX_LOG": "error"}


def train(environment: dict[str, str], folder: Path) -> None:
    """Fine-tune the built-in model, as a user would."""
    data = ROOT / "examples" / "data" / "pirate_tiny.jsonl"
    command = [sys.executable, "-m", "tinkex", "train", "sft", str(data), "--name", NAME]
    options = ["--base-model", "tinkex/tiny", "--steps", "60", "--learning-rate", "1e-3"]
    subprocess.run([*command, *options], env=environment, cwd=folder, check=True)


def take_picture(url: str) -> None:
    """Open the page of the run and save a screenshot."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    PICTURE.parent.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 630})
        page.goto(url)
        page.get_by_role("link", name=NAME).first.click()
        page.wait_for_selector(".u-legend")
        page.wait_for_timeout(1000)
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
