"""The ``zombies`` commands: exit statuses, tables that fit the terminal, pages without active content."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_affinode.base.resources import asset_dir
from slurm_affinode.cli.main import cli


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days of a synthetic cluster."""
    out = tmp_path_factory.mktemp("zombies")
    result = CliRunner().invoke(cli, ["demo", "--days", "2", "--trend", "0", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out / "state"


def _run(*arguments: str, columns: int = 80) -> Result:
    return CliRunner().invoke(cli, ["zombies", *arguments], env={"COLUMNS": str(columns)}, standalone_mode=False)


def _status(result: Result) -> int:
    """Return the exit status as ``main`` sets it."""
    if result.exception is not None:
        return int(getattr(result.exception, "exit_code", 70))
    return int(result.return_value or 0)


@pytest.mark.parametrize("columns", [76, 80, 140])
def test_list_fits_the_terminal_width(state: Path, columns: int) -> None:
    """Every finding is one aligned line; the exit status is 1. A command to be copied is not wrapped."""
    result = _run("list", "--state", str(state), "--slurm-backend", "commands", columns=columns)
    assert _status(result) == 1
    lines = result.stdout.splitlines()
    why = ["why"] if columns >= 100 else []
    assert lines[0].split() == ["what", "subject", "user", "where", "idle", "GPU-h", "waits", "score", *why]
    (hint,) = [line for line in lines if "zombies explain" in line]
    assert all(len(line) <= columns for line in lines if line != hint)
    assert f"--state {state} --slurm-backend commands" in hint
    assert any(line.startswith("squatter ") for line in lines)


def test_narrow_list_leaves_out_columns_and_cuts_no_number(state: Path) -> None:
    """A line names the columns that are left out."""
    result = _run("list", "--state", str(state), "--slurm-backend", "commands", columns=45)
    header, *rows = result.stdout.partition("Not shown on 45 columns: waits")[0].splitlines()
    assert "waits" not in header
    assert header.split()[-2:] == ["GPU-h", "score"]
    assert len(rows) > 1
    for row in rows:
        assert len(row) <= 45
        assert re.search(r" [01]\.\d\d$", row)
    assert "(--wide has" in result.stdout


def test_wide_list_has_the_reason_in_each_row(state: Path) -> None:
    """On a terminal of any width, without an ellipsis."""
    result = _run("list", "--state", str(state), "--wide", "--slurm-backend", "commands")
    lines = result.stdout.splitlines()
    assert lines[0].split()[-1] == "why"
    limits = [line for line in lines if line.startswith("time-limit ")]
    assert limits
    assert all("planned and not needed" in line for line in limits)
    assert "…" not in "".join(lines[: lines.index("")])


def test_no_findings_is_status_0(state: Path) -> None:
    result = _run("list", "--state", str(state), "--kind", "orphan-process", "--slurm-backend", "commands")
    assert _status(result) == 0
    assert result.stdout.startswith("Nothing found:")


def test_list_as_json(state: Path) -> None:
    """Evidence has value, threshold, weight, and whether it is unknown."""
    result = _run("list", "--state", str(state), "--json", "--kind", "squatter", "--slurm-backend", "commands")
    record = json.loads(result.stdout)
    assert _status(result) == 1
    assert record["source"] == "history"
    finding = record["findings"][0]
    assert {"dimension", "value", "unit", "threshold", "weight", "text", "unknown", "met", "sources"} == set(
        finding["evidence"][0]
    )
    assert finding["subject"]["type"] == "job"


def test_explain_shows_timeline_of_every_gpu(state: Path, tmp_path: Path) -> None:
    """In the terminal, as JSON, and as a self-contained page."""
    listed = _run("list", "--state", str(state), "--json", "--kind", "squatter", "--slurm-backend", "commands")
    job = json.loads(listed.stdout)["findings"][0]["subject"]["id"]
    shown = _run("explain", job, "--state", str(state), "--slurm-backend", "commands")
    assert _status(shown) == 0
    for words in ("squatter", "threshold", "activity", "memory", "power", "Time line from"):
        assert words in shown.stdout
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    page = tmp_path / "page.html"
    assert _status(_run("explain", job, "--state", str(state), "--html", str(page))) == 0
    html = page.read_text()
    assert "http://" not in html
    assert html.count("<script>") == 1
    data = json.loads(_run("explain", job, "--state", str(state), "--json").stdout)
    assert len(data["gpus"][0]["timeline"]) == 60
    assert data["gpus"][0]["signatures"][0]["fits"]


def test_unknown_job_is_status_1_and_invalid_id_is_status_2(state: Path) -> None:
    for job, status in (("999999", 1), ("abc", 2)):
        result = _run("explain", job, "--state", str(state))
        assert _status(result) == status


def test_signatures_check_and_test(tmp_path: Path) -> None:
    """The packaged file passes; errors are reported by line, or by the example that fails."""
    assert _status(_run("signatures", "check")) == 0
    assert _status(_run("signatures", "test")) == 0
    text = (asset_dir("reports") / "signatures.toml").read_text()
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(text.replace("above_pct = 95", "above_pct = 950", 1))
    line = next(number for number, row in enumerate(wrong.read_text().splitlines(), 1) if "950" in row)
    checked = _run("signatures", "check", str(wrong))
    assert _status(checked) == 1
    assert f"{wrong}:{line}: signature[1].memory.above_pct: 950 is not from 0 to 100" in checked.stdout
    assert getattr(_run("signatures", "test", str(wrong)).exception, "exit_code", None) == 2
    far = tmp_path / "far.toml"
    far.write_text(text.replace('longer_than = "1h"', 'longer_than = "5m"'))
    tested = _run("signatures", "test", str(far))
    assert _status(tested) == 1
    assert "idle for ten minutes only" in tested.stdout


def test_syntax_error_in_signatures_has_hint(tmp_path: Path) -> None:
    """File, line and hint are shown, also in JSON."""
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('[[signature]]\nname = "x"\n[signature.compute\n')
    shown = _run("signatures", "check", str(wrong)).stdout
    assert f"{wrong}:3: not TOML" in shown
    assert "close the heading: [name]" in shown
    (fault,) = json.loads(_run("signatures", "check", str(wrong), "--json").stdout)["faults"]
    assert (fault["line"], fault["hint"]) == (3, "close the heading: [name]")


@pytest.mark.parametrize("verb", ["check", "test"])
def test_oversized_signature_file_is_rejected(verb: str) -> None:
    """It is not read into memory."""
    result = _run("signatures", verb, "/dev/zero")
    assert _status(result) == 2
    assert "/dev/zero: is larger than 1 MiB" in str(result.exception)
