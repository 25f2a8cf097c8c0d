"""The tables of the newest schema version.

Times are seconds since 1970, free-form values are JSON, and every row that a client can name
belongs to a tenant.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

METADATA = sa.MetaData()

#: A growing number: 64 bits, a row id in SQLite. Tables whose readers continue from the last number
#: use sqlite_autoincrement, so that numbers of deleted rows are not reused.
Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")
Time = sa.Double
Json = sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def _partial_index(name: str, *columns: str, where: str, unique: bool = False) -> sa.Index:
    """Return a partial index. SQLite uses it if a query has the same condition text."""
    sqlite = sa.text(f"{where} = 1" if " " not in where else where)
    return sa.Index(
        name, *columns, unique=unique, sqlite_where=sqlite, postgresql_where=sa.text(where)
    )


settings = sa.Table(
    "settings",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", Json, nullable=False),
)
"""Settings of the store, such as its secret."""

tenants = sa.Table(
    "tenants",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("quotas", Json),
)
"""`quotas` holds the operator's overrides for this tenant by name; 0 means unlimited."""

api_keys = sa.Table(
    "api_keys",
    METADATA,
    sa.Column("id", Serial, primary_key=True, autoincrement=True),
    sa.Column("tenant_id", sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("note", sa.Text),
    sa.Column("hint", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("revoked_at", Time),
)
"""Only the SHA-256 of a key is stored; `hint` is its first letters, to recognize it."""

sessions = sa.Table(
    "sessions",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column("display_name", sa.Text),
    sa.Column("search_name", sa.Text, nullable=False),
    sa.Column("tags", Json, nullable=False),
    sa.Column("user_metadata", Json, nullable=False),
    sa.Column("sdk_version", sa.Text, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("seen_at", Time, nullable=False),
    sa.Column("finished_at", Time),
    sa.Column("finish_reason", sa.Text),
    sa.Column("finish_detail", sa.Text),
    sa.Column("expired_at", Time),
    sa.Index("sessions_by_tenant", "tenant_id", "created_at", "id"),
    sa.Index("sessions_by_seen", "finished_at", "expired_at", "seen_at"),
)
"""`seen_at` is the last heartbeat; `expired_at` is set when heartbeats stop, and cleared by a new
one. `search_name` is the display name in lower case, because databases lower text differently."""

runs = sa.Table(
    "runs",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("session_id", sa.ForeignKey("sessions.id"), nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("spec", Json, nullable=False),
    sa.Column("user_metadata", Json),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("used_at", Time, nullable=False),
    sa.Column("next_seq", sa.BigInteger, nullable=False),
    sa.Column("applied", sa.BigInteger, nullable=False),
    sa.Column("snapshot_applied", sa.BigInteger, nullable=False),
    sa.Column("snapshot", sa.Text),
    sa.Column("forgotten_seq", sa.BigInteger, nullable=False, server_default=sa.text("-1")),
    sa.Column("num_steps", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("group_id", sa.Text, nullable=False, server_default=sa.text("''")),
    sa.Index("runs_by_tenant", "tenant_id", "created_at", "id"),
    sa.Index("runs_by_session", "session_id"),
    sa.Index("runs_by_group", "group_id"),
)
"""A model in training. `applied` counts the operations that changed it; `snapshot` is the directory
of its state after the first `snapshot_applied` of them; the rest is replayed from payloads.
A snapshot with a slash in its name is a place in the object store.
`num_steps` counts optimizer steps, also those whose rows in `steps` have been dropped; `group_id`
is the worker group that owns the model."""

samplers = sa.Table(
    "samplers",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("session_id", sa.ForeignKey("sessions.id"), nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("model_path", sa.Text),
    sa.Column("checkpoint_id", sa.Text),
    sa.Column("num_clones", sa.BigInteger, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("used_at", Time, nullable=False, server_default=sa.text("0")),
    sa.Index("samplers_by_session", "session_id"),
    sa.Index("samplers_by_checkpoint", "checkpoint_id"),
)

checkpoints = sa.Table(
    "checkpoints",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("tenant_id", sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("project_id", sa.Text, nullable=False),
    sa.Column("run_id", sa.Text, nullable=False),
    sa.Column("segment", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("base_model", sa.Text, nullable=False),
    sa.Column("spec", Json, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("is_public", sa.Boolean, nullable=False),
    sa.Column("is_ephemeral", sa.Boolean, nullable=False),
    sa.Column("user_metadata", Json),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("expires_at", Time),
    sa.Column("deleted_at", Time),
    sa.Column("place", sa.Text, nullable=False, server_default=sa.text("''")),
    sa.Index("checkpoints_by_tenant", "tenant_id", "created_at", "id"),
    sa.Index("checkpoints_by_run", "run_id", "created_at"),
    sa.Index("checkpoints_by_session", "session_id"),
    sa.Index("checkpoints_by_end", "expires_at"),
    _partial_index("checkpoints_deleted", "id", where="deleted_at IS NOT NULL"),
    _partial_index("checkpoints_ephemeral", "session_id", where="is_ephemeral"),
    _partial_index("checkpoints_public", "run_id", where="is_public"),
    _partial_index("checkpoints_by_place", "place", where="place <> ''"),
    _partial_index(
        "checkpoints_by_path",
        "run_id",
        "segment",
        "name",
        unique=True,
        where="deleted_at IS NULL",
    ),
)
"""Checkpoints. Their files are at `place` in the object store, which copies share; if it is empty,
in the directory `checkpoints/<id>` of the home. An ephemeral one belongs to a sampling session and
is not listed. A deleted row stays until its files are removed."""

jobs = sa.Table(
    "jobs",
    METADATA,
    sa.Column("no", Serial, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("tenant_id", sa.ForeignKey("tenants.id"), nullable=False),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("key", sa.Text, unique=True),
    sa.Column("run_id", sa.Text),
    sa.Column("sampler_id", sa.Text),
    sa.Column("position", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("payload", sa.LargeBinary),
    sa.Column("payload_bytes", sa.BigInteger, nullable=False),
    sa.Column("is_proto", sa.Boolean, nullable=False),
    sa.Column("result", sa.LargeBinary),
    sa.Column("result_bytes", sa.BigInteger, nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("category", sa.Text),
    sa.Column("applied", sa.BigInteger),
    sa.Column("num_sequences", sa.Integer, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("started_at", Time),
    sa.Column("finished_at", Time),
    sa.Column("fetched_at", Time),
    sa.Column("num_tokens", sa.BigInteger, nullable=False, server_default=sa.text("0")),
    sa.Column("base_model", sa.Text),
    sa.Column("cancelled_at", Time),
    sa.Column("group_id", sa.Text, nullable=False, server_default=sa.text("''")),
    sa.Column("payload_ref", sa.Text),
    sa.Column("process_id", sa.Text),
    sa.Index("jobs_by_state", "state", "group_id", "no"),
    _partial_index(
        "jobs_open",
        "tenant_id",
        "payload_bytes",
        "num_tokens",
        where="finished_at IS NULL",
    ),
    sa.Index("jobs_by_run", "run_id", "applied"),
    _partial_index("jobs_fetched", "fetched_at", where="fetched_at IS NOT NULL"),
    _partial_index("jobs_unfetched", "finished_at", where="fetched_at IS NULL"),
    _partial_index(
        "jobs_by_process", "process_id", where="process_id IS NOT NULL AND finished_at IS NULL"
    ),
    sqlite_autoincrement=True,
)
"""Jobs. `no` is the order of arrival, `position` the sequence number within the run, `applied` the
number among the operations that changed the run. `is_proto` marks protobuf payloads. `group_id` is
the worker group that runs it: the group of its run, or the one that was chosen for a sample.
`payload_ref` is the place of a large payload in the object store; `payload` is empty then.
`process_id` is the API process whose client waits for the result, if it cannot be fetched later."""

aliases = sa.Table(
    "aliases",
    METADATA,
    sa.Column("tenant_id", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("checkpoint_id", sa.Text, nullable=False),
    sa.Column("updated_at", sa.Float, nullable=False),
)
"""Names that tenants give to checkpoints, for clients of the OpenAI and Anthropic APIs."""

unused_blobs = sa.Table(
    "unused_blobs",
    METADATA,
    sa.Column("place", sa.Text, primary_key=True),
)
"""Places in the object store that no row names any more, until their objects are removed."""

completions = sa.Table(
    "completions",
    METADATA,
    sa.Column("no", Serial, primary_key=True, autoincrement=True),
    sa.Column("sampler_id", sa.Text, nullable=False),
    sa.Column("clone", sa.BigInteger, nullable=False),
    sa.Column("job_id", sa.Text, nullable=False, unique=True),
    sa.Column("result_bytes", sa.BigInteger),
    sa.Column("created_at", Time, nullable=False),
    sa.Index("completions_by_client", "sampler_id", "clone", "no"),
    sa.Index("completions_by_time", "created_at"),
    sqlite_autoincrement=True,
)
"""Finished samples per sampling client, in order; `result_bytes` is null for failures."""

repeats = sa.Table(
    "repeats",
    METADATA,
    sa.Column("tenant_id", sa.Text, primary_key=True),
    sa.Column("endpoint", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("answer", sa.Text, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Index("repeats_by_time", "created_at"),
)
"""Responses of idempotency keys: the id of the created object."""

steps = sa.Table(
    "steps",
    METADATA,
    sa.Column("no", Serial, primary_key=True, autoincrement=True),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("run_id", sa.Text),
    sa.Column("sampler_id", sa.Text),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("job_id", sa.Text, nullable=False),
    sa.Column("num_tokens", sa.BigInteger, nullable=False),
    sa.Column("metrics", Json),
    sa.Column("queued_at", Time, nullable=False),
    sa.Column("started_at", Time, nullable=False),
    sa.Column("finished_at", Time, nullable=False),
    sa.Column("position", sa.BigInteger),
    sa.Index("steps_by_run", "run_id", "no"),
    sa.Index("steps_by_session", "session_id", "no"),
    sqlite_autoincrement=True,
)
"""Executed operations, for loss curves and traces. The newest of each session are kept. `position`
is the sequence number within the run."""

usage = sa.Table(
    "usage",
    METADATA,
    sa.Column("tenant_id", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, primary_key=True),
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("base_model", sa.Text, primary_key=True),
    sa.Column("kind", sa.Text, primary_key=True),
    sa.Column("hour", sa.BigInteger, primary_key=True),
    sa.Column("amount", sa.BigInteger, nullable=False),
    sa.Index("usage_by_hour", "tenant_id", "hour"),
    sa.Index("usage_by_run", "run_id"),
)
"""Tokens per hour and kind (training, prefill, prefill_cached, sample), and saved checkpoints.
`run_id` is empty for samples of base models."""

audit = sa.Table(
    "audit",
    METADATA,
    sa.Column("no", Serial, primary_key=True, autoincrement=True),
    sa.Column("tenant_id", sa.Text, nullable=False),
    sa.Column("at", Time, nullable=False),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("details", Json, nullable=False),
    sa.Column("run_id", sa.Text),
    sa.Column("tinker_path", sa.Text),
    sa.Index("audit_by_tenant", "tenant_id", "at"),
    sqlite_autoincrement=True,
)

processes = sa.Table(
    "processes",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("bell", sa.Text, nullable=False),
    sa.Column("started_at", Time, nullable=False),
    sa.Column("seen_at", Time, nullable=False),
    sa.Column("network", sa.Text, nullable=False, server_default=sa.text("''")),
    sa.Column("stream_address", sa.Text, nullable=False, server_default=sa.text("''")),
)
"""Running processes; `bell` is the UDP address for wake-up messages, which processes of the same
`network` can reach; `stream_address` the TCP address for the tokens of a worker's samples."""

groups = sa.Table(
    "groups",
    METADATA,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("base_models", Json, nullable=False),
    sa.Column("models_source", sa.Text, nullable=False),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("load", Json, nullable=False),
    sa.Column("num_moves", sa.BigInteger, nullable=False),
    sa.Column("started_at", Time, nullable=False),
    sa.Column("seen_at", Time, nullable=False),
)
"""Worker groups. A group owns models and runs their jobs; the group of a server with one worker has
an empty id. `models_source` identifies the settings that name its base models; `num_moves` counts
the transactions that gave it models or jobs of other groups."""

leases = sa.Table(
    "leases",
    METADATA,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("until", Time, nullable=False),
)
"""Exclusive rights, such as being the worker of a group. `epoch` grows with every new owner, so
that a replaced worker notices it."""
