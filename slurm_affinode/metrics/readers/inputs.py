"""The files of an ingest: find them, detect their formats by content, skip those read before."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.input_files import is_binary
from slurm_affinode.base.limits import GPU_LINE_BYTES
from slurm_affinode.metrics.aliases import Aliases
from slurm_affinode.metrics.readers import (
    csv_table,
    dmon,
    exposition,
    parquet_table,
    prometheus_json,
    smi_query,
    smi_table,
    smi_xml,
)
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions
from slurm_affinode.metrics.readers.csv_table import after_preface, is_smi_header, is_table
from slurm_affinode.metrics.readers.dmon import HEADER
from slurm_affinode.metrics.readers.lines import blocks, compression_of, head, reading
from slurm_affinode.metrics.readers.snapshot_times import LONGEST_LINE, time_from_name
from slurm_affinode.metrics.readers.snapshots import Parser, SnapshotReader

SNAPSHOT_PARSERS: dict[str, Parser] = {
    "nvidia-smi-table": smi_table.parse,
    "nvidia-smi-q": smi_query.parse,
    "nvidia-smi-xml": smi_xml.parse,
}
"""Formats of snapshots -> their parsers."""
FORMATS = ("prometheus", "openmetrics", "prometheus-json", "csv", "nvidia-smi", *SNAPSHOT_PARSERS, "dmon", "parquet")
"""Supported formats. ``prometheus`` is exposition text."""

_NUMBER = r"[-+]?(?:[0-9.]\S*|[iI]nf|[nN]a[nN])"
_SAMPLE = re.compile(
    rf"^(?:[a-zA-Z_:][a-zA-Z0-9_:]*(?:\s*\{{.*\}})?|\{{.*\}})\s+{_NUMBER}(?:\s+[-+]?[0-9.]\S*)?(?:\s+#.*)?\s*$"
)
_COMMENT = re.compile(r"^#\s*(?:HELP|TYPE|UNIT|EOF)\b")
_SMI_ROW = re.compile(r"GPU-[0-9a-f]{8}-|\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}\s*,|,\s*\d+ (?:%|MiB)\s*(?:,|$)")

_OTHER_SMI = re.compile(r"#\s*(?:Date\s+Time\s+)?gpu\s")
"""First lines of other outputs of nvidia-smi: ``dmon`` and ``pmon``."""
_SNAPSHOT_MARKS = (
    (smi_xml.BANNER, "nvidia-smi-xml"),
    (smi_query.BANNER, "nvidia-smi-q"),
    (smi_table.BANNER, "nvidia-smi-table"),
    (smi_table.HEADER, "nvidia-smi-table"),
)
_SNAPSHOT_LINES = 200
"""Lines in which the first snapshot begins: it may be quoted in a longer text."""


def detect(path: Path, name: str, aliases: Aliases) -> str:
    """Return the format of ``path``, one of ``FORMATS``. Raises ``InputError`` for any other content."""
    start = head(path)
    if not start.strip():
        raise InputError("is empty", where=name)
    if start.startswith(b"PAR1"):
        return "parquet"
    if is_binary(start):
        raise InputError("is a binary file of no known format", where=name, hint=_known_formats())
    text = start.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace")
    whole = [line for line in text.split("\n") if line.strip()]
    lines = after_preface(whole, aliases)
    # A line of exposition text may also begin with a brace: {"name", label="value"} 5
    if text.lstrip()[:1] in "{[" and not _SAMPLE.match(lines[0]) and _is_json(text):
        return "prometheus-json"
    if any(HEADER.match(line) for line in lines[:50]):
        return "dmon"
    if (snapshots := _snapshot_format(lines)) is not None:
        return snapshots
    if any(_OTHER_SMI.match(line) for line in lines[:5]):
        hint = (
            "log with nvidia-smi --query-gpu=timestamp,uuid,utilization.gpu,memory.used,power.draw --format=csv -l 30"
        )
        raise InputError("is output of nvidia-smi in a form that is not read", where=name, hint=hint)
    if _COMMENT.match(lines[0]) or _is_exposition(lines):
        return "openmetrics" if any(re.match(r"#\s*(?:EOF|UNIT)\b", line) for line in lines) else "prometheus"
    if is_smi_header(lines[0].strip()) or (_SMI_ROW.search(lines[0]) and not is_table(lines[0], aliases)):
        return "nvidia-smi"
    if is_table(lines[0], aliases):
        return "csv"
    raise InputError(
        f"has no known format; it begins with {whole[0].strip()[:60]!r}", where=name, hint=_known_formats()
    )


def _snapshot_format(lines: list[str]) -> str | None:
    """Return the format of the first snapshot of nvidia-smi in the lines."""
    for line in lines[:_SNAPSHOT_LINES]:
        for mark, format in _SNAPSHOT_MARKS:
            if mark.match(line[:LONGEST_LINE]):
                return format
    return None


def _known_formats() -> str:
    return f"formats: {', '.join(FORMATS)}; force one with --format"


def _is_json(text: str) -> bool:
    """Return whether the text is JSON or its beginning, not exposition text (``{`` never starts a metric name)."""
    try:
        json.JSONDecoder().raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return re.match(r'\s*[\[{]\s*(?:"|\{|\[)', text) is not None
    return True


def _is_exposition(lines: list[str]) -> bool:
    """Return whether most of the first lines are samples or comments; the last one may be truncated."""
    if "{" in lines[0] and _SAMPLE.match(lines[0]):
        return True
    first_lines = lines[: min(50, max(1, len(lines) - 1))]
    hits = sum(bool(_SAMPLE.match(line) or line.startswith("#")) for line in first_lines)
    metrics = any("{" in line for line in first_lines) or any(not line.startswith("#") for line in first_lines)
    return (
        metrics
        and 2 * hits >= len(first_lines)
        and not any(mark in first_lines[0].split("{")[0] for mark in (",", ";", "\t"))
    )


_TOOL_WORD = re.compile(
    "samples?|logs?|gpus?|metrics?|history|exports?|data|out|output|smi|nvidia|dmon|dcgmi?|util|utilization|stats?|monitor|"
    "monitoring|usage|csv|tmp|temp|dump|query|prom|prometheus|node|host|scrapes?|exporter|federate",
    re.IGNORECASE,
)
_NO_HOST = re.compile(
    "week|w|day|d|hour|h|month|m|year|y|q|t|v|rev|version|run|step|job|part|chunk|shard|batch|test|file|copy|backup|bak|old|"
    "new|stdin|tmp|archive|top|disk|vol|volume",
    re.IGNORECASE,
)
_HOST_WORDS = ("gpu", "node", "host")
_DATE = re.compile(
    r"(?<![0-9])\d{4}[-_.]?\d{2}(?:[-_.]?\d{2})?(?:[-_.T]?\d{2}[-_.:]?\d{2}(?:[-_.:]?\d{2})?Z?)?(?![0-9])"
)
_HOST = re.compile(r"([A-Za-z]+(?:-[A-Za-z]+)*)-?\d+(?:-?[A-Za-z]*\d+)*")


def node_from_path(path: str) -> str | None:
    """Return the node in the name of a file, else of its directory.

    Examples: ``gpu01.csv``, ``nvidia-smi_gpu01_2026-11-01.log``, ``gpu-01/dmon.txt``. Dates and names of tools are
    removed; the rest must be one name that ends in a number and does not count weeks, runs or parts.
    """
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    if not parts:
        return None
    name = _DATE.sub("", parts[-1].split(".", 1)[0])
    candidates = [host for part in name.split("_") if (host := _host(part)) is not None]
    # A device after the node ("gpu01_gpu0") is not a second host.
    hosts = [host for host in candidates if not re.fullmatch(r"gpu\d", host.lower())] or candidates
    if len(hosts) == 1:
        return hosts[0]
    # Directories have all kinds of names: one counts only if it is a host name and nothing else.
    above = parts[-2].split(".", 1)[0] if len(parts) > 1 else ""
    return above if above and _host(above) == above else None


def _host(part: str) -> str | None:
    words = [word for word in part.split("-") if word]
    while words and _is_tool(words):
        words = words[1:]
    while len(words) > 1 and _TOOL_WORD.fullmatch(words[-1]):
        words = words[:-1]
    host = "-".join(words)
    match = _HOST.fullmatch(host)
    return host if match is not None and len(host) <= 40 and not _is_numbered_file(match.group(1)) else None


def _is_numbered_file(word: str) -> bool:
    """Return whether a number after ``word`` counts files rather than hosts: ``smi2``, ``part0001``."""
    if word.lower() in _HOST_WORDS:
        return False
    return _NO_HOST.fullmatch(word) is not None or _TOOL_WORD.fullmatch(word) is not None


def _is_tool(words: list[str]) -> bool:
    """Return whether the first word names a tool rather than a host; ``gpu`` in ``gpu-01`` is part of a host name."""
    first = words[0].lower()
    return _TOOL_WORD.fullmatch(first) is not None and not (
        first in _HOST_WORDS and len(words) > 1 and words[1].isdigit()
    )


READER_VERSION = 5
"""Part of the fingerprints; incremented when readers return different samples for the same file."""
_IGNORED_SUFFIXES = (".md", ".rst", ".tmp", ".part", ".swp", ".py", ".sh", "~")
_REFUSED = "cannot be read"
_IGNORED_NAMES = ("readme", "license", "makefile")


def expand(paths: Sequence[str | Path]) -> tuple[list[Path], list[tuple[str, str]]]:
    """Return the files for ``paths``, in order, each once; and the paths without files, with the reason.

    Paths are files, directories and globs. For directories, all files below are returned, except hidden ones and those
    that are obviously no data (``*.md``, ``README``, ``*.tmp``). A file found again by links to directories counts
    once.
    """
    files: dict[Path, Path] = {}
    missing: list[tuple[str, str]] = []
    for name in paths:
        path = Path(name)
        try:
            directory, file, exists = path.is_dir(), path.is_file(), path.exists()
        except OSError as error:
            missing.append((str(name), _refused(error)))
            continue
        if directory:
            inside, refused = _below(path)
            missing += refused
            if not inside and not refused:
                missing.append((str(name), "the directory has no files"))
            _add(files, inside)
        elif file:
            _add(files, [path])
        elif exists:
            missing.append((str(name), "is no regular file; pipe it to standard input and give -"))
        elif matches := sorted(glob.glob(str(name), recursive=True)) if glob.has_magic(str(name)) else []:  # noqa: PTH207 - keeps absolute and relative patterns as they are
            inner, without = expand(matches)
            refused = [(match, why) for match, why in without if why.startswith(_REFUSED)]
            missing += refused
            if not inner and not refused:
                missing.append((str(name), "no file matches"))
            _add(files, inner)
        else:
            what = "no file matches" if glob.has_magic(str(name)) else "no such file or directory"
            missing.append((str(name), what))
    return list(files.values()), missing


def _add(files: dict[Path, Path], paths: Sequence[Path]) -> None:
    """Add ``paths`` by their real directory. A link to a file keeps its own name, which may have the node."""
    for path in paths:
        files.setdefault(Path(os.path.realpath(path.parent), path.name), path)


def _below(directory: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """Return the files below a directory, and the directories that cannot be read, with the reason."""
    errors: list[OSError] = []
    inside = [
        Path(parent, name) for parent, _, names in os.walk(directory, onerror=errors.append) for name in names
    ]  # fmt: skip
    refused = [(str(error.filename), _refused(error)) for error in errors]
    return sorted(path for path in inside if _is_input(path, directory)), refused


def _refused(error: OSError) -> str:
    return f"{_REFUSED}: {(error.strerror or str(error)).lower()}"


def _is_input(path: Path, root: Path) -> bool:
    relative = path.relative_to(root)
    if any(part.startswith(".") for part in relative.parts) or not path.is_file():
        return False
    name = path.name.lower()
    return not name.endswith(_IGNORED_SUFFIXES) and name.split(".")[0] not in _IGNORED_NAMES


def read_file(
    path: Path,
    options: ReadOptions,
    notes: ReadingNotes,
    format: str | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[str, Iterator[pl.DataFrame]]:
    """Return the format of a file and its samples (frames of ``SAMPLES``). Raises ``InputError``, also between frames.

    ``advance`` is called with numbers of bytes read, for text files without compression.
    """
    name = notes.name
    node = options.node or node_from_path(str(path.absolute()))
    kind = format or detect(path, name, options.aliases)
    if kind == "parquet":
        return kind, parquet_table.read(path, notes, options, node)
    if kind == "prometheus-json":
        return kind, prometheus_json.read(path, notes, options, options.node)

    def reject(line: int, why: str, _: bytes) -> None:
        notes.problem(line, why, strict=options.strict)

    plain = compression_of(path) is None
    lines = blocks(path, name, advance=advance if plain else lambda count: None, reject=reject)
    if kind in ("prometheus", "openmetrics"):
        # Series name their node; the file name is no substitute, because a file has many nodes.
        reader = exposition.ExpositionReader(notes, options, options.node, openmetrics=kind == "openmetrics")
        return kind, reader.read(lines)
    if kind == "dmon":
        return kind, dmon.DmonReader(notes, options, node).read(lines)
    if kind in SNAPSHOT_PARSERS:
        snapshots = SnapshotReader(notes, options, node, SNAPSHOT_PARSERS[kind], time_from_name(path.name))
        return kind, snapshots.read(lines)
    if kind in ("csv", "nvidia-smi"):
        dialect = csv_table.Dialect(log=kind == "nvidia-smi")
        return kind, csv_table.CsvReader(notes, options, node, dialect).read(lines)
    raise InputError(f"{kind!r} is not a format", hint=f"formats: {', '.join(FORMATS)}")


SMALL_FILE_BYTES = 256 << 10
"""Files of exposition text up to this size are read together."""


def read_small(paths: Sequence[Path], options: ReadOptions, format: str | None) -> dict[Path, exposition.FileSamples]:
    """Return the samples of ``paths`` that are small, sound exposition text; ``read_file`` reads the others."""
    texts: dict[Path, str] = {}
    for path in paths:
        text = _small_text(path, options, format)
        if text is not None:
            texts[path] = text
    if len(texts) < 2 or options.start is not None:
        return {}
    samples = exposition.SmallFilesReader(options).read_together(list(texts.values()))
    return {path: samples[index] for index, path in enumerate(texts) if index in samples}


def _small_text(path: Path, options: ReadOptions, format: str | None) -> str | None:
    """Return the text of a file if it is small exposition text with complete lines, without further conversions."""
    try:
        if size(path) > SMALL_FILE_BYTES or compression_of(path) is not None:
            return None
        with path.open("rb") as file:
            data = file.read(SMALL_FILE_BYTES + 1)
        if not data.endswith(b"\n") or any(mark in data for mark in (b"\r", b"\0", b"EOF", b"\xef\xbb\xbf")):
            return None
        if max(map(len, data.split(b"\n"))) > GPU_LINE_BYTES or len(data) > SMALL_FILE_BYTES:
            return None
        kind = format or detect(path, str(path), options.aliases)
        return data.decode() if kind == "prometheus" else None
    except (InputError, OSError, UnicodeDecodeError, EOFError):
        return None  # reported when the file is read alone


class _Verbatim(str):
    """Text that Python shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def fingerprint(path: Path, name: str, options: ReadOptions, format: str | None) -> str:
    """Return a digest of the file's content and of everything that determines how it is read."""
    digest_parts = (READER_VERSION, format, options.cluster, options.default_cluster, options.node, str(options.zone),
           options.start, options.interval_s, options.fields, *map(_Verbatim, options.aliases.texts),
           None if options.node else node_from_path(str(path.absolute())), time_from_name(path.name))  # fmt: skip
    return digest(path, name, digest_parts)


def digest(path: Path, name: str, parts: tuple[object, ...]) -> str:
    """Return a digest of a file's content and of ``parts``, which decide how it is read. Raises ``InputError``."""
    with reading(name), path.open("rb") as file:
        hashed = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    hashed.update(repr(parts).encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()


def size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
