"""JSON and CSV data that scripts of the pages read, and actions that only pages have."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from litestar import Response
from litestar.enums import HttpMethod
from litestar.handlers import post, route
from litestar.params import FromPath
from litestar.types import ControllerRouterHandler

from tinkex.errors import NotFoundError, UnprocessableEntityError
from tinkex.ids import check_id
from tinkex.server.dashboard.curves import (
    RunCurves,
    max_points_of,
    select_points,
    sort_metrics,
    write_csv,
)
from tinkex.server.dashboard.navigation import PAGE_DATA_PREFIX
from tinkex.server.dashboard.page_session import find_visitor
from tinkex.server.dashboard.page_views import READ_METHODS, read_page
from tinkex.server.dashboard.queries import DashboardReader
from tinkex.server.dashboard.rendering import PAGE_HEADERS
from tinkex.server.http.auth import authenticate
from tinkex.server.http.error_responses import HANDLED_ERRORS, response_for_error
from tinkex.server.http.ownership import require_run
from tinkex.server.http.request_context import RawResponse, Services, run_in_thread
from tinkex.server.http.request_origin import HttpRequest, read_origin
from tinkex.server.http.store_access import await_store_future
from tinkex.store import jobs
from tinkex.store.database import Connection
from tinkex.wire.codec import encode_json

#: Runs whose curves can be compared at once.
MAX_COMPARED_RUNS = 12
#: Jobs that one request cancels; the page sends it again while there are more.
MAX_CANCELLED_JOBS = 500
#: Metrics of an answer that does not say which are wanted.
NUM_DEFAULT_METRICS = 8
MAX_QUERY_FIELDS = 500
_BOUNDS = {"first": "0", "last": str(2**62)}
_DATA_HEADERS = {**PAGE_HEADERS, "content-security-policy": "default-src 'none'"}


@route(f"{PAGE_DATA_PREFIX}curves", http_method=READ_METHODS, name="page_curves")
async def get_curves(request: HttpRequest) -> Response[bytes]:
    """Return curves: `run` and `metric` may be repeated, `first` and `last` limit the steps."""
    try:
        tenant_id = (await authenticate(_services(request), request.headers)).tenant_id
        query = parse_qs(
            request.scope["query_string"].decode("latin-1"),
            keep_blank_values=True,
            max_num_fields=MAX_QUERY_FIELDS,
        )
        run_ids = _check_run_ids(query.get("run", []))
        found = await read_page(
            request, tenant_id, lambda reader: [reader.curves(run_id) for run_id in run_ids]
        )
        curves = dict(zip(run_ids, found, strict=True))
        tag = _entity_tag(request.scope["query_string"], curves)
        if request.headers.get("if-none-match") == tag:
            return Response(b"", status_code=304, headers={**_DATA_HEADERS, "etag": tag})
        wanted = _parse_selection(query)
        body = await run_in_thread(_encode_curves, curves, wanted)
    except (*HANDLED_ERRORS, ValueError) as error:
        return _to_litestar(_error_response(error))
    headers = {**_DATA_HEADERS, "etag": tag}
    return Response(body, media_type="application/json", headers=headers)


def _services(request: HttpRequest) -> Services:
    services: Services = request.app.state.services
    return services


def _check_run_ids(run_ids: Sequence[str]) -> list[str]:
    unique = list(dict.fromkeys(run_ids))
    if not 1 <= len(unique) <= MAX_COMPARED_RUNS:
        raise UnprocessableEntityError(
            f"curves of {len(unique)} runs were requested, expected 1 to {MAX_COMPARED_RUNS}"
        )
    return [check_id("run", run_id) for run_id in unique]


def _entity_tag(query: bytes, curves: Mapping[str, RunCurves]) -> str:
    versions = [curves[run_id].version for run_id in curves]
    digest = hashlib.sha256(query + repr(versions).encode()).hexdigest()[:32]
    return f'"{digest}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which metrics and steps of curves are requested."""

    metrics: frozenset[str] | None
    """None for the first ones."""
    first: int
    last: int


def _parse_selection(query: Mapping[str, Sequence[str]]) -> Selection:
    metrics = query.get("metric")
    bounds = {name: int(query.get(name, [default])[0]) for name, default in _BOUNDS.items()}
    return Selection(metrics=None if metrics is None else frozenset(metrics), **bounds)


def _encode_curves(curves: Mapping[str, RunCurves], wanted: Selection) -> bytes:
    names = sort_metrics(name for each in curves.values() for name in each.columns)
    chosen = wanted.metrics
    selected = (
        names[:NUM_DEFAULT_METRICS]
        if chosen is None
        else [name for name in names if name in chosen]
    )
    num_curves = sum(1 for each in curves.values() for name in selected if name in each.columns)
    max_points = max_points_of(num_curves)
    runs = []
    for run_id, each in curves.items():
        drawn = {
            name: dict(
                zip(
                    ("steps", "values"),
                    select_points(each.columns[name], max_points, wanted.first, wanted.last),
                    strict=True,
                )
            )
            for name in selected
            if name in each.columns
        }
        runs.append({"id": run_id, "last_step": each.last_step, "metrics": drawn})
    num_left_out = sum(each.num_left_out for each in curves.values())
    return encode_json({"metrics": names, "runs": runs, "num_left_out": num_left_out})


def _error_response(error: Exception) -> RawResponse:
    if isinstance(error, HANDLED_ERRORS):
        return response_for_error(error)
    return response_for_error(UnprocessableEntityError(f"the query is not valid: {error}"))


def _to_litestar(response: RawResponse) -> Response[bytes]:
    return Response(
        response.body,
        status_code=response.status,
        media_type=response.content_type,
        headers={**_DATA_HEADERS, **response.headers},
    )


@route("/runs/{run_id:str}/metrics.csv", http_method=[HttpMethod.GET], name="run_csv")
async def download_csv(request: HttpRequest, run_id: FromPath[str]) -> Response[Any]:
    """Download all metrics of a run as CSV; a link of the page, so a cookie is enough."""
    try:
        visitor = await find_visitor(_services(request), read_origin(request.scope))
        if visitor is None:
            raise NotFoundError("log in to download metrics")
        curves = await read_page(request, visitor.tenant.id, lambda reader: reader.curves(run_id))
        text = await run_in_thread(write_csv, curves)
    except HANDLED_ERRORS as error:
        return _to_litestar(response_for_error(error))
    disposition = {"content-disposition": 'attachment; filename="metrics.csv"'}
    return Response(text, media_type="text/csv", headers={**_DATA_HEADERS, **disposition})


@post(f"{PAGE_DATA_PREFIX}runs/{{run_id:str}}/cancel", name="cancel_run", status_code=200)
async def cancel_run(request: HttpRequest, run_id: FromPath[str]) -> Response[bytes]:
    """Cancel the passes of a run and the samples of its session that are not finished."""
    services = _services(request)
    try:
        identity = await authenticate(services, request.headers)

        def find(reader: DashboardReader) -> list[str]:
            return _open_job_ids(reader.db, identity.tenant_id, check_id("run", run_id))

        job_ids = await read_page(request, identity.tenant_id, find)
        cancelled = await asyncio.gather(
            *(
                await_store_future(services.queue.cancel(identity.tenant_id, job_id))
                for job_id in job_ids
            )
        )
    except HANDLED_ERRORS as error:
        return _to_litestar(response_for_error(error))
    body = encode_json({"num_open": len(job_ids), "num_cancelled": sum(cancelled)})
    return Response(body, media_type="application/json", headers=_DATA_HEADERS)


def _open_job_ids(db: Connection, tenant_id: str, run_id: str) -> list[str]:
    run = require_run(db, tenant_id, run_id, "run")
    return jobs.list_open_ids(db, run.id, run.session_id, limit=MAX_CANCELLED_JOBS)


HANDLERS: list[ControllerRouterHandler] = [get_curves, download_csv, cancel_run]
