"""A fake Hugging Face Hub with the endpoints that an upload needs."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.http_server import SmallServer

TOKEN = "hf_test"
USER = "anna"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    """A repository: its branches, each with files."""

    is_private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {}})


@dataclass
class Commit:
    """The data of one upload."""

    repo_id: str
    revision: str
    summary: str
    files: dict[str, bytes]


class FakeHub(SmallServer):
    """Keeps repositories in memory; commits are hardly checked."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.commits: list[Commit] = []
        self.refuses: int | None = None
        """If set, every write fails with this status."""
        super().__init__(_Handler)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        """Suppress the log."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.refuse(401)
        elif path == "/api/whoami-v2":
            self.reply({"name": USER, "type": "user", "orgs": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/discussions/1", path):
            self.reply(_discussion(match[1]))
        elif file is not None:
            self.send_file(*file.groups())
        else:
            self.describe(path.removeprefix("/api/models/"))

    def describe(self, repo_id: str) -> None:
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            return self.refuse(404, "RepoNotFound")
        return self.reply({"id": repo_id, "private": repo.is_private, "siblings": []})

    def send_file(self, repo_id: str, revision: str, name: str) -> None:
        repo = self.hub.repos.get(repo_id)
        if repo is None:
            return self.refuse(404, "RepoNotFound")
        if revision not in repo.branches:
            return self.refuse(404, "RevisionNotFound")
        content = repo.branches[revision].get(name)
        if content is None:
            return self.refuse(404, "EntryNotFound")
        return self.send(200, content, {"ETag": '"x"', "X-Repo-Commit": COMMIT})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        path = unquote(urlsplit(self.path).path)
        deed = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/(.+)", path)
        if self.hub.refuses is not None:
            self.refuse(self.hub.refuses)
        elif path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self.create_repo(json.loads(body))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/discussions", path):
            repo = self.hub.repos[match[1]]
            repo.branches["refs/pr/1"] = dict(repo.branches["main"])
            self.reply({"num": 1})
        elif deed is not None:
            self.change(*deed.groups(), body)
        else:
            raise AssertionError(f"nobody expected POST {path}")

    def change(self, repo_id: str, verb: str, revision: str, body: bytes) -> None:
        repo = self.hub.repos[repo_id]
        if verb == "branch":
            is_new = revision not in repo.branches
            repo.branches.setdefault(revision, dict(repo.branches["main"]))
            return self.reply({}) if is_new else self.refuse(409)
        if revision not in repo.branches:
            return self.refuse(404, "RevisionNotFound")
        if verb == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            rows = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            return self.reply({"files": rows})
        return self.commit(repo_id, revision, body)

    def create_repo(self, asked: dict[str, Any]) -> None:
        owner = asked.get("organization") or USER
        repo_id = f"{owner}/{asked['name'].rpartition('/')[2]}"
        url = f"{self.hub.url}/{repo_id}"
        if repo_id in self.hub.repos:
            body = {"url": url, "error": "You already created this model repo"}
            return self.send(409, json.dumps(body).encode(), {"Content-Type": "application/json"})
        is_private = asked.get("private", asked.get("visibility") == "private")
        self.hub.repos[repo_id] = Repo(is_private=bool(is_private))
        return self.reply({"url": url, "name": repo_id, "id": "1"})

    def commit(self, repo_id: str, revision: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines() if line]
        files = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        summary = lines[0]["value"]["summary"]
        self.hub.commits.append(Commit(repo_id, revision, summary, files))
        self.hub.repos[repo_id].branches[revision].update(files)
        url = f"{self.hub.url}/{repo_id}/commit/{COMMIT}"
        return self.reply({"commitUrl": url, "commitOid": COMMIT})

    def reply(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status: int, code: str | None = None) -> None:
        headers = {"X-Error-Code": code} if code else {}
        self.send(status, b'{"error": "no"}', headers | {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _discussion(repo_id: str) -> dict[str, Any]:
    return {
        "title": "a pull request",
        "num": 1,
        "author": {"name": USER},
        "createdAt": "2026-01-01T00:00:00.000Z",
        "status": "draft",
        "repo": {"name": repo_id, "type": "model"},
        "isPullRequest": True,
        "events": [],
        "changes": {"base": "refs/heads/main"},
        "filesWithConflicts": [],
    }
