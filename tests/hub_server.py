"""A stand-in of the Hugging Face Hub on loopback: what huggingface_hub asks of it, over models that a test has put there.

The facts of a model, the models of an owner, and files: small ones as they are, large ones over a redirect to a second
address, with the headers of the real hub (ETag, X-Repo-Commit, X-Linked-Etag, X-Linked-Size, X-Error-Code), ranges included.
A dataset is a model here: the two have different addresses and the same answers.
It also takes uploads: a model is made, small files come in the commit, large ones by git-LFS before it.
Not there: Xet, by which the real hub moves large files for clients with hf_xet; HF_HUB_DISABLE_XET=1 does without.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

LARGE = (".safetensors", ".bin", ".ckpt", ".pth")
TOKEN = "hf_of_a_test"


def git_sha1(content: bytes) -> str:
    """The digest that git has a file under."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Model:
    """A repository: its commits, what its branches and tags name, and who may have it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False
    private: bool = False
    large: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 -> content of uploads by git-LFS."""


@dataclass
class Hub:
    """The models, what is wrong with them, and what was asked."""

    address: str = ""
    models: dict[str, Model] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    """Of each request: method and path."""
    logins: list[str | None] = field(default_factory=list)
    """Of each request for a large file at the second address: its token or password."""
    status: int = 200
    """Another one: the answer to everything."""
    damaged: dict[str, int] = field(default_factory=dict)
    """File -> how many times it is sent with a byte changed."""
    broken: dict[str, int] = field(default_factory=dict)
    """File -> how many times its connection ends in the middle."""
    missing: set[str] = field(default_factory=set)
    """Files that are listed and not found."""

    def add(self, repo: str, content: Path | dict[str, bytes], revision: str = "main") -> str:
        """Put a folder's files into a model, and return the commit."""
        if isinstance(content, Path):
            files = (path for path in sorted(content.rglob("*")) if path.is_file())
            content = {path.relative_to(content).as_posix(): path.read_bytes() for path in files}
        model = self.models.setdefault(repo, Model())
        commit = hashlib.sha1("".join(f"{path} {git_sha1(content[path])}" for path in content).encode()).hexdigest()
        model.commits[commit], model.refs[revision] = content, commit
        return commit

    @property
    def sent(self) -> list[str]:
        """The files whose bytes were asked for, not their facts alone."""
        file = re.compile(r"GET /(?:cdn/[^/]+/[^/]+|[^/]+/[^/]+/resolve)/[^/]+/(.*)")
        matches = map(file.fullmatch, self.asked)
        return [unquote(one[1]) for one in matches if one and (not one[1].endswith(LARGE) or "/cdn/" in one[0])]


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve a hub on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def variables(hub: Hub, cache: Path) -> dict[str, str]:
    """The environment in which a command asks this hub, and has its cache here."""
    own = {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    return {**own, "HF_TOKEN_PATH": str(cache / "no_token"), "HF_TOKEN": ""}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub for this process and its cache, tmp_path/cache."""
    from huggingface_hub import constants

    from weights import hub as own

    with serving() as server:
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        cache, no_token = str(tmp_path / "cache"), str(tmp_path / "no_token")
        changed = {"ENDPOINT": server.address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": cache}
        for name, value in {**changed, "HF_HUB_OFFLINE": False, "HF_TOKEN_PATH": no_token}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        own._list_repo_files.cache_clear()
        yield server


def _lfs(path: str, content: bytes, key: str) -> dict[str, Any]:
    """What is said of a large file's content, its SHA-256 under this key; nothing of a small one."""
    about = {key: hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return {"lfs": about} if path.endswith(LARGE) else {}


def _facts(repo: str, model: Model, commit: str) -> dict[str, Any]:
    siblings = [
        {"rfilename": path, "size": len(content), "blobId": git_sha1(content), **_lfs(path, content, "sha256")}
        for path, content in model.commits[commit].items()
    ]
    gated = "auto" if model.is_gated else False
    return {"id": repo, "sha": commit, "private": False, "gated": gated, "tags": [], "siblings": siblings}


def _tree(content: dict[str, bytes], folder: str, is_recursive: bool) -> list[dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    begin = f"{folder}/" if folder else ""
    for path, data in content.items():
        name = path.removeprefix(begin)
        if path.startswith(begin) and "/" in name and not is_recursive:
            path = begin + name.partition("/")[0]
            entries[path] = {"type": "directory", "path": path, "oid": "1" * 40, "size": 0}
        elif path.startswith(begin):
            file = {"type": "file", "path": path, "size": len(data), "oid": git_sha1(data)}
            entries[path] = file | _lfs(path, data, "oid")
    return list(entries.values())


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_PUT(self) -> None:
            self._take(self.path.strip("/").split("/"), self._content())

        def do_POST(self) -> None:
            self._take(urlsplit(self.path).path.strip("/").split("/"), self._content())

        def _content(self) -> bytes:
            hub.asked.append(f"{self.command} {self.path}")
            if "chunked" not in (self.headers.get("transfer-encoding") or ""):
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content

        def _take(self, parts: list[str], content: bytes) -> None:
            """Take a part of an upload."""
            if hub.status != 200:
                return self._say(hub.status, {"error": "the hub is out of order"})
            if parts[0] != "lfs" and self.headers.get("authorization") != f"Bearer {TOKEN}":
                return self._say(401, {"error": "Invalid username or password."})
            if parts[0] == "lfs":
                digest = hashlib.sha256(content).hexdigest()
                hub.models["/".join(parts[1:3])].large[parts[3]] = content
                return self._say(200 if digest == parts[3] else 400, {})
            if parts == ["api", "validate-yaml"]:
                return self._say(200, {"warnings": [], "errors": []})
            asked = [json.loads(line) for line in content.splitlines()]
            if parts == ["api", "repos", "create"]:
                repo = f"{asked[0]['organization']}/{asked[0]['name']}"
                is_new = repo not in hub.models
                if is_new:
                    hub.models[repo] = Model(private=asked[0].get("visibility") == "private")
                return self._say(200 if is_new else 409, {"url": f"{hub.address}/{repo}"})
            if parts[2:] == ["info", "lfs", "objects", "batch"]:
                at = f"{hub.address}/lfs/{parts[0]}/{parts[1].removesuffix('.git')}"
                objects = [{**o, "actions": {"upload": {"href": f"{at}/{o['oid']}"}}} for o in asked[0]["objects"]]
                return self._say(200, {"transfer": "basic", "objects": objects})
            repo = "/".join(parts[2:4])
            if parts[4] == "preupload":
                modes = {one["path"]: "lfs" if one["path"].endswith(LARGE) else "regular" for one in asked[0]["files"]}
                files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
                return self._say(200, {"files": files})
            return self._commit(repo, asked)

        def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
            model = hub.models[repo]
            files = dict(model.commits.get(model.refs.get("main", ""), {}))
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = model.large[value["oid"]]
            commit = hub.add(repo, files)
            self._say(200, {"success": True, "commitOid": commit, "commitUrl": f"{hub.address}/{repo}/commit/{commit}"})

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            url = urlsplit(self.path)
            parts = [unquote(part) for part in url.path.strip("/").split("/")]
            if hub.status != 200:
                self._say(hub.status, {"error": "the hub is out of order"})
            elif parts == ["api", "models"]:
                [owner] = parse_qs(url.query)["author"]
                self._say(200, [{"id": repo} for repo in hub.models if repo.startswith(owner)])
            elif parts[0] == "cdn":
                hub.logins.append(self.headers.get("authorization"))
                self._send("/".join(parts[4:]), hub.models["/".join(parts[1:3])].commits[parts[3]]["/".join(parts[4:])])
            else:
                is_api = parts[0] == "api"
                parts = parts[1:] if parts[0] == "datasets" else parts
                self._about_model("/".join(parts[2:4] if is_api else parts[:2]), parts[4:] if is_api else parts[2:])

        def _about_model(self, repo: str, rest: list[str]) -> None:
            model, has_token = hub.models.get(repo), self.headers.get("authorization") == f"Bearer {TOKEN}"
            if model is None:  # the real one does not tell strangers whether there is a private model
                return self._say(404 if has_token else 401, {}, {"X-Error-Code": "RepoNotFound"} if has_token else {})
            revision = rest[1] if rest else "main"
            commit = model.refs.get(revision, revision)
            if commit not in model.commits:
                return self._say(404, {}, {"X-Error-Code": "RevisionNotFound"})
            if rest[:1] == ["tree"]:
                entries = _tree(model.commits[commit], "/".join(rest[2:]), "recursive=true" in self.path.lower())
                return self._say(200, entries) if entries else self._say(404, {}, {"X-Error-Code": "EntryNotFound"})
            if rest[:1] != ["resolve"]:
                return self._say(200, _facts(repo, model, commit))
            path, about = "/".join(rest[2:]), {"X-Repo-Commit": commit}
            if path not in model.commits[commit] or path in hub.missing:
                return self._say(404, {}, {"X-Error-Code": "EntryNotFound", **about})
            if model.is_gated and not has_token:
                return self._say(401, {}, {"X-Error-Code": "GatedRepo", **about})
            content = model.commits[commit][path]
            if not path.endswith(LARGE):
                return self._send(path, content, {"ETag": f'"{git_sha1(content)}"', **about})
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            storage = hub.address.replace("127.0.0.1", "localhost")  # another host, as the real one's
            linked = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content))}
            return self._say(302, {}, {"Location": f"{storage}/cdn/{repo}/{commit}/{path}", **linked, **about})

        def _send(self, path: str, content: bytes, headers: dict[str, str] | None = None) -> None:
            if self.command == "GET" and hub.damaged.get(path, 0) > 0:
                hub.damaged[path] -= 1
                content = content[:-1] + bytes([content[-1] ^ 1])
            start = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            begin, size = int(start[1]) if start else 0, len(content)
            content = content[: int(start[2]) + 1] if start and start[2] else content
            span = {"Content-Range": f"bytes {begin}-{len(content) - 1}/{size}"} if start else {}
            self._head(206 if start else 200, len(content) - begin, {**(headers or {}), **span})
            if self.command == "HEAD":
                return
            if hub.broken.get(path, 0) > 0:
                hub.broken[path] -= 1
                self.wfile.write(content[begin : begin + (len(content) - begin) // 2])
                self.close_connection = True
            else:
                self.wfile.write(content[begin:])

        def _say(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
            body = json.dumps(content).encode()
            self._head(status, len(body), {"Content-Type": "application/json", **(headers or {})})
            if self.command != "HEAD":
                self.wfile.write(body)

        def _head(self, status: int, size: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(size)}.items():
                self.send_header(name, value)
            self.end_headers()

    return Handler
