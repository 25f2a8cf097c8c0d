"""`tinkex checkpoint copy`, `publish`, `unpublish` and `set-ttl`."""

from __future__ import annotations

import click

from tinkex.cli.client import rest_client
from tinkex.cli.commands.time_params import Lifetime
from tinkex.cli.context import Context, pass_context
from tinkex.cli.format import format_duration
from tinkex.cli.id_arguments import CHECKPOINT, expand_path
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput, announce, show
from tinkex.cli.prompts import confirm, exit_cancelled, yes_option
from tinkex.errors import ConflictError
from tinkex.ids import parse_tinker_path


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@click.option("--project-id", metavar="ID", help="Project of the copy.")
@click.option(
    "--ttl", type=Lifetime(), metavar="TIME", help="TTL of the copy: 7d, 12h, or seconds."
)
@click.option(
    "--access-token", metavar="TOKEN", help="Credential for PATH if another account owns it."
)
@pass_context
def copy(
    context: Context,
    path: str,
    project_id: str | None,
    ttl: int | None,
    access_token: str | None,
) -> None:
    """Copy a checkpoint, optionally to another project.

    PATH is a checkpoint path such as tinker://RUN_ID/weights/0001: your own, a public one, or one
    that the access token gives access to.
    """
    path = expand_path(context, path)
    with rest_client(context, project_id=project_id) as client:
        # Without --project-id, the project may come from Config.
        project = client.holder.config.project_id
        copied = client.copy_weights(
            path, project, ttl_seconds=ttl, weights_access_token=access_token
        ).result()
    rows = [
        ("Tinker Path", copied),
        ("Copied From", path),
        *([("Project", project)] if project else []),
        ("Expires", "Never" if ttl is None else f"in {format_duration(ttl)}"),
    ]
    data = {
        "tinker_path": copied,
        "source_path": path,
        "project_id": project,
        "ttl_seconds": ttl,
    }
    show(context, PropertiesOutput(data, rows, "Checkpoint copied"))


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@pass_context
def publish(context: Context, path: str) -> None:
    """Make a checkpoint public.

    PATH is a checkpoint path such as tinker://RUN_ID/weights/0001 of one of your runs.
    """
    _set_public(context, expand_path(context, path), True)


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@yes_option()
@pass_context
def unpublish(context: Context, path: str, yes: bool) -> None:
    """Make a published checkpoint private again.

    PATH is a checkpoint path such as tinker://RUN_ID/weights/0001. Asks for confirmation if stdin
    is a terminal.
    """
    path = expand_path(context, path)
    parse_tinker_path(path)
    # Reversible, so scripts do not need --yes.
    should_ask = context.is_stdin_terminal and not yes
    if should_ask and not confirm(f"Make {path} private? Others can no longer use it."):
        exit_cancelled(context, {"tinker_path": path, "changed": False})
    _set_public(context, path, False)


def _set_public(context: Context, path: str, is_public: bool) -> None:
    from tinkex.cli.commands.checkpoint.list import find_checkpoint

    is_changed = True
    with rest_client(context) as client:
        change = (
            client.publish_checkpoint_from_tinker_path
            if is_public
            else client.unpublish_checkpoint_from_tinker_path
        )
        try:
            change(path).result()
        except ConflictError:
            if find_checkpoint(client, path).public is not is_public:
                raise
            is_changed = False
    announce(
        context,
        f"{path} is {'public' if is_public else 'private'} {'now' if is_changed else 'already'}.",
        {"tinker_path": path, "public": is_public, "changed": is_changed},
    )


@click.command("set-ttl", cls=Command)
@click.argument("path", type=CHECKPOINT)
@click.option(
    "--ttl", type=Lifetime(), metavar="TIME", help="Time until it is deleted: 7d, 12h, or seconds."
)
@click.option("--remove", is_flag=True, help="Remove the expiry.")
@pass_context
def set_ttl(context: Context, path: str, ttl: int | None, remove: bool) -> None:
    """Set or remove the expiry of a checkpoint.

    PATH is a checkpoint path such as tinker://RUN_ID/weights/0001 of one of your runs.
    """
    if (ttl is None) is not remove:
        raise click.UsageError("Give either --ttl TIME or --remove.")
    path = expand_path(context, path)
    with rest_client(context) as client:
        client.set_checkpoint_ttl_from_tinker_path(path, ttl).result()
    sentence = "does not expire" if ttl is None else f"expires in {format_duration(ttl)}"
    announce(context, f"{path} {sentence}.", {"tinker_path": path, "ttl_seconds": ttl})
