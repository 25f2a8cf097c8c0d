"""A curve in letters: braille dots, or stars where the screen knows no others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkex.server.dashboard.curve import nice_ticks

ChartPoints = Sequence[tuple[float, float]]

_BRAILLE = 0x2800
#: The bit of each dot in a braille letter, by row and column.
_DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_MIN_WIDTH, _MIN_HEIGHT = 12, 4


@dataclass(frozen=True, slots=True)
class AxisRange:
    """The numbers along one side."""

    low: float
    high: float

    @classmethod
    def covering(cls, values: Sequence[float]) -> AxisRange:
        """From the least to the greatest; a single value is put in the middle."""
        low, high = min(values), max(values)
        if high - low > max(abs(low), abs(high)) * 1e-9:
            return cls(low, high)
        air = max(abs(high) * 0.1, 0.5)
        return cls(low - air, high + air)

    def position(self, value: float, size: int) -> int:
        """Which of `size` places a value has."""
        share = (value - self.low) / (self.high - self.low)
        return min(size - 1, max(0, round(share * (size - 1))))


@dataclass(slots=True)
class BrailleCanvas:
    """Letters that are made of dots."""

    width: int
    height: int
    is_unicode: bool = True
    _cells: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def num_columns(self) -> int:
        """Dots from left to right."""
        return self.width * (2 if self.is_unicode else 1)

    @property
    def num_rows(self) -> int:
        """Dots from top to bottom."""
        return self.height * (4 if self.is_unicode else 1)

    def draw_line(self, start: tuple[int, int], end: tuple[int, int]) -> None:
        """Dots from one place to another; places are (column, row) from the top left."""
        (x0, y0), (x1, y1) = start, end
        num = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(num + 1):
            self._set_dot(round(x0 + (x1 - x0) * i / num), round(y0 + (y1 - y0) * i / num))

    def _set_dot(self, x: int, y: int) -> None:
        if not self.is_unicode:
            self._cells[x, y] = 1
            return
        cell = (x // 2, y // 4)
        self._cells[cell] = self._cells.get(cell, 0) | _DOT_BITS[y % 4][x % 2]

    def rows(self) -> list[str]:
        """The letters."""
        return [
            "".join(self._character(self._cells.get((x, y), 0)) for x in range(self.width)).rstrip()
            for y in range(self.height)
        ]

    def _character(self, bits: int) -> str:
        if not bits:
            return " "
        return chr(_BRAILLE + bits) if self.is_unicode else "*"


def draw_text_chart(
    points: ChartPoints, width: int, height: int, *, is_unicode: bool = True
) -> list[str]:
    """A curve through points in the order of their x, with labels on the left and below."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return []
    xs, ys = AxisRange.covering([x for x, _ in finite]), AxisRange.covering([y for _, y in finite])
    height = max(height, _MIN_HEIGHT)
    labels = _y_labels(ys, height)
    margin = max(map(len, labels.values()), default=0)
    canvas = BrailleCanvas(max(width - margin - 2, _MIN_WIDTH), height, is_unicode)
    places = [
        (
            xs.position(x, canvas.num_columns),
            canvas.num_rows - 1 - ys.position(y, canvas.num_rows),
        )
        for x, y in finite
    ]
    for start, end in zip(places, [*places[1:], places[-1]], strict=True):
        canvas.draw_line(start, end)
    side, corner, floor = ("│", "└", "─") if is_unicode else ("|", "+", "-")
    drawn = [
        f"{labels.get(y, ''):>{margin}} {side}{row}".rstrip() for y, row in enumerate(canvas.rows())
    ]
    below = [f"{'':>{margin}} {corner}{floor * canvas.width}"]
    return [*drawn, *below, " " * (margin + 2) + _x_labels(xs, canvas.width)]


def _y_labels(ys: AxisRange, height: int) -> dict[int, str]:
    """The numbers on the left by the row they stand in."""
    ticks = nice_ticks(ys.low, ys.high, max(2, height // 2))
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ys.high - ys.low)
    return {height - 1 - ys.position(tick, height): _format_tick(tick, step) for tick in ticks}


def _x_labels(xs: AxisRange, width: int) -> str:
    """The numbers below: those at the ends, and round ones between that have room."""
    letters = [" "] * width
    ticks = [tick for tick in nice_ticks(xs.low, xs.high, 6) if tick == round(tick)]
    free = 0
    for tick in ticks:
        text = f"{tick:,.0f}"
        start = min(max(0, xs.position(tick, width) - len(text) // 2), width - len(text))
        if start >= free and start >= 0:
            letters[start : start + len(text)] = text
            free = start + len(text) + 2
    return "".join(letters).rstrip()


def _format_tick(value: float, step: float) -> str:
    if abs(value) >= 1e6 or step < 1e-4:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:.{digits}f}"
