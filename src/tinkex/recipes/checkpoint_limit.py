"""Deletes the oldest training checkpoints of a run, like `save_total_limit` of transformers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tinkex.client.service import ServiceClient
from tinkex.errors import NotFoundError, TinkexError
from tinkex.ids import parse_tinker_path
from tinkex.recipes.method import NoticeFn


def choose_surplus(paths: Sequence[str], num_kept: int | None) -> Sequence[str]:
    """Return the paths to delete, given oldest first; None keeps all."""
    return paths[: max(0, len(paths) - num_kept)] if num_kept is not None else ()


def delete_checkpoints(
    service: ServiceClient, paths: Collection[str], tell: NoticeFn
) -> Collection[str]:
    """Delete checkpoints and return those that need no further attempt.

    Checkpoints that are published, have a TTL or an alias were chosen by the user: they stay, and
    no longer count. A failure does not stop the training; the next save repeats the attempt.
    """
    done = []
    for path in paths:
        try:
            if _is_deletable(service, path):
                service.rest_client().delete_checkpoint_from_tinker_path(path).result()
        except NotFoundError:
            pass  # deleted by the user
        except TinkexError as error:
            tell(f"The old checkpoint {path} could not be deleted: {error}")
            continue
        done.append(path)
    return done


def _is_deletable(service: ServiceClient, path: str) -> bool:
    run_id = parse_tinker_path(path).run_id
    listed = service.rest_client().list_checkpoints(run_id).result().checkpoints
    found = next((each for each in listed if each.tinker_path == path), None)
    if found is None or found.public or found.expires_at is not None:
        return False
    return path not in _list_aliased(service)


def _list_aliased(service: ServiceClient) -> Collection[str]:
    try:
        return service.rest_client().list_aliases().result().values()
    except NotFoundError:
        return ()  # only tinkex servers have aliases
