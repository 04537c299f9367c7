"""Write the generated pages of the documentation: ``python docs/generate.py [--check]``.

``docs/commands.md`` is the ``--help`` of every command, ``docs/metrics.md`` the definitions that the report shows;
``benchmarks/README.md`` has a table of the kept ratios.
With ``--check`` nothing is written, and the exit status is 1 if a file differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from slurm_affinode.analysis import definitions
from slurm_affinode.cli.main import cli

DOCS = Path(__file__).resolve().parent
BENCHMARKS = DOCS.parent / "benchmarks"


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield every command below ``command`` with the words that call it, parents first."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None and not child.hidden:
                yield from walk(child, (*path, name))


def commands() -> str:
    """The text of ``docs/commands.md``."""
    parts = [
        "# Commands",
        "",
        "Generated from `--help` by `make docs`. Every command has `--help`; many have `--json`.",
        "",
    ]
    for path, command in walk(cli, ("slurm-affinode",)):
        context = None
        for word in path[:-1]:
            context = click.Context(click.Group(word), info_name=word, parent=context)
        own = click.Context(command, info_name=path[-1], parent=context, terminal_width=110, max_content_width=110)
        parts += [f"## {' '.join(path)}", "", "```text", command.get_help(own).rstrip(), "```", ""]
    return "\n".join(parts)


_INTRODUCTION = """\
# Metrics

<!-- Generated from reports/metrics.toml by `make docs` -->

Hours are GPU-hours. For every row of a report that has them:

```
allocated = measured + unknown
measured  = idle + low + busy
```

A sum over runs, users, accounts, partitions, nodes or GPU models is the total. 0 is a measurement; an unknown
figure is absent.
"""


def metrics() -> str:
    """Return the text of ``docs/metrics.md``."""
    parts = [_INTRODUCTION, "## Rules\n"]
    parts += [f'<a id="{rule.id}"></a>\n### {rule.title}\n\n{rule.text}\n' for rule in definitions.rules().values()]
    parts.append("## Figures\n")
    for metric in definitions.load().values():
        parts.append(
            f'<a id="{metric.id}"></a>\n### {metric.name}\n\n{metric.help}\n\n'
            f"- Key: `{metric.id}`\n- Unit: {metric.unit}\n- Formula: {metric.formula}\n- Source: {metric.source}\n"
        )
    return "\n".join(parts)


def benchmarks() -> str:
    """Return the text of ``benchmarks/README.md`` with the table of the ratios."""
    sys.path.insert(0, str(BENCHMARKS))
    from ratios import table  # noqa: PLC0415 - not part of the package

    first, begin, rest = (BENCHMARKS / "README.md").read_text(encoding="utf-8").partition("<!-- ratios -->\n")
    return f"{first}{begin}\n{table()}\n\n<!-- end -->\n{rest.partition('<!-- end -->' + chr(10))[2]}"


def generated() -> dict[Path, str]:
    """Path -> text of every generated file."""
    return {DOCS / "commands.md": commands(), DOCS / "metrics.md": metrics(), BENCHMARKS / "README.md": benchmarks()}


def main(arguments: list[str]) -> int:
    """Write or check the generated files."""
    stale = [path for path, text in generated().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if "--check" not in arguments:
            path.write_text(generated()[path])
        print(f"{path.name} {'differs' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
