#!/usr/bin/env python3
"""Sends requests to a llama.cpp server: first as fast as it serves them, then four times as fast, until ended."""

import argparse
import json
import os
import sys
import threading
import time
import urllib.request

CLIENTS = 4
BODY = {"prompt": "one two three", "ignore_eos": True, "cache_prompt": False}


def say(phase: str, **values: object) -> None:
    """One line, as those of the other workloads."""
    print(f"{time.time():.3f} pid={os.getpid()}", phase, *(f"{k}={v}" for k, v in values.items()), flush=True)


def ask(options: argparse.Namespace) -> None:
    """Sends one request and waits for its answer."""
    body = json.dumps({**BODY, "n_predict": options.tokens}).encode()
    with urllib.request.urlopen(f"{options.url}/completion", body, timeout=600) as response:  # noqa: S310
        response.read()


def served_per_second(options: argparse.Namespace) -> float:
    """The requests that the server completes per second while a few clients wait for their answers."""
    began = time.monotonic()
    times: list[float] = []

    def client() -> None:
        while time.monotonic() < began + options.measure:
            ask(options)
            times.append(time.monotonic())

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return len(times) / (max(times) - began)


def main() -> int:
    """Runs the workload."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("url", help="root of the server, such as http://c1:8000")
    parser.add_argument("--tokens", type=int, default=4000, metavar="N", help="tokens of an answer")
    parser.add_argument("--measure", type=float, default=5.0, metavar="S", help="seconds in which the rate is measured")
    parser.add_argument("--factor", type=float, default=4.0, metavar="N", help="arrivals by service in the overload")
    options = parser.parse_args()
    rate = options.factor * served_per_second(options)
    say("overload", per_second=f"{rate:.2f}")
    while True:
        threading.Thread(target=ask, args=(options,), daemon=True).start()
        time.sleep(1 / rate)


if __name__ == "__main__":
    sys.exit(main())
