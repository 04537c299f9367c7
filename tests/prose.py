"""Check prose and names against the wording rules of ``prose.toml``.

Prose is documents, docstrings, comments, messages and help texts; names are those of classes, functions, fields,
parameters and aliases of imports in Python.

    python tests/prose.py [--all] [PATH ...]

Only paths listed under ``clean`` are checked, so that a part of the project can be reworded and then kept so; ``--all``
checks every file. It exits with 1 and prints ``FILE:LINE: PHRASE -> ADVICE`` for each finding.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RULES = Path(__file__).with_suffix(".toml")
SUFFIXES = {".py", ".md", ".toml", ".j2", ".c", ".h", ".sh"}
NAMED = ("benchmarks/", "containers/", "deploy/", "docs/", "slurm_affinode/", "spank/")
"""All rules for names apply in these folders; in others, those of ``local`` for their paths."""


class Rule(NamedTuple):
    """A pattern that must not occur in prose, and the word to use."""

    pattern: re.Pattern[str]
    advice: str


class Rules(NamedTuple):
    """Paths that follow the rules, and the rules for prose and for names."""

    clean: tuple[str, ...]
    banned: tuple[Rule, ...]
    names: tuple[Rule, ...]
    constants: tuple[Rule, ...]
    local: dict[str, tuple[Rule, ...]]
    """Path -> rules for all names in the files below it, also for those of local variables."""
    variables: dict[str, tuple[Rule, ...]]
    """Path -> rules for all names but those of constants in the files below it."""
    stored: dict[str, list[str]]
    """Path of a file -> names of declarations in it that other releases know."""

    def all_names(self, path: str) -> tuple[Rule, ...]:
        """Return the rules for the names of local variables in a file."""
        return tuple(rule for place, rules in self.local.items() if path.startswith(place) for rule in rules)

    def variable_names(self, path: str) -> tuple[Rule, ...]:
        """Return the rules for all names but those of constants in a file."""
        return tuple(rule for place, rules in self.variables.items() if path.startswith(place) for rule in rules)


class Finding(NamedTuple):
    """A phrase that breaks a rule."""

    path: str
    line: int
    phrase: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.phrase!r}: {self.advice}"


def read_rules(path: Path = RULES) -> Rules:
    """Read the rules. A phrase is a regular expression that begins and ends at a word boundary, in any case."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    # A space in a phrase also matches a line end, with the comment sign of the next line.
    banned = [(phrase.replace(" ", r"[\s#]+"), advice) for phrase, advice in table["banned"].items()]
    local, variables = _rules_by_path(table["local"]), _rules_by_path(table["variables"])
    return Rules(
        tuple(table["clean"]),
        tuple(Rule(re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE), advice) for phrase, advice in banned),
        _name_rules(table["names"]),
        tuple(Rule(re.compile(rf"(?:{words})"), advice) for words, advice in table["constants"].items()),
        local,
        variables,
        table["stored"],
    )


def _rules_by_path(tables: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Rule, ...]]:
    rules: dict[str, tuple[Rule, ...]] = {}
    for entry in tables:
        for place in entry["paths"]:
            rules[place] = (*rules.get(place, ()), *_name_rules(entry["names"]))
    return rules


def _name_rules(table: Mapping[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(re.compile(rf"(?:^|_)(?:{words})(?:_|$)"), advice) for words, advice in table.items())


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every comment and of every string that contains a space."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def python_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every class, function, parameter, field, module constant and alias of an import."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield node.lineno, node.asname
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        if isinstance(node, ast.ClassDef | ast.Module):
            for target in _assigned(node.body):
                yield target.lineno, target.id


def local_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every variable that is bound, in addition to ``python_names``."""
    yield from python_names(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def variable_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every parameter and of every variable that a function or a comprehension binds."""
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(text), False)]
    while pending:
        node, inside = pending.pop()
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and inside:
            yield node.lineno, node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name is not None and inside:
            yield node.lineno, node.name
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.comprehension):
            inside = True
        elif isinstance(node, ast.ClassDef):
            inside = False
        pending += [(child, inside) for child in ast.iter_child_nodes(node)]


def _assigned(body: Iterable[ast.stmt]) -> Iterator[ast.Name]:
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from (target for target in targets if isinstance(target, ast.Name))


def in_words(name: str) -> str:
    """Return a name as words: ``WakeRequest``, ``_WAKE_REQUEST`` and ``wake_request`` as ``wake_request``."""
    return "_".join(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)).lower()


def check_names(
    path: str, text: str, rules: Iterable[Rule], local: Iterable[Rule] = (), variables: Iterable[Rule] = (), *,
    stored: Collection[str] = (),
) -> Iterator[Finding]:  # fmt: skip
    """Yield the names in a Python file that hold a word of the rules.

    ``local``: rules for local variables, too. ``variables``: rules for all names but those of constants and, of
    declarations, ``stored``.
    """

    def declared_names(text: str) -> Iterator[tuple[int, str]]:
        yield from variable_names(text)
        yield from ((line, name) for line, name in python_names(text) if not name.isupper() and name not in stored)

    checks = ((python_names, rules), (local_names, local), (declared_names, variables))
    for names, applied in ((names, tuple(applied)) for names, applied in checks):
        for line, name in dict.fromkeys(names(text)) if applied else ():
            for rule in applied:
                if rule.pattern.search(in_words(name)):
                    yield Finding(path, line, name, rule.advice)


def check_constants(path: str, text: str, rules: Iterable[Rule]) -> Iterator[Finding]:
    """Yield the constants in a Python file whose whole name is one of the rules."""
    for line, name in dict.fromkeys(python_names(text)):
        for rule in rules if name.isupper() else ():
            if rule.pattern.fullmatch(in_words(name)):
                yield Finding(path, line, name, rule.advice)


def markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs outside of code blocks, without inline code."""
    block: list[str] = []
    begin, fenced = 1, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        if fence or fenced or not line.strip():
            if block:
                yield begin, re.sub(r"`[^`]*`", "``", "\n".join(block))
            block, begin, fenced = [], number + 1, fenced != fence
        else:
            block.append(line)


def check_text(path: str, text: str, rules: Iterable[Rule]) -> Iterator[Finding]:
    """Yield the findings of one file, in the order of its lines for each rule."""
    pieces = (
        python_prose(text) if path.endswith(".py") else markdown_prose(text) if path.endswith(".md") else [(1, text)]
    )
    for line, piece in pieces:
        for rule in rules:
            for match in rule.pattern.finditer(piece):
                yield Finding(path, line + piece.count("\n", 0, match.start()), " ".join(match[0].split()), rule.advice)


def project_files() -> list[str]:
    """Return the files of the project that hold prose, relative to its root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    return [item for item in listed if Path(item).suffix in SUFFIXES and (ROOT / item).is_file()]


def main(arguments: list[str] | None = None) -> int:
    """Print the findings; return 1 if there is one."""
    parser = argparse.ArgumentParser(description="Check prose against the wording rules.")
    parser.add_argument("--all", action="store_true", help="check files that are not listed as clean, too")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="check only these files")
    options = parser.parse_args(arguments)
    rules = read_rules()
    excluded = {"tests/prose.toml", "tests/unit/test_prose.py", "CHANGELOG.md"}
    files = [path for path in options.paths or project_files() if path not in excluded and (ROOT / path).is_file()]
    if not options.all and not options.paths:
        files = [item for item in files if item.startswith(rules.clean)]
    findings: list[Finding] = []
    for file in files:
        text = (ROOT / file).read_text(encoding="utf-8")
        findings += check_text(file, text, rules.banned)
        if file.endswith(".py"):
            strict = options.all or file.startswith(NAMED)
            findings += check_names(
                file, text, rules.names if strict else (), rules.all_names(file), rules.variable_names(file),
                stored=rules.stored.get(file, ()),
            )  # fmt: skip
            findings += check_constants(file, text, rules.constants if strict else ())
    for finding in findings:
        print(finding)
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
