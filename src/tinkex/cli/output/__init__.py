"""What commands print: a table for people, JSON for programs."""

from __future__ import annotations

from tinkex.cli.output.base import Facts, Output, Rows, announce, show
from tinkex.cli.output.fitting import Column

__all__ = ["Column", "Facts", "Output", "Rows", "announce", "show"]
