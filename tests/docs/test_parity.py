"""The table of job_defense_shield in ``docs/zombies.md`` is complete and names only existing features."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import click
import pytest

from slurm_affinode.base.config import MisfitConfig
from slurm_affinode.cli.main import cli
from slurm_affinode.core import cleanup_policy
from slurm_affinode.model.cleanup import MailPolicy
from slurm_affinode.model.finding import KINDS, VARIANTS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "zombies.md").read_text(encoding="utf-8")
TABLE = PAGE[PAGE.index("## Coming from job_defense_shield") :]

ALERTS = """cancel-zero-gpu-jobs zero-util-gpu-hours zero-cpu-utilization low-cpu-efficiency low-gpu-efficiency
excess-cpu-memory gpu-model-too-powerful multinode-cpu-fragmentation multinode-gpu-fragmentation excessive-time-cpu
excessive-time-gpu serial-allocating-multiple too-many-cores-per-gpu too-much-cpu-mem-per-gpu usage-overview
usage-by-slurm-account longest-queued most-cores most-gpus jobs-overview"""
"""The command-line options of version 1.1.1 that select an alert or a report."""
OPTIONS = """--days --starttime --endtime --clusters --partition --config-file --email --no-emails-to-users
--no-emails-to-admins --report --check --strict-start jobstats-module-path jobstats-config-path violation-logs-path
email-files-path email-domain-name sender reply-to greeting-method workday-method holidays-file report-emails verbose
show-empty-reports smtp-server smtp-user smtp-password smtp-port partition-renamings external-emails cluster partitions
nodelist min_run_time include_running_jobs email_file email_subject report_title admin_emails excluded_users
excluded_qos excluded_partitions num_top_users num_jobs_display max_num_jobid sampling_period_minutes
first_warning_minutes second_warning_minutes cancel_minutes email_file_first_warning email_file_second_warning
email_file_cancel jobid_cache_path max_interactive_hours max_interactive_gpus gpu_frac_threshold do_not_cancel
warnings_to_admin gpu_hours_threshold_user gpu_hours_threshold_admin eff_thres_pct eff_target_pct absolute_thres_hours
proportion_thres_pct gpu_hours_threshold num_cores_threshold gpu_util_threshold gpu_mem_threshold cpu_mem_threshold
gpu_util_target overall_ratio_threshold mean_ratio_threshold median_ratio_threshold cores_per_node gpus_per_node
cores_per_gpu_target cores_per_gpu_limit cpu_eff_threshold cpu_mem_per_node cpu_mem_per_gpu_target
cpu_mem_per_gpu_limit mem_eff_thres tb_hours_threshold ratio_threshold cores_fraction mem_per_node cpu_hours_threshold
lower_ratio safety_fraction min_nodes_thres"""
"""Every setting in its documentation and example files."""


@pytest.mark.parametrize("name", [*(f"--{word}" for word in ALERTS.split()), *OPTIONS.split()])
def test_every_alert_and_option_has_a_row(name: str) -> None:
    """In the first column, or in the second if the first names the alert."""
    cells = [cell for row in TABLE.splitlines() if row.startswith("|") for cell in row.split("|")[1:3]]
    assert any(f"`{name}`" in cell for cell in cells), name


def _commands() -> list[str]:
    return sorted(set(re.findall(r"`((?:zombies|report)(?: [^`]*)?)`", TABLE)))


@pytest.mark.parametrize("line", _commands())
def test_named_commands_and_options_exist(line: str) -> None:
    words = line.split()
    command: click.Command = cli
    context = click.Context(cli)
    while words and isinstance(command, click.Group) and not words[0].startswith("--"):
        result = command.get_command(context, words.pop(0))
        assert result is not None, line
        command = result
    known = {option: param for param in command.params for option in param.opts}
    for word, following in itertools.pairwise([*words, ""]):
        if word.startswith("--"):
            assert word in known, (line, word)
            kind = known[word].type
            if isinstance(kind, click.Choice):
                assert following in kind.choices, (line, word, following)


def test_named_misfit_settings_exist() -> None:
    """Names that follow ``misfits:`` in a cell."""
    fields = {field.name for field in dataclasses.fields(MisfitConfig)}
    for cell in re.findall(r"misfits: ([^|;]*)", TABLE):
        named = set(re.findall(r"`(\w+)`", cell))
        assert named, cell
        assert named <= fields, named - fields


def test_named_policy_settings_exist() -> None:
    """Names that follow ``policy`` in a cell are keys of a policy, its tables or its mail settings."""
    known = {*cleanup_policy._SETTINGS, *cleanup_policy._MATCH, *cleanup_policy._STAGES, *cleanup_policy._INTERACTIVE}
    known |= {field.name for field in dataclasses.fields(MailPolicy)}
    known |= {"until", "reason", "working_days", "hours", "holidays", *KINDS, *VARIANTS}
    for cell in re.findall(r"policy:? ([^|]*)", TABLE):
        named = {
            name
            for text in re.findall(r"`([^`]*)`", cell)
            for name in re.findall(r"^(?:\[mail\] |\[calendar\] )?(\w+)(?: = \w+)?$", text)
        }
        assert named <= known | {"misfits"}, (cell, named - known)
