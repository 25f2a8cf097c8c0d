"""The models that a server offers, for `tinkex model list`."""

from __future__ import annotations

from tinkex.cli.access import find_credential_of
from tinkex.cli.client import config_of, service
from tinkex.cli.context import Context
from tinkex.cli.errors import CliError
from tinkex.cli.output import show
from tinkex.cli.output.models import ModelList


def names_server(context: Context) -> bool:
    """Whether an option, a variable, a profile or a stored key names a server."""
    config = config_of(context)
    return config.local_home is None or find_credential_of(config) is not None


def show_served(context: Context, substring: str | None) -> None:
    """Print the models of the server whose name has this in it, whatever the case."""
    with service(context) as client:
        offered = client.get_server_capabilities().supported_models
        url = client.config.base_url
    wanted = (substring or "").lower()
    models = [model for model in offered if wanted in (model.model_name or "").lower()]
    if substring and not models:
        raise CliError(
            f"no model of {url} has {substring!r} in its name",
            f"`tinkex model list` shows all {len(offered)} of them.",
        )
    show(context, ModelList(models, len(offered)))
