"""Ingest of exposition text into the sample store: ``python benchmarks/bench_ingest_gpu.py [SCRAPES]``.

A synthetic cluster of 800 GPUs on 100 nodes is scraped every 30 s, with nine metrics and two comment lines for each.
Reading the text is timed separately from reading and storing it.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from datetime import UTC
from pathlib import Path

from slurm_affinode.metrics import aliases
from slurm_affinode.metrics.ingest import ingest_files
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions

GPUS = 800
METRICS = {
    "DCGM_FI_DEV_SM_CLOCK": "1410", "DCGM_FI_DEV_GPU_TEMP": "55", "DCGM_FI_DEV_POWER_USAGE": "312.417",
    "DCGM_FI_DEV_GPU_UTIL": "97", "DCGM_FI_DEV_FB_FREE": "10000", "DCGM_FI_DEV_FB_USED": "71000",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "0.953125", "DCGM_FI_PROF_DRAM_ACTIVE": "0.5", "DCGM_FI_DEV_XID_ERRORS": "0",
}  # fmt: skip


def write(path: Path, scrapes: int) -> int:
    """Write the text; return the number of lines."""
    labels = [
        f'gpu="{gpu % 8}",UUID="GPU-{gpu:032x}",pci_bus_id="00000000:{gpu % 8 + 16:02X}:00.0",device="nvidia{gpu % 8}",'
        f'modelName="NVIDIA A100-SXM4-80GB",Hostname="node{gpu // 8:04d}.example.org",hpc_job="{4000 + gpu // 4}"'
        for gpu in range(GPUS)
    ]
    with path.open("w") as file:
        for scrape in range(scrapes):
            stamp = 1793520000000 + scrape * 30000
            for name, value in METRICS.items():
                file.write(f"# HELP {name} help\n# TYPE {name} gauge\n")
                file.writelines(f"{name}{{{label}}} {value} {stamp}\n" for label in labels)
    return scrapes * len(METRICS) * (GPUS + 2)


def main() -> None:
    """Measure and print."""
    scrapes = int(sys.argv[1]) if len(sys.argv) > 1 else 240
    options = ReadOptions(aliases=aliases.load(), zone=UTC)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "metrics.prom"
        lines = write(path, scrapes)
        print(f"{lines:,} lines, {path.stat().st_size / 1e6:,.0f} MB, {scrapes * GPUS:,} samples")
        begin = time.perf_counter()
        _, frames = inputs.read_file(path, options, ReadingNotes(path.name))
        samples = sum(len(frame) for frame in frames)
        took = time.perf_counter() - begin
        print(f"read            {took:6.2f} s  {lines / took:12,.0f} lines/s  {samples / took:10,.0f} samples/s")
        begin = time.perf_counter()
        summary = ingest_files(SampleStore(Path(directory) / "history"), [path], options)
        took = time.perf_counter() - begin
        print(f"read and store  {took:6.2f} s  {lines / took:12,.0f} lines/s  {summary.new / took:10,.0f} samples/s")
        print(f"peak memory     {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:6.2f} GiB")


if __name__ == "__main__":
    main()
