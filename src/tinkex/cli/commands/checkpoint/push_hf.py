"""`tinkex checkpoint push-hf`: upload an adapter to the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError, missing_extra_error
from tinkex.cli.id_arguments import CHECKPOINT, expand_path
from tinkex.cli.options import Command
from tinkex.cli.output import show
from tinkex.cli.progress import print_status, spinner
from tinkex.ids import TinkerPath, parse_tinker_path

if TYPE_CHECKING:
    from tinkex.engine.models.hub_upload import HubUpload, HubUploader


class PushOptions(TypedDict):
    """Options of the command."""

    repo_id: str | None
    public: bool
    revision: str | None
    commit_message: str | None
    create_pr: bool
    allow_patterns: tuple[str, ...]
    ignore_patterns: tuple[str, ...]
    no_model_card: bool
    force: bool


_INVALID_CHARS = re.compile(r"[^A-Za-z0-9_.]+")


@click.command("push-hf", cls=Command)
@click.argument("path", type=CHECKPOINT)
@click.option(
    "-r",
    "--repo",
    "repo_id",
    metavar="REPO",
    help="Repository, such as USER/my-adapter.  [default: named after model and run]",
)
@click.option("--public", is_flag=True, help="Make a new repository public.  [default: private]")
@click.option(
    "--revision",
    metavar="BRANCH",
    help="Branch; created if missing.  [default: main; the checkpoint's id without -r]",
)
@click.option("--commit-message", metavar="TEXT", help="Commit message.")
@click.option(
    "--create-pr", is_flag=True, help="Open a pull request to the main branch instead of pushing."
)
@click.option(
    "--allow-pattern",
    "allow_patterns",
    multiple=True,
    metavar="GLOB",
    help="Upload only matching files; may be repeated.",
)
@click.option(
    "--ignore-pattern",
    "ignore_patterns",
    multiple=True,
    metavar="GLOB",
    help="Skip matching files; may be repeated.",
)
@click.option("--no-model-card", is_flag=True, help="Do not write a README.md.")
@click.option("--force", is_flag=True, help="Overwrite another checkpoint.")
@pass_context
def push_hf(context: Context, path: str, **options: Unpack[PushOptions]) -> None:
    """Push a checkpoint to the Hugging Face Hub.

    PATH is a checkpoint path such as tinker://RUN_ID/weights/0001. Uploads a PEFT adapter with a
    model card that names its source. Log in with `hf auth login` first. Needs the extra
    tinkex[torch].
    """
    import tempfile

    from tinkex.cli.commands.checkpoint import download, export
    from tinkex.cli.output.checkpoints import CheckpointPush

    if options["create_pr"] and options["revision"]:
        raise click.UsageError("--create-pr targets the main branch; remove --revision.")
    path = expand_path(context, path)
    address = parse_tinker_path(path)
    uploader = _open_uploader()
    user = uploader.check_login()
    target = _resolve_target(context, address, user, options)
    if not options["force"] and not options["create_pr"]:
        _check_origin(uploader, path, *target)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "adapter"
        download.fetch_checkpoint(context, path, folder, keeps_partial=False)
        export.check_adapter(folder, path)
        if not options["no_model_card"]:
            export.write_model_card(folder, path, target[0])
        with spinner(f"Uploading to {target[0]} ..."):
            pushed = uploader.upload(_build_push(folder, target, options))
    if pushed.is_public != options["public"]:
        state = "public" if pushed.is_public else "private"
        print_status(f"{pushed.repo_id} already existed and stays {state}.")
    show(context, CheckpointPush(path, pushed))


def _open_uploader() -> HubUploader:
    try:
        from tinkex.engine.models.hub_upload import HubUploader
    except ModuleNotFoundError as error:
        raise missing_extra_error(error, "torch") from error
    return HubUploader()


def _resolve_target(
    context: Context, address: TinkerPath, user: str, options: PushOptions
) -> tuple[str, str | None]:
    """Return repository and branch; by default they are named after the checkpoint."""
    from tinkex.cli.client import rest_client

    repo_id, revision = options["repo_id"], options["revision"]
    if repo_id is not None:
        return (repo_id if "/" in repo_id else f"{user}/{repo_id}"), revision
    with rest_client(context) as client:
        base_model = client.get_weights_info_by_tinker_path(str(address)).result().base_model
    name = sanitize_repo_name(f"tinker-{base_model.rpartition('/')[2]}-{address.run_id}")
    if not options["create_pr"]:
        revision = revision or sanitize_repo_name(address.checkpoint_id)
    return f"{user}/{name}", revision


def sanitize_repo_name(name: str) -> str:
    """Replace characters that the hub does not allow in repository names."""
    single = re.sub(r"\.{2,}", "-", _INVALID_CHARS.sub("-", name))
    return re.sub(r"-{2,}", "-", single).strip("-._")[:96].rstrip("-._")


def _check_origin(uploader: HubUploader, path: str, repo_id: str, revision: str | None) -> None:
    origin = uploader.find_origin(repo_id, revision)
    if origin is not None and origin != path:
        raise CliError(
            f"{repo_id} contains another checkpoint, {origin}",
            "Choose a branch with --revision or another --repo; --force overwrites it.",
        )


def _build_push(folder: Path, target: tuple[str, str | None], options: PushOptions) -> HubUpload:
    from tinkex.cli.commands.checkpoint.export import SERVER_FILE_NAMES
    from tinkex.engine.models.hub_upload import HubUpload

    allowed = options["allow_patterns"]
    return HubUpload(
        folder=folder,
        repo_id=target[0],
        revision=target[1],
        is_public=options["public"],
        commit_message=options["commit_message"],
        create_pr=options["create_pr"],
        allow_patterns=allowed,
        # Without --allow-pattern, skip files that only the server needs.
        ignore_patterns=(*options["ignore_patterns"], *(() if allowed else SERVER_FILE_NAMES)),
    )
