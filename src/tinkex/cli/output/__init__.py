"""What commands print: a table for people, JSON for programs."""

from __future__ import annotations

from tinkex.cli.format import Column
from tinkex.cli.output.base import Output, PropertiesOutput, TableOutput, announce, show

__all__ = ["Column", "Output", "PropertiesOutput", "TableOutput", "announce", "show"]
