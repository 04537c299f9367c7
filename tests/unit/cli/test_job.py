"""``job``: one screen at any width, JSON, a page; one clear line for each error, with its exit status."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_affinode.base import extras
from slurm_affinode.base.errors import AffinodeError, NoStoreError
from slurm_affinode.cli.main import cli
from slurm_affinode.demo import histories
from slurm_affinode.demo.histories import build_demo
from slurm_affinode.model.job_summary import JobSummary

PARTLY = "4273"
"""A job of the synthetic history with one busy and three unused GPUs."""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state directory of three synthetic days."""
    out = tmp_path_factory.mktemp("demo")
    build_demo(out, histories.synthetic(days=3, seed=7))
    return out / "state"


def run(state: Path, *words: str, env: Mapping[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, ["job", *words, "--state", str(state)], env=env)


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_screen_fits_the_terminal(state: Path, columns: int) -> None:
    """No line is wider; the narrower the terminal, the fewer columns of the table of GPUs."""
    result = run(state, PARTLY, env={"COLUMNS": str(columns)})
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert max(map(len, lines)) <= columns
    head = next(line for line in lines if line.startswith("GPU  "))
    assert ("memory" in head) is (columns >= 80)
    assert "use" in head or columns < 60
    assert "\x1b" not in result.stdout  # colors only on a terminal
    assert "request 1." in " ".join(result.stdout.split())


def test_json_is_the_summary(state: Path) -> None:
    """All keys of the documentation; readable by the reader of published files."""
    shown = json.loads(run(state, PARTLY, "--json").stdout)
    made = JobSummary.from_json(shown)
    assert (made.job.id, made.gpu_count, len(made.gpus), made.source) == (PARTLY, 4, 4, "database")
    documented = (Path(__file__).parents[3] / "docs" / "jobs.md").read_text(encoding="utf-8")
    assert [key for key in shown if f"`{key}`" not in documented] == []


def test_page_is_written(state: Path, tmp_path: Path) -> None:
    """The page has verdict, advice and each GPU, and takes the place of the screen."""
    page = tmp_path / "job.html"
    result = run(state, PARTLY, "--html", str(page))
    assert result.stdout == f"wrote {page}\n"
    text = page.read_text(encoding="utf-8")
    assert "Partly used: 3 of 4 GPUs were never active" in text
    assert text.count("<bdi>a100-02:") == 4


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (["999"], 1, "slurm-affinode: no attempt of job 999 is stored"),
        (["12x"], 2, "slurm-affinode: '12x' is not a job ID"),
        ([""], 2, "it is empty"),
        ([PARTLY, "--attempt", "2"], 1, "slurm-affinode: job 4273 has no attempt 2: there is one"),
        ([PARTLY, "--attempt", "0"], 2, "attempts are numbered from 1"),
        ([PARTLY, "--cluster", "elsewhere"], 1, "no attempt of job 4273 is stored"),
    ],
)
def test_error_is_one_line(state: Path, words: list[str], status: int, line: str) -> None:
    """The error, with the exit status of its kind; no traceback."""
    result = run(state, *words)
    if isinstance(result.exception, AffinodeError):
        assert (f"slurm-affinode: {result.exception}", result.exception.exit_code) == (
            line if line.startswith("slurm-affinode") else f"slurm-affinode: {line}", status,
        )  # fmt: skip
    else:
        assert result.exit_code == status
        assert line in result.stderr


def test_missing_database_is_reported(tmp_path: Path) -> None:
    """Exit status 2, as for every command that reads."""
    result = run(tmp_path / "none", PARTLY)
    assert "no database" in str(result.exception)
    assert getattr(result.exception, "exit_code", None) == 2


@pytest.mark.parametrize("directory", ["", "/nowhere"])
def test_owner_without_database_is_not_advised_to_create_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    """The reason is that of Slurm, with the place where summaries of ended jobs are published."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_AFFINODE_STATE", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 60_001)
    config = tmp_path / "config.toml"
    config.write_text(f'[nightly.jobs]\ndirectory = "{directory}"\n' if directory else "")
    error = CliRunner().invoke(cli, ["zombies", "explain", "7", "--config", str(config)]).exception
    assert isinstance(error, NoStoreError)
    assert "there is no database" not in str(error)
    assert "scontrol" in str(error)
    expected = "slurm-affinode job JOBID" if directory else "nightly.jobs.directory"
    assert expected in str(error.hint)
    if not directory:
        assert str(CliRunner().invoke(cli, ["job", "7", "--config", str(config)]).exception) == str(error)


def test_time_of_summary_is_now(state: Path) -> None:
    """It tells how old a published summary is."""
    shown = json.loads(run(state, PARTLY, "--json").stdout)
    assert (datetime.now(UTC) - datetime.fromisoformat(shown["generated"])).total_seconds() < 600


@pytest.fixture
def published(tmp_path: Path, state: Path) -> Path:
    """A configuration without a database, with a summary published for the user who runs the tests."""
    directory = tmp_path / "jobs"
    directory.mkdir()
    made = json.loads(run(state, PARTLY, "--json").stdout)
    (directory / f"{os.geteuid()}.jsonl").write_text(json.dumps(made) + "\n")
    config = tmp_path / "config.toml"
    config.write_text(f'[nightly.jobs]\ndirectory = "{directory}"\n')
    return config


def test_summary_comes_from_the_published_file_without_database(published: Path) -> None:
    """With a line that says so, in the text and in JSON; another job is not known."""
    nothing = str(published.parent / "none")
    shown = run(Path(nothing), PARTLY, "--config", str(published), env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert "by the nightly run" in shown.stdout.splitlines()[-1]
    assert json.loads(run(Path(nothing), PARTLY, "--config", str(published), "--json").stdout)["source"] == "published"
    missing = run(Path(nothing), "1", "--config", str(published)).exception
    assert "no summary of a job 1 of yours is published" in str(missing)
    assert getattr(missing, "exit_code", None) == 1


def test_damaged_published_file_is_named(published: Path) -> None:
    """File and line; exit status 2."""
    (path,) = (published.parent / "jobs").iterdir()
    path.write_text(path.read_text()[:100])
    error = run(published.parent / "none", PARTLY, "--config", str(published)).exception
    assert str(error) == f"{path}:1: is damaged"
    assert getattr(error, "exit_code", None) == 2


def test_task_of_an_array_id_is_named(tmp_path: Path) -> None:
    """Slurm gives the ID of an array to one of its tasks as well."""
    build_demo(tmp_path, histories.recorded())
    result = run(tmp_path / "state", "36", env={"COLUMNS": "100"})
    assert result.stdout.startswith("Job 36_3 (sweep)")
    assert "36 is an array; its task 36_3 has this ID. Name the others as 36_N" in result.stdout


def test_figures_of_public_accounting(tmp_path: Path, shared_data: Path) -> None:
    """A job of a public file: (1:26:54 + 46.033 s) of 5305 s on one core, and 4016648 KiB of 32 GiB."""
    state = str(tmp_path / "state")
    source = shared_data / "jobanalyzer" / "sacct_p.txt"
    assert CliRunner().invoke(cli, ["ingest", "sacct", str(source), "--state", state]).exit_code == 0
    uses = {use["key"]: use for use in json.loads(run(Path(state), "1639738", "--json").stdout)["uses"]}
    assert uses["cpu"]["share"] == pytest.approx((86 * 60 + 54 + 46.033) / 5305, abs=1e-6)
    assert uses["memory"]["share"] == pytest.approx(4016648 / (32 << 20), abs=1e-6)
    assert list(uses) == ["time_limit", "cpu", "memory"]


LINE = "gpu01: 1 GPU, busy 41 % of the measured time, idle 1.18 GPU-h, unknown 0.01 GPU-h, memory peak 61.2 GiB"
SACCT = {
    "Cluster": "hpc", "JobIDRaw": "77", "JobID": "77", "Submit": "2026-11-02T11:00:00", "Start": "2026-11-02T12:00:00",
    "End": "2026-11-02T14:00:00", "State": "COMPLETED", "User": "ann", "Account": "bio", "Partition": "gpu",
    "AllocCPUS": "8", "AllocTRES": "cpu=8,gres/gpu=1,mem=64G", "NNodes": "1", "NodeList": "gpu01",
    "TotalCPU": "08:00:00", "Elapsed": "02:00:00", "Timelimit": "04:00:00", "AdminComment": "", "JobName": "train",
}  # fmt: skip
"""An ended job, as sacct prints it."""


@pytest.fixture
def accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a sacct that knows job 77, with other values for some fields; no other command of Slurm."""

    def install(**values: str) -> None:
        row = {**SACCT, **values}
        (tmp_path / "rows").write_text("\x1f".join(row) + "\n" + "\x1f".join(row.values()) + "\n")
        script = (
            "#!/bin/sh\ncase $* in\n"
            f"*--helpformat*) echo {' '.join(SACCT)};;\n"
            f"*=End,AdminComment*) printf 'End\\037AdminComment\\n{row['End']}\\037%s\\n' \"$LINE\";;\n"
            f"*--jobs=77*) cat {tmp_path}/rows;;\n*) head -n 1 {tmp_path}/rows;;\nesac\n"
        )
        (tmp_path / "sacct").write_text(script)
        (tmp_path / "sacct").chmod(0o755)
        monkeypatch.setenv("LINE", row["AdminComment"])

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    install()
    return install


def test_line_of_the_agent_is_shown(state: Path, tmp_path: Path, accounting: Callable[..., None]) -> None:
    """From the database: on the screen, in JSON and on the page."""
    accounting(AdminComment=f"slurm-affinode: {LINE}")
    shutil.copytree(state, tmp_path / "state")
    stored = CliRunner().invoke(cli, ["ingest", "sacct", str(tmp_path / "rows"), "--state", str(tmp_path / "state")])
    assert stored.exit_code == 0
    page = tmp_path / "job.html"
    assert f"AdminComment, by the agent: {LINE}" in " ".join(run(tmp_path / "state", "77").stdout.split())
    shown = run(tmp_path / "state", "77", "--json", "--html", str(page))
    assert json.loads(shown.stdout)["admin_comment"] == LINE
    assert LINE in page.read_text(encoding="utf-8")
    assert json.loads(run(state, PARTLY, "--json").stdout)["admin_comment"] is None


@pytest.mark.parametrize(
    "comment", ["JS1:H4sIAAA", "<b>see ticket 7</b>", f"slurm-affinode: {LINE} <script>", "\x1b[2J"]
)
def test_comment_of_others_is_not_shown(tmp_path: Path, accounting: Callable[..., None], comment: str) -> None:
    """AdminComment is free text of the site; nothing of it is on the screen or on the page."""
    accounting(AdminComment=comment)
    page = tmp_path / "job.html"
    shown = run(tmp_path / "none", "77", "--html", str(page), "--json")
    assert json.loads(shown.stdout)["admin_comment"] is None
    assert comment not in run(tmp_path / "none", "77").stdout
    assert comment not in page.read_text(encoding="utf-8")


def test_ended_job_comes_from_accounting_without_database(
    published: Path, accounting: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its owner, whether or not the site publishes summaries: what Slurm has, and the line of the agent."""
    accounting(AdminComment=f"slurm-affinode: {LINE}")
    nothing = published.parent / "none"
    for config in ((), ("--config", str(published))):
        made = json.loads(run(nothing, "77", *config, "--json").stdout)
        uses = {use["key"]: use["share"] for use in made["uses"]}
        assert (made["source"], made["admin_comment"], made["user"]) == ("accounting", LINE, "ann")
        assert (uses["time_limit"], uses["cpu"], uses["gpu_busy"]) == (0.5, 0.5, None)
        assert made["verdict"] == "Unknown: the site's GPU metrics were not read."
    screen = run(nothing, "77", env={"COLUMNS": "80"}).stdout
    assert max(map(len, screen.splitlines())) <= 80
    assert screen.splitlines()[-1] == "from Slurm's accounting alone: stored GPU metrics were not read"
    assert not nothing.exists()
    assert "no attempt 2" in str(run(nothing, "77", "--attempt", "2").exception)
    assert "no summary of a job 78 of yours" in str(run(nothing, "78", "--config", str(published)).exception)
    accounting(End="Unknown", State="RUNNING")  # live data, whose error is more to the point
    assert "no summary of a job 77 of yours" in str(run(nothing, "77", "--config", str(published)).exception)


def test_line_of_the_agent_is_shown_without_the_extra(
    published: Path, accounting: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a login node, for a job without a published summary."""
    monkeypatch.setattr(extras, "missing", lambda: ["polars"])
    words = (published.parent / "none", "77", "--config", str(published))
    for comment, hint in ((f"slurm-affinode: {LINE}", f"accounting has a line of the agent about it: {LINE}"),
                          ("see ticket 7", "summaries appear after the next night")):  # fmt: skip
        accounting(AdminComment=comment)
        error = run(*words).exception
        assert isinstance(error, AffinodeError)
        assert (error.exit_code, str(error.hint)[: len(hint)]) == (1, hint)
