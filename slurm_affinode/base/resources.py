"""Location of files that are not Python: templates (``reports/``) and SQL (``sql/``).

In a built wheel they are inside the package (``_assets``); in a source checkout, at the top of the repository.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def asset_dir(name: str) -> Path:
    """Return the directory ``reports`` or ``sql``; raise ``FileNotFoundError`` if the installation lacks it."""
    for candidate in (_PACKAGE / "_assets" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"this installation of slurm-affinode has no {name!r} directory")
