"""The scrape program: its parser agrees with the reader of files, and hostile responses are bounded."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

from slurm_affinode.engines import metric_table, scrape
from slurm_affinode.engines.schema import COUNTERS, METRICS
from slurm_affinode.engines.scrape import EngineReading
from slurm_affinode.metrics.readers.common import ReadingNotes

Read = Callable[..., tuple[pl.DataFrame, ReadingNotes]]
NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
UNPRIVILEGED_UID = 65534
RUNNING = "vllm:num_requests_running"


def as_rows(readings: list[EngineReading]) -> list[tuple[object, ...]]:
    return sorted(
        (item.engine, item.model, item.rank, sorted(item.values.items()), sorted(item.buckets.items()))
        for item in readings
    )


def of_frame(frame: pl.DataFrame) -> list[tuple[object, ...]]:
    rows = []
    for row in frame.iter_rows(named=True):
        values = {
            name: float(row[name])
            for name in METRICS
            if name not in metric_table.BUCKETS and row[name] is not None and name != "error"
        }
        histograms = {name: row[name] for name in metric_table.BUCKETS if row[name]}
        buckets = [
            (name, tuple((count["le"], count["count"]) for count in counts))
            for name, counts in sorted(histograms.items())
        ]
        rows.append((row["engine"], row["model"], row["rank"], sorted(values.items()), buckets))
    return sorted(rows)


def test_program_and_reader_agree_on_a_real_scrape(read: Read, recordings: Path) -> None:
    path = recordings / "vllm-0.32-cpu-saturated.prom"
    assert as_rows(scrape.readings(path.read_text())) == of_frame(read(path, start=NOON)[0])


TEXTS = {
    "ranks": "".join(
        f'{RUNNING}{{engine="{rank}",model_name="m"}} {rank}\n'
        f'vllm:cache_config_info{{engine="{rank}",block_size="16"}} 1\n'
        for rank in (0, 1)
    )
    + "process_open_fds 40\n",
    "one rank": f'{RUNNING}{{engine="0",model_name="m"}} 1\n'
    'vllm:admission_rejections_total{model_name="m",reason="a"} 6\n',
    "triton": 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="a"} 5\n'
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="a"} 10\n'
    'nv_inference_request_success{model="a"} 4\nnv_inference_request_success{model="b"} 4\n',
    "sglang": 'sglang:num_running_reqs{tp_rank="0"} 5\nsglang:num_running_reqs{tp_rank="1"} 5\n'
    "sglang_token_usage 0.5\n",
    "odd values": f"{RUNNING} NaN\nvllm:num_requests_waiting 3\nvllm:kv_cache_usage_perc 7\ntgi_queue_size -1\n",
    "histograms": "".join(
        f'vllm:request_{kind}_tokens_bucket{{engine="0",model_name="m",le="{bound}"}} {count}\n'
        for kind in ("prompt", "generation")
        for bound, count in (("10", 1), ("+Inf", 7), ("100.0", 5))
    )
    + f'{RUNNING}{{engine="0",model_name="m"}} 1\n',
    "histogram without its end": f'vllm:request_prompt_tokens_bucket{{le="10"}} 1\n{RUNNING} 1\n',
    "histogram of two series": "".join(
        f'sglang:prompt_tokens_histogram_bucket{{le="{bound}",priority="{n}"}} {n + 1}\n'
        for bound in ("5", "+Inf")
        for n in range(2)
    )
    + "sglang:num_running_reqs 1\n",
    "asleep": 'vllm:engine_sleep_state{sleep_state="discard_all"} 1\nllamacpp:requests_processing 2\n',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_program_and_reader_agree(read: Read, text: str) -> None:
    """Rows without any value differ: a program has nothing to export."""
    expected = [row for row in of_frame(read(text, start=NOON, format="prometheus")[0]) if row[3]]
    assert [row for row in as_rows(scrape.readings(text)) if row[3]] == expected


def test_histogram_with_too_many_buckets_is_ignored() -> None:
    """A user chooses the bounds of a program's histograms, and each bucket is a series of the exporter."""
    name = "vllm:request_prompt_tokens_bucket"

    def buckets(count: int) -> dict[str, tuple[tuple[float, float], ...]]:
        bounds = [*map(str, range(count - 1)), "+Inf"]
        (reading,) = scrape.readings("".join(f'{name}{{le="{bound}"}} 1\n' for bound in bounds) + f"{RUNNING} 1\n")
        return dict(reading.buckets)

    assert len(buckets(scrape.MOST_BUCKETS)["prompt_lengths"]) == scrape.MOST_BUCKETS
    assert buckets(scrape.MOST_BUCKETS + 1) == {}


def test_table_has_every_counter_of_the_schema() -> None:
    assert not COUNTERS - set(METRICS)


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "{", f"{RUNNING}{{", f"{RUNNING}{{a=\n", f'{RUNNING}{{a="}} 1\n', "\0\0\0\n", "# EOF",
        f"{RUNNING} 1e999\n",
        f'{RUNNING}{{model_name="{chr(27)}]0;x{chr(7)}"}} 1\n', f"{RUNNING}{{{'x' * 100_000}}} 1\n",
        f"{RUNNING} {'9' * 500}\n",
        "".join(f'{RUNNING}{{model_name="{n}"}} 1\n' for n in range(50_000)),
    ],
)  # fmt: skip
def test_hostile_text_gives_a_bounded_report(text: str) -> None:
    line = scrape.report(scrape.readings(text))
    assert len(line) < scrape.LARGEST_REPORT
    for item in scrape.decode(line.encode()):
        assert all(math.isfinite(value) for value in item.values.values())
        assert (item.model or "").isprintable()


def test_report_keeps_buckets() -> None:
    result = [EngineReading("vllm", "m", None, {"running": 1.0}, {"prompt_lengths": ((5.0, 1.0), (math.inf, 2.0))})]
    assert scrape.decode(scrape.report(result).encode()) == result


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[1]", b'[["vllm"]]', b'[["x",null,null,{},{}]]', b'[["vllm","\\u001b",null,{},{}]]',
     b'[["vllm",null,null,{"running":NaN},{}]]', b'[["vllm",null,null,{"evil":1},{}]]',
     b'[["vllm",null,null,{"running":"1"},{}]]',
     b'[["vllm",null,null,{}]]', b'[["vllm",null,null,{},{"prompt_lengths":[]}]]',
     b'[["vllm",null,null,{},{"running":[[null,1.0]]}]]', b'[["vllm",null,null,{},{"prompt_lengths":[[1.0,1.0]]}]]',
     b'[["vllm",null,null,{},{"prompt_lengths":[[2.0,1.0],[1.0,1.0],[null,1.0]]}]]',
     b'[["vllm",null,null,{},{"prompt_lengths":[[1.0,NaN],[null,1.0]]}]]',
     b'[["vllm",null,null,{},{"prompt_lengths":[[1.0,1.0],[null,"1"]]}]]',
     b'[["vllm",null,null,{},{"prompt_lengths":[%s[null,1.0]]}]]'
     % b"".join(b"[%d.0,1.0]," % n for n in range(scrape.MOST_BUCKETS)),
     b'[["vllm",{},null,{},{}]]', b"[" * 100_000, b" " * 600_000, b'[["process",null,null,{},{}]]'],
)  # fmt: skip
def test_report_of_another_form_is_refused(line: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        scrape.decode(line)


# -- the request ----------------------------------------------------------------------------------------------------


class RawServer:
    """Sends bytes to each client, then does what a test says."""

    def __init__(self, *parts: bytes, pause_s: float = 0.0, hold: bool = False) -> None:
        self.requests: list[bytes] = []
        self._parts, self._pause_s, self._hold = parts, pause_s, hold
        self.done = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client:
                self.requests.append(client.recv(4096))
                try:
                    for part in self._parts:
                        client.sendall(part)
                        time.sleep(self._pause_s)
                except OSError:
                    continue
                if self._hold:
                    self.done.wait(20)

    def close(self) -> None:
        self.done.set()
        self._socket.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., RawServer]]:
    started: list[RawServer] = []

    def start(*parts: bytes, **options: float | bool) -> RawServer:
        started.append(RawServer(*parts, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for connection in started:
        connection.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def test_request_is_one_get_without_options(serve: Callable[..., RawServer]) -> None:
    server = serve(HEAD + b"\r\n" + RUNNING.encode() + b" 1\n")
    assert scrape.fetch("127.0.0.1", server.port) == f"{RUNNING} 1\n"
    assert server.requests[0].startswith(b"GET /metrics HTTP/1.0\r\n")


def test_response_that_keeps_the_connection_open_ends_with_its_length(serve: Callable[..., RawServer]) -> None:
    server = serve(HEAD + b"Content-Length: 3\r\n\r\na 1", hold=True)
    assert scrape.fetch("127.0.0.1", server.port) == "a 1"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",), "HTTP 302"),
        ((b"HTTP/1.1 500 no\r\n\r\n",), "HTTP 500"),
        ((b"SSH-2.0-OpenSSH_9.6\r\n",), "not an HTTP"),
        ((b"",), "not an HTTP"),
        ((HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n",), "encoded"),
        ((HEAD + b"\r\n", b"a 1\n" * 100_000), "more than"),
    ],
)
def test_other_responses_are_refused(
    serve: Callable[..., RawServer], parts: tuple[bytes, ...], reason: str
) -> None:  # fmt: skip
    """No redirect is followed, and a large response is not read to its end."""
    with pytest.raises(ValueError, match=reason):
        scrape.fetch("127.0.0.1", serve(*parts).port, largest=100_000)


def test_slow_response_ends_with_the_timeout(serve: Callable[..., RawServer]) -> None:
    """The limit is for the whole request, however often a byte arrives."""
    server = serve(HEAD + b"\r\n", *[b"a"] * 200, pause_s=0.05)
    with pytest.raises(TimeoutError):
        scrape.fetch("127.0.0.1", server.port, timeout_s=0.3)


# -- the program ----------------------------------------------------------------------------------------------------


def program(port: int, uid: int, groups: str = "") -> subprocess.CompletedProcess[bytes]:
    argv = [
        sys.executable,
        "-P",
        "-m",
        "slurm_affinode.engines.scrape",
        "127.0.0.1",
        str(port),
        str(uid),
        str(uid),
        groups,
    ]
    return subprocess.run(argv, capture_output=True, check=False, timeout=240)


def test_program_prints_readings(serve: Callable[..., RawServer]) -> None:
    done = program(serve(HEAD + b"\r\n" + RUNNING.encode() + b" 1\n").port, os.getuid() or UNPRIVILEGED_UID)
    assert (done.returncode, json.loads(done.stdout)) == (0, [["vllm", None, None, {"running": 1.0}, {}]]), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to drop privileges")
def test_program_connects_with_the_privileges_of_the_user(serve: Callable[..., RawServer]) -> None:
    """The peer of the connection, as the kernel records it, is the user."""
    server = serve(HEAD + b"\r\n", hold=True)
    code = (
        "from slurm_affinode.engines import scrape\nimport os,json\n"
        f"scrape.drop_privileges({UNPRIVILEGED_UID},{UNPRIVILEGED_UID},[1234])\n"
        "def refused(call):\n  try: call()\n  except OSError: return True\n"
        "print(json.dumps([os.getresuid(),os.getresgid(),os.getgroups(),refused(lambda:os.setuid(0)),"
        "refused(lambda:open('/etc/shadow'))]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True, timeout=240)
    assert json.loads(done.stdout) == [[UNPRIVILEGED_UID] * 3, [UNPRIVILEGED_UID] * 3, [1234], True, True]
    assert server.requests == []


@pytest.mark.skipif(os.geteuid() != 0, reason="root is refused as a user only if the program could become it")
@pytest.mark.parametrize(("uid", "groups"), [(0, ""), (2**32, ""), (UNPRIVILEGED_UID, "0"), (-1, "")])
def test_program_never_runs_as_root(serve: Callable[..., RawServer], uid: int, groups: str) -> None:
    """Neither by 0, nor by a number that the kernel would truncate to it."""
    server = serve(HEAD + b"\r\n")
    done = program(server.port, uid, groups)
    assert (done.returncode, done.stdout, server.requests) == (1, b"", [])
    assert b"is no user who may be scraped" in done.stderr
