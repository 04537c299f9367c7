"""Entry point of ``slurm-affinode``. Prolog and epilog run for every job and skip the imports of other commands."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command in ``sys.argv``."""
    match sys.argv[1:]:
        case [("prolog" | "epilog") as which]:
            config = None
        case [("prolog" | "epilog") as which, "--config", path]:
            config = path
        case _:
            from slurm_affinode.cli.main import main as commands  # noqa: PLC0415 - quick for the others

            commands()
    from slurm_affinode.agent.hooks import main as hook  # noqa: PLC0415

    sys.exit(hook(which, config))
