"""Metrics of inference engines: text that a server of a user sends, and the report that root reads of it.

Whatever the text, the scrape program must report engines that root's side accepts, in bounded time and size.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from random import Random

from fuzz import mutation
from fuzz.mutation import some
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.engines import metric_table, scrape

_NAMES = sorted(metric_table.load().by_name)
_LABELS = (
    "model_name",
    "model",
    "engine",
    "dp_rank",
    "sleep_state",
    "kv_cache_block_type",
    "reason",
    "le",
    "block_size",
)
_TEXTS = ("", "0", "1", "m", "discard_all", "max", "+Inf", 'a"} 1', "\\", "\x1b]0;x\x07", "x" * 300)
_VALUES = ("0", "1", "0.5", "1e308", "1e999", "-1", "NaN", "+Inf", "0x1", "9" * 400, "")
_WORDS = (b"{", b"}", b'"', b"\\", b",", b"=", b"\n", b" # {", b"NaN", b"# EOF", b"\0", b"_total", b"1e309")
_REPORT = [
    ["vllm", "m", "0", {"running": 2.0}, {"prompt_lengths": [[5.0, 1.0], [None, 2.0]]}],
    ["llamacpp", None, None, {"waiting": 1.0}, {}],
]


def _text(rng: Random) -> bytes:
    lines = []
    for _ in range(some(rng, (1, 2, 5, 30))):
        labels = ",".join(f'{some(rng, _LABELS)}="{some(rng, _TEXTS)}"' for _ in range(some(rng, (0, 1, 2, 4))))
        lines.append(f"{some(rng, _NAMES)}{{{labels}}} {some(rng, _VALUES)}\n")
    return mutation.mutated(rng, "".join(lines).encode(), _WORDS)


@contextlib.contextmanager
def _scraped() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        readings = scrape.readings(data.decode("utf-8", "replace"))
        line = scrape.report(readings).encode()
        if scrape.decode(line) != readings:
            raise Wrong("the report differs from the readings")
        return bool(readings)

    yield check


@contextlib.contextmanager
def _reported() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        for item in scrape.decode(data):
            sound = all(isinstance(value, float) and math.isfinite(value) for value in item.values.values())
            sound &= all(counts[-1][0] == math.inf for counts in item.buckets.values())
            if not sound or not (item.model or "").isprintable() or item.engine not in metric_table.load().engines:
                raise Wrong(f"{item!r:.80} was accepted")
        return True

    yield check


_RESPONSE = b'HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 9\r\n\r\na{b=""} 1\n'
_HEADERS = (
    b"\r\n\r\n",
    b"\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 9999999999\r\n",
    b"HTTP/1.",
    b"\x1b[2J",
    b"302",
)


@contextlib.contextmanager
def _responded() -> Iterator[Check]:
    def check(data: bytes) -> bool:
        length = scrape._length(bytearray(data))
        if length is not None and not 0 < length < 1 << 34:
            raise Wrong(f"a response of {length} bytes")
        try:
            scrape.body_of(data)
        except ValueError as error:
            if not str(error).isprintable() or len(str(error)) > 80:
                raise Wrong(f"{error!r} as the reason") from error
            raise
        return True

    yield check


TARGETS = (
    Target(
        "engine-response", "the response of a server of a user",
        lambda rng: mutation.mutated(rng, _RESPONSE, _HEADERS), _responded, (ValueError,),
    ),
    Target("engine-scrape", "metrics that a server of a user sends", _text, _scraped),
    Target(
        "engine-report", "the report of the scrape program", lambda rng: mutation.mutated_json(rng, _REPORT), _reported,
        (ValueError, RecursionError),
    ),
)  # fmt: skip
