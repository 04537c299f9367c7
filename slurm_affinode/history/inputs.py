"""The files of an ingest: which they are, whether they were read before, which reader is theirs."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import polars as pl

from slurm_affinode.errors import InputError
from slurm_affinode.history import csvfile, detect, dmon, exposition, parquetfile, promjson
from slurm_affinode.history.lines import blocks, compression_of, reading
from slurm_affinode.history.nodepath import node_from_path
from slurm_affinode.history.reading import Notes, ReadOptions

READER_VERSION = 4
"""Part of the fingerprints: raised when readers give other samples for the same file."""
_IGNORED_SUFFIXES = (".md", ".rst", ".tmp", ".part", ".swp", ".py", ".sh", "~")
_REFUSED = "cannot be read"
_IGNORED_NAMES = ("readme", "license", "makefile")


def expand(paths: Sequence[str | Path]) -> tuple[list[Path], list[tuple[str, str]]]:
    """The files that ``paths`` name, in order, each once; and those of ``paths`` that name nothing, with the reason.

    Paths are files, directories and globs. Of directories all files below are taken, except hidden ones and those
    that are plainly no data (``*.md``, ``README``, ``*.tmp``). A file that links to directories lead to again is one.
    """
    found: dict[Path, Path] = {}
    missing: list[tuple[str, str]] = []
    for given in paths:
        path = Path(given)
        try:
            directory, file, exists = path.is_dir(), path.is_file(), path.exists()
        except OSError as error:
            missing.append((str(given), _refused(error)))
            continue
        if directory:
            inside, refused = _below(path)
            missing += refused
            if not inside and not refused:
                missing.append((str(given), "the directory has no files"))
            _add(found, inside)
        elif file:
            _add(found, [path])
        elif exists:
            missing.append((str(given), "is no regular file; pipe it to standard input and give -"))
        elif matches := sorted(glob.glob(str(given), recursive=True)) if glob.has_magic(str(given)) else []:  # noqa: PTH207 - keeps absolute and relative patterns as they are
            inner, without = expand(matches)
            refused = [(match, why) for match, why in without if why.startswith(_REFUSED)]
            missing += refused
            if not inner and not refused:
                missing.append((str(given), "no file matches"))
            _add(found, inner)
        else:
            what = "no file matches" if glob.has_magic(str(given)) else "no such file or directory"
            missing.append((str(given), what))
    return list(found.values()), missing


def _add(found: dict[Path, Path], paths: Sequence[Path]) -> None:
    """Add ``paths`` by their true directory; what a file that is itself a link is called may say its node."""
    for path in paths:
        found.setdefault(Path(os.path.realpath(path.parent), path.name), path)


def _below(directory: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """The files below a directory, and the directories that cannot be read, with the reason."""
    errors: list[OSError] = []
    inside = [
        Path(parent, name) for parent, _, names in os.walk(directory, onerror=errors.append) for name in names
    ]  # fmt: skip
    refused = [(str(error.filename), _refused(error)) for error in errors]
    return sorted(one for one in inside if _wanted(one, directory)), refused


def _refused(error: OSError) -> str:
    return f"{_REFUSED}: {(error.strerror or str(error)).lower()}"


def _wanted(path: Path, root: Path) -> bool:
    relative = path.relative_to(root)
    if any(part.startswith(".") for part in relative.parts) or not path.is_file():
        return False
    name = path.name.lower()
    return not name.endswith(_IGNORED_SUFFIXES) and name.split(".")[0] not in _IGNORED_NAMES


def read_file(
    path: Path,
    options: ReadOptions,
    notes: Notes,
    format: str | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[str, Iterator[pl.DataFrame]]:
    """The format of a file and its samples (frames of ``SAMPLES``). Raises ``InputError``, also while frames come.

    ``advance`` hears how many bytes were used, of files that are not compressed text.
    """
    name = notes.name
    node = options.node or node_from_path(str(path.absolute()))
    kind = format or detect.detect(path, name, options.aliases)
    if kind == "parquet":
        return kind, parquetfile.read(path, notes, options, node)
    if kind == "prometheus-json":
        return kind, promjson.read(path, notes, options, options.node)

    def reject(line: int, why: str, _: bytes) -> None:
        notes.problem(line, why, strict=options.strict)

    plain = compression_of(path) is None
    lines = blocks(path, name, advance=advance if plain else lambda count: None, reject=reject)
    if kind in ("prometheus", "openmetrics"):
        # Series name their node; the file name is no substitute, one file has many nodes.
        reader = exposition.Reader(notes, options, options.node, openmetrics=kind == "openmetrics")
        return kind, reader.read(lines)
    if kind == "dmon":
        return kind, dmon.Reader(notes, options, node).read(lines)
    if kind in ("csv", "nvidia-smi"):
        dialect = csvfile.Dialect(log=kind == "nvidia-smi")
        return kind, csvfile.Reader(notes, options, node, dialect).read(lines)
    raise InputError(f"{kind!r} is no format", hint=f"formats: {', '.join(detect.FORMATS)}")


def fingerprint(path: Path, name: str, options: ReadOptions, format: str | None) -> str:
    """Digest of a file's content and of everything that decides how it is read."""
    with reading(name), path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
    how = (READER_VERSION, format, options.cluster, options.default_cluster, options.node, str(options.zone),
           options.start, options.interval_s, options.fields, sorted(options.aliases.metrics.items(), key=str),
           sorted(options.aliases.labels.items()), sorted(options.aliases.columns.items(), key=str),
           None if options.node else node_from_path(str(path.absolute())))  # fmt: skip
    digest.update(repr(how).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def size(path: Path) -> int:
    """Bytes of a file; 0 where it is gone."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
