"""API clients of commands, the server and key that they use, and requests through them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from tinkex.cli.context import Context

if TYPE_CHECKING:
    from typing import TypedDict, Unpack

    from tinkex.client.admin import AdminClient
    from tinkex.client.config import Config
    from tinkex.client.credentials import Credential
    from tinkex.client.rest import RestClient
    from tinkex.client.service import ServiceClient
    from tinkex.settings import Environment
    from tinkex.wire.endpoints import Endpoint
    from tinkex.wire.messages import ApiKeyReply

    class ClientSettings(TypedDict, total=False):
        """Settings of Config that commands choose; None selects Config's default."""

        connect_timeout_seconds: float | None
        first_contact_seconds: float | None
        first_answer_seconds: float | None
        timeout_seconds: float | None
        poll_timeout_seconds: float | None
        max_retries: int
        outage_seconds: float
        http_pool: str | None
        key_source: str | None
        project_id: str | None
        environment: Environment


T = TypeVar("T")
RequestT = TypeVar("RequestT")

#: Interactive use: an unreachable or silent server must be reported within five seconds.
INTERACTIVE_TIMEOUTS: ClientSettings = {
    "connect_timeout_seconds": 3.0,
    "first_contact_seconds": 2.0,
    "first_answer_seconds": 4.5,
}
#: The timeouts of scripts.
DEFAULT_TIMEOUTS: ClientSettings = {
    "connect_timeout_seconds": None,
    "first_contact_seconds": None,
    "first_answer_seconds": None,
}
#: The user can repeat a single request by hand.
_FEW_RETRIES: ClientSettings = {"max_retries": 3, "outage_seconds": 4.0}


def build_config(context: Context, **settings: Unpack[ClientSettings]) -> Config:
    """Build the client config from `settings`, the global options and Config's own sources."""
    with _explain_import_error():
        from tinkex.client.config import Config

    given: ClientSettings = {
        "key_source": "--api-key" if context.api_key else None,
        "timeout_seconds": context.timeout_seconds,
    }
    if context.timeout_seconds is not None:
        given["first_answer_seconds"] = context.timeout_seconds
    chosen: ClientSettings = {**INTERACTIVE_TIMEOUTS, **given, **settings}
    return Config.new(
        api_key=context.api_key, base_url=context.base_url, profile=context.profile, **chosen
    )


@contextlib.contextmanager
def service_client(
    context: Context, *, needs_worker: bool = True, **settings: Unpack[ClientSettings]
) -> Iterator[ServiceClient]:
    """Open a service client; on exit, close it and report to the server how the session ended.

    With `needs_worker=False`, a local server started for this client starts its worker on demand.
    """
    config = build_config(context, **settings)
    make = context.make_service or partial(_create_service, needs_worker=needs_worker)
    with make(config) as client:
        yield client


@contextlib.contextmanager
def rest_client(
    context: Context, *, needs_worker: bool = False, **settings: Unpack[ClientSettings]
) -> Iterator[RestClient]:
    """Open a client that lists and manages server resources without opening a session."""
    chosen: ClientSettings = {**_FEW_RETRIES, **settings}
    with service_client(context, needs_worker=needs_worker, **chosen) as client:
        yield client.rest_client()


@contextlib.contextmanager
def admin_client(context: Context) -> Iterator[AdminClient]:
    """Open a client for usage, storage and the audit log."""
    with rest_client(context) as client:
        from tinkex.client.admin import AdminClient

        yield AdminClient(client.holder)


def _create_service(config: Config, *, needs_worker: bool) -> ServiceClient:
    with _explain_import_error():
        from tinkex.client.local_server import with_local_server
        from tinkex.client.service import ServiceClient

    return ServiceClient(config=with_local_server(config, needs_worker=needs_worker))


@contextlib.contextmanager
def _explain_import_error() -> Iterator[None]:
    """Turn a failed import of the client into a CliError with an install command."""
    try:
        yield
    except ImportError as error:
        from tinkex.cli.errors import CliError
        from tinkex.installation import install_command

        raise CliError(
            f"the client cannot be loaded: {error}", f"Run: {install_command()}"
        ) from error


#: Shorter keys are masked completely.
_MIN_MASKED_CHARS = 16


class ServerAccess(NamedTuple):
    """A server and the credential for it."""

    config: Config
    base_url: str | None
    """None if the local server is used and is not running."""
    key: str | None = None
    """None if no key is configured, or if a credential command prints it."""
    source: str | None = None
    """Human-readable origin of the key; None without a key."""
    home: Path | None = None
    """Home directory of the local server, if that server is used."""

    def __repr__(self) -> str:
        # Keep the key out of tracebacks and logs.
        return f"ServerAccess(base_url={self.base_url!r}, source={self.source!r})"

    @property
    def has_credential(self) -> bool:
        """Whether a key or a credential command is configured."""
        return self.source is not None

    @property
    def masked_key(self) -> str | None:
        """The key with its middle hidden."""
        return mask_key(self.key) if self.key else None


def find_access(context: Context, **settings: Unpack[ClientSettings]) -> ServerAccess:
    """Resolve server and key from options, environment, profiles and stored keys."""
    config = build_config(context, **settings)
    credential = find_config_credential(config)
    if credential is None and config.local_home is not None:
        return _find_local_access(config, config.local_home)
    if credential is None:
        return ServerAccess(config=config, base_url=config.base_url)
    return ServerAccess(
        config=config, base_url=config.base_url, key=credential.value, source=credential.source
    )


def find_config_credential(config: Config) -> Credential | None:
    """Return the credential that a client with this config would send."""
    from tinkex.client.credentials import find_credential

    is_from_variable = config.api_key == config.environment.api_key and not config.key_source
    explicit = None if is_from_variable else config.api_key
    return find_credential(explicit, config.environment, config.key_source)


def has_no_records(context: Context) -> bool:
    """Whether the command would start a local server whose home has no data yet.

    List commands then print an empty list instead of starting the server.
    """
    from tinkex.home import Home
    from tinkex.server_discovery import find_lock_holder
    from tinkex.settings import read_variables

    config = build_config(context)
    if (
        context.make_service
        or config.local_home is None
        or find_config_credential(config) is not None
    ):
        return False
    home = Home(config.local_home)
    # A configured server may store its data elsewhere.
    has_settings = home.config_file.exists() or bool(read_variables(["TINKEX_STORE"]))
    return not home.store_file.exists() and not has_settings and find_lock_holder(home) is None


def _find_local_access(config: Config, root: Path) -> ServerAccess:
    from tinkex.home import Home
    from tinkex.server_discovery import find_server

    home = Home(root)
    server = find_server(home)
    try:
        key = home.key_file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        key = ""
    if server is None or not key:
        return ServerAccess(config=config, base_url=server.url if server else None, home=root)
    source = str(home.key_file)
    return ServerAccess(config=config, base_url=server.url, key=key, source=source, home=root)


def mask_key(key: str) -> str:
    """Hide all of a key except its ends."""
    return f"{key[:4]}...{key[-4:]}" if len(key) >= _MIN_MASKED_CHARS else "***"


# --- requests ------------------------------------------------------------------------------------


def call_endpoint(
    client: RestClient,
    endpoint: Endpoint[RequestT, T],
    message: object = None,
    ids: Mapping[str, str] | None = None,
) -> T:
    """Call an endpoint and wait for the response."""
    holder = client.holder

    async def call() -> T:
        await holder.ready()
        return await holder.transport.call(endpoint, message, ids=ids)

    return holder.start(call()).result()


def fetch_api_key_info(client: RestClient) -> ApiKeyReply | None:
    """Return the owner of the API key; None if the server does not report it."""
    from tinkex.errors import APIStatusError
    from tinkex.wire.endpoints import API_KEY

    try:
        return call_endpoint(client, API_KEY)
    except APIStatusError as error:
        if error.status in {404, 405, 501}:
            return None
        raise


class Listing(NamedTuple, Generic[T]):
    """The first items of a list."""

    items: Sequence[T]
    total: int
    """Total number of items on the server."""

    @property
    def num_hidden(self) -> int:
        """Number of items not in this listing."""
        return max(0, self.total - len(self.items))


def fetch_pages(
    fetch_page: Callable[[int, int], Listing[T]],
    limit: int,
    page_size: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Listing[T]:
    """Return the first `limit` items (0: all); `fetch_page` takes a page's limit and offset."""
    items: list[T] = []
    total, wanted = 0, limit or page_size
    while len(items) < wanted:
        page = fetch_page(min(page_size, wanted - len(items)), len(items))
        if not page.items:
            # The list became shorter in the meantime, or the server's total is wrong.
            return Listing(items, len(items))
        items.extend(page.items)
        total = max(page.total, len(items))
        wanted = min(limit, total) if limit else total
        on_progress(len(items), wanted)
    return Listing(items, total)
