"""Progress and prompts on stderr; without a terminal there are no bars."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tinkex
from tinkex.cli.client import Listing, fetch_pages
from tinkex.cli.context import Context, Screen
from tinkex.cli.progress import paged_progress_bar, print_status, progress_bar, spinner
from tinkex.cli.prompts import confirm

SOURCES = Path(tinkex.__file__).parent
WATCHED = Context(stderr=Screen(is_terminal=True, width=120))


def test_bar_shows_count_percent_and_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(WATCHED, "Fetching [x]", 4) as shown:
        shown.advance(1)
        shown.advance(2)
        assert shown.done == 3
    told = capsys.readouterr()
    assert told.out == ""
    assert "Fetching [x]" in told.err
    for text in ("3/4", "75%", "/s"):
        assert text in told.err


def test_byte_bar_shows_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(WATCHED, "Downloading", None, "bytes") as shown:
        shown.update(1500, 3000)
    assert "1.5/3.0 kB" in capsys.readouterr().err


@pytest.mark.parametrize(
    "context", [Context(), Context(format="json", stderr=Screen(is_terminal=True, width=80))]
)
def test_bar_is_hidden_without_terminal_or_with_json(
    context: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar(context, "Fetching", 4) as shown:
        shown.advance(4)
    assert shown.done == 4
    assert tuple(capsys.readouterr()) == ("", "")


def test_single_page_list_shows_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with paged_progress_bar(WATCHED, "Fetching") as told:
        told(3, 3)
    assert capsys.readouterr().err == ""
    with paged_progress_bar(WATCHED, "Fetching") as told:
        told(3, 9)
        told(9, 9)
    assert "9/9" in capsys.readouterr().err


def test_status_goes_to_stderr_except_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_status("Saving weights")
    assert tuple(capsys.readouterr()) == ("", "Saving weights\n")
    with click.Context(click.Command("x"), obj=Context(format="json")):
        print_status("Saving weights")
    assert tuple(capsys.readouterr()) == ("", "")


def test_spinner_is_one_line_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(click.Command("x"), obj=WATCHED), spinner("Starting ...") as shown:
        shown.print_line("Saving [x] ...")
        shown.print_line("Saved.")
    told = capsys.readouterr()
    assert told.out == ""
    assert "Saving [x] ..." in told.err
    # Only the text after the last erased line stays on the screen.
    assert told.err.rpartition("\x1b[2K")[2] == "Saved.\n"


def test_status_line_pauses_spinner(capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(click.Command("x"), obj=WATCHED), spinner("Loading ..."):
        print_status("This model has no chat template.")
    written = capsys.readouterr().err
    # The spinner line was erased, and the status line ends with a newline.
    assert "\x1b[2KThis model has no chat template.\n" in written


def test_spinner_text_is_wrapped_on_narrow_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    context = Context(stderr=Screen(is_terminal=True, width=40))
    text = "Creating the adapter on tinkex/bigram with rank 32 ..."
    with click.Context(click.Command("x"), obj=context), spinner(text):
        pass
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "\u2026" not in written
    assert "rank 32 ..." in " ".join(written.split())


def test_spinner_prints_lines_without_terminal_and_nothing_with_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with click.Context(click.Command("x"), obj=Context()), spinner("Starting ...") as shown:
        shown.show("Saving ...")
    assert tuple(capsys.readouterr()) == ("", "Starting ...\nSaving ...\n")
    context = WATCHED._replace(format="json")
    with click.Context(click.Command("x"), obj=context), spinner("Starting ..."):
        pass
    assert tuple(capsys.readouterr()) == ("", "")


def test_progress_bars_are_built_in_one_module() -> None:
    drawing = [
        str(path.relative_to(SOURCES))
        for path in sorted(SOURCES.rglob("*.py"))
        if re.search(r"^\s*from (rich\.progress|tqdm)\b.* import ", path.read_text(), re.MULTILINE)
    ]
    # The two others import a type only.
    others = ["cli/progress.py", "pipeline/train/metrics.py"]
    assert [path for path in drawing if path not in others] == ["progress_bar.py"]


# --- questions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "is_yes"),
    [
        ("y\n", True),
        ("YES\n", True),
        (" Yes \n", True),
        ("y", True),
        ("\n", False),
        ("", False),
        ("n\n", False),
        ("yep\n", False),
        ("ja\n", False),
    ],
)
def test_confirm_accepts_only_yes(
    answer: str,
    is_yes: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert confirm("Delete it?") is is_yes
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("Delete it? [y/N] ")
    assert told.err.endswith("Cancelled.\n") is not is_yes


def test_confirm_declines_without_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO("y\n")
    closed.close()
    for stdin in (closed, None):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert confirm("Delete it?") is False


# --- pages ------------------------------------------------------------------------------------


@given(
    total=st.integers(0, 60),
    limit=st.integers(0, 70),
    page_size=st.integers(1, 20),
    cap=st.integers(1, 20),
)
def test_fetch_pages_with_any_page_size(total: int, limit: int, page_size: int, cap: int) -> None:
    asked: list[Any] = []

    def ask(count: int, offset: int) -> Listing[int]:
        asked.append((count, offset))
        return Listing(list(range(total))[offset : offset + min(count, cap)], total)

    found = fetch_pages(ask, limit, page_size)
    assert list(found.items) == list(range(min(total, limit or total)))
    assert (found.total, found.num_hidden) == (total, total - len(found.items))
    assert all(1 <= count <= page_size for count, _ in asked)


def test_fetch_pages_stops_on_empty_page() -> None:
    pages = iter([Listing(["a"], 3), Listing(list[str](), 1)])
    found = fetch_pages(lambda limit, offset: next(pages), 0, 1)
    assert (found.items, found.total) == (["a"], 1)
