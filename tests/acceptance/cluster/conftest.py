"""A Ray cluster of three nodes on loopback, and a server with workers on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.processes.conftest import home, isolated_environment, serve
from tests.support.postgres import PostgresServer
from tests.support.ray_nodes import LocalRayCluster

__all__ = ["home", "isolated_environment", "serve"]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[LocalRayCluster]:
    cluster = LocalRayCluster(num_nodes=2)
    yield cluster
    cluster.stop()


@pytest.fixture
def store_url(postgres: PostgresServer) -> Iterator[str]:
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)
