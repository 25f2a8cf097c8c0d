from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.pipeline.stage_interface import DataPosition, TrainResult, count_updates, next_window


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
)
def test_windows_cover_every_batch_once_when_their_width_changes(
    sizes: list[int], widths: list[int]
) -> None:
    position, taken, number = DataPosition(), [], 0
    while position.epoch < len(sizes):
        width = widths[number % len(widths)]
        window = next_window(position, sizes[position.epoch], width)
        taken += [(window.epoch, index) for index in window.indexes]
        position, number = window.after, number + 1
    assert taken == [(epoch, index) for epoch, size in enumerate(sizes) for index in range(size)]


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    width=st.integers(1, 9),
    done=st.integers(0, 20),
)
def test_count_updates_counts_the_remaining_windows(
    sizes: list[int], width: int, done: int
) -> None:
    position, total = (
        DataPosition(),
        count_updates(DataPosition(), len(sizes), sizes.__getitem__, width),
    )
    for _ in range(min(done, total)):
        position = next_window(position, sizes[position.epoch], width).after
    left = count_updates(position, len(sizes), sizes.__getitem__, width)
    assert left == total - min(done, total)


def test_exit_code_reflects_the_stop_signal() -> None:
    def stopped(stopped_by: int | None) -> TrainResult:
        return TrainResult(
            stage="sft",
            steps=1,
            tokens=1,
            samples=1,
            seconds=1.0,
            before={},
            after={},
            stopped_by=stopped_by,
        )

    assert [stopped(number).exit_code for number in (None, 2, 15)] == [0, 130, 143]
