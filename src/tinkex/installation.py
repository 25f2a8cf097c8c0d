"""How this copy of tinkex was installed, and the command that adds what it lacks."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

from tinkex.settings import find_dist_info

#: What each extra brings that commands look for, as modules and as packages.
EXTRA_PACKAGES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "server": {
            "litestar": "litestar",
            "uvicorn": "uvicorn",
            "httptools": "httptools",
            "sqlalchemy": "sqlalchemy",
            "jinja2": "jinja2",
            "prometheus_client": "prometheus-client",
        },
        "torch": {
            "torch": "torch",
            "transformers": "transformers",
            "tokenizers": "tokenizers",
            "safetensors": "safetensors",
            "huggingface_hub": "huggingface-hub",
        },
        "pipeline": {"tensorboard": "tensorboard"},
    }
)


def missing_libraries(*extras: str) -> list[str]:
    """The packages of some extras that are not installed."""
    return [
        package
        for extra in extras
        for module, package in EXTRA_PACKAGES[extra].items()
        if not _is_importable(module)
    ]


def install_command(*extras: str) -> str:
    """The command that adds extras to this copy, whichever program installed it."""
    prefix, suffix = Path(sys.prefix), f"[{','.join(extras)}]" if extras else ""
    if (prefix / "pipx_metadata.json").is_file():
        # pip keeps the copy that is there, wherever it came from, and adds what it lacks.
        return f"pipx runpip {prefix.name} install {_shell_quote(f'tinkex{suffix}')}"
    source = _direct_url()
    checkout = _editable_directory(source)
    is_uv_tool = (prefix / "uv-receipt.toml").is_file()
    install = "uv tool install --force" if is_uv_tool else _pip_install()
    if checkout is not None:
        return f"{install} -e {_shell_quote(f'{checkout}{suffix}')}"
    # uv makes the environment of a tool anew, and must know where to take tinkex from.
    origin = f" @ {source['url']}" if is_uv_tool and "url" in source else ""
    return f"{install} {_shell_quote(f'tinkex{suffix}{origin}')}"


def _pip_install() -> str:
    """A pip that installs for this Python; a bare `pip` may belong to another one."""
    python = Path(sys.executable)
    if not _is_importable("pip"):
        return f"uv pip install --python {shlex.quote(str(python))}"
    found = shutil.which("pip")
    is_ours = found is not None and Path(found).parent == python.parent
    return "pip install" if is_ours else f"{shlex.quote(str(python))} -m pip install"


def _direct_url() -> Mapping[str, Any]:
    """Where the installer took this copy from; empty if it came from a package index."""
    records = find_dist_info()
    try:
        found = json.loads((records / "direct_url.json").read_bytes()) if records else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _editable_directory(source: Mapping[str, Any]) -> Path | None:
    """The directory that an editable copy runs from."""
    details, url = source.get("dir_info"), source.get("url")
    if not isinstance(details, dict) or not details.get("editable") or not isinstance(url, str):
        return None
    return Path(unquote(urlsplit(url).path))


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        # None in the table of modules, which is how Python says that it cannot be imported.
        return False


def _shell_quote(text: str) -> str:
    return f"'{text}'" if "'" not in text else shlex.quote(text)
