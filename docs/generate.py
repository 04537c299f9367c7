"""Write the generated pages of the documentation: ``python docs/generate.py [--check] [--man DIR]``.

``docs/commands.md`` is the ``--help`` of every command, ``docs/metrics.md`` the definitions that the report shows;
``benchmarks/README.md`` has a table of the kept ratios, ``docs/exporter.md`` one of the agent's metrics,
``docs/api.md`` one for each frame of the Python API.
With ``--check`` nothing is written, and the exit status is 1 if a file differs. With ``--man`` the manual page of every
command is written to a directory, and nothing else.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from slurm_affinode import __version__, api
from slurm_affinode.analysis import definitions
from slurm_affinode.analysis.result import MEASURES
from slurm_affinode.cli.main import cli
from slurm_affinode.suspension.metrics import METRICS

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


def contexts() -> Iterator[click.Context]:
    """Yield a context for every command, parents first."""
    for path, command in walk(cli, ("slurm-affinode",)):
        context = None
        for word in path[:-1]:
            context = click.Context(click.Group(word), info_name=word, parent=context)
        yield click.Context(command, info_name=path[-1], parent=context, terminal_width=110, max_content_width=110)


def commands() -> str:
    """The text of ``docs/commands.md``."""
    parts = [
        "# Commands",
        "",
        "Generated from `--help` by `make docs`. Every command has `--help`; many have `--json`.",
        "",
    ]
    for context in contexts():
        parts += [f"## {context.command_path}", "", "```text", context.get_help().rstrip(), "```", ""]
    return "\n".join(parts)


def _roff(text: str) -> str:
    """Return text for a manual page: hyphens can be copied, and no line is a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join("\\&" + line if line.startswith((".", "'")) else line for line in escaped.splitlines())


def _paragraphs(text: str | None) -> Iterator[str]:
    """Yield requests and text of paragraphs in click's format: a line with a backspace precedes preformatted ones."""
    for paragraph in inspect.cleandoc(text or "").split("\n\n"):
        if paragraph.startswith("\b\n"):
            yield from (".PP", ".nf", _roff(paragraph.removeprefix("\b\n")), ".fi")
        elif paragraph:
            yield from (".PP", _roff(paragraph))


def manual(context: click.Context) -> str:
    """Return the manual page of a command, in roff with the macros of man(7)."""
    command, name = context.command, context.command_path.replace(" ", "-")
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [
        f'.TH "{name.upper()}" "1" "" "slurm-affinode {__version__}" "slurm-affinode"',
        ".SH NAME", _roff(f"{name} - {command.get_short_help_str(200).removesuffix('.')}"),
        ".SH SYNOPSIS", f".B {_roff(context.command_path)}", _roff(usage),
        ".SH DESCRIPTION", *_paragraphs(command.help),
    ]  # fmt: skip
    title = None
    options = [parameter for parameter in command.get_params(context) if isinstance(parameter, click.Option)]
    for option in sorted(options, key=lambda option: getattr(option, "section", "")):
        record = option.get_help_record(context)
        if record is None:
            continue
        section = getattr(option, "section", "Options").upper()
        if section != title:
            parts.append(f".SH {section}")
            title = section
        parts += [".TP", f".B {_roff(record[0])}", _roff(record[1])]
    if isinstance(command, click.Group):
        parts.append(".SH COMMANDS")
        for word in command.list_commands(context):
            child = command.get_command(context, word)
            if child is not None and not child.hidden:
                parts += [".TP", f".BR {_roff(f'{name}-{word}')} (1)", _roff(child.get_short_help_str(200))]
    if command.epilog:
        parts += [".SH NOTES", *_paragraphs(command.epilog)]
    if context.parent is not None:
        parts += [".SH SEE ALSO", f".BR {_roff(context.parent.command_path.replace(' ', '-'))} (1)"]
    return "\n".join(parts) + "\n"


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


def _with_table(page: Path, name: str, table: str) -> str:
    """Return the text of a page with the table between ``<!-- name -->`` and ``<!-- end -->``."""
    first, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    return f"{first}{begin}\n{table}\n\n<!-- end -->\n{rest.partition('<!-- end -->' + chr(10))[2]}"


def benchmarks() -> str:
    """Return the text of ``benchmarks/README.md`` with the table of the ratios."""
    sys.path.insert(0, str(BENCHMARKS))
    from ratios import table  # noqa: PLC0415 - not part of the package

    return _with_table(BENCHMARKS / "README.md", "ratios", table())


def exporter() -> str:
    """Return the text of ``docs/exporter.md`` with the table of the agent's metrics."""
    rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in METRICS:
        labels = (
            f"`{label}`" + (f": {', '.join(f'`{value}`' for value in values)}" if values else "")
            for label, values in metric.labels.items()
        )
        rows.append(f"| `{metric.name}` | {metric.kind} | {'; '.join(labels)} | {metric.help} |")
    return _with_table(DOCS / "exporter.md", "agent metrics", "\n".join(rows))


def frames() -> str:
    """Return the text of ``docs/api.md`` with a table for each frame."""
    parts = []
    figures = definitions.load()
    for name, text in api.descriptions().items():
        parts += [f"### {name}\n", f"{text.rows}\n", "| column | unit | meaning |", "| --- | --- | --- |"]
        for column, (unit, meaning) in text.columns.items():
            if name == "groups" and column in MEASURES:
                continue
            linked = f"[{meaning}](metrics.md#{column})" if name == "jobs" and column in figures else meaning
            parts.append(f"| `{column}` | {unit} | {linked} |")
        parts.append("\nThen the columns of `jobs` from `gpu_hours_allocated` on.\n" if name == "groups" else "")
    return _with_table(DOCS / "api.md", "frames", "\n".join(parts).rstrip())


def generated() -> dict[Path, str]:
    """Path -> text of every generated file."""
    return {
        DOCS / "commands.md": commands(), DOCS / "metrics.md": metrics(), DOCS / "exporter.md": exporter(),
        DOCS / "api.md": frames(), BENCHMARKS / "README.md": benchmarks(),
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """Write or check the generated files."""
    if arguments[:1] == ["--man"]:
        directory = Path(arguments[1])
        directory.mkdir(parents=True, exist_ok=True)
        for context in contexts():
            page = directory / f"{context.command_path.replace(' ', '-')}.1"
            page.write_text(manual(context), encoding="utf-8")
        return 0
    stale = [path for path, text in generated().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if "--check" not in arguments:
            path.write_text(generated()[path])
        print(f"{path.name} {'differs' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
