"""A stand-in for the Hugging Face Hub on loopback: repositories in memory, commits, branches, LFS uploads, tokens.

It answers what `huggingface_hub` 2.4 asks for when it pushes and pulls. Xet is not spoken: clients need
HF_HUB_DISABLE_XET=1, and HF_ENDPOINT before they import huggingface_hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
TOKENS = {"hf_readwrite": True, "hf_readonly": False}


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    lfs: set[str] = field(default_factory=set)

    def find(self, revision: str) -> str | None:
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None


@dataclass
class Hub:
    """What the server holds.

    Args:
        url: set HF_ENDPOINT to it.
        refuse_uploads: numbers (from 1) of uploads of large files that fail.
        refuse_commits: numbers of commits that fail.
        arrived: set when an upload is waiting for `go_on`.
        go_on: uploads wait for it.
        uploads: sizes of large files that arrived whole.
        fetched: paths of files that were downloaded.
    """

    url: str = ""
    refuse_uploads: set[int] = field(default_factory=set)
    refuse_commits: set[int] = field(default_factory=set)
    arrived: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    uploads: list[int] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=lambda: {"upload": 0, "commit": 0})

    def __post_init__(self) -> None:
        self.go_on.set()

    def refuses(self, what: str) -> bool:
        """Count an upload or a commit; whether it is to fail."""
        self.asked[what] += 1
        return self.asked[what] in (self.refuse_uploads if what == "upload" else self.refuse_commits)

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Of a client process that knows this server only, with a cache of its own."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING_FACE"))}
        mine = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
        mine |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
        return kept | mine | ({"HF_TOKEN": token} if token else {})

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        found = self.repositories[repo]
        return found.commits[found.branches.get(revision, revision)]


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", commit: str = "") -> None:
        self.status, self.code, self.commit = status, code, commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        try:
            for method, pattern, action in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in method:
                    action(self, body, **match.groupdict())
                    return
            raise _Refused(404)
        except _Refused as refused:
            headers = {"X-Error-Code": refused.code} if refused.code else {}
            self._send({"error": refused.code or "no"}, refused.status, headers | _commit_header(refused.commit))

    def _send(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._raw(json.dumps(value).encode(), status, {"Content-Type": "application/json"} | (headers or {}))

    def _raw(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _token(self) -> str | None:
        word = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        if word is not None and word not in TOKENS:
            raise _Refused(401)
        return word

    def _writer(self) -> None:
        if not TOKENS.get(self._token() or "", False):
            raise _Refused(403 if self._token() else 401)

    def _repo(self, repo: str) -> Repository:
        token, found = self._token(), self.hub.repositories.get(repo)
        if found is None or (found.private and token is None):
            raise _Refused(404, "RepoNotFound")
        return found

    def _commit(self, repo: str, revision: str) -> str:
        found = self._repo(repo).find(revision)
        if found is None:
            raise _Refused(404, "RevisionNotFound")
        return found

    def whoami(self, body: bytes) -> None:
        if self._token() is None:
            raise _Refused(401)
        self._send({"name": "user", "type": "user", "orgs": []})

    def create(self, body: bytes) -> None:
        self._writer()
        asked = json.loads(body)
        repo = f"{asked.get('organization') or 'user'}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo}
        if repo in self.hub.repositories:
            self._send(answer, 409)
            return
        self.hub.repositories[repo] = Repository(asked.get("visibility") == "private" or asked.get("private") is True)
        self._send(answer)

    def branch(self, body: bytes, repo: str, revision: str) -> None:
        self._writer()
        found = self._repo(repo)
        if revision in found.branches:
            raise _Refused(409)
        found.branches[revision] = found.branches["main"]
        self._send({})

    def yaml(self, body: bytes) -> None:
        self._send({"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        self._writer()
        there, files = self._repo(repo).commits[self._commit(repo, revision)], []
        for asked in json.loads(body)["files"]:
            path = asked["path"]
            lfs = path.endswith(".safetensors")
            answer = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            files.append(answer | ({"oid": _etag(there[path], lfs)} if path in there else {}))
        self._send({"files": files})

    def batch(self, body: bytes, repo: str) -> None:
        self._writer()
        answers = []
        for wanted in json.loads(body)["objects"]:
            answer: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                place = f"{self.hub.url}/lfs/{wanted['oid']}"
                answer["actions"] = {"upload": {"href": place}, "verify": {"href": place}}
            answers.append(answer)
        self._send({"transfer": "basic", "objects": answers})

    def upload(self, body: bytes, oid: str) -> None:
        self.hub.arrived.set()
        if not self.hub.go_on.wait(60) or self.hub.refuses("upload"):
            raise _Refused(400)
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.hub.uploads.append(len(body))
        self._send({})

    def verify(self, body: bytes, oid: str) -> None:
        if len(self.hub.objects.get(oid, b"")) != json.loads(body)["size"]:
            raise _Refused(422)
        self._send({})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        self._writer()
        if self.hub.refuses("commit"):
            raise _Refused(400)
        found = self._repo(repo)
        files = dict(found.commits[self._commit(repo, revision)])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
                found.lfs.add(value["path"])
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
        sha = hashlib.sha1(body + revision.encode() + str(len(found.commits)).encode()).hexdigest()
        found.commits[sha], found.branches[revision] = files, sha
        self._send({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})

    def info(self, body: bytes, repo: str, revision: str = "main") -> None:
        sha, found = self._commit(repo, revision), self._repo(repo)
        names = [{"rfilename": name} for name in found.commits[sha]]
        self._send({"id": repo, "modelId": repo, "sha": sha, "private": found.private, "tags": [], "siblings": names})

    def tree(self, body: bytes, repo: str, revision: str) -> None:
        found = self._repo(repo)
        entries = []
        for name, data in found.commits[self._commit(repo, revision)].items():
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _etag(data, False)}
            if name in found.lfs:
                entry["lfs"] = {"oid": _etag(data, True), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        self._send(entries)

    def resolve(self, body: bytes, repo: str, revision: str, file: str) -> None:
        sha = self._commit(repo, revision)
        found = self._repo(repo)
        if file not in found.commits[sha]:
            raise _Refused(404, "EntryNotFound", sha)
        data = found.commits[sha][file]
        etag = f'"{_etag(data, file in found.lfs)}"'
        headers = _commit_header(sha) | {"ETag": etag, "X-Linked-Etag": etag, "X-Linked-Size": str(len(data))}
        headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if self.command == "GET":
            self.hub.fetched.append(file)
        self._raw(data, 200, headers)


def _etag(data: bytes, lfs: bool) -> str:
    return hashlib.sha256(data).hexdigest() if lfs else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _commit_header(commit: str) -> dict[str, str]:
    return {"X-Repo-Commit": commit} if commit else {}


_REPO, _REV = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
_ROUTES: list[tuple[tuple[str, ...], str, Any]] = [
    (("GET",), "/api/whoami-v2", _Handler.whoami),
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.yaml),
    (("POST",), f"/api/models/{_REPO}/branch/{_REV}", _Handler.branch),
    (("POST",), f"/api/models/{_REPO}/preupload/{_REV}", _Handler.preupload),
    (("POST",), f"/{_REPO}\\.git/info/lfs/objects/batch", _Handler.batch),
    (("PUT",), "/lfs/(?P<oid>[0-9a-f]{64})", _Handler.upload),
    (("POST",), "/lfs/(?P<oid>[0-9a-f]{64})", _Handler.verify),
    (("POST",), f"/api/models/{_REPO}/commit/{_REV}", _Handler.commit),
    (("GET",), f"/api/models/{_REPO}/revision/{_REV}", _Handler.info),
    (("GET",), f"/api/models/{_REPO}/tree/{_REV}", _Handler.tree),
    (("POST",), f"/api/models/{_REPO}/paths-info/{_REV}", _Handler.tree),
    (("GET",), f"/api/models/{_REPO}", _Handler.info),
    (("GET", "HEAD"), f"/{_REPO}/resolve/{_REV}/(?P<file>.+)", _Handler.resolve),
]


@contextmanager
def serving() -> Iterator[Hub]:
    """A running server."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
