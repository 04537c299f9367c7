"""Conversion of the sampler's spool files to Parquet: ``python -m slurm_affinode.metrics.spool FILE.csv...``

It runs in a separate process, so that the sampler does not keep Polars in memory. ``FILE.csv`` is replaced with
``FILE.parquet``, which appears as a whole or not at all. Both files hold the same samples, so no sample is lost or
counted twice if the conversion is interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from slurm_affinode.base.errors import InputError
from slurm_affinode.base.files import replacing
from slurm_affinode.metrics.schema import SAMPLES, TIME


def to_parquet(path: Path) -> Path:
    """Replace ``path`` with a Parquet file and return its path. Raises ``InputError``, ``OSError``."""
    try:
        table = pl.read_csv(path, schema_overrides={name: pl.String() for name in SAMPLES})
        rows = table.select(
            (
                pl.col("time").str.to_datetime("%Y-%m-%dT%H:%M:%S%.fZ", time_zone="UTC")
                if name == "time"
                else pl.col(name)
            )
            .cast(TIME if name == "time" else dtype)
            .alias(name)
            for name, dtype in SAMPLES.items()
        )
    except pl.exceptions.PolarsError as error:
        raise InputError(f"is not a file of a spool: {str(error).splitlines()[0]}", where=str(path)) from error
    target = path.with_suffix(".parquet")
    with replacing(target) as temporary:
        rows.sort("uuid", "mig", "time").write_parquet(temporary, compression="zstd", compression_level=3)
    path.unlink()
    return target


def main(arguments: Sequence[str]) -> int:
    """Convert the files; return 2 if any file could not be converted. Such a file is left unchanged."""
    status = 0
    for name in arguments:
        try:
            to_parquet(Path(name))
        except FileNotFoundError:
            continue  # already converted
        except (InputError, OSError) as error:
            print(error, file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
