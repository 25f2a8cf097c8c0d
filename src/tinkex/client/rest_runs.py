"""REST methods for training runs: list, search, rename, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from tinkex import types
from tinkex.client.future import APIFuture
from tinkex.client.rest_base import SessionlessClient, page_query
from tinkex.ids import parse_tinker_path
from tinkex.wire import endpoints as api
from tinkex.wire.messages import Empty, RenameRunRequest, ReportMetricsRequest

AccessScope = Literal["owned", "accessible"]


class RunsClient(SessionlessClient):
    """The methods of RestClient for training runs."""

    def get_training_run(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """Return one training run."""
        ids = {"training_run_id": training_run_id}
        return self._call(api.GET_RUN, ids, query={"access_scope": access_scope})

    async def get_training_run_async(
        self, training_run_id: types.ModelID, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        """Async version of get_training_run()."""
        return await self.get_training_run(training_run_id, access_scope)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[types.TrainingRun]:
        """Return the training run of a checkpoint."""
        return self.get_training_run(parse_tinker_path(tinker_path).run_id, access_scope)

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> types.TrainingRun:
        """Async version of get_training_run_by_tinker_path()."""
        return await self.get_training_run_by_tinker_path(tinker_path, access_scope)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[types.TrainingRunsResponse]:
        """List one page of training runs, newest first."""
        return self._call(
            api.LIST_RUNS,
            query=page_query(limit, offset)
            | {"access_scope": access_scope, "project_id": project_id},
        )

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> types.TrainingRunsResponse:
        """Async version of list_training_runs()."""
        return await self.list_training_runs(limit, offset, access_scope, project_id)

    def get_run_metrics(
        self, training_run_id: types.ModelID, limit: int = 100, after: int | None = None
    ) -> APIFuture[types.RunMetricsResponse]:
        """Return metrics of the newest steps, or of the first after a cursor. tinkex servers only.

        `after=0` starts with the oldest stored step; then pass the cursor of the last step.
        """
        query = {"limit": page_query(limit, 0)["limit"], "after": after}
        return self._call(api.RUN_METRICS, {"training_run_id": training_run_id}, query=query)

    async def get_run_metrics_async(
        self, training_run_id: types.ModelID, limit: int = 100, after: int | None = None
    ) -> types.RunMetricsResponse:
        """Async version of get_run_metrics()."""
        return await self.get_run_metrics(training_run_id, limit, after)

    def find_training_runs(
        self,
        search: str,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[types.TrainingRunsResponse]:
        """Find runs whose id starts with or whose name contains a string. tinkex servers only."""
        filters = {"access_scope": access_scope, "project_id": project_id, "search": search}
        return self._call(api.LIST_RUNS, query=page_query(limit, offset) | filters)

    def rename_training_run(
        self, training_run_id: types.ModelID, name: str | None
    ) -> APIFuture[Empty]:
        """Set the name of a run, or remove it with None. tinkex servers only."""
        message = RenameRunRequest(name=name)
        return self._call(api.RENAME_RUN, {"training_run_id": training_run_id}, message)

    def report_run_metrics(
        self, training_run_id: types.ModelID, seq_id: int, metrics: Mapping[str, float]
    ) -> APIFuture[Empty]:
        """Add metrics to a finished optimizer step. tinkex servers only.

        `seq_id` is the seq_id of the future that optim_step() returned.
        """
        message = ReportMetricsRequest(seq_id=seq_id, metrics=dict(metrics))
        return self._call(api.REPORT_RUN_METRICS, {"training_run_id": training_run_id}, message)
