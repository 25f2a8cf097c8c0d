"""Compiles chat templates as transformers does, in a sandbox: they may come from any server."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tinkex.clock import now


def compile_template(source: str) -> Template:
    """Compile a chat template in a sandbox, with the functions that transformers offers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _format_now,
        "dict": lambda *args, **values: dict(*args, **values),
        "namespace": _TemplateNamespace,
    }
    return environment.from_string(source)


def _format_now(layout: str) -> str:
    return datetime.fromtimestamp(now()).strftime(layout)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The filter of Jinja escapes characters of HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _TemplateNamespace(Namespace):
    """Variables of a template; names of Python's internals are refused."""

    def __init__(*args: Any, **values: Any) -> None:
        # `self` may be the name of a variable.
        self, *given = args
        variables = dict(*given, **values)
        for name in variables:
            _check_name(name)
        Namespace.__init__(self, variables)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a chat template cannot set {name!r}")
