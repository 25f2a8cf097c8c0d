"""Tokenizer endpoint: send the tokenizer files of base models to clients."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tinkex.errors import InvalidInput, NotFoundError, UnprocessableEntityError
from tinkex.server.http.model_specs import find_model, list_served_models
from tinkex.server.http.request_context import (
    Handler,
    RawResponse,
    RequestContext,
    Services,
    run_in_thread,
)
from tinkex.server.http.store_access import read
from tinkex.tokenizer_files import (
    CONFIG_FILE_NAME,
    digest_files,
    find_tokenizer_files,
    read_tokenizer_files,
)
from tinkex.wire.codec import encode_json
from tinkex.wire.messages import TokenizerReply


async def get_tokenizer(services: Services, context: RequestContext[object]) -> RawResponse:
    """Return the digest of a tokenizer, and its files if the request contains that digest."""
    name = context.query.get("base_model")
    if name is None:
        raise UnprocessableEntityError("the query parameter base_model is missing")
    base = find_model(await read(services, list_served_models), name)
    if base is None or base.tokenizer_folder is None:
        raise NotFoundError(f"base model {name!r:.200} does not exist or has no tokenizer")
    folder, digest = Path(base.tokenizer_folder), context.query.get("digest")
    reply = await run_in_thread(_build_reply, name, base.tokenizer_id or name, folder, digest)
    etag = f'"{reply.digest}"'
    if context.headers.get("if-none-match", "").removeprefix("W/") == etag:
        return RawResponse(status=304, body=b"", headers={"etag": etag})
    return RawResponse(body=encode_json(reply), headers={"etag": etag})


def _build_reply(
    name: str, tokenizer_id: str, folder: Path, wanted_digest: str | None
) -> TokenizerReply:
    try:
        if not find_tokenizer_files(folder):
            raise InvalidInput("its files are missing")
        digest = _cached_digest(folder, _file_stamps(folder))
        files = {} if wanted_digest is None else read_tokenizer_files(folder)
    except (OSError, InvalidInput) as error:
        raise NotFoundError(
            f"cannot read the tokenizer of {name!r}: {_failure_reason(error)}"
        ) from None
    if wanted_digest is not None and wanted_digest != (digest := digest_files(files)):
        raise NotFoundError(
            f"the tokenizer of {name!r} has the digest {digest}, not {wanted_digest!r}"
        )
    return TokenizerReply(base_model=name, tokenizer_id=tokenizer_id, digest=digest, files=files)


def _file_stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Sizes and modification times of the tokenizer's files, to detect changes."""
    paths = {**find_tokenizer_files(folder), CONFIG_FILE_NAME: folder / CONFIG_FILE_NAME}
    stats = {name: path.stat() for name, path in paths.items() if path.is_file()}
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())


@lru_cache(maxsize=64)
def _cached_digest(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    """The digest of a tokenizer; `stamps` is part of the cache key."""
    return digest_files(read_tokenizer_files(folder))


def _failure_reason(error: OSError | InvalidInput) -> str:
    # Without the path: clients must not see where the server stores its models.
    return error.message if isinstance(error, InvalidInput) else error.strerror or "I/O error"


ROUTES: dict[str, Handler] = {"get_tokenizer": get_tokenizer}
