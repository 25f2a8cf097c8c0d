"""A server whose default tenant can open the dashboard without a key."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from tests.support.dashboard_browser import Browser
from tests.support.server_harness import ServerHarness
from tinkex.server.config import DEFAULT_TENANT
from tinkex.store import keys

DEFAULT_KEY = "tml-default"


@dataclass(frozen=True)
class DashboardSetup:
    """A server, its default tenant, and a local visitor."""

    harness: ServerHarness
    tenant_id: str
    local: Browser


@pytest.fixture
def dashboard(harness: ServerHarness) -> DashboardSetup:
    tenant = harness.write(lambda db: keys.get_or_create_tenant(db, DEFAULT_TENANT, time.time()))
    harness.write(
        lambda db: keys.insert_key(db, tenant.id, DEFAULT_KEY, name="home", now=time.time())
    )
    return DashboardSetup(harness, tenant.id, Browser(harness))
