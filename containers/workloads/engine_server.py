#!/opt/slurm-affinode/bin/python
"""A model server in two processes, like vLLM: an API server with /metrics, and its engine, which holds GPU memory.

The engine does not end with the API server.
"""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import gpu

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="tiny"} 0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="tiny"} 0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="tiny"} 0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="tiny"} 1000
"""


class Handler(BaseHTTPRequestHandler):
    """Handles requests for metrics."""

    def do_GET(self) -> None:
        """Send the metrics of an engine without requests."""
        body = METRICS.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        gpu.log("metrics")

    def log_message(self, *_: object) -> None:
        """Suppress the default log of requests."""


def start_engine(memory_mib: int) -> subprocess.Popen[bytes]:
    """Start the engine, and wait until it is on the GPU."""
    started, starting = os.pipe()
    argv = [Path(__file__).resolve(), "--engine", str(starting), "--memory-mib", str(memory_mib)]
    engine = subprocess.Popen(argv, pass_fds=(starting,))  # noqa: S603 - its own program
    os.close(starting)
    os.read(started, 1)
    os.close(started)
    return engine


def main() -> int:
    """Run the API server, or with ``--engine`` the engine."""
    parser = gpu.parser(__doc__)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port; 0 takes a free one")
    parser.add_argument("--engine", type=int, metavar="FD", help="run the engine; close FD once it is on the GPU")
    options = parser.parse_args()
    if options.engine is not None:
        device, weights = gpu.start(options)
        os.close(options.engine)
        try:
            threading.Event().wait()
        except SystemExit:
            gpu.finish(device, weights)
            raise
    engine = start_engine(options.memory_mib)
    server = HTTPServer(("127.0.0.1", options.port), Handler)
    gpu.log("listening", port=server.server_port, engine=engine.pid)
    server.serve_forever(poll_interval=0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
