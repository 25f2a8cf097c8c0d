"""The tokenizers of base models, for clients on other machines."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from tinkex.errors import InvalidInput, NotFoundError, UnprocessableEntityError
from tinkex.server.base_models import find_model, served_models
from tinkex.server.call import Answer, Call, Handler, Services, in_thread
from tinkex.server.transactions import read
from tinkex.tokenizer_files import (
    CONFIG_FILE_NAME,
    digest_files,
    find_tokenizer_files,
    read_tokenizer_files,
)
from tinkex.wire.codec import encode_json
from tinkex.wire.messages import TokenizerReply


async def get_tokenizer(services: Services, call: Call[Any]) -> Answer:
    """Give the digest of a tokenizer, and for a request with that digest its files."""
    name = call.query.get("base_model")
    if name is None:
        raise UnprocessableEntityError("name the model: base_model=NAME")
    base = find_model(await read(services, served_models), name)
    if base is None or base.tokenizer_folder is None:
        raise NotFoundError(f"there is no tokenizer of a base model {name!r:.200}")
    reply = await in_thread(
        _describe, name, base.tokenizer_id or name, Path(base.tokenizer_folder), call.query
    )
    etag = f'"{reply.digest}"'
    if call.headers.get("if-none-match", "").removeprefix("W/") == etag:
        return Answer(status=304, body=b"", headers={"etag": etag})
    return Answer(body=encode_json(reply), headers={"etag": etag})


def _describe(name: str, tokenizer_id: str, folder: Path, query: Any) -> TokenizerReply:
    try:
        if not find_tokenizer_files(folder):
            raise InvalidInput("its files are gone")
        digest = _digest(folder, _state(folder))
        wanted = query.get("digest")
        files = {} if wanted is None else read_tokenizer_files(folder)
    except (OSError, InvalidInput) as error:
        raise NotFoundError(f"the tokenizer of {name!r} cannot be sent: {_reason(error)}") from None
    if wanted is not None and wanted != (digest := digest_files(files)):
        raise NotFoundError(f"the tokenizer of {name!r} has the digest {digest}, not {wanted!r}")
    return TokenizerReply(base_model=name, tokenizer_id=tokenizer_id, digest=digest, files=files)


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when a file does."""
    paths = {**find_tokenizer_files(folder), CONFIG_FILE_NAME: folder / CONFIG_FILE_NAME}
    stats = {name: path.stat() for name, path in paths.items() if path.is_file()}
    return tuple((name, found.st_size, found.st_mtime_ns) for name, found in stats.items())


@lru_cache(maxsize=64)
def _digest(folder: Path, state: tuple[tuple[str, int, int], ...]) -> str:
    """A tokenizer's digest; it is computed again when a file changes."""
    return digest_files(read_tokenizer_files(folder))


def _reason(error: OSError | InvalidInput) -> str:
    # Not the path: where the server keeps its models is not for clients.
    return error.message if isinstance(error, InvalidInput) else error.strerror or "it is not there"


ROUTES: dict[str, Handler] = {"get_tokenizer": get_tokenizer}
