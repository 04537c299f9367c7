"""Slurm's commands on a machine without a slurmctld: ``sacct``, ``scontrol``, ``squeue``, ``sacctmgr``, ``scancel``.

Installed under each of these names. The records are in ``RECORDS``, JSON with ``accounting``
(records of ``sacct``, with ``StartEpoch`` and ``EndEpoch`` beside its fields), ``jobs`` and ``nodes`` (as in ``scontrol
--json``; ``squeue``: fields of that command). Runs on the machine's Python and imports nothing of this repository.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RECORDS = Path("/etc/slurm/records.json")
RELEASE = "24.11.5"
CONFIGURATION = """Configuration data
AccountingStorageTRES   = cpu,mem,energy,node,billing,gres/gpu
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = alpha
GresTypes               = gpu
SLURM_VERSION           = 24.11.5
"""


def option(arguments: list[str], name: str, default: str = "") -> str:
    """Return the value of ``--name=VALUE``."""
    return next((word.partition("=")[2] for word in arguments if word.startswith(f"--{name}=")), default)


def epoch(text: str, default: float) -> float:
    """Return seconds of a time as the command line has it, in UTC; ``default`` for other words."""
    if not re.match(r"\d{4}-", text):
        return default
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def sacct(arguments: list[str], records: dict[str, Any]) -> str:
    """Return the accounting that the arguments select, in ``--parsable2`` form."""
    fields = list(dict.fromkeys(name for record in records["accounting"] for name in record))
    if "--helpformat" in arguments:
        return " ".join(name for name in fields if not name.endswith("Epoch")) + "\n"
    if "now" in arguments:
        return ""
    names = option(arguments, "format").split(",")
    job = option(arguments, "jobs")
    begin, end = epoch(option(arguments, "starttime"), 0), epoch(option(arguments, "endtime"), float("inf"))
    lines = [names]
    for record in records["accounting"]:
        meets = record["StartEpoch"] < end and (record["EndEpoch"] is None or record["EndEpoch"] >= begin)
        if record["JobIDRaw"].partition(".")[0] == job if job else meets:
            lines.append([str(record.get(name, "")) for name in names])
    separator = option(arguments, "delimiter", "|")
    return "".join(separator.join(line) + "\n" for line in lines)


def scontrol(arguments: list[str], records: dict[str, Any]) -> str:
    """Return what ``scontrol`` reports of the cluster, a job, all jobs or all nodes."""
    words = [word for word in arguments if not word.startswith("-")]
    if "--version" in arguments:
        return f"slurm {RELEASE}\n"
    if "--json=list" in arguments:
        return "Possible JSON plugins:\ndata_parser/v0.0.42\n"
    if words == ["ping"]:
        return "Slurmctld(primary) at head is UP\n"
    if words == ["show", "config"]:
        return CONFIGURATION
    key = {"job": "jobs", "jobs": "jobs", "nodes": "nodes"}.get(words[1], words[1])
    chosen = [job for job in records.get(key, []) if len(words) < 3 or str(job.get("job_id")) == words[2]]
    return json.dumps({key: chosen, "last_update": {"set": True, "number": 1}, "errors": [], "warnings": []})


def squeue(arguments: list[str], records: dict[str, Any]) -> str:
    """Return the fields of ``--Format`` of all jobs, each followed by the text that the format has after its name."""
    columns = [column.partition(":")[::2] for column in option(arguments, "Format").split(",")]
    return "".join(
        "".join(str(job["squeue"].get(name, "")) + mark for name, mark in columns) + "\n" for job in records["jobs"]
    )


def main(program: str, arguments: list[str]) -> str:
    """Return the output of a command."""
    records = json.loads(RECORDS.read_text(encoding="utf-8"))
    if program == "sacct":
        return sacct(arguments, records)
    if program == "scontrol":
        return scontrol(arguments, records)
    if program == "squeue":
        return squeue(arguments, records)
    return "alpha\n" if program == "sacctmgr" else ""


if __name__ == "__main__":
    sys.stdout.write(main(Path(sys.argv[0]).name, sys.argv[1:]))
