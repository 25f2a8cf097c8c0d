"""The tokenizer endpoint: digest first, then files, and never a path of the server."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.support.resources import create_ready_model
from tests.support.server_harness import ServerHarness, publish_models
from tinkex.models import TINY_FOLDER
from tinkex.store import groups
from tinkex.tokenizer_files import digest_files, read_tokenizer_files

URL = "/tokenizer?base_model=tinkex/bigram"


def serve_tokenizer(harness: ServerHarness, folder: Path | None, **fields: Any) -> None:
    """Store base models as the worker does, with a tokenizer folder."""

    def change(db: Any) -> None:
        group = groups.find(db, "")
        assert group is not None
        (model,) = group.base_models
        changes = {"tokenizer_folder": None if folder is None else str(folder), **fields}
        publish_models(db, {**model, **changes})

    harness.write(change)


def test_tokenizer_files_are_served_by_digest(harness: ServerHarness) -> None:
    serve_tokenizer(harness, TINY_FOLDER)
    expected = read_tokenizer_files(TINY_FOLDER)

    first = harness.send_request("GET", URL)
    about = first.json()
    full = harness.send_request("GET", f"{URL}&digest={about['digest']}").json()

    assert about["files"] == {} and about["digest"] == digest_files(expected)
    assert about["tokenizer_id"] == "tinkex/bigram"
    assert {name: base64.b64decode(text) for name, text in full["files"].items()} == expected
    assert first.headers["etag"] == f'"{about["digest"]}"'
    again = harness.send_request("GET", URL, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_changed_file_changes_digest(harness: ServerHarness, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a")
    serve_tokenizer(harness, tmp_path)
    before = harness.send_request("GET", URL).json()["digest"]
    (tmp_path / "vocab.txt").write_text("bc")
    after = harness.send_request("GET", URL).json()["digest"]
    assert before != after
    stale = harness.send_request("GET", f"{URL}&digest={before}")
    assert stale.status_code == 404 and after in stale.json()["error"]


def test_tokenizer_requires_key(harness: ServerHarness) -> None:
    serve_tokenizer(harness, TINY_FOLDER)
    assert harness.send_request("GET", URL, key=None).status_code == 401


@pytest.mark.parametrize(
    ("query", "status"),
    [("", 422), ("?base_model=nope", 404), ("?base_model=a%20b", 422), ("?digest=xyz", 422)],
)
def test_invalid_tokenizer_requests_are_rejected(
    harness: ServerHarness, query: str, status: int
) -> None:
    assert harness.send_request("GET", f"/tokenizer{query}").status_code == status


def test_missing_folder_path_is_not_disclosed(harness: ServerHarness, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "vocab.txt").mkdir()
    for folder in (None, tmp_path / "gone", tmp_path / "model"):
        serve_tokenizer(harness, folder)
        answer = harness.send_request("GET", URL)
        assert answer.status_code == 404
        assert str(tmp_path) not in answer.text


def test_tokenizer_id_is_not_a_server_path(harness: ServerHarness) -> None:
    serve_tokenizer(harness, TINY_FOLDER)
    session_id = harness.session()
    run_id = create_ready_model(harness, session_id)
    info = harness.post("/get_info", {"model_id": run_id}).json()
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tinkex/bigram"}
    made = harness.post("/create_sampling_session", body).json()
    sampler = harness.send_request("GET", f"/samplers/{made['sampling_session_id']}").json()

    assert info["model_data"]["tokenizer_id"] == sampler["tokenizer_id"] == "tinkex/bigram"
    assert str(TINY_FOLDER) not in str(info) + str(sampler)
    serve_tokenizer(harness, TINY_FOLDER, tokenizer_id="Qwen/Qwen3-8B")
    info = harness.post("/get_info", {"model_id": run_id}).json()
    assert info["model_data"]["tokenizer_id"] == "Qwen/Qwen3-8B"
