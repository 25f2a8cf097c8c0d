"""Missing optional packages, and the command that installs them into this environment."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

from tinkex.settings import find_dist_info

#: The modules of each extra and the packages that contain them.
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
        "ray": {"ray": "ray[client]"},
        "structured": {"llguidance": "llguidance"},
    }
)


def missing_libraries(*extras: str) -> list[str]:
    """Return the packages of these extras that are not installed."""
    return [
        package
        for extra in extras
        for module, package in EXTRA_PACKAGES[extra].items()
        if not _is_importable(module)
    ]


def install_command(*extras: str) -> str:
    """Return the command that adds extras, for pip, pipx or uv."""
    prefix, suffix = Path(sys.prefix), f"[{','.join(extras)}]" if extras else ""
    if (prefix / "pipx_metadata.json").is_file():
        # pip keeps the installed copy, whatever its source, and adds missing packages.
        return f"pipx runpip {prefix.name} install {_shell_quote(f'tinkex{suffix}')}"
    source = _direct_url()
    checkout = _editable_directory(source)
    is_uv_tool = (prefix / "uv-receipt.toml").is_file()
    install = "uv tool install --force" if is_uv_tool else _pip_install()
    if checkout is not None:
        return f"{install} -e {_shell_quote(f'{checkout}{suffix}')}"
    # uv recreates the environment of a tool and needs the source of tinkex.
    origin = f" @ {source['url']}" if is_uv_tool and "url" in source else ""
    return f"{install} {_shell_quote(f'tinkex{suffix}{origin}')}"


def _pip_install() -> str:
    """Return the pip command of this Python; a bare `pip` may belong to another one."""
    python = Path(sys.executable)
    if not _is_importable("pip"):
        return f"uv pip install --python {shlex.quote(str(python))}"
    pip = shutil.which("pip")
    is_same_python = pip is not None and Path(pip).parent == python.parent
    return "pip install" if is_same_python else f"{shlex.quote(str(python))} -m pip install"


def _direct_url() -> Mapping[str, object]:
    """Return the source of this installation; empty if it is a package index."""
    records = find_dist_info()
    try:
        source = json.loads((records / "direct_url.json").read_bytes()) if records else {}
    except (OSError, ValueError):
        return {}
    return source if isinstance(source, dict) else {}


def _editable_directory(source: Mapping[str, object]) -> Path | None:
    """Return the source directory of an editable installation."""
    details, url = source.get("dir_info"), source.get("url")
    if not isinstance(details, dict) or not details.get("editable") or not isinstance(url, str):
        return None
    return Path(unquote(urlsplit(url).path))


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        # sys.modules has None for it, which marks a module as not importable.
        return False


def _shell_quote(text: str) -> str:
    return f"'{text}'" if "'" not in text else shlex.quote(text)
