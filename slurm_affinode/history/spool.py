"""Makes Parquet of a file of the sampler's spool: ``python -m slurm_affinode.history.spool FILE.csv...``

A process of its own, so that the sampler need not carry Polars in its memory. ``FILE.csv`` gives way to
``FILE.parquet``, which is there whole or not at all; both hold the same samples, so nothing is lost or counted twice
whatever happens in between.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl

from slurm_affinode.errors import InputError
from slurm_affinode.files import replacing
from slurm_affinode.history.schema import SAMPLES, TIME


def to_parquet(path: Path) -> Path:
    """Write the Parquet file beside ``path`` and remove ``path``; the new path. Raises ``InputError``, ``OSError``."""
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
        raise InputError(f"is no file of a spool: {str(error).splitlines()[0]}", where=str(path)) from error
    target = path.with_suffix(".parquet")
    with replacing(target) as temporary:
        rows.sort("uuid", "mig", "time").write_parquet(temporary, compression="zstd", compression_level=3)
    path.unlink()
    return target


def main(arguments: Sequence[str]) -> int:
    """Convert the files; 2 where one could not be, which is left as it is."""
    status = 0
    for name in arguments:
        try:
            to_parquet(Path(name))
        except FileNotFoundError:
            continue  # was converted before
        except (InputError, OSError) as error:
            print(error, file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
