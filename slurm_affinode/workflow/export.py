"""The GPU history in formats of others, written to a file as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from slurm_affinode.config import Config
from slurm_affinode.errors import AffinodeError, InputError
from slurm_affinode.files import delivering
from slurm_affinode.history import openmetrics
from slurm_affinode.history.openmetrics import Written
from slurm_affinode.history.store import SampleStore


def as_openmetrics(
    config: Config,
    since: datetime,
    until: datetime,
    out: Path | BinaryIO,
    *,
    labels: Mapping[str, str] | None = None,
    advance: Callable[[int], None] = lambda values: None,
) -> Written:
    """Write the history of the half-open interval to ``out``. Raises ``AffinodeError`` where there is none of it.

    ``advance`` hears how many rows were gone through, each once for each metric.
    """
    if until <= since:
        raise AffinodeError(
            f"the interval ends ({until:%Y-%m-%dT%H:%M:%SZ}) before it begins ({since:%Y-%m-%dT%H:%M:%SZ})",
            hint="choose --since before --until",
        )
    with closing(SampleStore(config.history_dir)) as history:
        if history.devices(since, until).is_empty():
            span = history.span()
            hint = "take some in first: slurm-affinode ingest gpu PATH..."
            if span is not None:
                hint = f"it has samples from {span[0]:%Y-%m-%dT%H:%M:%SZ} to {span[1]:%Y-%m-%dT%H:%M:%SZ}"
            raise InputError("has no samples of that time", where=str(config.history_dir), hint=hint)
        if not isinstance(out, Path):
            return openmetrics.write(history, since, until, out, extra=labels, advance=advance)
        if out.is_dir():
            raise InputError("is a directory: give --out FILE", where=str(out))
        try:
            with delivering(out) as temporary, temporary.open("wb") as file:
                written = openmetrics.write(history, since, until, file, extra=labels, advance=advance)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror or error}", where=str(out)) from error
        return written
