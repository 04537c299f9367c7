"""Validate ``serving tune`` on a real vLLM on CPUs: the same load before and after its advice.

    python benchmarks/tune_vllm.py --vllm VENV/bin/vllm --model tiny

For each case, vLLM starts with settings that do not fit the load, serves it, and is scraped every second. The advice is
that of ``serving tune --write`` for the scrapes and the log. vLLM starts again with the command line that it prints,
and serves the same requests at the same times. Fails if no option is advised, or if preemptions or waiting requests do
not become fewer.

MODEL is a directory with a configuration and a tokenizer; weights are random, so every request asks for a fixed number
of tokens. Lengths and arrival times are drawn with ``--seed``. Not one of ``make bench``: vLLM takes minutes to start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_S = 600.0
REQUEST_S = 600.0
END_S = 30.0
SCRAPE_S = 1.0
BLOCK = 32
"""Tokens of a KV block."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1",
}  # fmt: skip
WAITING, RUNNING = "vllm:num_requests_waiting{", "vllm:num_requests_running{"
PREEMPTIONS, TOKENS = "vllm:num_preemptions_total{", "vllm:generation_tokens_total{"
TTFT_SUM, TTFT_COUNT = "vllm:time_to_first_token_seconds_sum{", "vllm:time_to_first_token_seconds_count{"


@dataclass(frozen=True)
class Case:
    """Settings that do not fit the load, and the figures that the advice has to improve."""

    title: str
    settings: tuple[str, ...]
    figures: tuple[str, ...]


CASES = {
    "preempting": Case(
        "KV cache smaller than memory permits",
        ("--num-gpu-blocks-override", "96", "--max-num-seqs", "32"), ("preemptions", "waiting, mean"),
    ),
    "waiting": Case(
        "batch smaller than the KV cache permits",
        ("--num-gpu-blocks-override", "256", "--max-num-seqs", "2"), ("waiting, mean",),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A request of the load."""

    at_s: float
    prompt: str
    tokens: int


def load(count: int, rate: float, seed: int) -> list[Request]:
    """Return the requests: Poisson arrivals, prompts of 48 to 144 characters, answers of 150 to 350 tokens."""
    draw = random.Random(seed)  # noqa: S311
    at, requests = 0.0, []
    for number in range(count):
        at += draw.expovariate(rate)
        # Different from the first character on, so that no prefix is cached.
        prompt = f"{number:04d}" + "".join(draw.choices("abcdefgh ", k=draw.randint(44, 140)))
        requests.append(Request(at, prompt, draw.randint(150, 350)))
    return requests


def cpu_seconds(session: int) -> float:
    """Return the CPU time of the processes of a session that are alive."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(arguments: Sequence[str], port: int, log: Path) -> Iterator[int]:
    """Run vLLM with ``arguments`` in a session of its own; yield the session's ID."""
    environment = {**os.environ, **ENVIRONMENT}
    environment["PATH"] = f"{Path(arguments[0]).resolve().parent}:{environment.get('PATH', '')}"
    with log.open("w") as stream:
        server = subprocess.Popen(
            arguments, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        wait_ready(server, port, log)
        yield server.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_ready(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until the server responds. Raises ``SystemExit`` with the end of its log if it does not."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(1)
    raise SystemExit(f"vLLM does not respond; the end of its log:\n{log.read_text(errors='replace')[-2000:]}")


def scrape(port: int) -> str:
    """Return the metrics of the server."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        text: str = response.read().decode()
        return text


def value(text: str, name: str) -> float:
    """Return the value of the only series with this name."""
    (number,) = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)]
    return number


def ask(port: int, model: str, request: Request, failures: list[str]) -> None:
    """Send a request and wait for its answer."""
    body = {
        "model": model, "prompt": request.prompt, "max_tokens": request.tokens, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    message = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(message, timeout=REQUEST_S) as response:  # noqa: S310
            response.read()
    except OSError as error:
        failures.append(str(error))


def measure(session: int, port: int, model: str, requests: Sequence[Request], recording: Path) -> dict[str, float]:
    """Serve the load, record the scrapes, and return the figures of the run."""
    used = cpu_seconds(session)
    failures: list[str] = []
    texts: list[str] = []
    began = time.monotonic()

    def client() -> None:
        threads = []
        for request in requests:
            time.sleep(max(0.0, began + request.at_s - time.monotonic()))
            threads.append(threading.Thread(target=ask, args=(port, model, request, failures)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    sending = threading.Thread(target=client)
    with recording.open("w") as stream:

        def record() -> None:
            at, clock = round(time.time() * 1000), time.monotonic()
            text = scrape(port)
            stream.write(f"# scrape {at} took {time.monotonic() - clock:.3f}s\n{text}")
            texts.append(text)

        record()
        sending.start()
        while sending.is_alive():
            sending.join(SCRAPE_S)
            record()
    took = time.monotonic() - began
    if failures:
        raise SystemExit(f"{len(failures)} requests failed: {failures[0]}")
    waiting, running = ([value(text, name) for text in texts] for name in (WAITING, RUNNING))

    def rise(name: str) -> float:
        return value(texts[-1], name) - value(texts[0], name)

    return {
        "preemptions": rise(PREEMPTIONS), "waiting, mean": sum(waiting) / len(waiting), "waiting, peak": max(waiting),
        "running, peak": max(running), "time to first token, mean (s)": rise(TTFT_SUM) / rise(TTFT_COUNT),
        "output tokens/s": rise(TOKENS) / took,
        "output tokens per CPU second": rise(TOKENS) / (cpu_seconds(session) - used), "duration (s)": took,
    }  # fmt: skip


def product(*arguments: str) -> str:
    """Return the output of ``slurm-affinode``. Raises ``SystemExit`` if it fails."""
    program = Path(sys.executable).with_name("slurm-affinode")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"slurm-affinode {shlex.join(arguments)}: {done.stderr}")
    return done.stdout


def advice(recording: Path, log: Path, state: Path, address: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the command line that ``serving tune --write`` prints, without the program, and the recommendations."""
    where = ("--state", str(state))
    product("ingest", "serving", *where, "--node", "local", "--address", address, str(recording))
    tune = ("serving", "tune", address, *where, "--log", str(log))
    (result,) = json.loads(product(*tune, "--json"))
    recommendations: list[dict[str, Any]] = result["recommendations"]
    return shlex.split(product(*tune, "--write"))[1:], recommendations


def run_case(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the load before and after the advice."""
    model = Path(options.model).name
    command = [
        options.vllm, "serve", options.model, "--load-format", "dummy", "--served-model-name", model,
        "--host", "127.0.0.1", "--port", str(options.port), "--max-model-len", "512", "--block-size", str(BLOCK),
        "--enforce-eager", "--dtype", "bfloat16", *case.settings,
    ]  # fmt: skip
    requests = load(options.requests, options.rate, options.seed)
    results: dict[str, Any] = {"case": case.title, "settings": shlex.join(case.settings)}
    for name in ("before", "after"):
        log, recording = folder / f"{name}.log", folder / f"{name}.prom"
        with serving(command, options.port, log) as session:
            results[name] = measure(session, options.port, model, requests, recording)
        if name == "before":
            advised, why = advice(recording, log, folder / "state", f"127.0.0.1:{options.port}")
            results["advice"] = " ".join(
                f"{reason['option']} {reason['proposed']}" for reason in why if reason["option"]
            )
            results["reasons"] = {reason["option"] or reason["setting"]: reason["reason"] for reason in why}
            if not advised:
                raise SystemExit(f"{case.title}: no option is advised; {json.dumps(results)}")
            command = [options.vllm, *advised]
    results["improved"] = all(results["after"][name] < results["before"][name] for name in case.figures)
    return results


def show(results: Mapping[str, Any]) -> None:
    """Print a case as a table."""
    print(f"\n{results['case']}: {results['settings']}; advice: {results['advice']}\n\n| | before | after |")
    print("| --- | --- | --- |")
    for name, before in results["before"].items():
        print(f"| {name} | {before:.4g} | {results['after'][name]:.4g} |")
    for option, reason in results["reasons"].items():
        print(f"\n{option}: {reason}")


def main() -> int:
    """Run the cases; exit with 1 if the advice does not help in one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, metavar="FILE", help="the program vllm")
    parser.add_argument("--model", required=True, metavar="DIR", help="model directory")
    parser.add_argument("--port", type=int, default=18200, metavar="N", help="port of the server [default: 18200]")
    parser.add_argument("--requests", type=int, default=240, metavar="N", help="requests of a run [default: 240]")
    parser.add_argument("--rate", type=float, default=8.0, metavar="N", help="arrivals per second [default: 8]")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of lengths and arrivals [default: 1]")
    parser.add_argument("--case", choices=tuple(CASES), action="append", help="only this case; may be repeated")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and recordings in DIR")
    parser.add_argument("--json", action="store_true", help="output JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = []
        for name in options.case or CASES:
            folder = (options.keep or Path(temporary)) / name
            folder.mkdir(parents=True)
            outcomes.append(run_case(CASES[name], options, folder))
            if not options.json:
                show(outcomes[-1])
    if options.json:
        print(json.dumps(outcomes, indent=2))
    return 0 if all(result["improved"] for result in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
