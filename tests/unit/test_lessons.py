"""Every known mistake of others that concerns this SDK, and the tests that show ours does better.

P-xx are the mistakes numbered in the runtime rules, 12.x the weak points numbered in section 12 of
the description of the protocol; 12.28 and above are about the command line.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tinkex
import tinkex.types
from tinkex.client.config import Config
from tinkex.client.rate_limits import SamplingLimits
from tinkex.settings import Environment
from tinkex.types import ClientConfigResponse

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "tinkex").rglob("*.py"))
IDS = [
    *(f"P-{number:02}" for number in range(1, 51)),
    *(f"12.{number}" for number in range(1, 28)),
    "12.27a",
    "12.27b",
]
NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
#: Longer files had to be taken apart later.
MAX_LINES = 400

NOT_THE_SDKS = {
    "P-27": "what the command line writes to stdout",
    "P-28": "how the command line shows errors",
    "P-29": "how the command line reads its options",
    "P-30": "what `version` prints",
    "P-31": "metadata that the command line writes; there are no atoms to leak here",
    "P-43": "how to judge code of others; nothing that runs",
    "P-45": "how the command line prints sizes and words",
    "P-49": "an option of the command line",
}

#: One test in each line, its path below tests/.
TABLE = """
P-01   integration/test_training_order.py::test_calls_of_one_thread_arrive_in_order
P-01   integration/test_training_order.py::test_calls_of_async_code_arrive_in_order
P-01   unit/client/test_road.py::test_ids_are_given_in_the_callers_thread
P-02   integration/test_lessons.py::test_a_step_does_not_pass_the_backward_of_a_custom_loss
P-03   unit/client/test_chunking.py::test_one_datum_above_the_limit_is_one_chunk_and_none_is_empty
P-03   integration/test_training_loop.py::test_chunks_are_cut_by_bytes
P-04   unit/test_errors.py::test_the_judge_follows_the_table_everywhere
P-04   unit/test_errors.py::test_an_answer_that_makes_no_sense_is_never_blamed_on_the_user
P-05   unit/test_errors.py::test_error_objects_carry_the_judges_word
P-05   unit/client/test_retry.py::test_statuses_are_retried_as_the_judge_says
P-05   unit/client/test_sampling_retry.py::test_what_is_worth_another_submission
P-06   integration/test_sampling_workflow.py::test_the_server_decides_what_is_retried
P-06   unit/client/test_sampling_retry.py::test_the_servers_no_is_known_here_too
P-07   integration/test_polling.py::test_a_failed_job_fails_at_once_with_its_category
P-08   unit/client/test_patience.py::test_failures_of_the_work
P-08   unit/client/test_patience.py::test_answers_that_are_results_or_must_be_read_as_such
P-08   unit/client/test_polling.py::test_what_is_no_result_is_a_clear_error
P-09   integration/test_polling.py::test_instant_answers_do_not_make_a_hot_loop
P-09   integration/test_polling.py::test_a_polls_retry_after_is_honoured
P-09   integration/test_polling.py::test_a_paused_queue_is_told_once_and_slows_the_polls
P-10   integration/test_shutdown.py::test_closing_resolves_everything_under_way
P-10   unit/client/test_road.py::test_a_crash_of_any_kind_resolves_its_future
P-10   unit/client/test_completions.py::test_a_crash_of_the_poll_reaches_its_waiters
P-11   integration/test_lessons.py::test_closing_clients_harms_nobody_and_restarts_nothing
P-12   integration/test_lessons.py::test_a_download_is_written_while_it_arrives
P-12   integration/test_download.py::test_a_cancelled_download_keeps_its_part
P-13   unit/client/test_limiter.py::test_a_later_shorter_refusal_never_shortens
P-13   unit/client/test_limiter.py::test_a_success_that_began_before_the_refusal_proves_nothing
P-13   unit/client/test_lanes.py::test_a_deadline_that_moves_is_checked_again_after_sleeping
P-13   integration/test_sampling_workflow.py::test_429_holds_back_every_client_of_the_lane
P-14   integration/test_lessons.py::test_sample_returns_at_once_while_the_io_thread_is_busy
P-15   unit/client/test_lanes.py::test_equal_server_and_key_share_a_lane
P-15   unit/client/test_lanes.py::test_bytes_hold_submissions_back
P-15   unit/client/test_budget.py::test_one_piece_larger_than_everything_passes_alone
P-16   unit/client/test_lanes.py::test_another_server_or_key_is_another_lane
P-16   integration/test_tenants.py::test_a_429_for_one_does_not_delay_the_other
P-17   integration/test_lessons.py::test_progress_of_others_is_progress
P-18   integration/test_lessons.py::test_no_progress_ends_it_but_idle_time_does_not_count
P-18   unit/client/test_retry.py::test_no_time_at_all_still_allows_the_first_attempt
P-18   unit/client/test_sampling_retry.py::test_a_full_queue_and_an_outage_are_bounded_by_time_only
P-19   unit/testing/test_routing.py::test_every_endpoint_of_the_table_is_served
P-19   unit/wire/test_endpoints.py::test_every_path_is_in_the_table_exactly_once
P-19   integration/test_lessons.py::test_silence_of_the_heartbeats_is_said_aloud_and_once
P-20   integration/test_heartbeats.py::test_one_hung_session_does_not_delay_another
P-21   unit/client/test_lanes.py::test_the_key_is_kept_nowhere
P-21   integration/test_heartbeats.py::test_a_forgotten_client_stops_beating
P-22   integration/test_heartbeats.py::test_none_comes_after_close
P-22   integration/test_heartbeats.py::test_410_ends_them_quietly
P-23   integration/test_tenants.py::test_closing_one_leaves_the_other_working
P-24   integration/test_telemetry.py::test_one_timer_flushes
P-25   integration/test_telemetry.py::test_a_failing_endpoint_keeps_the_events
P-25   integration/test_telemetry.py::test_a_hung_endpoint_holds_up_nothing
P-26   integration/test_shutdown.py::test_a_script_that_forgets_to_close_ends_well
P-26   integration/test_shutdown.py::test_ctrl_c_while_waiting_ends_at_once
P-32   integration/test_download.py::test_force_keeps_the_old_folder_until_the_new_one_is_complete
P-32   integration/test_download.py::test_a_file_that_stays_short_names_both_sizes
P-32   integration/test_transfers.py::test_a_broken_archive_is_typed_and_leaves_nothing
P-32   unit/client/test_archive.py::test_unpacks
P-33   unit/client/test_archive.py::test_unsafe_names_are_refused
P-33   unit/client/test_archive.py::test_only_files_and_folders
P-33   unit/client/test_archive.py::test_a_link_cannot_be_written_through
P-34   unit/test_text.py::test_many_threads_load_once
P-35   unit/test_logs.py::test_the_state_belongs_to_its_owner
P-35   unit/client/test_lanes.py::test_a_lane_lives_as_long_as_somebody_uses_it
P-36   unit/client/test_lanes.py::test_after_a_back_off_a_few_go_first
P-36   unit/client/test_lanes.py::test_a_submission_that_fails_or_is_cancelled_gives_everything_back
P-37   unit/test_lessons.py::test_waiting_for_a_turn_needs_no_timer
P-38   integration/test_lessons.py::test_what_is_not_set_is_not_sent
P-39   integration/test_lessons.py::test_an_empty_answer_to_a_delete_is_fine
P-39   integration/test_rest.py::test_training_runs
P-40   integration/test_lessons.py::test_a_model_may_be_answered_at_once
P-41   integration/test_lessons.py::test_slow_creation_is_waited_for
P-42   integration/test_docs.py::test_the_code_of_a_page_runs
P-42   integration/test_docs.py::test_generated_parts_are_fresh
P-44   unit/test_lessons.py::test_no_file_is_too_long
P-46   unit/client/test_credentials.py::test_an_odd_prefix_is_accepted_with_one_warning
P-47   integration/test_lessons.py::test_what_the_server_says_at_the_start_reaches_the_user
P-48   integration/test_lessons.py::test_a_failed_load_leaves_nothing_here
P-48   integration/test_lessons.py::test_a_failed_load_leaves_nothing_on_the_server
P-50   integration/test_lessons.py::test_every_result_of_training_is_typed

12.1   integration/test_telemetry.py::test_no_secret_is_in_any_body
12.1   integration/test_resilience.py::test_the_key_is_never_in_an_error
12.2   integration/test_transfers.py::test_a_broken_download_goes_on_where_it_stopped
12.2   integration/test_download.py::test_a_body_that_ends_quietly_too_soon_is_short
12.2   integration/test_download.py::test_a_wrong_digest_keeps_nothing
12.3   integration/test_training_order.py::test_cancelling_a_queued_operation_blocks_nobody
12.3   integration/test_training_order.py::test_a_cancelled_await_frees_the_road
12.4   unit/wire/test_proto_sampling.py::test_bfloat16_tensors_are_read_as_numbers
12.5   unit/types/test_base.py::test_a_misspelled_field_is_refused_with_the_right_name
12.6   acceptance/test_weak_points.py::test_a_custom_loss_takes_sparse_targets
12.7   acceptance/test_weak_points.py::test_a_retried_save_asks_for_the_same_sampler
12.8   acceptance/test_weak_points.py::test_any_metric_name_is_read
12.8   unit/client/test_merging.py::test_it_never_raises
12.8   unit/client/test_merging.py::test_a_key_missing_in_a_later_chunk_is_reduced_over_the_rest
12.9   integration/test_rest.py::test_ids_are_quoted_in_paths
12.9   unit/test_ids.py::test_a_path_that_is_none_is_refused
12.10  integration/test_sampling_workflow.py::test_wrong_number_of_sequences_is_a_typed_error
12.10  integration/test_resilience.py::test_a_nonsensical_result_is_a_typed_error
12.11  integration/test_lessons.py::test_sync_and_async_creation_send_the_same
12.12  acceptance/test_weak_points.py::test_saving_does_not_block_the_callers_loop
12.13  integration/test_heartbeats.py::test_a_custom_loss_does_not_delay_them
12.13  integration/test_lessons.py::test_a_step_does_not_pass_the_backward_of_a_custom_loss
12.14  integration/test_lessons.py::test_encoding_and_decoding_of_batches_keep_off_the_io_thread
12.15  integration/test_telemetry.py::test_a_missing_endpoint_is_asked_once_and_delays_nothing
12.16  acceptance/test_weak_points.py::test_a_server_in_trouble_is_not_flooded
12.16  integration/test_polling.py::test_a_server_that_stays_away_is_given_up
12.17  integration/test_resilience.py::test_a_publish_is_sent_once
12.17  integration/test_resilience.py::test_a_failing_exchange_is_not_tried_squared
12.17  integration/test_resilience.py::test_retry_after_is_honoured
12.18  integration/test_resilience.py::test_a_dead_server_is_reported_in_a_few_seconds
12.18  integration/test_resilience.py::test_a_hung_server_runs_into_the_timeout
12.18  unit/client/test_config.py::test_an_unknown_setting_is_refused_by_name
12.19  integration/test_lessons.py::test_asking_whether_the_server_is_there_asks_once
12.20  integration/test_polling.py::test_a_billing_issue_is_waited_for_then_surfaces
12.20  unit/client/test_polling.py::test_a_billing_issue_is_shown_and_waited_out
12.21  integration/test_lessons.py::test_everything_of_one_service_reads_the_flags_once
12.21  integration/test_shutdown.py::test_a_forked_child_is_told_or_works
12.21  unit/test_light_imports.py::test_an_import_is_light
12.22  acceptance/test_weak_points.py::test_the_round_trip_of_a_sample_is_measured
12.23  unit/client/test_patience.py::test_refusals_are_typed
12.23  integration/test_training_order.py::test_an_expired_promise_surfaces
12.24  unit/client/test_budget.py::test_first_come_first_served
12.24  unit/client/test_budget.py::test_whatever_happens_nobody_starves
12.25  unit/test_lessons.py::test_docstrings_and_pages_name_only_what_exists
12.25  integration/test_docs.py::test_the_code_of_a_page_runs
12.26  integration/test_polling.py::test_waiting_for_a_result_has_a_limit_of_its_own
12.26  unit/test_lessons.py::test_every_setting_is_read_somewhere
12.27  unit/types/test_inputs.py::test_loss_inputs_become_tensors
12.27  unit/types/test_inputs.py::test_bad_loss_inputs_are_refused_by_name
12.27a unit/types/test_training.py::test_adam_refuses_numbers_that_cannot_work
12.27a unit/wire/test_codec.py::test_number_that_json_lacks_is_refused_by_name
12.27b integration/test_resilience.py::test_each_status_is_a_class
"""


def read_table() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for line in filter(None, TABLE.splitlines()):
        lesson, test = line.split()
        found[lesson] += (f"tests/{test}",)
    return dict(found)


LESSONS = read_table()


# --- the table --------------------------------------------------------------------------------


def test_every_lesson_is_answered_or_is_not_the_sdks() -> None:
    forgotten = [lesson for lesson in IDS if lesson not in LESSONS | NOT_THE_SDKS]
    assert not forgotten, f"no test and no reason for {', '.join(forgotten)}"
    twice = sorted(LESSONS.keys() & NOT_THE_SDKS.keys())
    assert not twice, f"both answered and called somebody else's: {', '.join(twice)}"
    unknown = sorted((LESSONS.keys() | NOT_THE_SDKS.keys()) - set(IDS))
    assert not unknown, f"no such lesson: {', '.join(unknown)}"
    assert all(reason.strip() for reason in NOT_THE_SDKS.values())


@cache
def names_in(path: str) -> set[str]:
    """The test functions of a file; empty when there is no such file."""
    file = ROOT / path
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
    return {node.name for node in body if isinstance(node, NAMED) and node.name.startswith("test_")}


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_tests_of_a_lesson_exist(lesson: str) -> None:
    for test in LESSONS[lesson]:
        path, _, name = test.partition("::")
        assert name in names_in(path), f"{lesson} is answered by {test}, which does not exist"
    assert len(set(LESSONS[lesson])) == len(LESSONS[lesson]), f"{lesson} names a test twice"


# --- lessons about the code itself ------------------------------------------------------------


def test_no_file_is_too_long() -> None:
    """P-44: files of 2,155 and 1,762 lines."""
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in SOURCES}
    assert {str(path): length for path, length in lengths.items() if length > MAX_LINES} == {}


class Timers(asyncio.SelectorEventLoop):
    """A loop that counts how often somebody asks to be woken later."""

    num_set = 0

    def call_at(self, *args: Any, **options: Any) -> asyncio.TimerHandle:
        self.num_set += 1
        return super().call_at(*args, **options)


def test_waiting_for_a_turn_needs_no_timer() -> None:
    """P-37: a wait that looks every 2 ms is a wait that never sleeps."""
    lane = SamplingLimits()
    lane.apply_server_config(ClientConfigResponse(sample_dispatch_bytes_semaphore_size=10))

    async def submit(num_bytes: int) -> None:
        async with lane.acquire(num_bytes):
            await asyncio.sleep(0)

    async def crowd() -> None:
        async with AsyncExitStack() as held:
            await held.enter_async_context(lane.acquire(10))
            waiting = [asyncio.create_task(submit(1 + number % 9)) for number in range(30)]
            for _ in range(20):
                await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
        await asyncio.gather(*waiting)

    with asyncio.Runner(loop_factory=Timers) as runner:
        runner.run(crowd())
        loop = runner.get_loop()
        assert isinstance(loop, Timers)
        assert loop.num_set == 0


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def read_names(*, outside: str) -> set[str]:
    """Every attribute that is read anywhere but in the file that declares it."""
    return {
        node.attr
        for path in SOURCES
        if not str(path).endswith(outside) and "testing" not in path.parts
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize(
    ("names", "home"),
    [
        ([row.name for row in dataclasses.fields(Config)], "client/config.py"),
        (list(Environment._fields), "tinkex/settings.py"),
        (
            [*{*ClientConfigResponse.__struct_fields__} - {"use_pyqwest_transport"}],
            "types/config.py",
        ),
    ],
    ids=["Config", "Environment", "ClientConfigResponse"],
)
def test_every_setting_is_read_somewhere(names: list[str], home: str) -> None:
    """12.26: a time limit that nobody passes and a variable that nobody asks for."""
    assert sorted(set(names) - read_names(outside=home)) == []


def texts() -> Iterator[tuple[str, str]]:
    """Where we explain ourselves: docstrings, and pages without their code, which runs."""
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.Module, *NAMED)):
                yield f"{path.name}:{getattr(node, 'name', '')}", ast.get_docstring(node) or ""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield page.name, re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)


def test_docstrings_and_pages_name_only_what_exists() -> None:
    """12.25: `result.loss`, `capabilities.max_batch_size`, `model_data.lora_rank`."""
    owners = {name: getattr(home, name) for home in (tinkex, tinkex.types) for name in home.__all__}
    wrong = [
        f"{place} says {owner}.{name}"
        for place, text in texts()
        for owner, name in re.findall(r"\b([A-Z]\w+)\.([a-z]\w*)", text)
        if owner in owners and not hasattr(owners[owner], name)
    ]
    known = {*dir(builtins), "item"}  # that of torch's tensors
    for path in SOURCES:
        known |= {node.name for node in ast.walk(tree(path)) if isinstance(node, NAMED)}
    wrong += [
        f"{place} says {name}()"
        for place, text in texts()
        for name in re.findall(r"\b([a-z_]\w+)\(\)", text)
        if name not in known
    ]
    assert wrong == []
