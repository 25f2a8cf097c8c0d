"""The first tables, as they were made; frozen, because stores with them exist."""

from __future__ import annotations

from collections.abc import Iterator

#: What the databases do not spell alike.
_TYPE_NAMES = {
    "sqlite": {
        "counter": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
        "serial": "INTEGER",
        "time": "DOUBLE",
        "json": "JSON",
        "bytes": "BLOB",
        "is_true": " = 1",
    },
    "postgresql": {
        "counter": "BIGSERIAL NOT NULL PRIMARY KEY",
        "serial": "BIGSERIAL",
        "time": "DOUBLE PRECISION",
        "json": "JSONB",
        "bytes": "BYTEA",
        "is_true": "",
    },
}

_STATEMENTS = """
CREATE TABLE settings (
    name TEXT NOT NULL,
    value {json} NOT NULL,
    PRIMARY KEY (name)
);

CREATE TABLE tenants (
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at {time} NOT NULL,
    PRIMARY KEY (id),
    UNIQUE (name)
);

CREATE TABLE api_keys (
    id {serial} NOT NULL,
    tenant_id TEXT NOT NULL,
    name TEXT NOT NULL,
    note TEXT,
    hint TEXT NOT NULL,
    digest TEXT NOT NULL,
    created_at {time} NOT NULL,
    revoked_at {time},
    PRIMARY KEY (id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    UNIQUE (digest)
);

CREATE TABLE sessions (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    project_id TEXT NOT NULL,
    display_name TEXT,
    search_name TEXT NOT NULL,
    tags {json} NOT NULL,
    user_metadata {json} NOT NULL,
    sdk_version TEXT NOT NULL,
    created_at {time} NOT NULL,
    seen_at {time} NOT NULL,
    finished_at {time},
    finish_reason TEXT,
    finish_detail TEXT,
    expired_at {time},
    PRIMARY KEY (id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
CREATE INDEX sessions_by_seen ON sessions (finished_at, expired_at, seen_at);
CREATE INDEX sessions_by_tenant ON sessions (tenant_id, created_at, id);

CREATE TABLE runs (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    base_model TEXT NOT NULL,
    spec {json} NOT NULL,
    user_metadata {json},
    state TEXT NOT NULL,
    created_at {time} NOT NULL,
    used_at {time} NOT NULL,
    next_seq BIGINT NOT NULL,
    applied BIGINT NOT NULL,
    snapshot_applied BIGINT NOT NULL,
    snapshot TEXT,
    PRIMARY KEY (id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    FOREIGN KEY(session_id) REFERENCES sessions (id)
);
CREATE INDEX runs_by_session ON runs (session_id);
CREATE INDEX runs_by_tenant ON runs (tenant_id, created_at, id);

CREATE TABLE samplers (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    base_model TEXT NOT NULL,
    model_path TEXT,
    checkpoint_id TEXT,
    num_clones BIGINT NOT NULL,
    created_at {time} NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    FOREIGN KEY(session_id) REFERENCES sessions (id)
);
CREATE INDEX samplers_by_checkpoint ON samplers (checkpoint_id);
CREATE INDEX samplers_by_session ON samplers (session_id);

CREATE TABLE checkpoints (
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    project_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    segment TEXT NOT NULL,
    name TEXT NOT NULL,
    base_model TEXT NOT NULL,
    spec {json} NOT NULL,
    size_bytes BIGINT NOT NULL,
    is_public BOOLEAN NOT NULL,
    is_ephemeral BOOLEAN NOT NULL,
    user_metadata {json},
    created_at {time} NOT NULL,
    expires_at {time},
    deleted_at {time},
    PRIMARY KEY (id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id)
);
CREATE INDEX checkpoints_by_end ON checkpoints (expires_at);
CREATE UNIQUE INDEX checkpoints_by_path
    ON checkpoints (run_id, segment, name)
    WHERE deleted_at IS NULL;
CREATE INDEX checkpoints_by_run ON checkpoints (run_id, created_at);
CREATE INDEX checkpoints_by_session ON checkpoints (session_id);
CREATE INDEX checkpoints_by_tenant ON checkpoints (tenant_id, created_at, id);
CREATE INDEX checkpoints_deleted ON checkpoints (id) WHERE deleted_at IS NOT NULL;
CREATE INDEX checkpoints_ephemeral ON checkpoints (session_id) WHERE is_ephemeral{is_true};
CREATE INDEX checkpoints_public ON checkpoints (run_id) WHERE is_public{is_true};

CREATE TABLE jobs (
    no {counter},
    id TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    "key" TEXT,
    run_id TEXT,
    sampler_id TEXT,
    position BIGINT NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL,
    payload {bytes},
    payload_bytes BIGINT NOT NULL,
    is_proto BOOLEAN NOT NULL,
    result {bytes},
    result_bytes BIGINT NOT NULL,
    error TEXT,
    category TEXT,
    applied BIGINT,
    num_sequences INTEGER NOT NULL,
    created_at {time} NOT NULL,
    started_at {time},
    finished_at {time},
    fetched_at {time},
    UNIQUE (id),
    FOREIGN KEY(tenant_id) REFERENCES tenants (id),
    UNIQUE ("key")
);
CREATE INDEX jobs_by_run ON jobs (run_id, applied);
CREATE INDEX jobs_by_state ON jobs (state, no);
CREATE INDEX jobs_fetched ON jobs (fetched_at) WHERE fetched_at IS NOT NULL;
CREATE INDEX jobs_open ON jobs (tenant_id, payload_bytes) WHERE finished_at IS NULL;
CREATE INDEX jobs_unfetched ON jobs (finished_at) WHERE fetched_at IS NULL;

CREATE TABLE completions (
    no {counter},
    sampler_id TEXT NOT NULL,
    clone BIGINT NOT NULL,
    job_id TEXT NOT NULL,
    result_bytes BIGINT,
    created_at {time} NOT NULL,
    UNIQUE (job_id)
);
CREATE INDEX completions_by_client ON completions (sampler_id, clone, no);
CREATE INDEX completions_by_time ON completions (created_at);

CREATE TABLE repeats (
    tenant_id TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    "key" TEXT NOT NULL,
    answer TEXT NOT NULL,
    created_at {time} NOT NULL,
    PRIMARY KEY (tenant_id, endpoint, "key")
);
CREATE INDEX repeats_by_time ON repeats (created_at);

CREATE TABLE steps (
    no {counter},
    session_id TEXT NOT NULL,
    run_id TEXT,
    sampler_id TEXT,
    kind TEXT NOT NULL,
    job_id TEXT NOT NULL,
    num_tokens BIGINT NOT NULL,
    metrics {json},
    queued_at {time} NOT NULL,
    started_at {time} NOT NULL,
    finished_at {time} NOT NULL
);
CREATE INDEX steps_by_run ON steps (run_id, no);
CREATE INDEX steps_by_session ON steps (session_id, no);

CREATE TABLE usage (
    tenant_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    base_model TEXT NOT NULL,
    kind TEXT NOT NULL,
    hour BIGINT NOT NULL,
    amount BIGINT NOT NULL,
    PRIMARY KEY (tenant_id, session_id, run_id, base_model, kind, hour)
);
CREATE INDEX usage_by_hour ON usage (tenant_id, hour);
CREATE INDEX usage_by_run ON usage (run_id);

CREATE TABLE audit (
    no {counter},
    tenant_id TEXT NOT NULL,
    at {time} NOT NULL,
    event TEXT NOT NULL,
    details {json} NOT NULL,
    run_id TEXT,
    tinker_path TEXT
);
CREATE INDEX audit_by_tenant ON audit (tenant_id, at);

CREATE TABLE processes (
    id TEXT NOT NULL,
    role TEXT NOT NULL,
    bell TEXT NOT NULL,
    started_at {time} NOT NULL,
    seen_at {time} NOT NULL,
    PRIMARY KEY (id)
);

CREATE TABLE leases (
    name TEXT NOT NULL,
    owner TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    until {time} NOT NULL,
    PRIMARY KEY (name)
);
"""


def statements(dialect: str) -> Iterator[str]:
    """The statements that make the tables, in the words of a database."""
    for statement in _STATEMENTS.format_map(_TYPE_NAMES[dialect]).split(";"):
        if statement.strip():
            yield statement.strip()
