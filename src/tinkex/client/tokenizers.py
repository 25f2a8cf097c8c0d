"""Download tokenizers from the server and cache them on disk by digest.

Only tinkex servers have this endpoint; for others, tokenizers come from the Hugging Face Hub.
"""

from __future__ import annotations

from pathlib import Path

from tinkex.client.holder import Holder
from tinkex.errors import APIStatusError, CheckpointError, InvalidInput
from tinkex.home import Home
from tinkex.logs import get_logger
from tinkex.settings import read_environment
from tinkex.text import Tokenizer, load_tokenizer, resolve_tokenizer_id
from tinkex.tokenizer_files import check_tokenizer_files, store_tokenizer_files
from tinkex.wire.endpoints import GET_TOKENIZER

#: Statuses of servers that do not have the endpoint.
_UNSUPPORTED_STATUSES = frozenset({404, 405, 501})
logger = get_logger(__name__)


def load_model_tokenizer(
    holder: Holder, base_model: str, tokenizer_id: str | None, *, is_minimal: bool = False
) -> Tokenizer:
    """Load a base model's tokenizer: by the configured loader, else from the server or the Hub."""
    resolved_id = resolve_tokenizer_id(base_model, tokenizer_id)
    loader = holder.config.tokenizer_loader
    if loader is not None:
        return load_tokenizer(resolved_id, loader=loader)
    folder = holder.run(fetch_tokenizer(holder, base_model, Home(read_environment().home)))
    return load_tokenizer(resolved_id if folder is None else str(folder), is_minimal=is_minimal)


async def fetch_tokenizer(holder: Holder, base_model: str, home: Home) -> Path | None:
    """Return a directory with the server's tokenizer of a base model; None if it has none."""
    await holder.ready()
    call = holder.transport.call
    try:
        info = await call(GET_TOKENIZER, query={"base_model": base_model})
        folder = home.tokenizers / _checked_digest(info.digest)
        if folder.is_dir():
            folder.touch()
            return folder
        query = {"base_model": base_model, "digest": info.digest}
        tokenizer = await call(GET_TOKENIZER, query=query)
    except APIStatusError as error:
        if error.status_code in _UNSUPPORTED_STATUSES:
            return None
        raise
    check_tokenizer_files(tokenizer.files, info.digest)
    try:
        store_tokenizer_files(folder, tokenizer.files)
    except (OSError, CheckpointError) as error:
        logger.warning("Cannot store the tokenizer of %s in %s: %s", base_model, folder, error)
        return None
    return folder


def _checked_digest(digest: str) -> str:
    """Return a digest that is safe as a directory name."""
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise InvalidInput(f"the server sent an invalid tokenizer digest: {digest!r:.80}")
    return digest
