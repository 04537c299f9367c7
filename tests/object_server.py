"""An object store, in a thread of the test run.

It is the S3 server of moto, which keeps objects in memory, or passes requests on to the gateway of a Ceph cluster
(``ceph_server``) or to an emulator of Azure Storage (``azurite_server``): ``OBJECT_SERVER`` in the environment is
``ceph`` or ``azurite``. All of them honor conditional writes. Answers can be replaced, as those of a server that
refuses.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import ssl
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

import azurite_server
import pytest
from ceph_server import ACCESS_KEY, SECRET_KEY, ceph_gateway

from slurm_affinode.base.object_url import ObjectPrefix

Answer = tuple[str, bytes]
"""Status line and body."""


def refusal(status: str, code: str, message: str) -> Answer:
    """Return the answer of a server that refuses."""
    return status, f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>".encode()


Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""Of WSGI."""


def moto_application() -> Application:
    """Return the server of moto, which also accepts ETags without their quotes, as S3 does."""
    from moto.server import DomainDispatcherApplication, create_backend_app

    moto: Application = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if tag := environ.get("HTTP_IF_MATCH"):
            environ["HTTP_IF_MATCH"] = f'"{tag.strip(chr(34))}"'
        return moto(environ, start)

    return application


def forwarding(url: str) -> Application:
    """Return a server that passes requests on to another one, with the ``Host`` that their signatures contain."""
    server = urlsplit(url).netloc
    dropped_headers = {"connection", "transfer-encoding", "date", "server", "keep-alive"}

    def application(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        headers = {
            name.removeprefix("HTTP_").replace("_", "-"): value
            for name, value in environ.items() if name.startswith("HTTP_") or name in ("CONTENT_TYPE", "CONTENT_LENGTH")
        }  # fmt: skip
        headers = {name: value for name, value in headers.items() if name not in ("CONNECTION", "EXPECT")}
        length = int(environ.get("CONTENT_LENGTH") or 0)
        connection = http.client.HTTPConnection(server, timeout=60)
        try:
            body = environ["wsgi.input"].read(length)
            connection.putrequest(
                environ["REQUEST_METHOD"], environ["RAW_URI"], skip_host=True, skip_accept_encoding=True
            )
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        start(
            f"{answer.status} {answer.reason}",
            [item for item in answer.getheaders() if item[0].lower() not in dropped_headers],
        )
        return [content]

    return application


class ObjectServer:
    """The server. ``before`` is called with method and path of each request, and may answer it itself.

    ``scheme``: of the URLs of its buckets, ``s3`` or ``abfs``. ``bare_tags``: compare ``If-Match`` with the ETag
    without its quotes, as the gateway of Ceph 16 does.
    """

    def __init__(
        self, application: Application, certificate: tuple[Path, Path] | None = None, scheme: str = "s3"
    ) -> None:
        """``certificate``: for TLS, with its key."""
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log(self, *_: Any) -> None:
                pass

        self.before: Callable[[str, str], Answer | None] = lambda method, path: None
        self.bare_tags = False
        self.requests: list[tuple[str, str]] = []
        self.scheme = scheme
        self.application = application
        context = None
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet, ssl_context=context
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http{'s' if certificate else ''}://127.0.0.1:{self._server.server_port}"

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append(request)
        answer = self.before(*request)
        if self.bare_tags and environ.get("HTTP_IF_MATCH", "").startswith('"'):
            answer = refusal("412 Precondition Failed", "PreconditionFailed", "")
        if answer is None:
            return self.application(environ, start)
        status, body = answer
        start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    def bucket(self) -> str:
        """Return the URL of a new bucket: a container of Azure."""
        name = f"samples-{uuid.uuid4()}"
        if self.scheme == "abfs":
            azurite_server.create_container(self.url, name)
        else:
            import boto3

            boto3.client("s3").create_bucket(Bucket=name)
        return f"{self.scheme}://{name}"

    def prefix(self, cache: Path, name: str = "a/site") -> ObjectPrefix:
        """Return a place in a new bucket."""
        return ObjectPrefix(f"{self.bucket()}/{name}", cache, 1 << 30)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def azure_settings(url: str) -> Iterator[pytest.MonkeyPatch]:
    """Have clients use the account of Azurite at ``url``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", azurite_server.ACCOUNT)
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azurite_server.KEY)
        patch.setenv("AZURE_STORAGE_ENDPOINT", f"{url}/{azurite_server.ACCOUNT}")
        yield patch


@pytest.fixture(scope="session")
def object_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """Start the server that ``OBJECT_SERVER`` names once, with the environment of its clients."""
    kind = os.environ.get("OBJECT_SERVER", "moto")
    with contextlib.ExitStack() as stack:
        if kind == "azurite":
            application = forwarding(stack.enter_context(azurite_server.azurite(tmp_path_factory.mktemp("azurite"))))
            server = ObjectServer(application, scheme="abfs")
            stack.callback(server.close)
            stack.enter_context(azure_settings(server.url))
            yield server
            return
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in (
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY), ("AWS_REGION", "us-east-1"),
            ("AWS_DEFAULT_REGION", "us-east-1"), ("AWS_CONFIG_FILE", "/dev/null"),
            ("AWS_SHARED_CREDENTIALS_FILE", "/dev/null"), ("AWS_EC2_METADATA_DISABLED", "true"),
        ):  # fmt: skip
            patch.setenv(name, value)
        if kind == "ceph":
            application = forwarding(stack.enter_context(ceph_gateway(tmp_path_factory.mktemp("ceph"))))
        else:
            assert kind == "moto", f"OBJECT_SERVER={kind}: it is moto, ceph or azurite"
            application = moto_application()
        server = ObjectServer(application)
        stack.callback(server.close)
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server


@pytest.fixture
def object_server(object_process: ObjectServer) -> Iterator[ObjectServer]:
    """Return the server, without replaced answers."""
    object_process.requests.clear()
    yield object_process
    object_process.before = lambda method, path: None
    object_process.bare_tags = False


@pytest.fixture
def s3(object_server: ObjectServer) -> ObjectServer:
    """Return the server, if it speaks the protocol of S3."""
    if object_server.scheme != "s3":
        pytest.skip("a test of S3 alone")
    return object_server
