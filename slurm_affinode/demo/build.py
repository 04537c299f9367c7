"""From a history to a report: write it as files, take them in, render."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from slurm_affinode.analysis.result import WasteQuery
from slurm_affinode.config import ClusterConfig, Config, StoreConfig
from slurm_affinode.demo.histories import DemoHistory
from slurm_affinode.errors import AffinodeError, unwritable
from slurm_affinode.files import write_text
from slurm_affinode.report.build import WrittenReport
from slurm_affinode.slurm import sacct
from slurm_affinode.slurm.sacct import Reading
from slurm_affinode.store.repository import Repository
from slurm_affinode.workflow import gpu_intake, intake, pipeline

_MARK = "made by slurm-affinode demo"

Step = Callable[[str], None]


def build_demo(out: Path, history: DemoHistory, *, step: Step | None = None) -> WrittenReport:
    """Write ``input/``, ``state/``, ``report.html`` and ``summary.json`` into ``out``; what an earlier demo left goes.

    Raises ``AffinodeError`` where ``out`` cannot be written or holds something that no demo made.
    """
    say = step or (lambda _: None)
    try:
        _clear(out)
        say("writing the history")
        history.write_input(out / "input")
    except OSError as error:
        raise unwritable(out, error, hint="choose another --out") from error
    config = Config(StoreConfig(state_dir=out / "state", db=f"sqlite:///{out / 'state' / 'affinode.sqlite'}"),
                    ClusterConfig(name=history.cluster, timezone="UTC"))  # fmt: skip
    say("taking in accounting")
    source = out / "input" / "sacct.txt"
    with Repository.open(config.db_url) as repository:
        accounting = sacct.read(source, where=str(source), how=Reading(cluster=history.cluster, zone="UTC"))
        intake.take_in(repository, accounting, source=str(source), started=history.until, finished=history.until)
        say("taking in GPU history")
        options = gpu_intake.read_options(config)
        gpu_intake.take_in(config, repository, [out / "input" / "gpu"], options)
    query = WasteQuery(history.since, history.until, thresholds=pipeline.thresholds(config))
    return pipeline.build_report(
        config, query, out, options=pipeline.ReportOptions(title=history.title, csv=True), now=history.until, step=say
    )


def _clear(out: Path) -> None:
    """Remove ``input/`` and ``state/`` of an earlier demo; refuse to touch any other directory of these names."""
    mark = out / "state" / "demo.txt"
    if not mark.exists() and any((out / name).exists() for name in ("input", "state")):
        raise AffinodeError(f"{out}: has input/ or state/ that no demo made", hint="choose another --out")
    for name in ("input", "state"):
        shutil.rmtree(out / name, ignore_errors=True)
    write_text(mark, f"{_MARK}: this directory is made anew by the next one\n")
