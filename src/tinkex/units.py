"""Human-readable amounts; a kB has 1,000 bytes."""

from __future__ import annotations

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB", "EB", "ZB")


def format_bytes(num_bytes: float) -> str:
    """Format a size in its largest unit: 512 B, 1.5 kB, 184 MB."""
    amount, unit = float(num_bytes), 0
    while amount >= 999.5 and unit < len(_SIZES) - 1:
        amount, unit = amount / 1000, unit + 1
    digits = 0 if unit == 0 or amount >= 99.95 else 1
    return f"{amount:,.{digits}f} {_SIZES[unit]}"


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: 1 run, 2 runs, 1,024 tokens."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
