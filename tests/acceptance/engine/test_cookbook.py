"""Unmodified cookbook recipes against a real server: the core of `make compat`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.compat.__main__ import COOKBOOK_REQUIREMENTS, IN_PLACE
from tests.compat.cookbook.recipes import RECIPES, is_there
from tests.compat.cookbook.runner import Cookbook
from tests.compat.cookbook.workspace import MODEL, TINY, prepare
from tests.compat.environments import ROOT, CannotInstall, python_of
from tests.compat.results import PASS
from tests.compat.versions import COOKBOOK
from tests.support.real_server import RealServer, start_server

BY_NAME = {each.name: each for each in RECIPES}


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of an environment with the cookbook."""
    try:
        return python_of(f"cookbook-{COOKBOOK}", COOKBOOK_REQUIREMENTS)
    except CannotInstall as error:
        pytest.skip(f"tinker-cookbook {COOKBOOK} cannot be installed: {error}")


@pytest.fixture(scope="module")
def named_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server of the built-in model under a name that the cookbook has a renderer for."""
    home = tmp_path_factory.mktemp("named")
    server = start_server(home, {"models": [f"{MODEL}={TINY}"]}, engine="local")
    try:
        yield server
    finally:
        server.stop()


def test_loss_decreases_with_official_sdk(
    python: Path, named_server: RealServer, tmp_path: Path
) -> None:
    prepare(tmp_path, {MODEL: TINY})
    cookbook = Cookbook(python, tmp_path, named_server, named_server.new_key("official"))
    found = cookbook.outcome(replace(BY_NAME["sl_loop"], steps=4))
    assert found.status == PASS, found.detail


def test_rewards_with_tinkex_as_tinker(
    python: Path, named_server: RealServer, tmp_path: Path
) -> None:
    prepare(tmp_path, {MODEL: TINY})
    key = named_server.new_key("own")
    cookbook = Cookbook(python, tmp_path, named_server, key, IN_PLACE, str(ROOT / "src"))
    recipe = replace(BY_NAME["rl_loop"], starts={}, steps=2, rule=is_there)
    found = cookbook.outcome(recipe)
    assert found.status == PASS, found.detail
