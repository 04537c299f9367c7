"""A minimal SMTP server on a local port, which accepts or rejects mail."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterator
from typing import ClassVar

from slurm_affinode.model.cleanup import Smtp


class Server(socketserver.StreamRequestHandler):
    """A minimal SMTP server."""

    got: ClassVar[list[bytes]] = []
    refuse = b""

    def handle(self) -> None:
        self.wfile.write(b"220 test\r\n")
        while line := self.rfile.readline():
            word = line.split(b":")[0].split()[0].upper() if line.strip() else b""
            if word == self.refuse:
                self.wfile.write(b"550 no such user here\r\n")
            elif word == b"DATA":
                self.wfile.write(b"354 go\r\n")
                mail = b""
                while (part := self.rfile.readline()) != b".\r\n":
                    mail += part
                self.got.append(mail)
                self.wfile.write(b"250 taken\r\n")
            elif word == b"QUIT":
                self.wfile.write(b"221 bye\r\n")
                return
            else:
                self.wfile.write(b"250 ok\r\n")


@contextlib.contextmanager
def serving(refuse: bytes = b"") -> Iterator[Smtp]:
    handler = type("Handler", (Server,), {"refuse": refuse, "got": Server.got})
    Server.got.clear()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield Smtp("127.0.0.1", server.server_address[1], timeout_s=60.0)
        server.shutdown()
        thread.join()
