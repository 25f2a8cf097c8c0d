"""Uploads folders to repositories of the Hugging Face Hub."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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

from tinkex.engine.models.hub_download import HUB_NETWORK_ERROR
from tinkex.engine.models.weight_files import error_reason
from tinkex.errors import ConfigError, InvalidInput, TinkexError

_LOGIN_HINT = "Log in with `hf auth login`, or set HF_TOKEN to a token that may write."
#: How much of a repository's README is searched for the origin, which is near its top.
MAX_PAGE_CHARACTERS = 2**20
_ORIGIN = re.compile(r"tinker://[^\s`\"']+")


class HubError(TinkexError):
    """The Hub refused a request, or cannot be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubUpload:
    """A folder to upload, its target repository and options."""

    folder: Path
    repo_id: str
    is_public: bool = False
    """The visibility of the repository, if it is created."""
    revision: str | None = None
    """The branch, created if it does not exist; None is the main branch."""
    commit_message: str | None = None
    create_pr: bool = False
    """Open a pull request, always against the main branch."""
    allow_patterns: Sequence[str] = ()
    ignore_patterns: Sequence[str] = ()

    @property
    def files(self) -> list[str]:
        """The relative paths of the files to upload."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return list(
            filter_repo_objects(
                [path.relative_to(self.folder).as_posix() for path in paths],
                allow_patterns=list(self.allow_patterns) or None,
                ignore_patterns=list(self.ignore_patterns) or None,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubUploadResult:
    """The uploaded commit and its repository."""

    repo_id: str
    """Including the owner's name."""
    revision: str | None
    """The branch, or that of the pull request."""
    is_public: bool
    """The visibility of the repository, which may have existed before."""
    url: str
    files: Sequence[str]
    commit_url: str | None = None
    pr_url: str | None = None


class HubUploader:
    """Uploads to one endpoint with one token; defaults to those of huggingface_hub."""

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        self._api = HfApi(endpoint=endpoint, token=token)
        # The CLI shows its own progress.
        disable_progress_bars()
        logging.getLogger(huggingface_hub.__name__).setLevel(logging.ERROR)

    def check_login(self) -> str:
        """Return the name of the logged-in user; raises ConfigError without a login."""
        with _translate_errors("The Hub"):
            return str(self._api.whoami()["name"])

    def find_origin(self, repo_id: str, revision: str | None = None) -> str | None:
        """Return the tinker:// path in a repository's README; None if it has none."""
        with TemporaryDirectory() as scratch, _translate_errors(repo_id):
            try:
                readme = self._api.hf_hub_download(
                    repo_id, "README.md", revision=revision, local_dir=scratch
                )
            except LocalEntryNotFoundError as error:
                # The file may exist, but the Hub did not answer.
                raise error.__cause__ or error from None
            except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
                return None
            with Path(str(readme)).open(encoding="utf-8", errors="replace") as file:
                match = _ORIGIN.search(file.read(MAX_PAGE_CHARACTERS))
            return match[0] if match else None

    def upload(self, request: HubUpload) -> HubUploadResult:
        """Upload a folder as one commit; creates the repository and branch if needed."""
        api, files = self._api, request.files
        if not files:
            raise InvalidInput("No file of the checkpoint matches the patterns")
        with _translate_errors(request.repo_id):
            repo = api.create_repo(request.repo_id, private=not request.is_public, exist_ok=True)
            repo_id = repo.repo_id
            if request.revision is not None:
                api.create_branch(repo_id, branch=request.revision, exist_ok=True)
            commit = api.upload_folder(
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
            url=str(repo),
            files=files,
            commit_url=commit.commit_url,
            pr_url=commit.pr_url,
        )


@contextmanager
def _translate_errors(label: str) -> Iterator[None]:
    """Translate errors of huggingface_hub to errors of tinkex."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            "You are not logged in to the Hugging Face Hub", hint=_LOGIN_HINT
        ) from error
    except HFValidationError as error:
        raise InvalidInput(
            f"{label!r} is not a valid repository name: {error_reason(error)}",
            hint="A name looks like USER/my-adapter.",
        ) from error
    except OfflineModeIsEnabled as error:
        raise HubError("HF_HUB_OFFLINE forbids access to the Hub") from error
    except HfHubHTTPError as error:
        raise _http_error(label, error) from error
    except ValueError as error:
        # The library's own argument checks.
        raise InvalidInput(error_reason(error)) from error
    except (HUB_NETWORK_ERROR, OSError) as error:
        raise HubError(
            f"The Hub cannot be reached: {error_reason(error)}",
            hint="Try again when you are online.",
        ) from error


def _http_error(label: str, error: HfHubHTTPError) -> TinkexError:
    status = getattr(error.response, "status_code", None)
    if status == 401:
        return ConfigError("The Hugging Face Hub rejected your token", hint=_LOGIN_HINT)
    if status == 403:
        return ConfigError(f"Your token may not write to {label}", hint=_LOGIN_HINT)
    text = error.server_message or error_reason(error)
    refusal = HubError(f"The Hub refused {label} with status {status}: {text}")
    refusal.status = status
    return refusal
