"""Extras: ``analysis``, the libraries of the report machine, which nodes and users do not need; and others."""

from __future__ import annotations

from importlib.util import find_spec

from slurm_affinode.base.errors import AffinodeError

LIBRARIES = ("numpy", "pandas", "polars", "pyarrow", "sqlalchemy")
"""The modules of the extra."""
INSTALL = "pip install 'slurm-affinode[analysis]', or install the package slurm-affinode"
"""The package (deb, rpm) of the report machine includes it."""


_EXTRAS = {
    **dict.fromkeys(LIBRARIES, "analysis"),
    **dict.fromkeys(("boto3", "botocore", "obstore"), "objects"),
    **dict.fromkeys(("dask", "dask_jobqueue", "distributed"), "scale"),
}


class ExtraMissingError(AffinodeError):
    """An extra is not installed."""


def missing() -> list[str]:
    """Return the modules of the extra that are not installed."""
    return [name for name in LIBRARIES if find_spec(name) is None]


def explained(error: ModuleNotFoundError, command: str) -> ExtraMissingError | None:
    """Return the error to show if ``command`` could not import a module of an extra; ``None`` for other modules."""
    name = (error.name or "").partition(".")[0]
    if (extra := _EXTRAS.get(name)) is None:
        return None
    install = INSTALL if extra == "analysis" else f"pip install 'slurm-affinode[{extra}]'"
    return ExtraMissingError(f"{command}: needs the extra {extra} (there is no module {name}); {install}")
