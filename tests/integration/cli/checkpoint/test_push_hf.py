"""`checkpoint push-hf` against a fake hub."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from huggingface_hub import constants

from tests.integration.cli.checkpoint.download_sources import ADAPTER, manifest, offer_archive, tar
from tests.integration.cli.conftest import RunCli, SeededServer
from tests.integration.cli.test_official_shapes import OFFICIAL, official
from tests.integration.conftest import BASE_MODEL
from tests.support.fake_hub import TOKEN, FakeHub, Repo
from tinkex.ids import parse_tinker_path
from tinkex.installation import install_command

FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture
def seeded(shared_seeded: SeededServer) -> SeededServer:
    """Nothing here changes the server."""
    return shared_seeded


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    hub = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    hub.close()


def test_adapter_is_uploaded_with_model_card(
    hub: FakeHub, seeded: SeededServer, tinkex: RunCli
) -> None:
    words = ("checkpoint", "push-hf", seeded.training, "-r", "anna/mine", "--public")
    found = tinkex(*words, "--commit-message", "first", "--json").json
    (commit,) = hub.commits
    assert found == {
        "checkpoint_path": seeded.training,
        "repo_id": "anna/mine",
        "public": True,
        "url": f"{hub.url}/anna/mine",
        "commit_url": f"{hub.url}/anna/mine/commit/0123456789abcdef0123456789abcdef01234567",
        "files": FILES,
    }
    assert (commit.revision, commit.summary) == ("main", "first")
    assert sorted(commit.files) == FILES
    card = commit.files["README.md"].decode()
    assert card.startswith(f'---\nbase_model: "{BASE_MODEL}"\nlibrary_name: peft\n')
    assert seeded.training in card
    assert "- LoRA rank: 8" in card
    assert not hub.repos["anna/mine"].is_private


@pytest.mark.skipif(not OFFICIAL.exists(), reason="the official command line is not installed")
def test_json_matches_official_cli(
    hub: FakeHub, seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    theirs = official("checkpoint", "push-hf", seeded.training, "-r", "anna/theirs")
    ours = tinkex("checkpoint", "push-hf", seeded.training, "-r", "anna/ours", "--json").json
    assert {key: ours[key] for key in theirs} == theirs | {"repo_id": "anna/ours"}
    first, second = hub.commits
    assert sorted(second.files) == FILES
    assert set(first.files) - set(FILES) == {"manifest.json", "tinkex.json"}


def test_branch_is_created_and_reported(hub: FakeHub, seeded: SeededServer, tinkex: RunCli) -> None:
    """The official CLI neither creates nor reports the branch."""
    derived = tinkex("checkpoint", "push-hf", seeded.training, "--json").json
    run_id = parse_tinker_path(seeded.training).run_id.replace(":", "-")
    assert derived["repo_id"] == f"anna/tinker-bigram-{run_id}"
    assert derived["revision"] == "weights-0001"
    assert derived["public"] is False
    assert "weights-0001" in hub.repos[derived["repo_id"]].branches
    words = ("checkpoint", "push-hf", seeded.training, "-r", "mine", "--revision", "v2", "--json")
    assert tinkex(*words).json["revision"] == "v2"
    assert tinkex(*words).json["repo_id"] == "anna/mine"
    assert [commit.revision for commit in hub.commits] == ["weights-0001", "v2", "v2"]


def test_pull_request_is_reported(hub: FakeHub, seeded: SeededServer, tinkex: RunCli) -> None:
    words = ("checkpoint", "push-hf", seeded.training, "-r", "anna/mine", "--create-pr")
    found = tinkex(*words, "--json").json
    assert found["pr_url"] == f"{hub.url}/anna/mine/discussions/1"
    assert found["revision"] == "refs/pr/1"
    assert hub.repos["anna/mine"].branches["main"] == {}
    assert "Pull Request" in tinkex(*words).out
    assert tinkex(*words, "--revision", "v2").exit_code == 2


def test_server_files_are_not_uploaded(hub: FakeHub, seeded: SeededServer, tinkex: RunCli) -> None:
    files = {**ADAPTER, "optimizer.safetensors": b"large", "trainer_state.json": b"{}"}
    listed = {**files, "manifest.json": manifest(files)}
    offer_archive(seeded.server, tar(listed))
    words = ("checkpoint", "push-hf", seeded.training, "-r", "anna/mine", "--json")
    assert tinkex(*words).json["files"] == FILES
    assert tinkex(*words, "--no-model-card").json["files"] == FILES[1:]
    assert tinkex(*words, "--ignore-pattern", "*.md").json["files"] == FILES[1:]
    chosen = tinkex(*words, "--allow-pattern", "optim*", "--allow-pattern", "*.json").json["files"]
    assert chosen == [
        "adapter_config.json",
        "manifest.json",
        "optimizer.safetensors",
        "trainer_state.json",
    ]
    nothing = tinkex(*words, "--allow-pattern", "nosuch")
    assert "No file of the checkpoint matches" in nothing.failure["message"]


def test_other_checkpoint_is_not_overwritten_without_force(
    hub: FakeHub, seeded: SeededServer, tinkex: RunCli
) -> None:
    words = ("checkpoint", "push-hf", "-r", "anna/mine")
    assert tinkex(*words, seeded.training).exit_code == 0
    assert tinkex(*words, seeded.training).exit_code == 0
    refused = tinkex(*words, seeded.sampler, "--json")
    assert seeded.training in refused.failure["message"]
    assert "--revision" in refused.failure["hint"]
    assert len(hub.commits) == 2
    assert tinkex(*words, seeded.sampler, "--force").exit_code == 0


def test_existing_repository_keeps_visibility(
    hub: FakeHub, seeded: SeededServer, tinkex: RunCli
) -> None:
    hub.repos["anna/mine"] = Repo(is_private=True)
    words = ("checkpoint", "push-hf", seeded.training, "-r", "anna/mine", "--public")
    result = tinkex(*words)
    assert "already existed and stays private" in result.err
    assert tinkex(*words, "--json").json["public"] is False


def test_existing_model_card_is_kept(hub: FakeHub, seeded: SeededServer, tinkex: RunCli) -> None:
    offer_archive(seeded.server, tar({**ADAPTER, "README.md": b"my own words"}))
    assert tinkex("checkpoint", "push-hf", seeded.training, "-r", "mine").exit_code == 0
    assert hub.commits[0].files["README.md"] == b"my own words"


# --- what can go wrong -----------------------------------------------------------------------


def test_missing_login_is_reported_before_download(
    hub: FakeHub, seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_downloads = len(seeded.server.calls("download"))
    words = ("checkpoint", "push-hf", seeded.training, "-r", "mine")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "rejected your token" in tinkex(*words).err
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent")
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", "/nonexistent")
    refused = tinkex(*words, "--json")
    assert "not logged in" in refused.failure["message"]
    assert "hf auth login" in refused.failure["hint"]
    assert len(seeded.server.calls("download")) == num_downloads


@pytest.mark.parametrize(
    ("status", "text"), [(403, "may not write to anna/mine"), (500, "with status 500")]
)
def test_hub_error_is_reported(
    status: int, text: str, hub: FakeHub, seeded: SeededServer, tinkex: RunCli
) -> None:
    hub.refuses = status
    refused = tinkex("checkpoint", "push-hf", seeded.training, "-r", "anna/mine")
    assert refused.exit_code == 1
    assert text in refused.err


def test_invalid_repo_name(hub: FakeHub, seeded: SeededServer, tinkex: RunCli) -> None:
    refused = tinkex("checkpoint", "push-hf", seeded.training, "-r", "anna/my adapter")
    assert "is not a valid repository name" in refused.err


def test_unreachable_hub_is_reported(
    seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    refused = tinkex("checkpoint", "push-hf", seeded.training, "-r", "anna/mine", "--json")
    assert "The Hub cannot be reached" in refused.failure["message"]


def test_missing_library_error_has_install_command(
    seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "tinkex.engine.models.hub_upload", raising=False)
    refused = tinkex("checkpoint", "push-hf", seeded.training, "-r", "anna/mine", "--json")
    assert "needs huggingface_hub" in refused.failure["message"]
    assert refused.failure["hint"] == f"Run: {install_command('torch')}"


def test_folder_without_adapter_is_not_uploaded(
    hub: FakeHub, seeded: SeededServer, tinkex: RunCli
) -> None:
    offer_archive(seeded.server, tar({"something.bin": b"x"}))
    words = ("checkpoint", "push-hf", seeded.training, "-r", "anna/mine")
    assert "does not contain a PEFT adapter" in tinkex(*words).err
    seeded.server.clear_faults()
    encrypted = {f"{name}.age": content for name, content in ADAPTER.items()}
    offer_archive(seeded.server, tar(encrypted))
    assert "is encrypted" in tinkex(*words).err
    assert hub.repos == {}
