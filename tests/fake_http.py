"""A web server with scripted responses, over real sockets."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

JSON = "application/json"
GOOD = json.dumps(
    {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "2"]}]}}
)


@dataclass(frozen=True)
class Answer:
    """The response to one request."""

    body: str | bytes = GOOD
    status: int = 200
    kind: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    """A false ``Content-Length``."""
    before: Callable[[], Any] = lambda: None


Question = tuple[str, str, dict[str, list[str]], dict[str, str]]
"""Method, path, parameters, headers."""


@dataclass
class Fake:
    """A server that returns ``answers`` in order, and repeats the last one."""

    answers: list[Answer]
    judge: Callable[[Question], Answer] | None = None
    """Computes responses instead of ``answers``."""
    url: str = ""
    requests: list[Question] = field(default_factory=list)


@contextmanager
def serving(
    *answers: Answer, judge: Callable[[Question], Answer] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[Fake]:
    """Run a server on a free port of the loopback interface."""
    fake = Fake(list(answers), judge)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            parts = urlsplit(self.path)
            form = parse_qs(self.rfile.read(size).decode() if size else parts.query)
            question = (self.command, parts.path, form, dict(self.headers))
            fake.requests.append(question)
            if fake.judge is not None:
                answer = fake.judge(question)
            else:
                answer = fake.answers.pop(0) if len(fake.answers) > 1 else fake.answers[0]
            answer.before()
            body = answer.body.encode() if isinstance(answer.body, str) else answer.body
            self.send_response(answer.status)
            for name, value in {"Content-Type": answer.kind, **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if answer.length is None else answer.length))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """Ignore clients that disconnect, as in some tests."""

    server = Quiet(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
