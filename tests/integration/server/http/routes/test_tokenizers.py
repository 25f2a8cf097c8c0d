"""The tokenizers of base models: digest first, then files, and never a path of the server."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_harness import House
from tests.support.resources import ready_model
from tinkex.models import TINY_FOLDER
from tinkex.store import settings
from tinkex.tokenizer_files import digest_files, read_tokenizer_files

URL = "/tokenizer?base_model=tinkex/bigram"


def serve_tokenizer(house: House, folder: Path | None, **fields: Any) -> None:
    """Have the worker's announcement name a folder."""

    def change(db: Any) -> None:
        (model,) = settings.get(db, "base_models")
        told = {"tokenizer_folder": None if folder is None else str(folder), **fields}
        settings.put(db, "base_models", [{**model, **told}])

    house.write(change)


def test_files_are_given_to_those_who_name_the_digest(house: House) -> None:
    serve_tokenizer(house, TINY_FOLDER)
    expected = read_tokenizer_files(TINY_FOLDER)

    first = house.ask("GET", URL)
    about = first.json()
    full = house.ask("GET", f"{URL}&digest={about['digest']}").json()

    assert about["files"] == {} and about["digest"] == digest_files(expected)
    assert about["tokenizer_id"] == "tinkex/bigram"
    assert {name: base64.b64decode(text) for name, text in full["files"].items()} == expected
    assert first.headers["etag"] == f'"{about["digest"]}"'
    again = house.ask("GET", URL, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_changed_file_changes_the_digest(house: House, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("a")
    serve_tokenizer(house, tmp_path)
    before = house.ask("GET", URL).json()["digest"]
    (tmp_path / "vocab.txt").write_text("bc")
    after = house.ask("GET", URL).json()["digest"]
    assert before != after
    stale = house.ask("GET", f"{URL}&digest={before}")
    assert stale.status_code == 404 and after in stale.json()["error"]


def test_no_key_no_tokenizer(house: House) -> None:
    serve_tokenizer(house, TINY_FOLDER)
    assert house.ask("GET", URL, key=None).status_code == 401


@pytest.mark.parametrize(
    ("query", "status"),
    [("", 422), ("?base_model=nope", 404), ("?base_model=a%20b", 422), ("?digest=xyz", 422)],
)
def test_other_questions_are_refused(house: House, query: str, status: int) -> None:
    assert house.ask("GET", f"/tokenizer{query}").status_code == status


def test_a_folder_that_is_gone_is_not_named(house: House, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "vocab.txt").mkdir()
    for folder in (None, tmp_path / "gone", tmp_path / "model"):
        serve_tokenizer(house, folder)
        answer = house.ask("GET", URL)
        assert answer.status_code == 404
        assert str(tmp_path) not in answer.text


def test_clients_are_told_a_name_and_no_path(house: House) -> None:
    serve_tokenizer(house, TINY_FOLDER)
    session_id = house.session()
    run_id = ready_model(house, session_id)
    info = house.post("/get_info", {"model_id": run_id}).json()
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tinkex/bigram"}
    made = house.post("/create_sampling_session", body).json()
    sampler = house.ask("GET", f"/samplers/{made['sampling_session_id']}").json()

    assert info["model_data"]["tokenizer_id"] == sampler["tokenizer_id"] == "tinkex/bigram"
    assert str(TINY_FOLDER) not in str(info) + str(sampler)
    serve_tokenizer(house, TINY_FOLDER, tokenizer_id="Qwen/Qwen3-8B")
    info = house.post("/get_info", {"model_id": run_id}).json()
    assert info["model_data"]["tokenizer_id"] == "Qwen/Qwen3-8B"
