#!/opt/slurm-affinode/bin/python
"""A small model server that holds its weights on the GPU and computes on requests over HTTP.

GET /health responds at once; POST /predict computes for a while and returns a number that depends on the weights;
POST /stop ends it.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import gpu


class Server(HTTPServer):
    """The server, its GPU and the number of its predictions."""

    def __init__(self, address: tuple[str, int], device: gpu.Gpu, weights: gpu.Buffer, service_s: float) -> None:
        super().__init__(address, Handler)
        self.device, self.weights, self.service_s = device, weights, service_s
        self.answered = 0


class Handler(BaseHTTPRequestHandler):
    """Handles one request at a time, as the GPU computes one at a time."""

    server: Server

    def do_GET(self) -> None:
        """Send the health."""
        if self.path != "/health":
            self.send_error(404)
            return
        self._answer({"status": "ok", "gpu": self.server.device.uuid, "answered": self.server.answered})

    def do_POST(self) -> None:
        """Send a prediction, or stop the server."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/predict":
            self.server.device.compute(self.server.service_s)
            self.server.answered += 1
            gpu.log("predict", number=self.server.answered)
            self._answer({"prediction": int(self.server.weights.digest[:8], 16), "number": self.server.answered})
        elif self.path == "/stop":
            self._answer({"status": "stopping"})
            threading.Thread(target=self.server.shutdown).start()
        else:
            self.send_error(404)

    def log_message(self, *_: Any) -> None:
        """Suppress the default log: ``gpu.log`` is used instead."""

    def _answer(self, value: dict[str, object]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> int:
    """Run the workload."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--host", default="0.0.0.0", metavar="ADDRESS", help="address to listen on")  # noqa: S104
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port; 0 takes a free one")
    parser.add_argument("--service-ms", type=float, default=200, metavar="MS", help="computing time of a prediction")
    options = parser.parse_args()
    device, weights = gpu.start(options)
    server = Server((options.host, options.port), device, weights, options.service_ms / 1000)
    gpu.log("listening", port=server.server_port)
    server.serve_forever(poll_interval=0.1)
    return gpu.finish(device, weights)


if __name__ == "__main__":
    sys.exit(main())
