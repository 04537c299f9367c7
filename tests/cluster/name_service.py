"""A service of the node like SSSD, for one socket: ``name_service.py PATH``, run as root.

It answers each line with its number, and counts the connections: ``CONNECTION LINE``. A line ``slow`` is answered when
``PATH.go`` exists.
"""

from __future__ import annotations

import socketserver
import sys
import time
from pathlib import Path

PLACE = Path(sys.argv[1])


class Handler(socketserver.StreamRequestHandler):
    """One connection, from which a line is read when the one before is answered."""

    rbufsize = 0

    def handle(self) -> None:
        """Answer until the client closes the connection."""
        self.server.connections += 1  # type: ignore[attr-defined]
        number = self.server.connections  # type: ignore[attr-defined]
        for count, line in enumerate(self.rfile, 1):
            while line == b"slow\n" and not PLACE.with_suffix(".go").exists():
                time.sleep(0.05)
            self.wfile.write(f"{number} {count}\n".encode())


class Server(socketserver.ThreadingUnixStreamServer):
    """The service."""

    connections = 0
    daemon_threads = True


PLACE.parent.mkdir(parents=True, exist_ok=True)
PLACE.unlink(missing_ok=True)
with Server(str(PLACE), Handler) as server:
    PLACE.chmod(0o666)
    server.serve_forever()
