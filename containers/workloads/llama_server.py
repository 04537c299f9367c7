#!/opt/programs/bin/python
"""Serve a language model with llama.cpp over HTTP (/completion, /metrics, /v1/...) while holding GPU memory.

With ``--engine-process``, a child holds the memory, as with vLLM. It does not end with the server.
"""

import argparse
import sys
import threading

import gpu
import xllamacpp
from engine_server import start_engine


def main() -> int:
    """Run the workload until SIGTERM. The model is computed on the CPU."""
    parser = gpu.parser(__doc__)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--host", default="0.0.0.0", metavar="ADDRESS", help="address to listen on")  # noqa: S104
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port")
    parser.add_argument("--context", type=int, default=256, metavar="N", help="tokens of the KV cache")
    parser.add_argument("--engine-process", action="store_true", help="hold the GPU memory in a child process")
    options = parser.parse_args()
    if options.engine_process:
        engine = start_engine(options.memory_mib)
        gpu.log("engine", engine=engine.pid)
        return serve(options)
    device, weights = gpu.start(options)
    try:
        return serve(options, device)
    except SystemExit:
        gpu.finish(device, weights)
        raise


def serve(options: argparse.Namespace, device: gpu.Gpu | None = None) -> int:
    """Run the server until SIGTERM."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.model
    parameters.hostnames, parameters.port = [options.host], options.port
    parameters.n_ctx, parameters.n_parallel, parameters.n_predict = options.context, 2, 200
    parameters.cpuparams.n_threads = 1
    parameters.warmup, parameters.endpoint_metrics = False, True
    server = xllamacpp.Server(parameters)
    if device is not None:
        device.compute(0.5)  # idle from now on
    gpu.log("listening", address=server.listening_address)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
