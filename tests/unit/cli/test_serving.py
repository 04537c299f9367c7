"""``slurm-affinode serving triage``: its screen, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_affinode.base.errors import InputError
from slurm_affinode.cli.main import cli


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["serving", "triage", *arguments], input=stdin, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def test_screen_names_cause_sizes_and_advice(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "start\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "80.00 GiB of which 1.00 GiB is free. Process 9 has 31.00 GiB memory in use.\n"
    )
    code, text = run(str(log))
    assert code == 0
    assert text.startswith("gpu-out-of-memory: ")
    for part in ("2 GiB", "1 GiB", "80 GiB", "held by PID 9", "server.log:2", "Advice:"):
        assert part in text


def test_json_has_cause_and_problems(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("RuntimeError: CUDA error: out of memory\n")
    code, text = run(str(log), "--json")
    row = json.loads(text)
    assert (code, row["kind"], row["memory"], row["requested"], row["problems"]) == (
        0, "gpu-out-of-memory", "gpu", None, [],
    )  # fmt: skip


def test_log_without_failure_gives_status_1(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("all is well\n")
    code, text = run(str(log))
    assert code == 1
    assert text.startswith("no cause: ")


def test_message_of_a_program_does_not_control_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("RuntimeError: CUDA error: out of memory \x1b]0;owned\x07\n")
    assert "\x1b" not in run(str(log))[1]


def test_missing_log_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        run(str(tmp_path / "gone.log"))


def test_recorded_server_that_could_not_start_names_the_length_that_fits(shared_data: Path) -> None:
    code, text = run(str(shared_data / "serving" / "vllm-0.32-cpu-kv-too-small.log"))
    assert code == 0
    assert "176 tokens" in text
