"""Output of nvidia-smi that was pasted or logged: the table, ``-q`` and ``-q -x``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzz.mutation import mutated, some
from fuzz.runner import Check, Target, Wrong
from slurm_affinode.base.errors import InputError
from slurm_affinode.metrics.readers.inputs import SNAPSHOT_PARSERS

_DATA = Path(__file__).parents[1] / "data" / "gpu"
_SEEDS = {
    "nvidia-smi-table": ("nvidia-smi-table-390.txt", "nvidia-smi-table-525.txt", "nvidia-smi-table-580-mig.txt"),
    "nvidia-smi-q": ("nvidia-smi-q-550.txt",),
    "nvidia-smi-xml": ("nvidia-smi-535.xml",),
}
_WORDS = (
    b"|",
    b"+",
    b"+---------------+\n",
    b"|======+=====+=====|\n",
    b"ERR!",
    b"N/A",
    b" MiB",
    b" %",
    b"> ",
    b"\t",
    b"| NVIDIA-SMI 1",
    b"| MIG devices:  |\n",
    b"| Processes: |\n",
    b"==============NVSMI LOG==============\n",
    b"GPU 00000000:01:00.0\n",
    b"    MIG Device\n",
    b'<?xml version="1.0" ?>\n',
    b"</nvidia_smi_log>\n",
    b"<!ENTITY a 'b'>",
    b"&a;",
    b"<gpu>",
    b"</gpu>",
    b"Sun Nov  1 08:00:00 2026\n",
    b"9" * 400,
    b" : ",
    b"\xff",
    b"\0",
    b"\x1b[31m",
)


def _output(rng: Random) -> bytes:
    kind = some(rng, tuple(_SEEDS))
    whole = (_DATA / some(rng, _SEEDS[kind])).read_bytes()
    return kind.encode() + b"\n" + mutated(rng, whole * some(rng, (1, 1, 2)), _WORDS, 1 << 15)


@contextlib.contextmanager
def _snapshots() -> Iterator[Check]:
    """Values of a device are in the output, from the line of the device on."""

    def check(data: bytes) -> bool:
        kind, _, output = data.partition(b"\n")
        parser = SNAPSHOT_PARSERS.get(kind.decode("utf-8", "replace"))
        if parser is None:
            raise InputError("has no format of snapshots")
        text = output.decode("utf-8", "replace")
        lines = text.split("\n")
        snapshots = list(parser(((line, number) for number, line in enumerate(lines, start=1)), "x"))
        complete = [snapshot for snapshot in snapshots if snapshot.incomplete is None and snapshot.devices]
        for device in (device for snapshot in complete for device in snapshot.devices):
            below = "\n".join(lines[device.line - 1 :])
            for value in (device.util, device.used, device.total, device.power):
                if value and "&" not in text and value.split()[:1] and value.split()[0] not in below:
                    raise Wrong(f"{value} is not in the output")
        return bool(complete)

    yield check


TARGETS = (Target("nvidia-smi", "output of nvidia-smi that users paste", _output, _snapshots, (InputError,)),)
