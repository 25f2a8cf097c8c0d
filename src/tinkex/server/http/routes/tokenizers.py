"""Tokenizer endpoint: send the tokenizer files of base models to clients."""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path

from tinkex.checkpoint.storage import FileStorage
from tinkex.engine.protocol import BaseModel
from tinkex.errors import CheckpointError, InvalidInput, NotFoundError, UnprocessableEntityError
from tinkex.jobs.tokenizer_blobs import read_published_tokenizer
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
    build = _build_reply
    if base.tokenizer_digest is not None and services.storage.has_blobs:
        build = partial(_build_reply_from_blobs, services.storage)
    reply = await run_in_thread(build, base, context.query.get("digest"))
    etag = f'"{reply.digest}"'
    if context.headers.get("if-none-match", "").removeprefix("W/") == etag:
        return RawResponse(status=304, body=b"", headers={"etag": etag})
    return RawResponse(body=encode_json(reply), headers={"etag": etag})


def _build_reply_from_blobs(
    storage: FileStorage, base: BaseModel, wanted_digest: str | None
) -> TokenizerReply:
    digest = base.tokenizer_digest
    assert digest is not None
    _check_digest(base.name, digest, wanted_digest)
    try:
        files = {} if wanted_digest is None else read_published_tokenizer(storage, digest)
    except (CheckpointError, InvalidInput) as error:
        reason = f"cannot read the tokenizer of {base.name!r}: {error.message}"
        raise NotFoundError(reason) from None
    return _make_reply(base, digest, files)


def _make_reply(base: BaseModel, digest: str, files: dict[str, bytes]) -> TokenizerReply:
    tokenizer_id = base.tokenizer_id or base.name
    return TokenizerReply(
        base_model=base.name, tokenizer_id=tokenizer_id, digest=digest, files=files
    )


def _check_digest(name: str, digest: str, wanted_digest: str | None) -> None:
    if wanted_digest not in {None, digest}:
        raise NotFoundError(
            f"the tokenizer of {name!r} has the digest {digest}, not {wanted_digest!r}"
        )


def _build_reply(base: BaseModel, wanted_digest: str | None) -> TokenizerReply:
    name, folder = base.name, Path(base.tokenizer_folder or "")
    try:
        if not find_tokenizer_files(folder):
            raise InvalidInput("its files are missing")
        digest = _cached_digest(folder, _file_stamps(folder))
        files = {} if wanted_digest is None else read_tokenizer_files(folder)
    except (OSError, InvalidInput) as error:
        raise NotFoundError(
            f"cannot read the tokenizer of {name!r}: {_failure_reason(error)}"
        ) from None
    if wanted_digest is not None:
        digest = digest_files(files)
    _check_digest(name, digest, wanted_digest)
    return _make_reply(base, digest, files)


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
