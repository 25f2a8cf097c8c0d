"""The pages that the header of every page links to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NavigationLink:
    """A link in the header."""

    path: str
    label: str
    is_operator_only: bool = False
    """Whether only the default tenant of the server sees it."""
    needs_cluster: bool = False
    """Whether it is shown only if the server has several worker groups or a cluster."""


LINKS: Sequence[NavigationLink] = (
    NavigationLink(path="/", label="Runs"),
    NavigationLink(path="/playground", label="Playground"),
    NavigationLink(path="/models", label="Models"),
    NavigationLink(path="/usage", label="Usage"),
    NavigationLink(path="/keys", label="Keys"),
    NavigationLink(path="/cluster", label="Cluster", is_operator_only=True, needs_cluster=True),
)
PAGE_PATHS = frozenset(link.path for link in LINKS)
#: Paths of JSON data that only pages read.
PAGE_DATA_PREFIX = "/page/"


def visible_links(*, is_operator: bool, has_cluster: bool) -> list[NavigationLink]:
    """The links that a visitor sees."""
    return [
        link
        for link in LINKS
        if (is_operator or not link.is_operator_only) and (has_cluster or not link.needs_cluster)
    ]


def is_current(link: NavigationLink, path: str) -> bool:
    """Whether a path belongs to the page of a link; pages of single runs belong to the list."""
    return path == link.path or (link.path == "/" and path.startswith("/runs/"))
