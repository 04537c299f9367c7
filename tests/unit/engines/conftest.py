"""Reading of engine metrics from text, and the recordings of real engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import polars as pl
import pytest

from slurm_affinode.engines import reader
from slurm_affinode.engines.schema import SAMPLES
from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions

Read = Callable[..., tuple[pl.DataFrame, ReadingNotes]]


@pytest.fixture(scope="session")
def options() -> ReadOptions:
    return ReadOptions(aliases=aliases.load(), default_cluster="alpha")


@pytest.fixture
def read(options: ReadOptions, tmp_path: Path) -> Read:
    """Read text, or a file, as one source; return its samples and notes."""

    def whole(source: str | bytes | Path, *, start: datetime | None = None, format: str | None = None,
              **changes: object) -> tuple[pl.DataFrame, ReadingNotes]:  # fmt: skip
        path = source if isinstance(source, Path) else tmp_path / "input.prom"
        if isinstance(source, str):
            path.write_text(source)
        elif isinstance(source, bytes):
            path.write_bytes(source)
        notes = ReadingNotes(str(path))
        read_options = replace(options, start=start, **changes)  # type: ignore[arg-type]
        _, frames = reader.read_file(path, read_options, notes, format=format)
        return pl.concat([pl.DataFrame(schema=SAMPLES), *frames]).sort("time", "model", "rank"), notes

    return whole


@pytest.fixture
def recordings(shared_data: Path) -> Path:
    return shared_data / "serving"
