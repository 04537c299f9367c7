"""What Slurm's commands say in text alone: configuration, partitions, versions, whether a daemon answers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurm_affinode.model.cluster import Partition
from slurm_affinode.slurm import live, units

_SETTING = re.compile(r"^([A-Za-z][A-Za-z0-9_:.\[\]-]*)\s*= ?(.*)$")
_WORD = re.compile(r"(?:^| )([A-Za-z][A-Za-z0-9_]*)=((?:(?! [A-Za-z][A-Za-z0-9_]*=).)*)")
_VERSION = re.compile(r"\b(\d{2}\.\d{2})(?:\.(\d+))?")


def config(text: str) -> dict[str, str]:
    """``scontrol show config``: its settings. The cgroup, MPI and plugin sections below keep their own names."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := _SETTING.match(line.strip()):
            value = match[2].strip()
            found.setdefault(match[1], "" if value == "(null)" else value)
    return found


def partitions(text: str) -> tuple[Partition, ...]:
    """``scontrol --oneliner show partitions``: the JSON form does not say which is the default."""
    rows = (dict(_WORD.findall(line)) for line in text.split("\n") if "PartitionName=" in line)
    return tuple(_partition(words) for words in rows if "PartitionName" in words)


def _partition(words: Mapping[str, str]) -> Partition:
    tres = live.tres(live.word(words.get("TRES")))
    return Partition(
        name=words["PartitionName"],
        nodes=live.nodes(live.word(words.get("Nodes"))),
        state=words.get("State", "UNKNOWN"),
        default=words.get("Default") == "YES",
        tres=tres,
        gpus=live.gpus(tres),
    )


def span_s(text: str) -> int | None:
    """A span as Slurm writes it, in seconds; ``None``: none, or not known."""
    try:
        seconds = units.parse_duration_s(text)
    except ValueError:
        return None
    return None if seconds is None else round(seconds)


def version(text: str) -> str | None:
    """``26.05.5`` of ``slurm-wlm 26.05.5`` or ``slurm 24.11.5-1``."""
    match = _VERSION.search(text)
    return match[0] if match else None


def release(text: str | None) -> str | None:
    """``26.05`` of ``26.05.5``: what must match between the parts of Slurm."""
    match = _VERSION.search(text or "")
    return match[1] if match else None
