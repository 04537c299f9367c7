"""Azurite, the emulator of Azure Storage by Microsoft: its blob service, with objects in memory.

Its program is that of the npm package ``azurite``.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import re
import shutil
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from background import running

PROGRAM = "azurite-blob"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Account and key of every Azurite: https://learn.microsoft.com/azure/storage/common/storage-use-azurite."""
START_S = 120
_VERSION = "2021-08-06"
_LISTENING = re.compile(r"successfully listens on (http://\S+)")


@contextlib.contextmanager
def azurite(root: Path) -> Iterator[str]:
    """Start the service; yield its URL. Skip the test if its program is not installed."""
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.skip(f"{PROGRAM} is not installed (npm install --global azurite): there is no Azure Storage")
    log = root / "log"
    argv = [program, "--silent", "--disableTelemetry", "--inMemoryPersistence", "--blobPort", "0"]
    with running(argv, log, root) as process:
        deadline = time.monotonic() + START_S
        while (match := _LISTENING.search(log.read_text(encoding="utf-8"))) is None:
            assert process.poll() is None, log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, "Azurite does not respond"
            time.sleep(0.1)
        yield match[1]


def create_container(url: str, name: str) -> None:
    """Create a container, which objects are in, with a request that is signed by the rules of Shared Key.

    They are those of https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key. The account is
    in the path, which follows the account in the text that is signed.
    """
    path = f"/{ACCOUNT}/{name}"
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _VERSION}
    lines = ["PUT", *[""] * 11, *(":".join(pair) for pair in headers.items())]
    signed = "\n".join((*lines, f"/{ACCOUNT}{path}", "restype:container"))
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    with contextlib.closing(connection):
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        answer = connection.getresponse()
        assert answer.status == http.HTTPStatus.CREATED, answer.read()
