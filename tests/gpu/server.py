"""A model server with weights on the GPU that computes on request: ``python server.py DIRECTORY MIB [torch]``.

``POST /predict`` returns a prediction, which depends only on the weights, and the number of predictions so far. The
port is in ``DIRECTORY/ready``. With ``torch`` the model is PyTorch's, otherwise a kernel.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent))

import protocol

MIB = 1 << 20


class Model(Protocol):
    """A model."""

    def predict(self) -> str:
        """Return the prediction, which is always the same."""
        ...


class Kernels:
    """A model that uses the driver API: the GPU is busy briefly, then the weights are read."""

    def __init__(self, mib: int, seed: int) -> None:
        from worker import Work

        self.work = Work(0)
        self.work.setup(mib=mib, seed=seed, graph=False)

    def predict(self) -> str:
        """Return a checksum of the first and last bytes of each piece."""
        self.work.busy(0.05)
        self.work.wait()
        return str(self.work.sample())


class Layers:
    """A model in PyTorch: a pass through all layers."""

    def __init__(self, mib: int, seed: int) -> None:
        import torch

        self.torch = torch
        torch.manual_seed(seed)
        width = 4096 if mib >= 1024 else 512
        layers = max(1, mib * MIB // (width * width * 4))
        self.weights = [torch.randn(width, width, device="cuda").mul_(width**-0.5) for _ in range(layers)]
        self.x = torch.randn(16, width, device="cuda")

    def predict(self) -> str:
        """Return the sum of the output in hexadecimal."""
        with self.torch.inference_mode():
            x = self.x
            for weight in self.weights:
                x = self.torch.tanh(x + x @ weight)
            return float(x.sum().item()).hex()


class Server(HTTPServer):
    """Handles one request at a time, as the GPU would anyway; others wait in the queue of the socket."""

    request_queue_size = 64

    def __init__(self, model: Model) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.answered = model, 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        """Send a prediction."""
        prediction = self.server.model.predict()
        self.server.answered += 1
        body = json.dumps({"prediction": prediction, "number": self.server.answered}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def main() -> None:
    """Serve until killed, or until the directory is gone."""
    directory, mib, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    protocol.detach()
    model = Layers if kind == "torch" else Kernels
    server = protocol.built(directory, lambda: Server(model(mib, seed=os.getpid())))
    protocol.write(directory / "ready", {"ok": {"port": server.server_port}})
    server.timeout = 1.0
    while directory.is_dir():
        server.handle_request()


if __name__ == "__main__":
    main()
