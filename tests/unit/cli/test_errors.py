"""Error messages, hints, categories and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from tinkex import errors as sdk
from tinkex.cli.context import Context
from tinkex.cli.errors import (
    ERROR_TITLES,
    CliError,
    ErrorReport,
    describe_error,
    missing_extra_error,
    print_error,
)
from tinkex.cli.main import run
from tinkex.installation import install_command


class Answer(NamedTuple):
    """Fake response for API errors."""

    status_code: int
    request: Any = None


def refusal(status: int) -> sdk.APIStatusError:
    kind = sdk.error_class_for(status)
    return kind(f"Error code: {status} - no such luck.", Answer(status))


@pytest.mark.parametrize(
    ("status", "title", "category"),
    [
        (400, "Invalid request", "user"),
        (401, "Authentication failed", "user"),
        (402, "Billing issue", "user"),
        (403, "Permission denied", "user"),
        (404, "Resource not found", "user"),
        (409, "API error (status 409)", "server"),
        (418, "API error (status 418)", "user"),
        (422, "Invalid data provided", "user"),
        (429, "Rate limit exceeded", "server"),
        (500, "Internal server error", "server"),
        (503, "Internal server error", "server"),
    ],
)
def test_status_errors_have_title_hint_and_category(status: int, title: str, category: str) -> None:
    failure = describe_error(refusal(status))
    assert failure.message == f"{title}: no such luck"
    assert (failure.status, failure.category, failure.exit_code) == (status, category, 1)
    assert failure.hint
    # User errors never suggest a retry.
    assert ("run the same command again" in failure.hint) == (category == "server")


@pytest.mark.parametrize(
    ("error", "title", "words"),
    [
        (sdk.APITimeoutError(), "Request timeout", "--timeout"),
        (sdk.ConnectTimeoutError(), "Request timeout", "--timeout"),
        (
            sdk.APIConnectionError(message="Connection error: cannot reach h:1"),
            "Connection failed: cannot reach h:1",
            "`tinkex serve` starts one",
        ),
        (sdk.APIError("strange"), "API error: strange", "again"),
        (sdk.APIResponseValidationError(), "API error: ", "again"),
    ],
)
def test_connection_errors_have_title_and_hint(
    error: sdk.TinkexError, title: str, words: str
) -> None:
    failure = describe_error(error)
    assert failure.message.startswith(title)
    assert words in (failure.hint or "")
    assert failure.category == "server"


def test_failed_operation_reports_category() -> None:
    user, server = sdk.RequestErrorCategory.User, sdk.RequestErrorCategory.Server
    assert "Correct the input" in (describe_error(sdk.RequestFailedError("x", "", user)).hint or "")
    assert "may be temporary" in (
        describe_error(sdk.RequestFailedError("x", "", server)).hint or ""
    )


def test_rejected_key_names_its_source() -> None:
    error = refusal(401)
    error.hint = "The server refused the key from profile 'work' in /home/me/config.toml."
    assert "profile 'work' in /home/me/config.toml" in (describe_error(error).hint or "")
    error.hint = None
    assert "No key was sent" in (describe_error(error).hint or "")


def test_sdk_hints_use_flag_names() -> None:
    failure = describe_error(
        sdk.ConfigError("no key", hint="Pass api_key=..., or base_url=... of it.")
    )
    assert failure.hint == "Pass --api-key, or --base-url of it."


def test_own_errors_keep_their_message() -> None:
    failure = describe_error(CliError("the port is 'x'", "Pass a number.", exit_code=3))
    assert (failure.to_text(), failure.exit_code) == ("Error: the port is 'x'\nPass a number.", 3)
    assert describe_error(missing_extra_error(ModuleNotFoundError(name="torch"), "torch")).hint == (
        f"Run: {install_command('torch')}"
    )


def test_serve_lists_all_missing_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    assert run(["serve", "--home", str(tmp_path / "home"), "--engine", "local"]).exit_code == 1
    said = capsys.readouterr().err
    assert "a server on this machine needs torch, transformers, which are not installed" in said
    assert f"Run: {install_command('server', 'torch')}" in said
    assert not (tmp_path / "home").exists()


def test_file_errors_name_the_file_and_bugs_are_reported() -> None:
    assert describe_error(PermissionError(13, "Permission denied", "/x")).message == (
        "/x cannot be used: Permission denied"
    )
    directory = IsADirectoryError(21, "Is a directory", "/x")
    assert describe_error(directory).hint == "Give a file, not a directory."
    assert describe_error(OSError(5, "I/O")).message.startswith("Unexpected error: OSError: ")
    assert describe_error(ZeroDivisionError()).message == "Unexpected error: ZeroDivisionError"


def test_interrupts_and_usage_have_their_own_exit_codes() -> None:
    assert describe_error(KeyboardInterrupt()).exit_code == 130
    assert describe_error(click.Abort()).exit_code == 130
    assert describe_error(click.UsageError("x")).exit_code == 2
    assert describe_error(click.ClickException("x")).exit_code == 1


def test_no_title_shadows_a_later_one() -> None:
    kinds = [kind for kind, _, _ in ERROR_TITLES]
    for place, kind in enumerate(kinds):
        assert not any(issubclass(kind, earlier) for earlier in kinds[:place])


def test_json_omits_unknown_fields() -> None:
    assert ErrorReport(message="m", type="T").to_dict() == {
        "error": {"message": "m", "hint": None, "type": "T"}
    }


def test_error_text_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(CliError("two\nlines \x1b[2J"), Context())
    assert capsys.readouterr().err == "Error: two\nlines \\x1b[2J\n"


def test_error_is_json_with_json_format(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(refusal(404), Context(format="json"))
    told = capsys.readouterr()
    found = json.loads(told.err)["error"]
    assert (told.out, found["status"], found["type"]) == ("", 404, "NotFoundError")


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(28, "No space left on device", "/data/metrics.jsonl"),
        Exception("I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_not_reported_as_a_bug(error: Exception) -> None:
    failure = describe_error(error)
    place = getattr(error, "filename", None) or "The disk"
    assert failure.message == f"{place} cannot be written: No space left on device"
    assert failure.hint == "Free some space, then run the same command again."
    assert failure.exit_code == 1
