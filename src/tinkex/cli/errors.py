"""CLI errors: message, hint and exit code for every kind of failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import click

from tinkex import errors as sdk
from tinkex.cli.format import escape_line, wrap_text
from tinkex.errors import ConfigError, TinkexError
from tinkex.system.disk_errors import DISK_FULL_MESSAGE, is_disk_full

if TYPE_CHECKING:
    from tinkex.cli.context import Context

FAILED, USAGE, INTERRUPTED, TERMINATED = 1, 2, 130, 143
_FIX_HINT = "Correct the input; the same command will fail again."
_RETRY_HINT = "This may be temporary: run the same command again."

#: Title and hint for each error class; the first matching class is used.
ERROR_TITLES: tuple[tuple[type[TinkexError], str, str], ...] = (
    (
        sdk.NotFoundError,
        "Resource not found",
        "`tinkex run list` and `tinkex checkpoint list` list the available ones.",
    ),
    (sdk.AuthenticationError, "Authentication failed", ""),
    (sdk.BillingError, "Billing issue", "Set up billing for this account."),
    (
        sdk.PermissionDeniedError,
        "Permission denied",
        "Ask the owner for access, or use the owner's key.",
    ),
    (sdk.BadRequestError, "Invalid request", _FIX_HINT),
    (sdk.UnprocessableEntityError, "Invalid data provided", _FIX_HINT),
    (sdk.RateLimitError, "Rate limit exceeded", "Wait a moment, or send fewer requests at once."),
    (sdk.InternalServerError, "Internal server error", "The error is on the server's side."),
    (sdk.APITimeoutError, "Request timeout", "--timeout 2m waits longer."),
    (
        sdk.APIConnectionError,
        "Connection failed",
        "Is the server running? `tinkex serve` starts one on this machine; --base-url selects "
        "another.",
    ),
    (sdk.APIStatusError, "API error (status {status})", ""),
    (sdk.APIError, "API error", ""),
    (sdk.RequestFailedError, "The operation failed", ""),
)
#: Command-line flags for the SDK settings that messages mention.
_FLAG_NAMES = (
    ("api_key=...", "--api-key"),
    ("base_url=...", "--base-url"),
    ("api_key argument", "--api-key"),
    ("poll_timeout_seconds", "--timeout"),
)


class CliError(TinkexError):
    """A command failed because of its input or the state of the server."""

    category = sdk.RequestErrorCategory.User
    verdict = sdk.FailureClass(is_user_error=True, is_retryable=False)

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        exit_code: int = FAILED,
        category: sdk.RequestErrorCategory | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code
        if category is not None:
            self.category = category


class Interrupted(CliError):
    """Ctrl-C stopped a command; the message states what remains of its work."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint, exit_code=INTERRUPTED)


@contextlib.contextmanager
def on_interrupt(message: str, hint: str | None = None) -> Iterator[None]:
    """Turn Ctrl-C into an Interrupted error with this message and hint."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(message, hint) from error


class ErrorReport(NamedTuple):
    """An error in the form that is printed."""

    message: str
    type: str
    hint: str | None = None
    exit_code: int = FAILED
    status: int | None = None
    category: str | None = None
    usage: str | None = None
    """Usage line of the command, for usage errors."""

    def to_dict(self) -> dict[str, object]:
        """The error as JSON data; unknown fields are omitted."""
        fields = {"message": self.message, "hint": self.hint, "type": self.type}
        more = {"status": self.status, "category": self.category}
        return {"error": fields | {key: value for key, value in more.items() if value is not None}}

    def to_text(self) -> str:
        """The error as text."""
        # Ctrl-C and SIGTERM are user decisions, not errors.
        is_error = self.exit_code not in {INTERRUPTED, TERMINATED}
        lines = [self.usage, f"Error: {self.message}" if is_error else self.message, self.hint]
        return "\n".join(line for line in lines if line)


def describe_error(error: BaseException) -> ErrorReport:
    """Describe any exception as an ErrorReport."""
    if isinstance(error, click.ClickException):
        return _describe_click_error(error)
    if isinstance(error, TinkexError):
        return _describe_own_error(error)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return ErrorReport(message="Interrupted.", type="Interrupted", exit_code=INTERRUPTED)
    if is_disk_full(error):
        return _describe_own_error(_disk_full_error(error))
    if isinstance(error, OSError) and error.filename is not None:
        return _describe_own_error(unusable_file_error(error))
    return ErrorReport(
        message=f"Unexpected error: {type(error).__name__}: {error}".rstrip(": "),
        hint="This is a bug in tinkex; --verbose prints the traceback.",
        type=type(error).__name__,
    )


def _describe_click_error(error: click.ClickException) -> ErrorReport:
    message = error.format_message()
    usage = hint = None
    if isinstance(error, click.UsageError) and error.ctx is not None:
        usage = error.ctx.get_usage()
        hint = f"`{error.ctx.command_path} --help` lists all options."
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        # The message of this error is the complete help text.
        usage, message, hint = f"{message}\n", "Missing command.", None
    return ErrorReport(
        message=message,
        hint=hint,
        type=type(error).__name__,
        exit_code=error.exit_code,
        category="user",
        usage=usage,
    )


def _describe_own_error(error: TinkexError) -> ErrorReport:
    message, hint = error.message, error.hint
    mappings = ERROR_TITLES
    if isinstance(error, sdk.APIError) and error.is_web_page and not error.retryable:
        # The status comes from another web server and has no meaning in this API.
        message, mappings = _detail(error), ()
    for kind, title, advice in mappings:
        if isinstance(error, kind):
            message = f"{title.format(status=error.status)}: {_detail(error)}"
            hint = _advice(error, advice)
            break
    return ErrorReport(
        message=message,
        hint=_with_flag_names(hint) if hint else None,
        type=type(error).__name__,
        exit_code=getattr(error, "exit_code", FAILED),
        status=error.status,
        category="user" if error.is_user_error else "server",
    )


def _detail(error: TinkexError) -> str:
    prefixes = (f"Error code: {error.status} - ", "Connection error: ", "Request timed out: ")
    text = error.message
    for prefix in prefixes:
        text = text.removeprefix(prefix)
    return text if text.endswith("...") else text.removesuffix(".")


def _advice(error: TinkexError, advice: str) -> str:
    """Return the hint for an error, and whether a retry may help."""
    if isinstance(error, sdk.AuthenticationError):
        source = error.hint or "No key was sent."
        if "--api-key" in _with_flag_names(source):
            return f"{source} Or store one with `tinkex auth login`."
        return f"{source} Pass another with --api-key, or run `tinkex auth login`."
    if error.is_user_error:
        return advice or _FIX_HINT
    # The SDK decides whether a retry is useful, not the status code.
    again = _RETRY_HINT if error.retryable or isinstance(error, sdk.APIError) else ""
    return f"{advice or error.hint or ''} {again}".strip()


def _with_flag_names(text: str) -> str:
    for setting, flag in _FLAG_NAMES:
        text = text.replace(setting, flag)
    return text


def print_error(error: BaseException, context: Context) -> ErrorReport:
    """Print an error to stderr in the context's format."""
    failure = describe_error(error)
    if context.verbose and not isinstance(error, click.ClickException):
        import traceback

        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    if context.is_json:
        import json

        click.echo(json.dumps(failure.to_dict(), indent=2), err=True)
    else:
        # Server messages must not contain terminal control characters.
        lines = failure.to_text().split("\n")
        text = "\n".join(escape_line(line) for line in lines)
        click.echo(wrap_text(text, context.stderr), err=True)
    return failure


def _disk_full_error(error: BaseException) -> ConfigError:
    path = error.filename if isinstance(error, OSError) else None
    return ConfigError(
        f"{path or 'The disk'} cannot be written: {DISK_FULL_MESSAGE}",
        hint="Free some space, then run the same command again.",
    )


def unusable_file_error(error: OSError) -> ConfigError:
    """Describe a file or directory that cannot be opened."""
    hint = "Make it readable and writable for this user, or choose another."
    if isinstance(error, FileNotFoundError):
        hint = "Check the spelling, or choose another."
    if isinstance(error, IsADirectoryError):
        hint = "Give a file, not a directory."
    return ConfigError(f"{error.filename} cannot be used: {error.strerror}", hint=hint)


def missing_extra_error(error: ModuleNotFoundError, extra: str) -> ConfigError:
    """Describe a missing library and the command that installs its extra."""
    from tinkex.installation import install_command

    return ConfigError(
        f"this command needs {error.name}, which is not installed",
        hint=f"Run: {install_command(extra)}",
    )


def check_server_libraries(*extras: str) -> None:
    """Raise ConfigError if libraries for a local server are missing."""
    from tinkex.installation import install_command, missing_libraries

    if missing := missing_libraries(*extras):
        raise ConfigError(
            f"a server on this machine needs {', '.join(missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed",
            hint=f"Run: {install_command('server', 'torch')}",
        )
