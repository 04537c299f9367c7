#!/opt/programs/bin/python
"""Serves a language model with llama.cpp over HTTP (/completion, /metrics, /v1/...) while it holds GPU memory."""

import sys
import threading

import gpu
import xllamacpp


def main() -> int:
    """Runs the workload. The model is computed on the CPU; it ends at SIGTERM."""
    parser = gpu.parser(__doc__)
    parser.add_argument("model", help="file in the format GGUF")
    parser.add_argument("--host", default="0.0.0.0", metavar="ADDRESS", help="address to listen on")  # noqa: S104
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port")
    options = parser.parse_args()
    device, weights = gpu.start(options)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.model
    parameters.hostnames, parameters.port = [options.host], options.port
    parameters.n_ctx, parameters.n_parallel, parameters.n_predict = 256, 2, 200
    parameters.cpuparams.n_threads = 1
    parameters.warmup, parameters.endpoint_metrics = False, True
    server = xllamacpp.Server(parameters)
    device.compute(0.5)  # idle from now on
    gpu.say("listening", address=server.listening_address)
    try:
        threading.Event().wait()
    except SystemExit:
        gpu.finish(device, weights)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
