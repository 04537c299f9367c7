"""The command line as a whole: help, one-line errors, exit statuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from slurm_affinode import __version__
from slurm_affinode.base.errors import InputError, NoStoreError, UnreachableError
from slurm_affinode.cli import main as entry
from slurm_affinode.cli.main import cli
from slurm_affinode.cli.options import print_json


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every command."""
    context = click.Context(group)
    result: list[tuple[str, ...]] = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        result.append((*path, name))
        if isinstance(command, click.Group):
            result += commands(command, (*path, name))
    return result


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_help(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [*words, "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage:" in done.output
    assert len(done.output.splitlines()) > 4


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the console script in a separate process."""
    code = "from slurm_affinode.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=240
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"slurm-affinode, version {__version__}\n")


def test_unknown_option_is_a_usage_error() -> None:
    """Exit status 2; the reason goes to standard error."""
    done = run("report", "--no-such-option")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "--no-such-option" in done.stderr


def test_all_errors_of_a_configuration_are_printed(tmp_path: Path) -> None:
    """A line each, with the line of the file."""
    file = tmp_path / "c.toml"
    file.write_text("[store]\ndbb = 'x'\n[agent]\nperiod = '0s'\n")
    done = run("doctor", "--config", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"slurm-affinode: {file}:2: store.dbb: unknown key (is db meant?)",
        f"slurm-affinode: {file}:4: agent.period: 0s is not above 0",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("reportt", "No such command 'reportt'. Did you mean 'report'"),
        ("ingest gup", "No such command 'gup'. Did you mean 'gpu'?"),
        ("qqq", "No such command 'qqq'.\n"),
    ],
)
def test_unknown_command_is_answered_with_similar_ones(words: str, message: str) -> None:
    done = CliRunner().invoke(cli, words.split())
    assert (done.exit_code, message in done.output) == (2, True), done.output


def test_missing_configuration_is_reported_with_hint(tmp_path: Path) -> None:
    """An expected failure has no traceback."""
    done = run("report", "--config", str(tmp_path / "none.toml"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"slurm-affinode: {tmp_path / 'none.toml'}: no such file",
        "  give --config a file that exists",
    ]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InputError("empty", where="f.txt"), 2, "slurm-affinode: f.txt: empty\n"),
        (UnreachableError("sacct: no such program", hint="install it"), 3,
         "slurm-affinode: sacct: no such program\n  install it\n"),
        (OSError(28, "No space left on device", "/x"), 2, "slurm-affinode: /x: No space left on device\n"),
        (KeyboardInterrupt(), 130, "slurm-affinode: interrupted\n"),
        (click.exceptions.Abort(), 130, "slurm-affinode: interrupted\n"),
    ],
)  # fmt: skip
def test_errors_have_one_line_and_an_exit_status(
    error: BaseException, status: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(entry.cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == status
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("words", [("report", "--title"), ("ingest", "sacct", "--cluster")])
def test_argument_that_is_not_utf8_is_rejected(words: tuple[str, ...], tmp_path: Path) -> None:
    """File names may be any bytes; titles and names that are stored or shown may not."""
    state, file = str(tmp_path / "state"), tmp_path / "caf\udce9.txt"
    file.write_text("JobID|Start|End\n1|2026-11-01T00:00:00|2026-11-01T01:00:00\n")
    assert run("ingest", "sacct", str(file), "--state", state).returncode == 0
    rest = [str(file)] if words[0] == "ingest" else ["--since", "2026-11-01", "--out", str(tmp_path / "out")]
    done = run(*words, "caf\udce9", *rest, "--state", state)
    assert (done.returncode, done.stderr) == (2, "slurm-affinode: 'caf\\udce9': this argument is not UTF-8\n")


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_paths_are_completed_by_the_shell(words: tuple[str, ...]) -> None:
    """Every parameter that is a file, path or directory."""
    context, command = click.Context(cli), cli
    for word in words:
        command = command.get_command(context, word)  # type: ignore[assignment, union-attr]
    for item in command.params:
        if {"FILE", "PATH", "DIR"} & set(re.findall("[A-Z]+", item.make_metavar(context))):
            assert [result.type for result in item.shell_complete(context, "/et")] in (["file"], ["dir"]), item.name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    """There is a completion script for each shell."""
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0
    assert "_SLURM_AFFINODE_COMPLETE" in done.output


def test_completion_of_fish_keeps_commas_of_descriptions() -> None:
    """A completion is KIND,VALUE<tab>DESCRIPTION: only the first comma separates."""
    script = CliRunner().invoke(cli, ["completion", "fish"]).output
    assert re.findall(r"string split .*", script) == ['string split --max 1 "," $completion);']


def test_control_characters_in_json_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Users choose the names: C1 control sequences, right-to-left overrides and lone surrogates may occur."""
    names = ["\x1b[2J", "\x9b2J", "\u202egnp.exe", "\ud800", "J\u00fcrgen"]
    print_json(names)
    text = capsys.readouterr().out
    assert json.loads(text) == names
    assert all(item.isprintable() or item == "\n" for item in text)
    assert "J\u00fcrgen" in text


@pytest.mark.parametrize(
    "words",
    [
        "report --out out", "db status", "export openmetrics", "zombies list --since 7d", "zombies explain 1",
        "report users", "report queue", "zombies users", "zombies history", "zombies warn", "zombies clean",
        "zombies policy check",
        "doctor",
    ],
)  # fmt: skip
def test_reading_commands_do_not_create_a_state_directory(words, tmp_path, monkeypatch):
    """A mistyped ``--state`` must not look like a site without findings."""
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(cli, [*words.split(), "--state", "typo"])
    assert not Path("typo").exists()
    assert not Path("out").exists()


def test_report_without_database_is_an_error(tmp_path):
    with pytest.raises(NoStoreError, match=r"typo/affinode\.sqlite: there is no database") as caught:
        CliRunner().invoke(
            cli, ["report", "--state", str(tmp_path / "typo"), "--out", str(tmp_path / "out")], catch_exceptions=False
        )
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_tolerated(tmp_path: Path, closed: str) -> None:
    """A supervisor may start a program without them; output is discarded and goes to no other file."""
    state = tmp_path / "state"
    program = f"{sys.executable} -c 'from slurm_affinode.cli.main import main; main()'"
    script = f"{program} db upgrade --state {state} {closed} && {program} db status --state {state} {closed}"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def piped(script: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which ``$program`` is the command."""
    program = f"{sys.executable} -c 'from slurm_affinode.cli.main import main; main()'"
    line = script.replace("$program", program)
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=240, check=False)


def test_nightly_run_completes_after_a_broken_pipe(tmp_path: Path) -> None:
    r"""``nightly -v | head -1``: the exit status is that of the nightly run."""
    (tmp_path / "sacct.txt").write_text("JobID|Start|End\n1|2026-11-01T00:00:00|2026-11-01T01:00:00\n")
    config = tmp_path / "c.toml"
    config.write_text(f'[nightly]\naccounting_paths = ["{tmp_path}/sacct.txt"]\n')
    run_it = f"$program nightly -v --state {tmp_path}/state --config {config}"
    done = piped(f"{run_it} | true; echo ${{PIPESTATUS[0]}}; $program db status --state {tmp_path}/state --json")
    status, _, store = done.stdout.partition("\n")
    assert (status, done.stderr) == ("0", "")
    assert json.loads(store)["jobs"] == 1
    assert (tmp_path / "state" / "reports" / "index.html").exists()


def test_full_disk_at_standard_output_is_reported_once() -> None:
    """The buffered rest is not reported again at exit; errors of a closed standard error are ignored."""
    done = piped("$program --help >/dev/full")
    assert (done.returncode, done.stderr) == (2, "slurm-affinode: standard output: No space left on device\n")
    assert piped("$program report --config /none 2>/dev/full").returncode == 2


@pytest.mark.parametrize("words", ["zombies list --min-score", "report --idle-pct", "demo --days"])
def test_nan_is_rejected(words: str) -> None:
    done = CliRunner().invoke(cli, [*words.split(), "nan"])
    assert (done.exit_code, "'nan' is not a number" in done.output) == (2, True)


@pytest.mark.parametrize("option", ["--state", "--config"])
def test_empty_path_is_rejected(option: str, tmp_path: Path, monkeypatch) -> None:
    """``--state "$STATE"`` with an unset variable created a database in the working directory."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["db", "upgrade", option, ""])
    assert (done.exit_code, f"Invalid value for '{option}': it is empty" in done.output) == (2, True)
    assert not list(tmp_path.iterdir())
