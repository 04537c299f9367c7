#!/usr/bin/env python3
"""Send requests to a llama.cpp server: first as fast as it serves them, then four times as fast, until killed."""

import argparse
import json
import os
import sys
import threading
import time
import urllib.request

CLIENTS = 4
BODY = {"prompt": "one two three", "ignore_eos": True, "cache_prompt": False}


def log(phase: str, **values: object) -> None:
    """Print one line in the format of the other workloads."""
    print(f"{time.time():.3f} pid={os.getpid()}", phase, *(f"{k}={v}" for k, v in values.items()), flush=True)


def send(options: argparse.Namespace) -> None:
    """Send one request and wait for its response."""
    body = json.dumps({**BODY, "n_predict": options.tokens}).encode()
    with urllib.request.urlopen(f"{options.url}/completion", body, timeout=600) as response:  # noqa: S310
        response.read()


def served_per_second(options: argparse.Namespace) -> float:
    """Return the requests that the server completes per second while a few clients wait for their responses."""
    began = time.monotonic()
    times: list[float] = []

    def client() -> None:
        while time.monotonic() < began + options.measure:
            send(options)
            times.append(time.monotonic())

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return len(times) / (max(times) - began)


def main() -> int:
    """Run the workload."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("url", help="root of the server, such as http://c1:8000")
    parser.add_argument("--tokens", type=int, default=4000, metavar="N", help="tokens of a response")
    parser.add_argument("--measure", type=float, default=5.0, metavar="S", help="seconds in which the rate is measured")
    parser.add_argument("--factor", type=float, default=4.0, metavar="N", help="arrival rate by service rate")
    options = parser.parse_args()
    rate = options.factor * served_per_second(options)
    log("overload", per_second=f"{rate:.2f}")
    while True:
        threading.Thread(target=send, args=(options,), daemon=True).start()
        time.sleep(1 / rate)


if __name__ == "__main__":
    sys.exit(main())
