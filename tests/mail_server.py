"""A minimal SMTP server on a local port, which accepts or rejects mail."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import ClassVar

from slurm_affinode.model.cleanup import Smtp


class Server(socketserver.StreamRequestHandler):
    """A minimal SMTP server."""

    got: ClassVar[list[bytes]] = []
    refuse = b""
    reply = b"550 no such user here"
    most: ClassVar[int | None] = None
    """Number of mails after which it refuses; ``None``: it refuses from the first one."""

    def handle(self) -> None:
        self.wfile.write(b"220 test\r\n")
        while line := self.rfile.readline():
            word = line.split(b":")[0].split()[0].upper() if line.strip() else b""
            if word == self.refuse and (self.most is None or len(self.got) >= self.most):
                self.wfile.write(self.reply + b"\r\n")
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
def serving(refuse: bytes = b"", reply: bytes = Server.reply, most: int | None = None) -> Iterator[Smtp]:
    """Run a server that answers the command ``refuse`` with ``reply``, after ``most`` mails."""
    handler = type("Handler", (Server,), {"refuse": refuse, "reply": reply, "most": most, "got": Server.got})
    Server.got.clear()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield Smtp("127.0.0.1", server.server_address[1], timeout_s=60.0)
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def hanging() -> Iterator[Smtp]:
    """Run a server that accepts connections and never writes; the client waits for half a second."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Smtp("127.0.0.1", server.getsockname()[1], timeout_s=0.5)
