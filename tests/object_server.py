"""A server that speaks the protocol of S3, in a thread of the test run: that of moto, which keeps objects in memory.

It honors conditional writes. Answers can be replaced, as those of a server that refuses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest

from slurm_affinode.base.object_url import ObjectPrefix

Answer = tuple[str, bytes]
"""Status line and body."""


def refusal(status: str, code: str, message: str) -> Answer:
    """Return the answer of a server that refuses."""
    return status, f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>".encode()


class ObjectServer:
    """The server. ``before`` is called with method and path of each request, and may answer it itself."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *_: Any) -> None:
                pass

        self.before: Callable[[str, str], Answer | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._buckets = 0

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append(request)
        answer = self.before(*request)
        if answer is None:
            return self._application(environ, start)
        status, body = answer
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def client(self) -> Any:
        """Return another client of the server."""
        import boto3

        return boto3.client("s3")

    def bucket(self) -> str:
        """Return the name of a new bucket."""
        self._buckets += 1
        name = f"samples-{self._buckets}"
        self.client().create_bucket(Bucket=name)
        return name

    def prefix(self, cache: Path, name: str = "a/site") -> ObjectPrefix:
        """Return a place in a new bucket."""
        return ObjectPrefix(f"s3://{self.bucket()}/{name}", cache, 1 << 30)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="session")
def s3_process() -> Iterator[ObjectServer]:
    """Start the server once, with the environment of its clients."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "geheim"), ("AWS_REGION", "us-east-1"),
            ("AWS_DEFAULT_REGION", "us-east-1"), ("AWS_CONFIG_FILE", "/dev/null"),
            ("AWS_SHARED_CREDENTIALS_FILE", "/dev/null"), ("AWS_EC2_METADATA_DISABLED", "true"),
        ):  # fmt: skip
            patch.setenv(name, value)
        server = ObjectServer()
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server
        server.close()


@pytest.fixture
def s3(s3_process: ObjectServer) -> Iterator[ObjectServer]:
    """Return the server, without replaced answers."""
    s3_process.requests.clear()
    yield s3_process
    s3_process.before = lambda method, path: None
