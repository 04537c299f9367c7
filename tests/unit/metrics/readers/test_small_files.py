"""Small files of exposition text are read together, with the same result as one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from slurm_affinode.metrics import aliases, ingest
from slurm_affinode.metrics.ingest import GPU_FILES, FileOutcome, ingest_files
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.readers import inputs
from slurm_affinode.metrics.readers.common import ReadingNotes, ReadOptions

OPTIONS = ReadOptions(aliases=aliases.load(), zone=UTC)
STAMP = 1793520000000


def _line(metric: str, value: object, *, gpu: int = 0, stamp: object = STAMP, more: str = "") -> str:
    return f'{metric}{{gpu="{gpu}",UUID="GPU-{gpu}",Hostname="n1"{more}}} {value} {stamp}\n'


SOUND = {
    "plain": _line("DCGM_FI_DEV_GPU_UTIL", 5) + _line("DCGM_FI_DEV_POWER_USAGE", 61.5),
    "same-device": _line("DCGM_FI_DEV_GPU_UTIL", 6) + _line("DCGM_FI_DEV_GPU_UTIL", 7, stamp=STAMP + 30000),
    "ratio": _line("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0.5) + _line("nvidia_smi_utilization_gpu_ratio", 0.25, gpu=2),
    "percent": _line("gpu_utilization", 50, gpu=3) + _line("gpu_utilization", 0.5, gpu=4),
    "low": _line("gpu_utilization", 0.5, gpu=3) + _line("gpu_utilization", 1, gpu=4),
    "unknown": _line("somebody_else", 1) + "# HELP x y\n\n" + _line("DCGM_FI_DEV_GPU_UTIL", 8) + _line("other", 2) * 2,
    "job": _line("DCGM_FI_DEV_GPU_UTIL", 9, more=',hpc_job="42,41"') + _line("DCGM_FI_DEV_GPU_UTIL", 9, gpu=1),
    "job-value": _line("DCGM_FI_DEV_GPU_UTIL", 9) + _line("nvidia_gpu_jobId", 77),
    "ended": _line("DCGM_FI_DEV_GPU_UTIL", "NaN", more=',hpc_job="42"'),
    "blank": _line("DCGM_FI_DEV_GPU_UTIL", 2147483632) + _line("DCGM_FI_DEV_FB_USED", 3),
}
"""Files without anything to report."""
OTHER = {
    "bad-value": _line("DCGM_FI_DEV_GPU_UTIL", 5) + _line("DCGM_FI_DEV_GPU_UTIL", "x", gpu=1),
    "bad-line": _line("DCGM_FI_DEV_GPU_UTIL", 5) + "?\n",
    "bad-unknown": _line("DCGM_FI_DEV_GPU_UTIL", 5) + "word word word word\n",
    "bad-time": _line("DCGM_FI_DEV_GPU_UTIL", 5) + _line("DCGM_FI_DEV_GPU_UTIL", 5, gpu=1, stamp="-5"),
    "no-device": _line("DCGM_FI_DEV_GPU_UTIL", 5) + f'DCGM_FI_DEV_GPU_UTIL{{Hostname="n1"}} 5 {STAMP}\n',
    "no-time": _line("DCGM_FI_DEV_GPU_UTIL", 5) + _line("DCGM_FI_DEV_GPU_UTIL", 5, gpu=1, stamp=""),
    "no-end": _line("DCGM_FI_DEV_GPU_UTIL", 5) + _line("DCGM_FI_DEV_GPU_UTIL", 5, gpu=1)[:-1],
    "eof": _line("DCGM_FI_DEV_GPU_UTIL", 5) + "# EOF\n",
    "crlf": _line("DCGM_FI_DEV_GPU_UTIL", 5).replace("\n", "\r\n"),
    "nul": _line("DCGM_FI_DEV_GPU_UTIL", 5) + "\0\n",
    "only-jobs": _line("nvidia_gpu_jobId", 77),
    "only-unknown": _line("somebody_else", 1),
}
"""Files with something to report, or in another form."""


@pytest.fixture
def files(tmp_path: Path) -> Callable[[dict[str, str]], list[Path]]:
    """Write files with the given texts; return their paths."""

    def _write(texts: dict[str, str]) -> list[Path]:
        (tmp_path / "in").mkdir(exist_ok=True)
        paths = [tmp_path / "in" / f"{name}.prom" for name in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.write_text(text, newline="")
        return paths

    return _write


def test_small_files_have_the_samples_of_each_file(files: Callable[..., list[Path]]) -> None:
    """Samples, their percent and the unknown names are those of each file; others are left to be read alone."""
    paths = files({**SOUND, **OTHER})
    result = inputs.read_small(paths, OPTIONS, None)
    assert [path.stem for path in result] == list(SOUND)
    for path, samples in result.items():
        notes = ReadingNotes(path.name)
        _, frames = inputs.read_file(path, OPTIONS, notes)
        expected = pl.concat(list(frames))
        assert_frame_equal(samples.frame.sort("uuid", "time"), expected.sort("uuid", "time"), check_row_order=True)
        assert samples.unknown.most_common() == notes.unknown.most_common()
        assert not notes.problem_count


def test_files_without_times_are_read_alone(files: Callable[..., list[Path]]) -> None:
    """With ``--start``, the times depend on the scrapes of each file."""
    start = datetime(2026, 11, 1, tzinfo=UTC)
    assert not inputs.read_small(files(SOUND), replace(OPTIONS, start=start), None)


@pytest.mark.parametrize("impossible", [False, True])
def test_ingest_of_small_files_has_the_same_outcome(
    files: Callable[..., list[Path]], tmp_path: Path, impossible: bool
) -> None:
    """Outcomes, in the order of the files, and stored samples do not depend on which files are read together."""
    more = {"impossible": _line("DCGM_FI_DEV_GPU_UTIL", 900)} if impossible else {}
    paths = files({**SOUND, **OTHER, **more})

    def outcome(name: str) -> tuple[list[FileOutcome], Any, pl.DataFrame]:
        store = SampleStore(tmp_path / name)
        summary = ingest_files(store, paths, OPTIONS)
        every = [replace(file, started=None, finished=None) for file in summary.files]
        rest = replace(summary, files=())
        return every, rest, store.scan().collect().sort(pl.all())

    together = outcome("together")
    with mock.patch.object(ingest, "_FILES_AT_ONCE", 1):
        alone = outcome("alone")
    assert together[0] == alone[0]
    assert together[1] == alone[1]
    assert_frame_equal(together[2], alone[2])


def test_sound_small_files_are_not_read_one_by_one(files: Callable[..., list[Path]], tmp_path: Path) -> None:
    """Reading a file alone takes as long as a thousand lines."""
    texts = {f"scrape{at}": _line("DCGM_FI_DEV_GPU_UTIL", 5, stamp=STAMP + at * 1000) for at in range(50)}
    paths = files({**texts, "bad": OTHER["bad-value"]})
    alone = mock.Mock(side_effect=inputs.read_file)
    summary = ingest_files(SampleStore(tmp_path / "store"), paths, OPTIONS, reader=replace(GPU_FILES, read=alone))
    assert [call.args[0].stem for call in alone.call_args_list] == ["bad"]
    assert summary.samples == 51
