"""The extra ``analysis``: libraries of the report machine, which nodes and users do not need."""

from __future__ import annotations

from importlib.util import find_spec

from slurm_affinode.base.errors import AffinodeError

LIBRARIES = ("numpy", "pandas", "polars", "pyarrow", "sqlalchemy")
"""The modules of the extra."""
INSTALL = "pip install 'slurm-affinode[analysis]', or install the package slurm-affinode"
"""The package (deb, rpm) of the report machine includes it."""


class ExtraMissingError(AffinodeError):
    """The extra ``analysis`` is not installed."""


def missing() -> list[str]:
    """Return the modules of the extra that are not installed."""
    return [name for name in LIBRARIES if find_spec(name) is None]


def explained(error: ModuleNotFoundError, command: str) -> ExtraMissingError | None:
    """Return the error to show if ``command`` could not import a module of the extra; ``None`` for other modules."""
    name = (error.name or "").partition(".")[0]
    if name not in LIBRARIES:
        return None
    return ExtraMissingError(f"{command}: needs the extra analysis (there is no module {name}); {INSTALL}")
