"""The files of a part, and the two small tables that index its samples."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from slurm_affinode.errors import UnreachableError, one_line
from slurm_affinode.history import manifest
from slurm_affinode.history.manifest import PartEntry
from slurm_affinode.history.schema import IDENTITY, TIME

POLARS_ERRORS = (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException)
"""What Polars raises for a file that is gone or damaged; some damage makes it panic."""
_FILES_AT_ONCE = 256

DEVICES: dict[str, pl.DataType] = {
    "device": pl.UInt64(),
    **IDENTITY,
    "rows": pl.Int64(),  # of the device in the part; their running sum gives the offsets
    "first": TIME,
    "last": TIME,
    "step_ms": pl.Int64(),  # ``sampling_step``; None where there are fewer than two samples
}
"""The table of a part's devices, in the order of the part."""

JOBS: dict[str, pl.DataType] = {
    "device": pl.UInt64(),
    "job": pl.String(),  # one id
    "first": TIME,
    "last": TIME,
    "rows": pl.Int64(),
}
"""The job labels of a part: one row per maximal run of a device's consecutive samples that carry the id."""


@dataclass(frozen=True, slots=True)
class PartFiles:
    """Where the three files of a part are."""

    samples: Path
    devices: Path
    jobs: Path
    devices_digest: str | None = None
    jobs_digest: str | None = None

    @classmethod
    def of(cls, directory: Path, name: str) -> PartFiles:
        """The files of the part ``name`` in ``directory``."""
        samples, devices, jobs = (directory / f"{kind}-{name}.parquet" for kind in ("part", "devices", "jobs"))
        return cls(samples, devices, jobs)

    @classmethod
    def live(cls, directory: Path, entry: PartEntry) -> PartFiles:
        """The files of a part that the manifest names, with their digests."""
        files = cls.of(directory, entry.name)
        return replace(files, devices_digest=entry.devices_digest, jobs_digest=entry.jobs_digest)

    def all(self) -> tuple[Path, Path, Path]:
        """The three of them."""
        return (self.samples, self.devices, self.jobs)


def damaged(path: Path, what: str) -> UnreachableError:
    """What is raised for a file of a part that cannot be read or says what cannot be."""
    return UnreachableError(
        f"{path}: the GPU history cannot be read: {what}",
        hint="remove the directory of the damaged day and take its files in again",
    )


def read_devices(files: PartFiles) -> pl.DataFrame:
    """``DEVICES`` of a part. Raises ``UnreachableError`` where the table is gone or damaged."""
    return _read(files.devices, files.devices_digest, DEVICES)


def read_tables(parts: Sequence[PartFiles]) -> list[tuple[pl.DataFrame, pl.DataFrame]]:
    """``DEVICES`` and ``JOBS`` of many parts at once: several times as fast as one by one. Raises
    ``UnreachableError``."""
    wanted = [
        one
        for files in parts
        for one in ((files.devices, files.devices_digest, DEVICES), (files.jobs, files.jobs_digest, JOBS))
    ]
    contents = [_content(path, digest) for path, digest, _ in wanted]
    try:
        # Of more than 512 that wait for a file at the same time Polars warns that they may be stuck.
        slices = (contents[begin : begin + _FILES_AT_ONCE] for begin in range(0, len(contents), _FILES_AT_ONCE))
        frames = [frame for some in slices for frame in pl.collect_all([pl.scan_parquet(content) for content in some])]
    except POLARS_ERRORS:
        # One by one it is known which of them is damaged.
        frames = [_table_of(content, path) for content, (path, _, _) in zip(contents, wanted, strict=True)]
    tables = iter([_checked(frame, path, schema) for frame, (path, _, schema) in zip(frames, wanted, strict=True)])
    return list(zip(tables, tables, strict=True))


def read_jobs(files: PartFiles) -> pl.DataFrame:
    """``JOBS`` of a part. Raises ``UnreachableError`` where the table is gone or damaged."""
    return _read(files.jobs, files.jobs_digest, JOBS)


def _read(path: Path, digest: str | None, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    return _checked(_table_of(_content(path, digest), path), path, schema)


def _content(path: Path, digest: str | None) -> bytes:
    """A small file. Compared first with what was written: there is damage that ends the process that decodes it."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise damaged(path, one_line(error)) from error
    if digest is not None and manifest.digest(content) != digest:
        raise damaged(path, "its content is not what was written")
    return content


def _table_of(content: bytes, path: Path) -> pl.DataFrame:
    try:
        return pl.read_parquet(content)
    except POLARS_ERRORS as error:
        raise damaged(path, one_line(error)) from error


def _checked(table: pl.DataFrame, path: Path, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """``table``, if it has the columns and can be true. Raises ``UnreachableError``."""
    if dict(table.schema) != schema:
        raise damaged(path, "its columns are not those of such a table")
    if any(table[name].has_nulls() for name in ("device", "first", "last", "rows")) or (table["rows"] < 1).any():
        raise damaged(path, "a row of it says nothing")
    if schema is DEVICES and (table["device"].is_duplicated().any() or (table["step_ms"] < 0).any()):
        raise damaged(path, "its rows contradict each other")
    return table


def write(table: pl.DataFrame, path: Path) -> str:
    """Write a table of a part; its digest. Raises ``OSError``."""
    content = io.BytesIO()
    table.write_parquet(content, compression="zstd")
    path.write_bytes(content.getvalue())
    return manifest.digest(content.getvalue())
