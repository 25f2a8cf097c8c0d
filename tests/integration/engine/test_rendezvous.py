"""How ranks find each other: bad input is refused with one sentence."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta

import msgspec
import pytest

from tests.support.ports import free_port
from tinkex.engine.config import EngineConfig
from tinkex.engine.parallel import rendezvous
from tinkex.engine.parallel.messages import RankSetup
from tinkex.engine.parallel.rendezvous import Address
from tinkex.errors import ConfigError

SOON = timedelta(seconds=0.2)


def setup_of(**changes: object) -> RankSetup:
    setup = RankSetup(
        version=rendezvous.versions(), num_ranks=2, sources={}, config=EngineConfig(ranks=2)
    )
    return msgspec.structs.replace(setup, **changes)


def test_ranks_join_on_a_free_port_of_the_loopback_interface() -> None:
    store, address = rendezvous.open_store(None)
    assert address.host == "127.0.0.1"
    rendezvous.publish_setup(store, setup_of(sources={"tiny": "/models/tiny"}))
    joined, setup = rendezvous.read_setup(address, 1)
    assert setup.sources == {"tiny": "/models/tiny"}
    assert setup.config == EngineConfig(ranks=2)
    with pytest.raises(ConfigError, match=r"^rank 1 of 2 has not joined within 0\.2 s"):
        rendezvous.wait_for_followers(store, 2, lambda: None, SOON)
    rendezvous.announce(joined, 1)
    rendezvous.wait_for_followers(store, 2, lambda: None, SOON)


@pytest.mark.parametrize(
    ("rank", "changes", "reason"),
    [
        (1, {"version": "tinkex 0.0.1, torch 1.0"}, "but the leader has tinkex 0.0.1, torch 1.0"),
        (2, {}, "rank 2 cannot join: the worker has ranks 1 to 1"),
        (0, {}, "rank 0 cannot join: the worker has ranks 1 to 1"),
    ],
)
def test_rank_that_cannot_join_ends_both_sides(
    rank: int, changes: dict[str, object], reason: str
) -> None:
    store, address = rendezvous.open_store(None)
    rendezvous.publish_setup(store, setup_of(**changes))
    with pytest.raises(ConfigError, match=reason):
        rendezvous.read_setup(address, rank)
    with pytest.raises(ConfigError, match=reason):
        rendezvous.wait_for_followers(store, 2, lambda: None)


def test_two_followers_of_one_rank_are_refused() -> None:
    store, address = rendezvous.open_store(None)
    rendezvous.publish_setup(store, setup_of())
    rendezvous.read_setup(address, 1)
    with pytest.raises(ConfigError, match="rank 1 has joined twice"):
        rendezvous.read_setup(address, 1)


def test_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = Address(*used.getsockname())
        with pytest.raises(ConfigError, match=f"cannot wait for ranks at {address}: Address alr"):
            rendezvous.open_store(address)


@pytest.mark.parametrize("text", ["", "host", ":29400", "host:", "host:0", "host:70000", "h:x"])
def test_bad_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        rendezvous.parse_address(text)


def test_addresses_with_colons() -> None:
    assert rendezvous.parse_address("[::1]:29400") == ("::1", 29400)
    assert str(Address("::1", 29400)) == "[::1]:29400"


def test_leader_that_starts_later_is_found() -> None:
    address = Address("127.0.0.1", free_port())
    found: list[RankSetup] = []
    follower = threading.Thread(target=lambda: found.append(rendezvous.read_setup(address, 1)[1]))
    follower.start()
    store, _ = rendezvous.open_store(address)
    rendezvous.publish_setup(store, setup_of())
    follower.join(30)
    assert found == [setup_of()]
