"""The tokenizers of base models, for clients on other machines."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

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


async def get_tokenizer(services: Services, context: RequestContext[Any]) -> RawResponse:
    """Give the digest of a tokenizer, and for a request with that digest its files."""
    name = context.query.get("base_model")
    if name is None:
        raise UnprocessableEntityError("name the model: base_model=NAME")
    base = find_model(await read(services, list_served_models), name)
    if base is None or base.tokenizer_folder is None:
        raise NotFoundError(f"there is no tokenizer of a base model {name!r:.200}")
    reply = await run_in_thread(
        _build_reply, name, base.tokenizer_id or name, Path(base.tokenizer_folder), context.query
    )
    etag = f'"{reply.digest}"'
    if context.headers.get("if-none-match", "").removeprefix("W/") == etag:
        return RawResponse(status=304, body=b"", headers={"etag": etag})
    return RawResponse(body=encode_json(reply), headers={"etag": etag})


def _build_reply(name: str, tokenizer_id: str, folder: Path, query: Any) -> TokenizerReply:
    try:
        if not find_tokenizer_files(folder):
            raise InvalidInput("its files are gone")
        digest = _cached_digest(folder, _file_stamps(folder))
        wanted = query.get("digest")
        files = {} if wanted is None else read_tokenizer_files(folder)
    except (OSError, InvalidInput) as error:
        raise NotFoundError(
            f"the tokenizer of {name!r} cannot be sent: {_failure_reason(error)}"
        ) from None
    if wanted is not None and wanted != (digest := digest_files(files)):
        raise NotFoundError(f"the tokenizer of {name!r} has the digest {digest}, not {wanted!r}")
    return TokenizerReply(base_model=name, tokenizer_id=tokenizer_id, digest=digest, files=files)


def _file_stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when a file does."""
    paths = {**find_tokenizer_files(folder), CONFIG_FILE_NAME: folder / CONFIG_FILE_NAME}
    stats = {name: path.stat() for name, path in paths.items() if path.is_file()}
    return tuple((name, found.st_size, found.st_mtime_ns) for name, found in stats.items())


@lru_cache(maxsize=64)
def _cached_digest(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    """A tokenizer's digest; it is computed again when a file changes."""
    return digest_files(read_tokenizer_files(folder))


def _failure_reason(error: OSError | InvalidInput) -> str:
    # Not the path: where the server keeps its models is not for clients.
    return error.message if isinstance(error, InvalidInput) else error.strerror or "it is not there"


ROUTES: dict[str, Handler] = {"get_tokenizer": get_tokenizer}
