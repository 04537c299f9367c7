"""``slurm-affinode completion``: shell completion."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from slurm_affinode.cli.command import command


class _FishComplete(FishComplete):
    """Completion for fish: a comma ends the kind of a completion, and may occur in its description."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')


_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": _FishComplete}


@command()
@click.argument("shell", type=click.Choice(list(_SHELLS)))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  slurm-affinode completion bash > /usr/share/bash-completion/completions/slurm-affinode
    zsh:   slurm-affinode completion zsh > "${fpath[1]}/_slurm-affinode"
    fish:  slurm-affinode completion fish > ~/.config/fish/completions/slurm-affinode.fish
    """
    from slurm_affinode.cli.main import cli  # noqa: PLC0415 - main imports this module lazily

    click.echo(_SHELLS[shell](cli, {}, "slurm-affinode", "_SLURM_AFFINODE_COMPLETE").source())
