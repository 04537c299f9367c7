"""Triage of a job: accounting and output files as sacct knows them, and logs that cannot be read."""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from slurm_affinode.base.config import Config, StoreConfig, parse
from slurm_affinode.base.errors import InputError, UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.engines.schema import SAMPLES as ENGINE_SAMPLES
from slurm_affinode.engines.store import engine_store
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.metrics.schema import SAMPLES as GPU_SAMPLES
from slurm_affinode.pipeline.triage import JobTriage, examine, is_job, last_metrics

OUT_OF_GPU = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
FIELDS = (
    "JobIDRaw JobID Cluster User UID State ExitCode Submit Start End NNodes ReqMem AllocTRES MaxRSS WorkDir JobName"
)


class FakeSacct:
    """Accounting of one job, 77, whose output files are ``files``."""

    def __init__(
        self,
        files: Sequence[Path],
        *,
        state: str = "FAILED",
        down: bool = False,
        old: bool = False,
        uid: str | None = None,
        tasks: int = 0,
    ) -> None:
        self._files, self._state, self._down, self._old = files, state, down, old
        self._uid = str(os.getuid()) if uid is None else uid
        self._tasks = tasks

    def __call__(
        self, argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, check: bool = True
    ) -> Completed:
        """Reply."""
        if self._down:
            return Completed(tuple(argv), 1, b"", "sacct: error: Problem talking to the database: Connection refused\n")
        if "--helpformat" in argv:
            known = FIELDS if self._old else f"{FIELDS} StdOut StdErr"
            return Completed(tuple(argv), 0, known.encode(), "")
        if "--format=StdOut,StdErr" in argv:
            assert "--expand-patterns" in argv
            text = "StdOut\x1fStdErr\n" + "".join(f"{file}\x1f\n" for file in self._files)
            return Completed(tuple(argv), 0, text.encode(), "")
        names = next(item for item in argv if item.startswith("--format=")).removeprefix("--format=").split(",")
        assert "--jobs=77" in argv
        job = {
            "JobIDRaw": "77", "JobID": "77", "Cluster": "c", "User": "u", "UID": self._uid,
            "State": self._state, "ExitCode": "1:0", "Submit": "2026-01-01T00:00:00",
            "Start": "2026-01-01T00:00:01", "End": "2026-01-01T01:00:00", "NNodes": "1", "ReqMem": "2G",
            "AllocTRES": "cpu=1,mem=2G,node=1", "MaxRSS": "", "JobName": "j", "WorkDir": "/nowhere",
        }  # fmt: skip
        step = {**job, "JobIDRaw": "77.batch", "JobID": "77.batch", "MaxRSS": "1900M", "JobName": "batch"}
        tasks = [{**job, "JobIDRaw": str(77 + task), "JobID": f"77_{task}"} for task in range(self._tasks)]
        rows = tasks or [job, step]
        lines = ["\x1f".join(names), *("\x1f".join(row.get(name, "") for name in names) for row in rows)]
        return Completed(tuple(argv), 0, ("\n".join(lines) + "\n").encode(), "")


def test_outcome_of_an_array_is_unknown(tmp_path: Path) -> None:
    """The state of its last task says nothing about the task that failed; the output of all of them is read."""
    failed, other = tmp_path / "slurm-77_0.out", tmp_path / "slurm-77_1.out"
    failed.write_text(OUT_OF_GPU)
    other.write_text("nothing\n")
    examination = examine(["77"], run=FakeSacct([failed, other], state="COMPLETED", tasks=2))
    assert examination.problems == ("77 is several jobs in accounting: name one of them to use its outcome",)
    assert examination.result.cause is not None
    assert examination.result.job is None


def test_output_files_and_accounting_of_a_job_are_joined(tmp_path: Path) -> None:
    output = tmp_path / "slurm-77.out"
    output.write_text(OUT_OF_GPU)
    examination = examine(["77"], run=FakeSacct([output]))
    assert examination.problems == ()
    assert examination.result.kind == "gpu-out-of-memory"
    job = examination.result.job
    assert job is not None
    assert (job.job_id, job.state, job.memory_bytes, job.max_rss_bytes) == (77, "FAILED", 2 << 30, 1900 << 20)
    assert job.steps == (("batch", "FAILED"),)


def test_other_logs_are_read_beside_those_of_the_job(tmp_path: Path) -> None:
    output, slurmd = tmp_path / "out", tmp_path / "slurmd.log.gz"
    output.write_text("nothing\n")
    slurmd.write_bytes(gzip.compress(b"slurmstepd: error: Detected 1 oom_kill event in StepId=77.batch.\n"))
    examination = examine(["77", str(slurmd)], run=FakeSacct([output], state="OUT_OF_MEMORY"))
    assert examination.result.kind == "job-memory-limit"
    assert examination.result.cause is not None
    assert examination.result.cause.log == str(slurmd)
    assert len(examination.result.logs) == 2


def test_missing_output_file_is_a_problem_and_accounting_is_used(tmp_path: Path) -> None:
    examination = examine(["77"], run=FakeSacct([tmp_path / "gone"], state="OUT_OF_MEMORY"))
    assert "No such file" in examination.problems[0]
    assert examination.result.kind == "job-memory-limit"


def test_slurm_that_does_not_record_output_files(tmp_path: Path) -> None:
    examination = examine(["77"], run=FakeSacct([], old=True))
    assert "name the logs" in examination.problems[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has more rights than the owner of a job")
def test_root_reads_no_output_of_an_unknown_owner(tmp_path: Path) -> None:
    """The owner has chosen the path, so root would follow it with rights that the owner may not have."""
    output = tmp_path / "out"
    output.write_text(OUT_OF_GPU)
    examination = examine(["77"], run=FakeSacct([output], uid=""))
    assert "does not know the job's owner" in examination.problems[0]
    assert examination.result.kind != "gpu-out-of-memory"


def test_accounting_that_does_not_respond_matters_only_without_logs(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(OUT_OF_GPU)
    with pytest.raises(UnreachableError):
        examine(["77"], run=FakeSacct([], down=True))
    examination = examine(["77", str(log)], run=FakeSacct([], down=True))
    assert examination.result.kind == "gpu-out-of-memory"
    assert "accounting database" in examination.problems[0]


@pytest.mark.parametrize(("name", "job"), [("77", True), ("77_3", True), ("77+1", True), ("./77", False),
                                           ("77.out", False), ("77.batch", False), ("-", False)])  # fmt: skip
def test_job_ids_are_distinguished_from_log_files(name: str, job: bool) -> None:
    assert is_job(name) is job


def at(minute: float, second: float = 0) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute, seconds=second)


def stored(rows: Sequence[Mapping[str, object]], schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={name: schema[name] for name in rows[0]}).select(
        (pl.col(name) if name in rows[0] else pl.lit(None)).cast(dtype).alias(name) for name, dtype in schema.items()
    )


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A site with samples of two GPUs and an engine of job 77, which ended at 01:00, and of other jobs."""
    config = replace(parse('[cluster]\ntimezone = "UTC"\n', where="test"), store=StoreConfig(state_dir=tmp_path))
    gpu = {"cluster": "c", "node": "n1", "uuid": "GPU-1", "job": "77", "fb_total_mib": 81559.0}
    of_gpus = [
        {**gpu, "time": at(50), "fb_used_mib": 70000.0, "util_pct": 3.0},
        {**gpu, "time": at(59), "fb_used_mib": 80000.0, "util_pct": None},
        {**gpu, "time": at(61), "fb_used_mib": 0.0, "util_pct": 0.0},
        {**gpu, "time": at(59), "fb_used_mib": 9.0, "util_pct": 1.0, "uuid": "GPU-2", "job": None},
        {**gpu, "time": at(59), "fb_used_mib": 9.0, "util_pct": 1.0, "uuid": "GPU-3", "job": "177,770"},
        {**gpu, "time": at(59), "fb_used_mib": 9.0, "util_pct": 1.0, "cluster": "d", "uuid": "GPU-4"},
    ]
    engine = {"cluster": "c", "node": "n1", "address": "n1:8000", "engine": "vllm", "job": "77", "error": None}
    of_engines = [
        {**engine, "time": at(40), "kv_usage": 0.5, "running": 2.0, "waiting": 0.0, "gpus": "GPU-1,GPU-2"},
        {**engine, "time": at(58), "kv_usage": 0.97, "running": 9.0, "waiting": None, "gpus": "GPU-1,GPU-2"},
        {**engine, "time": at(59), "kv_usage": None, "running": None, "waiting": None, "gpus": None, "error": "late"},
        {**engine, "time": at(58), "kv_usage": 0.1, "running": 1.0, "waiting": 0.0, "gpus": "GPU-9", "job": "7",
         "address": "n1:8001"},
    ]  # fmt: skip
    for store, rows, schema in (
        (SampleStore(config.history_dir), of_gpus, GPU_SAMPLES),
        (engine_store(config.serving_dir), of_engines, ENGINE_SAMPLES),
    ):
        with closing(store):
            store.ingest(stored(rows, schema), source="test")
    return config


def figures(triage: JobTriage) -> dict[str, tuple[datetime, dict[str, float | None]]]:
    return {metric.source: (metric.time, dict(metric.figures)) for metric in triage.result.metrics}


def test_last_metrics_of_engines_and_gpus_are_joined(tmp_path: Path, config: Config) -> None:
    """Those of the job's own GPUs, by label or by the engine, before its end; a value not measured is unknown."""
    examination = examine(["77"], run=FakeSacct([]), metrics=partial(last_metrics, config))
    assert figures(examination) == {
        "vllm at n1:8000": (at(58), {"kv_usage": pytest.approx(0.97), "running": 9, "waiting": None, "asleep": None,
                                     "failed_scrapes": 1}),
        "GPU-1": (at(59), {"fb_used_mib": 80000, "fb_total_mib": 81559, "util_pct": None, "power_w": None}),
        "GPU-2": (at(59), {"fb_used_mib": 9, "fb_total_mib": 81559, "util_pct": 1, "power_w": None}),
    }  # fmt: skip


def test_last_metrics_are_those_before_the_failure(tmp_path: Path, config: Config) -> None:
    output = tmp_path / "slurm-77.out"
    output.write_text("2026-01-01 00:55:00 ERROR " + OUT_OF_GPU)
    examination = examine(["77"], run=FakeSacct([output]), metrics=partial(last_metrics, config))
    assert examination.result.cause is not None
    assert examination.result.cause.time == datetime(2026, 1, 1, 0, 55)  # noqa: DTZ001 - as logged
    assert {source: time for source, (time, _) in figures(examination).items()} == {
        "vllm at n1:8000": at(40), "GPU-1": at(50)
    }  # fmt: skip


def test_last_metrics_of_the_only_job_that_a_log_names(tmp_path: Path, config: Config) -> None:
    log = tmp_path / "slurmd.log"
    line = "[2026-01-01T00:59:30.000] [77.batch] error: Detected 1 oom_kill event in StepId=77.batch. Some of the\n"
    log.write_text(line)
    metrics = partial(last_metrics, config)
    examination = examine([str(log)], run=FakeSacct([], down=True), metrics=metrics)
    assert set(figures(examination)) == {"vllm at n1:8000", "GPU-1", "GPU-2", "GPU-4"}
    log.write_text(line + line.replace("77", "78"))
    assert examine([str(log)], run=FakeSacct([], down=True), metrics=metrics).result.metrics == ()


def test_state_without_samples_has_no_last_metrics(tmp_path: Path) -> None:
    config = replace(Config(), store=StoreConfig(state_dir=tmp_path / "none"))
    examination = examine(["77"], run=FakeSacct([]), metrics=partial(last_metrics, config))
    assert examination.result.metrics == ()
    assert not (tmp_path / "none").exists()


def test_unreadable_samples_are_a_problem(tmp_path: Path, config: Config) -> None:
    (config.serving_dir / "manifest.json").write_text("{")
    examination = examine(["77"], run=FakeSacct([]), metrics=partial(last_metrics, config))
    assert examination.result.job is not None
    assert any("manifest.json" in problem for problem in examination.problems)


def test_two_jobs_are_refused() -> None:
    with pytest.raises(InputError, match="several jobs"):
        examine(["77", "78"], run=FakeSacct([]))


def test_fifo_in_place_of_a_log_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError, match="not a regular file"):
        examine([str(tmp_path / "fifo")], run=FakeSacct([]))


def test_damaged_compressed_log_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "a.gz"
    log.write_bytes(gzip.compress(os.urandom(100000))[:5000])
    with pytest.raises(InputError, match="damaged or cut"):
        examine([str(log)], run=FakeSacct([]))


def test_log_in_utf_16_is_read(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_bytes(OUT_OF_GPU.encode("utf-16"))
    assert examine([str(log)], run=FakeSacct([])).result.kind == "gpu-out-of-memory"
