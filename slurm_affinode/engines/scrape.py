"""Scrape of one engine on a node, by a program of its own with the privileges of the job's user.

``python -m slurm_affinode.engines.scrape HOST PORT UID GID GROUPS`` drops all privileges, requests ``/metrics``
and prints the columns as JSON. So the caller, who may be root, reads neither the response nor its labels: the text of a
hostile server is parsed with the rights of that server's user. Nothing is followed, and time, size, CPU time and memory
are limited. Polars is not imported, so that a scrape costs little.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import resource
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_affinode.engines import metric_table
from slurm_affinode.engines.metric_table import BUCKETS, CONFIGURATION, HELPERS, PROCESS, EngineLabels, MetricSource

TIMEOUT_S = 3.0
"""For the whole request."""
LARGEST = 16 << 20
"""Maximum size of a response."""
MOST_SERIES = 20_000
"""Series of known metrics that are read."""
MOST_ENGINES = 32
"""Engines (models and ranks) behind one port."""
MOST_BUCKETS = 40
"""Buckets of a histogram; one with more is left out."""
MOST_NAME = 200
"""Characters of a model's name."""
LARGEST_REPORT = 512 << 10
"""Maximum size of what the program prints."""
_CPU_S = 5
_MEMORY = 512 << 20
_MOST_HEAD = 16 << 10
_LONGEST_LINE = 64 << 10
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_STATUS = re.compile(rb"HTTP/1\.[0-9] ([0-9]{3})(?: |\r\n|$)")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_SHARES = ("kv_usage", "host_kv_usage", "memory_share")
_MOST_ID = 2**32 - 2
_RESET, _ORDERLY = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
"""``struct linger``: a socket that is closed resets its connection, or ends it in order."""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The columns of one engine at one scrape."""

    engine: str
    model: str | None
    rank: str | None
    values: Mapping[str, float]
    """Column -> value; a column that the engine does not export is absent."""
    buckets: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """Column of ``engines.BUCKETS`` -> upper bounds, ascending, the last one infinite, and cumulative counts."""


class NoMetricsError(ValueError):
    """The response is HTTP, but has no metrics: the server works, and has closed the connection."""


def readings(text: str) -> list[EngineReading]:
    """Return the engines in exposition text. Lines that are no samples are skipped; no text raises an exception."""
    table = metric_table.load()
    engines: dict[EngineLabels, dict[int, list[float]]] = {}
    counts: dict[EngineLabels, dict[str, dict[float, float]]] = {}
    makers: set[EngineLabels] = set()
    values_by_series: dict[tuple[str, str], float] = {}
    for name, written, value in _samples(text):
        if len(values_by_series) >= MOST_SERIES and (name, written) not in values_by_series:
            break
        if name in table.by_name:
            values_by_series[name, written] = value  # the same series twice: the last value counts
    for (name, written), value in values_by_series.items():
        labels = _labels(written)
        if labels is None:
            continue
        for source in table.by_name[name]:
            number = _value(source, labels, value)
            if number is None or not source.matches(labels):
                continue
            names = table.engines[source.engine]
            key = (source.engine, _first(labels, names.model), _first(labels, names.rank))
            if source.field in BUCKETS:
                bound = _bound(labels)
                if bound is not None:
                    of_field = counts.setdefault(key, {}).setdefault(source.field, {})
                    of_field[bound] = of_field.get(bound, 0.0) + number
                engines.setdefault(key, {})
            else:
                engines.setdefault(key, {}).setdefault(source.number, []).append(number)
            if not source.attached and source.engine != PROCESS:
                makers.add(key)
    owners = metric_table.owners(engines, (key for key in engines if key in makers))
    chosen = {key: dict[int, list[float]]() for key in [key for key in engines if owners[key] == [key]][:MOST_ENGINES]}
    for key, numbers in engines.items():
        of_key = owners[key]
        for number, values in numbers.items():
            source = table.sources[number]
            shared = source.engine == PROCESS or source.field in CONFIGURATION
            if shared or len(of_key) == 1:
                for owner in of_key if len(of_key) <= MOST_ENGINES else chosen:
                    if owner in chosen:
                        chosen[owner].setdefault(number, []).extend(values)
    histograms: dict[EngineLabels, dict[str, dict[float, float]]] = {}
    for key, of_fields in counts.items():
        if len(owners[key]) == 1 and owners[key][0] in chosen:
            histograms.setdefault(owners[key][0], {}).update(of_fields)
    return [_reading(key, numbers, histograms.get(key, {})) for key, numbers in chosen.items()]


def _reading(
    key: EngineLabels, numbers: Mapping[int, list[float]], histograms: Mapping[str, Mapping[float, float]]
) -> EngineReading:
    sources = metric_table.load().sources
    fields: dict[str, float] = {}
    for number in sorted(numbers):
        source = sources[number]
        total = sum(numbers[number]) if source.summed else max(numbers[number])
        if math.isfinite(total):
            fields.setdefault(source.field, total * source.scale)
    blocks, size, used = (fields.get(name) for name in ("kv_blocks", "block_size", "kv_blocks_used"))
    if blocks is not None and size is not None:
        fields.setdefault("kv_tokens", blocks * size)
    if blocks and used is not None:
        fields.setdefault("kv_usage", used / blocks)
    if "asleep" in fields:
        fields["asleep"] = float(fields["asleep"] > 0)
    plain = {
        name: value
        for name, value in fields.items()
        if name not in HELPERS and math.isfinite(value) and not (name in _SHARES and value > 1.1)
    }
    buckets = {
        name: tuple(sorted(counts.items()))
        for name, counts in histograms.items()
        if len(counts) <= MOST_BUCKETS and math.inf in counts and all(map(math.isfinite, counts.values()))
    }
    return EngineReading(key[0], _shown(key[1]), _shown(key[2]), plain, buckets)


def _bound(labels: Mapping[str, str]) -> float | None:
    try:
        bound = float(labels.get("le", "nan"))
    except ValueError:
        return None
    return None if math.isnan(bound) or bound == -math.inf else bound


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield name, labels (as text) and value of each line that is a sample; the last line may be cut off."""
    for line in text.split("\n")[:-1]:
        match = _NAME.match(line)
        if match is None or len(line) > _LONGEST_LINE:
            continue
        rest, labels = line[match.end() :].strip(), ""
        if rest.startswith("{"):
            end = rest.rfind("}", 0, rest.rfind(" # {") if " # {" in rest else len(rest))
            if end < 0:
                continue
            labels, rest = rest[1:end], rest[end + 1 :]
        words = rest.split(None, 1)
        try:
            yield match[0], labels, float(words[0])
        except (IndexError, ValueError):
            continue


def _labels(text: str) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    position = 0
    while text[position:].strip():
        match = _LABEL.match(text, position)
        if match is None:
            return None
        labels[match[1]] = _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], match[2])
        position = match.end()
    return labels


def _value(source: MetricSource, labels: Mapping[str, str], value: float) -> float | None:
    if source.label is not None:
        try:
            value = float(labels.get(source.label, "nan"))
        except ValueError:
            return None
    return value if math.isfinite(value) and value >= 0 else None


def _first(labels: Mapping[str, str], names: Sequence[str]) -> str | None:
    return next((labels[name] for name in names if labels.get(name)), None)


def _shown(text: str | None) -> str | None:
    """Return a label without characters that a terminal or a log would interpret, shortened."""
    if text is None:
        return None
    return "".join(character if character.isprintable() else "?" for character in text[:MOST_NAME])


def fetch(host: str, port: int, *, timeout_s: float = TIMEOUT_S, largest: int = LARGEST) -> str:
    """Return the body of ``GET /metrics``. Raises ``OSError`` or ``ValueError`` with the reason, in one line.

    HTTP/1.0, so that the response is neither chunked nor compressed and ends with the connection. Without a complete
    response the connection is reset: its end is an error event for the peer, and the kernel keeps neither a socket in
    CLOSE-WAIT nor unread bytes for a program that does not read.
    """
    ends = time.monotonic() + timeout_s
    data = bytearray()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        connection.settimeout(timeout_s)
        connection.connect((host, port))
        connection.sendall(
            b"GET /metrics HTTP/1.0\r\nHost: localhost\r\nAccept: text/plain\r\nConnection: close\r\n\r\n"
        )
        length = None
        while (remaining_s := ends - time.monotonic()) > 0:
            connection.settimeout(remaining_s)
            block = connection.recv(1 << 16)
            if not block:
                break
            data += block
            if len(data) > largest + _MOST_HEAD:
                raise ValueError(f"has more than {largest >> 20} MiB")
            length = length or _length(data)
            if length is not None and len(data) >= length:
                break
        else:
            raise TimeoutError(f"timed out after {timeout_s:g} s")
        response = bytes(data)
        if _STATUS.match(response):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ORDERLY)
    return body_of(response)


def body_of(data: bytes) -> str:
    """Return the body of a whole response. Raises ``ValueError`` with the reason, in one line.

    ``NoMetricsError``: it is one of HTTP.
    """
    head, blank, body = data.partition(b"\r\n\r\n")
    status = _STATUS.match(head)
    if not blank or status is None:
        raise ValueError("is not an HTTP response")
    if status[1] != b"200":
        raise NoMetricsError(f"HTTP {status[1].decode()}")
    if b"\r\ntransfer-encoding:" in head.lower() or b"\r\ncontent-encoding:" in head.lower():
        raise NoMetricsError("is an encoded response, which was not requested")
    return body.decode("utf-8", "replace")


def _length(data: bytearray) -> int | None:
    """Return the size of the whole response, if its head is complete and states it."""
    end = data.find(b"\r\n\r\n", 0, _MOST_HEAD)
    match = re.search(rb"\r\ncontent-length: *([0-9]{1,10})\r\n", bytes(data[: end + 2]).lower()) if end >= 0 else None
    return None if match is None else end + 4 + int(match[1])


def drop_privileges(uid: int, gid: int, groups: Sequence[int]) -> None:
    """Become a user, irrevocably, with limits. Raises ``OSError`` or ``ValueError``; the caller must end then."""
    if not all(0 < number <= _MOST_ID for number in (uid, gid, *groups)):
        raise ValueError("is no user who may be scraped")
    for limit, most in (
        (resource.RLIMIT_CPU, _CPU_S), (resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, LARGEST_REPORT),
    ):  # fmt: skip
        hard = resource.getrlimit(limit)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (least, least))
    os.setgroups(list(groups))
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid, uid, uid) or os.getresgid() != (gid, gid, gid):
        raise ValueError("the privileges could not be dropped")


def report(engine_readings: Sequence[EngineReading]) -> str:
    """Return readings as one line of JSON. The bound of the last bucket, which is infinite, is null."""
    return json.dumps([
        [reading.engine, reading.model, reading.rank, dict(reading.values), {
            name: [[None if bound == math.inf else bound, count] for bound, count in counts]
            for name, counts in reading.buckets.items()
        }]
        for reading in engine_readings
    ])  # fmt: skip


def decode(line: bytes) -> list[EngineReading]:
    """Return the readings in a line of ``report``. Raises ``ValueError`` for anything else."""
    if len(line) > LARGEST_REPORT:
        raise ValueError("is too long")
    fields = {*metric_table.exported_fields().values()} - {*metric_table.ORPHANED}
    kinds = {*metric_table.load().engines} - {PROCESS}
    data = json.loads(line)
    if not isinstance(data, list) or len(data) > MOST_ENGINES:
        raise ValueError("is no list of engines")
    engine_readings = []
    for encoded in data:
        if not isinstance(encoded, list) or len(encoded) != 5:
            raise ValueError("is no engine")
        engine, model, rank, values, histograms = encoded
        names = all(text is None or (isinstance(text, str) and len(text) <= MOST_NAME and text.isprintable())
                    for text in (model, rank))  # fmt: skip
        if (
            not isinstance(engine, str)
            or engine not in kinds
            or not names
            or not isinstance(values, dict)
            or not values.keys() <= fields
            or not isinstance(histograms, dict)
            or not histograms.keys() <= {*BUCKETS}
        ):
            raise ValueError("is no engine")
        if not all(type(value) is float and math.isfinite(value) for value in values.values()):
            raise ValueError("has a value that is not a number")
        buckets = {name: _decoded_buckets(counts) for name, counts in histograms.items()}
        engine_readings.append(EngineReading(engine, model, rank, values, buckets))
    return engine_readings


def _decoded_buckets(counts: object) -> tuple[tuple[float, float], ...]:
    if not isinstance(counts, list) or not 0 < len(counts) <= MOST_BUCKETS:
        raise ValueError("has a histogram that is no list of buckets")
    if not all(isinstance(bucket, list) and len(bucket) == 2 for bucket in counts):
        raise ValueError("has a histogram that is no list of buckets")
    bounds = [bucket[0] for bucket in counts[:-1]]
    numbers = [*bounds, *(bucket[1] for bucket in counts)]
    if counts[-1][0] is not None or not all(type(number) is float and math.isfinite(number) for number in numbers):
        raise ValueError("has a bucket that is no number")
    if any(below >= above for below, above in itertools.pairwise(bounds)):
        raise ValueError("has buckets that are not in order")
    return tuple(zip([*bounds, math.inf], [bucket[1] for bucket in counts], strict=True))


def main(arguments: Sequence[str]) -> int:
    """Scrape and print the readings, none if the response has no metrics.

    Returns 1 if there was no response of HTTP, with the reason on standard error.
    """
    host, port, uid, gid, groups = arguments
    metric_table.load()  # the user may not be permitted to read the package
    try:
        if os.geteuid() == 0:
            drop_privileges(int(uid), int(gid), [int(group) for group in groups.split(",") if group])
        try:
            engine_readings = readings(fetch(host, int(port)))
        except NoMetricsError:
            engine_readings = []
        print(report(engine_readings))
    except (OSError, ValueError, MemoryError) as error:
        print(getattr(error, "strerror", None) or str(error) or type(error).__name__, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
