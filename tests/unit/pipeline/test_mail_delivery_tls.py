"""Mail over TLS, implicit or by STARTTLS, to a server with a self-signed certificate."""

from __future__ import annotations

import base64
import contextlib
import shutil
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
from zombie_samples import NOW

from slurm_affinode.base.errors import InputError, UnreachableError
from slurm_affinode.model.cleanup import MailPolicy, Smtp
from slurm_affinode.pipeline.mail_delivery import postman
from slurm_affinode.report.mail import Digest

Pair = tuple[Path, Path]
DIGEST = Digest("alice@example.org", "alice", "Subject", "Text\n", "<p>Text</p>")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A self-signed certificate for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be created")
    directory = tmp_path_factory.mktemp("tls")
    pem, key = directory / "server.pem", directory / "server.key"
    argv = (openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out",
            str(pem))  # fmt: skip
    subprocess.run(argv, check=True, capture_output=True, timeout=240)
    return pem, key


class Taken:
    """Commands and mails that a server received."""

    def __init__(self) -> None:
        self.mails: list[bytes] = []
        self.logins: list[str] = []
        self.clear: list[bytes] = []
        """Commands before TLS."""


@contextlib.contextmanager
def server(certificate: Pair, *, at_once: bool = False, offers: bool = True) -> Iterator[tuple[int, Taken]]:
    """Yield a port and what arrives there. ``at_once``: implicit TLS; ``offers``: the server has STARTTLS."""
    taken = Taken()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):  # clients that do not trust the certificate disconnect
                self.talk()

        def talk(self) -> None:
            connection: Any = self.request
            secure = at_once
            if at_once:
                connection = context.wrap_socket(connection, server_side=True)
            lines = connection.makefile("rb")
            connection.sendall(b"220 test\r\n")
            while line := lines.readline():
                word = line.split()[0].upper()
                if not secure:
                    taken.clear.append(line)
                if word == b"EHLO":
                    more = b"250-STARTTLS\r\n" if offers and not secure else b""
                    connection.sendall(b"250-test\r\n" + more + b"250 AUTH PLAIN\r\n")
                elif word == b"STARTTLS":
                    connection.sendall(b"220 go\r\n")
                    connection = context.wrap_socket(connection, server_side=True)
                    lines, secure = connection.makefile("rb"), True
                elif word == b"AUTH":
                    taken.logins.append(base64.b64decode(line.split()[2]).decode())
                    connection.sendall(b"235 welcome\r\n")
                elif word == b"DATA":
                    connection.sendall(b"354 go\r\n")
                    mail = b""
                    while (part := lines.readline()) != b".\r\n":
                        mail += part
                    taken.mails.append(mail)
                    connection.sendall(b"250 taken\r\n")
                elif word == b"QUIT":
                    connection.sendall(b"221 bye\r\n")
                    connection.close()
                    return
                else:
                    connection.sendall(b"250 ok\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield listening.server_address[1], taken
        listening.shutdown()
        thread.join()


def send(smtp: Smtp) -> None:
    postman(MailPolicy(via="smtp", smtp=smtp), lambda: NOW)(DIGEST)


@pytest.mark.parametrize(("tls", "at_once"), [("starttls", False), ("tls", True)])
def test_mail_and_password_are_encrypted(certificate: Pair, tmp_path: Path, tls: Any, at_once: bool) -> None:
    """Only EHLO and STARTTLS are sent in clear text."""
    secret = tmp_path / "password"
    secret.write_text("s3cret\n")
    with server(certificate, at_once=at_once) as (port, taken):
        send(Smtp("127.0.0.1", port, tls, "gpus", str(secret), 60.0, str(certificate[0])))
    [mail] = taken.mails
    assert message_from_bytes(mail)["To"] == "alice@example.org"
    assert taken.logins == ["\0gpus\0s3cret"]
    assert [line.split()[0].upper() for line in taken.clear] == ([] if at_once else [b"EHLO", b"STARTTLS"])


@pytest.mark.parametrize(("tls", "at_once"), [("starttls", False), ("tls", True)])
def test_untrusted_server_gets_no_mail(certificate: Pair, tls: Any, at_once: bool) -> None:
    """Neither does a server with a certificate for another name."""
    with server(certificate, at_once=at_once) as (port, taken):
        with pytest.raises(UnreachableError, match="certificate verify failed"):
            send(Smtp("127.0.0.1", port, tls, timeout_s=60.0))
        with pytest.raises(UnreachableError, match=r"certificate is not valid for 'localhost'|Hostname mismatch"):
            send(Smtp("localhost", port, tls, timeout_s=60.0, ca_file=str(certificate[0])))
    assert taken.mails == []


def test_missing_starttls_is_an_error(certificate: Pair) -> None:
    """The server may lack it, or an attacker may hide it."""
    with (
        server(certificate, offers=False) as (port, taken),
        pytest.raises(UnreachableError, match="STARTTLS extension not supported"),
    ):
        send(Smtp("127.0.0.1", port, "starttls", timeout_s=60.0))
    assert taken.mails == []


def test_invalid_ca_bundle_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for name in ("ca.pem", "missing.pem"):
        with pytest.raises(InputError, match="holds no certificates"):
            send(Smtp("127.0.0.1", 1, "tls", ca_file=str(tmp_path / name)))
