"""Folders on their way to the Hugging Face hub: into a repository, on a branch if one is named."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import disable_progress_bars

from tinkex.errors import ConfigError, InvalidInput, TinkexError

_LOGIN_HINT = "Log in with `hf auth login`, or set HF_TOKEN to a token that may write."
#: How much of a repository's page is searched for its origin, which stands at the top.
MAX_PAGE_CHARACTERS = 2**20
_ORIGIN = re.compile(r"tinker://[^\s`\"']+")
#: What the hub's library raises when no answer comes; its name depends on the version.
_NETWORK: type[Exception] = HfHubHTTPError.__mro__[1]
assert issubclass(_NETWORK, Exception)


class HubError(TinkexError):
    """The hub said no, or nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubUpload:
    """What goes where, and how."""

    folder: Path
    repo_id: str
    is_public: bool = False
    """What a repository becomes that does not exist yet."""
    revision: str | None = None
    """The branch, made if there is none; None is the main one."""
    commit_message: str | None = None
    create_pr: bool = False
    """Open a pull request, which is always to the main branch."""
    allow_patterns: Sequence[str] = ()
    ignore_patterns: Sequence[str] = ()

    @property
    def files(self) -> list[str]:
        """The files that go there, by their paths."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return list(
            filter_repo_objects(
                [path.relative_to(self.folder).as_posix() for path in found],
                allow_patterns=list(self.allow_patterns) or None,
                ignore_patterns=list(self.ignore_patterns) or None,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubUploadResult:
    """What is on the hub now."""

    repo_id: str
    """With its owner's name."""
    revision: str | None
    """The branch; that of the pull request if there is one."""
    is_public: bool
    """As the repository is, which may have existed before."""
    url: str
    files: Sequence[str]
    commit_url: str | None = None
    pr_url: str | None = None


class HubUploader:
    """A hub, and who speaks to it; the defaults are those of the library."""

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        self._api = HfApi(endpoint=endpoint, token=token)
        # The command shows its own progress.
        disable_progress_bars()
        logging.getLogger(huggingface_hub.__name__).setLevel(logging.ERROR)

    def check_login(self) -> str:
        """The name of whoever is logged in; a ConfigError if nobody is."""
        with _translate_errors("The hub"):
            return str(self._api.whoami()["name"])

    def find_origin(self, repo_id: str, revision: str | None = None) -> str | None:
        """The tinker path that a repository's page names; None if there is no such page."""
        with TemporaryDirectory() as scratch, _translate_errors(repo_id):
            try:
                page = self._api.hf_hub_download(
                    repo_id, "README.md", revision=revision, local_dir=scratch
                )
            except LocalEntryNotFoundError as error:
                # Not that there is none: the hub did not answer.
                raise error.__cause__ or error from None
            except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
                return None
            with Path(str(page)).open(encoding="utf-8", errors="replace") as file:
                found = _ORIGIN.search(file.read(MAX_PAGE_CHARACTERS))
            return found[0] if found else None

    def upload(self, request: HubUpload) -> HubUploadResult:
        """Upload a folder as one commit; repository and branch are made if there are none."""
        api, files = self._api, request.files
        if not files:
            raise InvalidInput("No file of the checkpoint fits the patterns")
        with _translate_errors(request.repo_id):
            made = api.create_repo(request.repo_id, private=not request.is_public, exist_ok=True)
            repo_id = made.repo_id
            if request.revision is not None:
                api.create_branch(repo_id, branch=request.revision, exist_ok=True)
            commit: Any = api.upload_folder(
                repo_id=repo_id,
                folder_path=request.folder,
                revision=request.revision,
                commit_message=request.commit_message,
                create_pr=request.create_pr,
                allow_patterns=list(request.allow_patterns) or None,
                ignore_patterns=list(request.ignore_patterns) or None,
            )
            is_private = api.model_info(repo_id).private
        return HubUploadResult(
            repo_id=repo_id,
            revision=commit.pr_revision or request.revision,
            is_public=not is_private,
            url=str(made),
            files=files,
            commit_url=commit.commit_url,
            pr_url=commit.pr_url,
        )


@contextmanager
def _translate_errors(label: str) -> Iterator[None]:
    """Turn what the hub's library raises into sentences."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            "You are not logged in to the Hugging Face hub", hint=_LOGIN_HINT
        ) from error
    except HFValidationError as error:
        raise InvalidInput(
            f"{label!r} is no name for a repository: {_reason(error)}",
            hint="A name looks like USER/my-adapter.",
        ) from error
    except OfflineModeIsEnabled as error:
        raise HubError("HF_HUB_OFFLINE forbids to speak to the hub") from error
    except HfHubHTTPError as error:
        raise _http_error(label, error) from error
    except ValueError as error:
        # The library's own checks of what it was asked for.
        raise InvalidInput(_reason(error)) from error
    except (_NETWORK, OSError) as error:
        raise HubError(
            f"The hub cannot be reached: {_reason(error)}", hint="Try again when you are online."
        ) from error


def _http_error(label: str, error: HfHubHTTPError) -> TinkexError:
    status = getattr(error.response, "status_code", None)
    if status == 401:
        return ConfigError("The Hugging Face hub does not take your token", hint=_LOGIN_HINT)
    if status == 403:
        return ConfigError(f"Your token may not write to {label}", hint=_LOGIN_HINT)
    text = error.server_message or _reason(error)
    refusal = HubError(f"The hub refused {label} with status {status}: {text}")
    refusal.status = status
    return refusal


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
