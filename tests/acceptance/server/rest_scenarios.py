"""The official RestClient and AdminClient: lists, sessions, traces, usage, audit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import warnings
from collections import Counter
from collections.abc import Coroutine, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.acceptance.server.scenario_context import BASE_MODEL, HELLO, ScenarioContext, datum, step
from tests.acceptance.server.weights_scenarios import connect, fetch, is_absent, rest_of

PROMPT = [1, 2, 3, 4, 5]


def admin_of(place: ScenarioContext, key: str = "") -> Any:
    import tinker

    return tinker.AdminClient(base_url=place.url, api_key=key or place.key)


def list_runs(place: ScenarioContext) -> None:
    rest = rest_of(place)
    assert rest.get_telemetry() is not None
    assert rest.list_training_runs().result().training_runs == []
    with connect(place, project_id="alpha") as one, connect(place, project_id="beta") as two:
        clients = [one.create_lora_training_client(BASE_MODEL, rank=4) for _ in range(2)]
        clients.append(two.create_lora_training_client(BASE_MODEL, user_metadata={"run": "3"}))
        ids = [client.model_id for client in reversed(clients)]
        page = rest.list_training_runs(limit=2).result()
        assert [run.training_run_id for run in page.training_runs] == ids[:2]
        assert (page.cursor.offset, page.cursor.limit, page.cursor.total_count) == (0, 2, 3)
        rest_of_it = rest.list_training_runs(limit=2, offset=2).result().training_runs
        assert [run.training_run_id for run in rest_of_it] == ids[2:]
        beta = rest.list_training_runs(project_id="beta").result().training_runs
        assert [run.training_run_id for run in beta] == ids[:1]
        assert beta[0].user_metadata == {"run": "3"}

        state = clients[0].save_state("first").result().path
        sampler = clients[0].save_weights_for_sampler("best").result().path
        run = rest.get_training_run(clients[0].model_id).result()
        assert (run.base_model, run.lora_rank, run.is_lora) == (BASE_MODEL, 4, True)
        assert not run.corrupted
        assert run.last_checkpoint.tinker_path == state
        assert run.last_sampler_checkpoint.tinker_path == sampler
        assert rest.get_training_run_by_tinker_path(state).result() == run
        assert is_absent(lambda: rest.get_training_run("no-such-run").result())
        asyncio.run(_list_runs_async(rest, run, state, ids))


async def _list_runs_async(rest: Any, run: Any, path: str, ids: list[str]) -> None:
    assert await rest.get_training_run_async(run.training_run_id) == run
    assert await rest.get_training_run_by_tinker_path_async(path) == run
    page = await rest.list_training_runs_async(limit=10, access_scope="owned")
    assert [each.training_run_id for each in page.training_runs] == ids


def list_checkpoints(place: ScenarioContext) -> None:
    rest = rest_of(place)
    with connect(place) as service:
        first, second = (service.create_lora_training_client(BASE_MODEL) for _ in range(2))
        paths = [first.save_state(f"step-{number}").result().path for number in range(3)]
        paths.append(second.save_weights_for_sampler("best").result().path)
        newest = paths[::-1]
        page = rest.list_user_checkpoints(limit=3).result()
        assert [each.tinker_path for each in page.checkpoints] == newest[:3]
        assert page.cursor.total_count == 4
        tail = rest.list_user_checkpoints(limit=3, offset=3).result().checkpoints
        assert [each.tinker_path for each in tail] == newest[3:]
        listed = rest.list_checkpoints(first.model_id).result().checkpoints
        assert {each.tinker_path for each in listed} == set(paths[:3])
        assert {each.checkpoint_type for each in listed} == {"training"}
        assert all(each.size_bytes > 0 and not each.public for each in listed)
        rest.delete_checkpoint(first.model_id, "weights/step-0").result()
        rest.delete_checkpoint_from_tinker_path(paths[1]).result()
        assert is_absent(lambda: rest.delete_checkpoint_from_tinker_path(paths[1]).result())
        asyncio.run(_list_checkpoints_async(rest, first.model_id, paths))
        assert rest.list_user_checkpoints().result().checkpoints == []


async def _list_checkpoints_async(rest: Any, model_id: str, paths: list[str]) -> None:
    left = (await rest.list_user_checkpoints_async()).checkpoints
    assert [each.tinker_path for each in left] == [paths[3], paths[2]]
    [last] = (await rest.list_checkpoints_async(model_id)).checkpoints
    await rest.delete_checkpoint_async(model_id, last.checkpoint_id)
    await rest.delete_checkpoint_from_tinker_path_async(paths[3])


def look_at_sessions(place: ScenarioContext) -> None:
    rest = rest_of(place)
    with connect(place, user_metadata={"team": "a"}, display_name="A run") as service:
        client = service.create_lora_training_client(BASE_MODEL)
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        session_id = service.holder.get_session_id()
        assert rest.list_sessions().result().sessions == [session_id]
        session = rest.get_session(session_id).result()
        assert session.training_run_ids == [client.model_id]
        assert (session.user_metadata, session.display_name) == ({"team": "a"}, "A run")
        [sampler_id] = session.sampler_ids
        response = rest.get_sampler(sampler_id).result()
        assert (response.sampler_id, response.base_model) == (sampler_id, BASE_MODEL)
        assert response.model_path is None and sampler.get_base_model() == BASE_MODEL
        assert is_absent(lambda: rest.get_session("no-such-session").result())
        assert is_absent(lambda: rest_of(place, place.other_key).get_session(session_id).result())
        rest.assign_session_project(session_id, "project-1").result()
        runs = rest.list_training_runs(project_id="project-1").result().training_runs
        assert [run.training_run_id for run in runs] == [client.model_id]
        with connect(place):
            pass  # a client without requests creates no session
        asyncio.run(_look_at_sessions_async(rest, session_id, sampler_id, session))


async def _look_at_sessions_async(rest: Any, session_id: str, sampler_id: str, one: Any) -> None:
    assert (await rest.list_sessions_async(limit=5, offset=0)).sessions == [session_id]
    assert (await rest.list_sessions_async(offset=1)).sessions == []
    assert await rest.get_session_async(session_id) == one
    assert (await rest.get_sampler_async(sampler_id)).sampler_id == sampler_id
    await rest.assign_session_project_async(session_id, "project-2")
    runs = (await rest.list_training_runs_async(project_id="project-2")).training_runs
    assert [run.training_run_id for run in runs] == one.training_run_ids


def search_sessions(place: ScenarioContext) -> None:
    import tinker
    from tinker import types

    warnings.simplefilter("ignore", tinker.ExperimentalWarning)
    rest = rest_of(place)
    ids = {}
    for name, status in (("Nightly one", "success"), ("Nightly two", "errored"), ("Day", None)):
        options = {"display_name": name, "project_id": name[-3:], "user_metadata": {"n": name}}
        service = connect(place, **options)
        client = service.create_lora_training_client(BASE_MODEL)
        client.save_state("kept").result()
        ids[service.holder.get_session_id()] = name
        if status:
            service.close(status, detail="so it is").result()

    def names(**filters: Any) -> list[str]:
        page = rest.search_sessions(types.SessionSearchRequest(**filters)).result()
        return [ids[each.session_id] for each in page.sessions]

    assert names() == ["Day", "Nightly two", "Nightly one"]
    assert names(display_name="NIGHT") == ["Nightly two", "Nightly one"]
    assert names(display_name="two nightly") == ["Nightly two"]
    assert names(user_metadata={"n": "Day"}) == ["Day"]
    assert names(project_ids=["one", "two"]) == ["Nightly two", "Nightly one"]
    assert names(session_id=next(iter(ids))) == ["Nightly one"]
    assert names(statuses=[types.ActiveSessionStatusQuery()]) == ["Day"]
    errored = types.ClientFinishedSessionStatusQuery(reasons=["errored"])
    assert names(statuses=[errored]) == ["Nightly two"]
    assert names(statuses=[errored, types.ActiveSessionStatusQuery()]) == ["Day", "Nightly two"]
    assert names(owner=types.AccessibleSearchOwner(), limit=1) == ["Day"]
    [session] = rest.search_sessions(types.SessionSearchRequest(limit=1)).result().sessions
    assert (session.checkpoints_count, session.display_name) == (1, "Day")
    assert session.checkpoint_storage_bytes and session.status.type == "active"
    assert names(owner=types.UserSearchOwner(owner_urns=[session.owner])) == names()
    assert names(owner=types.UserSearchOwner(owner_urns=["tml:user:nobody"])) == []
    assert asyncio.run(_page_through(rest, ids)) == names()
    stranger = rest_of(place, place.other_key)
    everything = types.SessionSearchRequest(owner=types.AccessibleSearchOwner())
    assert stranger.search_sessions(everything).result().sessions == []


async def _page_through(rest: Any, ids: dict[str, str]) -> list[str]:
    from tinker.types import SessionSearchRequest

    seen: list[str] = []
    request = SessionSearchRequest(limit=1)
    while True:
        page = await rest.search_sessions_async(request)
        seen += [ids[each.session_id] for each in page.sessions]
        if page.next_cursor is None:
            return seen
        request = request.model_copy(update={"cursor": page.next_cursor})


def export_a_trace(place: ScenarioContext) -> None:
    import tinker

    rest = rest_of(place)
    with connect(place) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        losses = [step(tinker, client)[0] for _ in range(3)]
        sampler = client.save_weights_and_get_sampling_client()
        prompt = tinker.ModelInput.from_ints(PROMPT)
        sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=2)).result()
        session_id = service.holder.get_session_id()
        trace = json.loads(fetch(rest.export_session_trace(session_id).result()))
        events = trace["traceEvents"]
        assert all(isinstance(event["ts"], int) for event in events if event["ph"] != "M")
        bars = Counter(event["name"] for event in events if event["ph"] == "X")
        assert (bars["forward_backward"], bars["optim_step"]) == (3, 3), bars
        spans = Counter(event["ph"] for event in events if event["ph"] in "be")
        assert spans["b"] == spans["e"] > 0
        counted = [event["args"] for event in events if event["ph"] == "C"]
        assert [args["loss"] for args in counted if "loss" in args] == losses
        tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert client.model_id in tracks and len(tracks) >= 2
        url = asyncio.run(_export_async(rest, session_id))
        assert json.loads(fetch(url))["traceEvents"]
        stranger = rest_of(place, place.other_key)
        assert is_absent(lambda: stranger.export_session_trace(session_id).result())


async def _export_async(rest: Any, session_id: str) -> str:
    url: str = await rest.export_session_trace_async(session_id)
    return url


def this_day() -> tuple[datetime, datetime]:
    """A range of full hours around now."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return hour - timedelta(hours=1), hour + timedelta(hours=2)


def totals(events: Iterable[Any]) -> dict[str, float]:
    """Total usage by kind."""
    totals: Counter[str] = Counter()
    for event in events:
        info = event.event_info
        totals[info.type] += getattr(info, "token_count", 0) or getattr(info, "count", 0)
    return dict(totals)


def count_what_was_used(place: ScenarioContext) -> None:
    """Usage counts all trained and sampled tokens; failed requests are free."""
    import tinker

    admin = admin_of(place)
    with connect(place, project_id="billed", user_metadata={"who": "me"}) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        for _ in range(2):
            client.forward_backward([datum(tinker, HELLO)] * 3, "cross_entropy").result()
        client.forward([datum(tinker, HELLO)], "cross_entropy").result()
        with contextlib.suppress(tinker.UnprocessableEntityError):
            client.forward_backward([datum(tinker, HELLO)], "no_such_loss").result()
        client.save_state("one").result()
        sampler = service.create_sampling_client(base_model=BASE_MODEL)
        params = tinker.SamplingParams(max_tokens=6, stop=[])
        sampler.sample(tinker.ModelInput.from_ints(PROMPT), 2, params).result()
        session_id = service.holder.get_session_id()
        usage = admin.get_billing_usage(*this_day()).result()
        expected = {
            "training": 7 * (len(HELLO) - 1),
            "sampling_prefill": len(PROMPT),
            "sampling_sample": 12,
            "checkpoint": 1,
        }
        counted = totals(usage.data)
        assert {kind: counted[kind] for kind in expected} == expected, counted
        assert {event.session_id for event in usage.data} == {session_id}
        assert {event.project_id for event in usage.data} == {"billed"}
        assert {event.base_model for event in usage.data} == {BASE_MODEL}
        assert usage.sessions[session_id].user_metadata == {"who": "me"}
        assert admin_of(place, place.other_key).get_billing_usage(*this_day()).result().data == []
        [stored] = admin.get_current_checkpoint_storage_usage().result().data
        assert (stored.project_id, stored.checkpoint_count) == ("billed", 1)
        [checkpoint] = rest_of(place).list_user_checkpoints().result().checkpoints
        assert stored.size_bytes == checkpoint.size_bytes
        assert admin.get_current_checkpoint_storage_usage("other").result().data == []
        assert admin.get_telemetry() is not None
        asyncio.run(_count_async(admin, counted))
        _count_by_the_old_names(place, counted)


async def _count_async(admin: Any, counted: dict[str, float]) -> None:
    start, end = this_day()
    usage = await admin.get_billing_usage_async(start.isoformat(), end.isoformat())
    assert totals(usage.data) == counted
    stored = await admin.get_current_checkpoint_storage_usage_async(project_id="billed")
    assert stored.data[0].checkpoint_count == 1


def _count_by_the_old_names(place: ScenarioContext, counted: dict[str, float]) -> None:
    """What RestClient still forwards to AdminClient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with connect(place) as service:
            old = service.create_rest_client()
            assert totals(old.get_billing_usage(*this_day()).result().data) == counted
            stored = old.get_current_checkpoint_storage_usage().result().data
            assert stored[0].checkpoint_count == 1
            assert old.get_audit_log("checkpoints").result().entries
            asyncio.run(_count_by_the_old_names_async(old, counted))
            assert on_its_loop(old, old.get_audit_log_async("checkpoints")).entries


async def _count_by_the_old_names_async(old: Any, counted: dict[str, float]) -> None:
    assert totals((await old.get_billing_usage_async(*this_day())).data) == counted
    assert (await old.get_current_checkpoint_storage_usage_async()).data[0].checkpoint_count == 1


def read_the_audit_log(place: ScenarioContext) -> None:
    rest, admin = rest_of(place), admin_of(place)
    with connect(place) as service:
        client = service.create_lora_training_client(BASE_MODEL)
        path = client.save_state("audited").result().path
        service.create_training_client_from_state(path)
        rest.publish_checkpoint_from_tinker_path(path).result()
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
        rest.copy_weights(path, "elsewhere").result()
        rest.delete_checkpoint_from_tinker_path(path).result()
        rest.assign_session_project(service.holder.get_session_id(), "moved").result()
        entries = admin.get_audit_log("checkpoints").result().entries
        of_path = [entry.event for entry in entries if entry.tinker_path == path]
        assert of_path == [
            "checkpoint_saved",
            "checkpoint_loaded",
            "checkpoint_published",
            "checkpoint_unpublished",
            "checkpoint_ttl_set",
            "checkpoint_deleted",
        ]
        assert [entry.timestamp for entry in entries] == sorted(each.timestamp for each in entries)
        assert all(entry.model_id == client.model_id for entry in entries[:2])
        projects = admin.get_audit_log("projects").result().entries
        assert [entry.event_details["project_id"] for entry in projects] == ["moved"]
        everything = {entry.event for entry in admin.get_audit_log().result().entries}
        assert {"checkpoint_copied", "project_assigned", "session_created"} <= everything
        today = datetime.now(UTC).date()
        again = on_its_loop(admin, admin.get_audit_log_async("checkpoints", day=today))
        assert again.entries == entries
        yesterday = today - timedelta(days=1)
        assert on_its_loop(admin, admin.get_audit_log_async(day=yesterday)).entries == []
        foreign = admin_of(place, place.other_key).get_audit_log().result().entries
        assert [entry.event for entry in foreign] == ["api_key_created"], "a stranger's own"


def on_its_loop(client: Any, work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that must be awaited on the SDK's own event loop."""
    return client.holder.run_coroutine_threadsafe(work).result()


SCENARIOS = (
    list_runs,
    list_checkpoints,
    look_at_sessions,
    search_sessions,
    export_a_trace,
    count_what_was_used,
    read_the_audit_log,
)
