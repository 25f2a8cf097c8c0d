"""Publishes the tokens of running samples; called by the engine's thread only."""

from __future__ import annotations

from collections.abc import Callable

from tinkex.engine.protocol import Engine
from tinkex.jobs.token_stream_server import TokenStreamServer
from tinkex.store.records import JobRecord


class SamplePublisher:
    """Connects the engine's progress with the connections that watch it.

    While no job is watched, each call is one truth test.
    """

    def __init__(self, engine: Engine, server: TokenStreamServer) -> None:
        self._engine = engine
        self._server = server

    def sample_started(self, job: JobRecord) -> None:
        """A sample was started in the engine."""
        if self._server.is_active and self._server.start_job(job.id, job.attempts + 1):
            self._engine.watch_sample(job.id)

    def sample_ended(self, job_id: str) -> None:
        """A sample is finished, cancelled or declined."""
        if self._server.is_active:
            self._server.finish_job(job_id)

    def publish(self, find_running: Callable[[str], JobRecord | None]) -> None:
        """Send what the last step of the engine has computed."""
        if not self._server.is_active:
            return
        changes = self._server.take_changes()
        for job_id in changes.unwatched:
            self._engine.unwatch_sample(job_id)
        for job_id in changes.watched:
            job = find_running(job_id)
            if job is not None:
                self.sample_started(job)
        progress = self._engine.sample_progress()
        if progress:
            self._server.send_progress(progress)
