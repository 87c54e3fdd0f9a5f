"""A stand-in for Weights & Biases' server: what its client of 2026 asks of it in a run, in a resumed run and in a sync.

    with WandbServer() as server:
        ...                                  # WANDB_BASE_URL=server.address
        server.runs["my-run-id"].history     # the rows that were logged, in order

Run, files and rows are kept in memory. It knows no users, so that every key is taken.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LINES = "wandb-history.jsonl"


@dataclass
class Run:
    """What the server was sent about one run, by all of its starts."""

    about: dict[str, Any] = field(default_factory=dict)
    """Last value of each variable of the client's UpsertBucket: displayName, groupName, tags, config, ..."""
    lines: dict[str, list[str]] = field(default_factory=dict)
    """Streamed file, as `wandb-history.jsonl` -> its lines."""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: int = 0
    """How often a start asked whether there is a run of this id, or began it."""

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines.get(LINES, ())]


class WandbServer:
    """The server, on a free port of this machine, from `with` to its end."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.lock = threading.Lock()
        self._http = _Quiet(("127.0.0.1", 0), _handler(self))
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        """Answer one GraphQL operation; an unknown one with nothing, as an older server of theirs does."""
        if operation == "Viewer":
            viewer = {"id": "u", "entity": "team", "username": "someone", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": viewer}
        if operation == "RunResumeStatus":
            run = self.runs.get(given["name"])
            if run is None:
                return {"model": None}
            run.asked += 1
            return {"model": {**_project(given), "bucket": _bucket(given["name"], run)}}
        if operation == "UpsertBucket":
            is_new = given["name"] not in self.runs
            run = self.runs.setdefault(given["name"], Run(asked=1))
            run.about.update({name: value for name, value in given.items() if value is not None})
            bucket = {**_bucket(given["name"], run), "project": _project(given)}
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if operation == "CreateRunFiles":
            urls = [{"name": name, "uploadUrl": f"{self.address}/put/{given['run']}/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": urls}}
        return {}

    def stream(self, run_id: str, sent: dict[str, Any]) -> None:
        """Take lines of the files that a run writes while it goes on, each at its place."""
        run = self.runs.setdefault(run_id, Run())
        for name, part in (sent.get("files") or {}).items():
            lines, offset = run.lines.setdefault(name, []), part["offset"]
            lines[offset : offset + len(part["content"])] = part["content"]


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing: the client drops its connections when it ends."""


def _project(given: dict[str, Any]) -> dict[str, Any]:
    return {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "team"}}


def _bucket(name: str, run: Run) -> dict[str, Any]:
    """Give a run as the client reads it: how many lines the server has, and the last ones."""
    bucket = {"id": name, "name": name, "displayName": run.about.get("displayName")}
    bucket |= {key: run.about.get(key, "{}") for key in ("config", "summaryMetrics")}
    for kind in ("history", "events"):
        lines = run.lines.get(f"wandb-{kind}.jsonl", [])
        bucket |= {f"{kind}LineCount": len(lines), f"{kind}Tail": json.dumps(lines[-1:])}
    return {**bucket, "logLineCount": len(run.lines.get("output.log", ()))}


def _handler(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            parts = self.path.strip("/").split("/")
            if parts == ["graphql"]:
                sent = json.loads(self._body())
                named = re.search(r"(?:query|mutation)\s+(\w+)", sent.get("query") or "")
                operation = sent.get("operationName") or (named and named[1])  # wandb-workspaces has the query alone
                with server.lock:
                    self._say({"data": server.answer(operation, sent.get("variables") or {})})
            elif parts[-1] == "file_stream":  # files/ENTITY/PROJECT/RUN/file_stream
                sent = json.loads(self._body())
                with server.lock:
                    server.stream(parts[3], sent)
                self._say({})
            else:  # the client's reports about itself
                self.close_connection = True
                self.send_error(404)

        def do_PUT(self) -> None:
            body, (_, run_id, name) = self._body(), self.path.strip("/").split("/", 2)
            with server.lock:
                server.runs[run_id].files[name] = body
            self._say({})

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _say(self, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
