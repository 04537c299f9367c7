"""The checks of wording and of commit messages."""

from __future__ import annotations

from pathlib import Path

import commit_subject
import prose
import pytest

ROOT = Path(__file__).parents[2]
RULES = prose.read_rules()


def phrases(path: str, text: str) -> list[tuple[int, str]]:
    return [(problem.line, problem.phrase) for problem in prose.check_text(path, text, RULES.banned)]


def test_clean_paths_exist() -> None:
    assert [path for path in RULES.clean if not (ROOT / path).exists()] == []


def test_python_is_checked_in_comments_and_strings_only() -> None:
    text = '"""Of the job id.\n\nWhoever asks."""\nwhoever = 1  # in vain\nlog("the relational store")\n'
    assert sorted(phrases("a.py", text)) == [(1, "job id"), (3, "Whoever"), (4, "in vain"), (5, "relational store")]


NAMES = """
import a as theirs
ASKED_S = 1
class SilentNode:
    told: int
    def whoever_asks(self, mine, *, wanted): self.eyes = found = 1
"""


def test_names_are_checked() -> None:
    """Those of classes, functions, parameters, fields, constants and aliases, but not of local variables."""
    names = {problem.phrase for problem in prose.check_names("a.py", NAMES, RULES.names)}
    assert sorted(names) == ["ASKED_S", "SilentNode", "eyes", "mine", "theirs", "told", "wanted", "whoever_asks"]
    assert not list(prose.check_names("a.py", "def settle(salute, commands, undermined): ...\n", RULES.names))


def test_names_of_constants_are_checked() -> None:
    """A name that says of what the constant is, and not what it is; a longer name may hold these words."""
    text = "_OF_JOB = 1\nNOTHING = 2\nMAX_OF_ADDRESS = WHY_UNKNOWN = 3\ndef of_job(): of_step = 1\n"
    assert [item.phrase for item in prose.check_constants("a.py", text, RULES.constants)] == ["_OF_JOB", "NOTHING"]


def test_names_of_local_variables_are_checked_below_some_paths() -> None:
    text = (
        "def f(things):\n    found = [one for one in things]\n    for look in found: self.lookup = look.stone\n"
        "    own = own_names = None\n"
    )
    local = RULES.all_names("slurm_affinode/suspension/wake.py")
    result = sorted((problem.line, problem.phrase) for problem in prose.check_names("a.py", text, (), local))
    assert result == [(2, "found"), (2, "one"), (3, "look"), (4, "own")]
    local = RULES.all_names("tests/waiting.py")
    names = {finding.phrase for finding in prose.check_names("a.py", f"{text}    given_columns = 1\n", (), local)}
    assert names == {"found", "one", "look", "own"}
    assert RULES.all_names("hatch_build.py") == ()


def test_names_of_declarations_are_checked_unless_they_are_stored() -> None:
    text = (
        "HELD = 1\nclass Taken:\n    at: int\n    def known(self): self.others = HELD\n    def kept_rows(self): ...\n"
    )
    rules = RULES.variable_names("slurm_affinode/base/a.py")
    names = {finding.phrase for finding in prose.check_names("a.py", text, (), (), rules, stored=["at"])}
    assert names == {"Taken", "known", "others"}
    for path, stored in RULES.stored.items():
        assert set(stored) <= {name for _, name in prose.python_names((prose.ROOT / path).read_text())}


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("slurm_affinode/base/a.py", "def whoever_asks(): ...\n", "whoever_asks"),
        ("tests/unit/test_a.py", "def whoever_asks(): ...\n", "whoever_asks"),
        ("tests/unit/test_a.py", "def f():\n    told = 1\n", "told"),
        ("tests/unit/test_a.py", "def test_figures_are_those_of_the_report(): ...\n", ""),
    ],
)
def test_command_checks_names_in_package_and_tests(  # noqa: PLR0917
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, text: str,
    expected: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "project_files", lambda: [path])
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text, encoding="utf-8")
    assert prose.main([]) == bool(expected)
    output = capsys.readouterr().out
    assert (f"{path}:" in output, repr(expected) in output) == (bool(expected), bool(expected))


def test_a_path_of_several_tables_has_the_rules_of_all() -> None:
    text = "own = found = one = 1\nown_jobs = one_line = every_one = 2\n"
    local = RULES.all_names("spank/srun.py")
    names = {finding.phrase for finding in prose.check_names("a.py", text, (), local)}
    assert names == {"own", "found", "one", "every_one"}


@pytest.mark.parametrize(
    "word",
    [
        "done",
        "made",
        "seen",
        "taken",
        "held",
        "kept",
        "left",
        "known",
        "listed",
        "at",
        "how",
        "here",
        "other",
        "others",
    ],
)
def test_word_without_noun_is_no_name(word: str) -> None:
    """Rejected as a parameter, a variable and a field, but not with a noun."""
    rules = RULES.variable_names("slurm_affinode/suspension/wake.py")
    text = (
        f"def f({word}, _{word}_jobs): ...\ndef g():\n    {word} = {word}_jobs = 1\n"
        f"n = [1 for {word} in x]\nm = lambda {word}: 1\n"
        f"def h():\n    try: ...\n    except OSError as {word}: ...\nclass C:\n    {word}: int\n"
    )
    lines = sorted(finding.line for finding in prose.check_names("a.py", text, (), (), rules))
    assert lines == [1, 3, 4, 5, 8, 10]


def test_markdown_code_is_not_checked() -> None:
    text = "A `whoever` and\nwhoever.\n\n```\nwhoever\n```\nJob\nids\n"
    assert phrases("a.md", text) == [(2, "whoever"), (7, "Job ids")]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("Reject images signed with another key\n\nThe reason.\n", []),
        ("Process messages of shepherds in order", []),
        ("Merge branch 'a'", []),
        ("# a comment\nFix the sweep", []),
        ("fix the sweep", ["begins with 'fix'"]),
        ("Fixed the sweep", ["use the imperative"]),
        ("Fixes the sweep.", ["use the imperative", "full stop"]),
        ("A" * 73, ["73 characters"]),
        ("Fix the sweep\nand more", ["second line"]),
        ("", ["empty"]),
    ],
)
def test_commit_subject(message: str, expected: list[str]) -> None:
    faults = commit_subject.faults(message)
    assert len(faults) == len(expected)
    assert all(part in fault for part, fault in zip(expected, faults, strict=True))


def test_commit_message_hook_exits_with_1(tmp_path: Path) -> None:
    file = tmp_path / "message"
    file.write_text("fixed it\n", encoding="utf-8")
    assert commit_subject.main([str(file)]) == 1
    file.write_text("Fix it\n", encoding="utf-8")
    assert commit_subject.main([str(file)]) == 0
