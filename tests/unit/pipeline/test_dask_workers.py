"""Reports whose samples are folded by the workers of a real Dask cluster on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from distributed import LocalCluster

from slurm_affinode.analysis import samples
from slurm_affinode.analysis.join import kernel
from slurm_affinode.base.config import Config, DaskConfig, StoreConfig
from slurm_affinode.base.errors import UnreachableError
from slurm_affinode.engines.schema import SAMPLES as ENGINE_SAMPLES
from slurm_affinode.engines.store import engine_store
from slurm_affinode.metrics.parquet.store import SampleStore
from slurm_affinode.pipeline import dask_workers
from slurm_affinode.slurm.accounting.schema import conform

from .sampled_site import NOW, START, add_jobs, assert_same, command, samples_of, written

GPUS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two workers with a process each."""
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight GPUs for three days, one of them with two sources, and a job of six hours after the other on each."""
    directory = tmp_path_factory.mktemp("state")
    add_jobs(config_of(directory), GPUS)
    with closing(SampleStore(directory / "history")) as history:
        history.ingest(samples_of(range(GPUS)), source="all")
        history.ingest(samples_of(range(1), 2, late_s=20), source="other")
    return directory


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several tasks of each day."""
    monkeypatch.setattr(kernel, "MOST_ROWS", 1000)
    monkeypatch.setattr(kernel.ranges_of, "__kwdefaults__", {"most_rows": 1000})


def config_of(state: Path) -> Config:
    return Config(store=StoreConfig(state_dir=state))


def test_report_of_workers_is_that_of_one_machine(cluster: LocalCluster, state: Path, tmp_path: Path) -> None:
    """Every byte of the page, the summary and the tables is the same."""
    local = written(config_of(state), tmp_path / "local")
    with dask_workers.connected(cluster.scheduler_address) as workers:
        assert_same(local, written(config_of(state), tmp_path / "dask", fold=workers.fold))


def test_report_survives_the_end_of_a_worker(cluster: LocalCluster, state: Path, tmp_path: Path) -> None:
    """The worker is killed after the first results; the cluster starts another one."""
    local = written(config_of(state), tmp_path / "local")
    with dask_workers.connected(cluster.scheduler_address) as workers:

        def fold(index: Any, allocations: Any, cells: Any, thresholds: Any, advance: Any) -> Any:
            killed = False

            def progress(rows: int) -> None:
                nonlocal killed
                if not killed:
                    next(iter(cluster.workers.values())).process.process._process.kill()
                    killed = True
                advance(rows)

            totals = workers.fold(index, allocations, cells, thresholds, progress)
            assert killed
            return totals

        assert_same(local, written(config_of(state), tmp_path / "dask", fold=fold))


def test_command_reports_with_workers(
    cluster: LocalCluster,
    state: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The option is given as to a site's cluster."""
    period = ("--since", "2026-11-02T00:00Z", "--until", "2026-11-05T00:00Z", "--state", str(state))
    out = tmp_path / "out"
    code = command(monkeypatch, "report", *period, "--out", str(out), "--dask", cluster.scheduler_address)
    assert not code, capsys.readouterr().err
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("address", "text"),
    [("localhost:1", "not an address of a Dask scheduler"), ("tcp://127.0.0.1:1", "there is no Dask scheduler at")],
)
def test_missing_scheduler_is_one_line(  # noqa: PLR0917 - fixtures and parameters
    state: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    text: str,
) -> None:
    """Nothing is written."""
    assert command(monkeypatch, "report", "--state", str(state), "--out", str(tmp_path / "out"), "--dask", address)
    shown = capsys.readouterr().err
    assert text in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "out").exists()


def test_worker_of_another_version_is_refused(
    cluster: LocalCluster, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sums could differ."""
    monkeypatch.setattr(dask_workers, "identity", lambda: "0.1.0, abc")
    with (
        dask_workers.connected(cluster.scheduler_address) as workers,
        pytest.raises(UnreachableError, match=r"the command was started with 0\.1\.0, abc"),
    ):
        written(config_of(state), tmp_path / "out", fold=workers.fold)
    assert not (tmp_path / "out" / "report.html").exists()


def test_damaged_and_missing_stores_are_named(cluster: LocalCluster, state: Path, tmp_path: Path) -> None:
    """The error of a worker is that of this machine, with the name of the file."""
    copy = tmp_path / "copy"
    shutil.copytree(state, copy)
    part = max((copy / "history").rglob("*.parquet"), key=lambda path: path.stat().st_size)
    part.write_bytes(part.read_bytes()[:-1000])
    with dask_workers.connected(cluster.scheduler_address) as workers:
        with pytest.raises(UnreachableError, match=part.name.partition(".")[0]):
            written(config_of(copy), tmp_path / "out", fold=workers.fold)

        def moved(index: Any, *arguments: Any) -> Any:
            shutil.move(state_moved / "history", state_moved / "elsewhere")
            return workers.fold(index, *arguments)

        state_moved = tmp_path / "moved"
        shutil.copytree(state, state_moved)
        with pytest.raises(UnreachableError, match="no such directory"):
            written(config_of(state_moved), tmp_path / "out", fold=moved)
    assert not (tmp_path / "out" / "report.html").exists()


def test_part_that_is_deleted_meanwhile_is_named(cluster: LocalCluster, state: Path, tmp_path: Path) -> None:
    """The index was read before; nothing is written, and the same report can be made when the part is back."""
    copy = tmp_path / "copy"
    shutil.copytree(state, copy)
    part = max((copy / "history").rglob("part-*.parquet"), key=lambda path: path.stat().st_size)
    kept = tmp_path / part.name
    with dask_workers.connected(cluster.scheduler_address) as workers:

        def deleted(index: Any, *arguments: Any) -> Any:
            part.rename(kept)
            return workers.fold(index, *arguments)

        with pytest.raises(UnreachableError, match=rf"^[^\n]*{part.name}[^\n]*$") as error:
            written(config_of(copy), tmp_path / "out", fold=deleted)
        assert "Dask cluster" not in str(error.value)
        assert not (tmp_path / "out" / "report.html").exists()
        kept.rename(part)
        written(config_of(copy), tmp_path / "out", fold=workers.fold)


@pytest.mark.parametrize("closed", ["store", "part"])
def test_store_that_workers_may_not_read_is_named(state: Path, tmp_path: Path, closed: str) -> None:
    """They may run as another user than the command."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a worker of another user")
    copy = tmp_path / "copy"
    shutil.copytree(state, copy)
    part = max((copy / "history").rglob("part-*.parquet"), key=lambda path: path.stat().st_size)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster,
        cluster.get_client() as client,
        dask_workers.connected(cluster.scheduler_address) as workers,
    ):
        written(config_of(copy), tmp_path / "first", fold=workers.fold)  # it imports what it needs, as root
        for directory in (*copy.rglob("*/"), copy, tmp_path, *tmp_path.parents[:-2]):
            directory.chmod(0o755)
        for file in (copy / "history").rglob("*.*"):
            file.chmod(0o755)
        path = part if closed == "part" else copy / "history"
        path.chmod(0o600)
        client.run(os.seteuid, 65534)
        with pytest.raises(UnreachableError, match=rf"^[^\n]*{path.name}[^\n]*ermi[^\n]*$") as error:
            written(config_of(copy), tmp_path / "out", fold=workers.fold)
        client.run(os.seteuid, 0)
    assert "Dask cluster" not in str(error.value)
    assert "must be able to read the sample store" in (error.value.hint or "")
    assert not (tmp_path / "out" / "report.html").exists()


def test_end_of_the_scheduler_ends_the_report(state: Path, tmp_path: Path) -> None:
    """The report ends with one line, and writes nothing."""
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster,
        dask_workers.connected(cluster.scheduler_address) as workers,
    ):

        def fold(index: Any, allocations: Any, cells: Any, thresholds: Any, advance: Any) -> Any:
            def progress(rows: int) -> None:
                advance(rows)
                cluster.close()

            return workers.fold(index, allocations, cells, thresholds, progress)

        with pytest.raises(UnreachableError, match=r"the Dask cluster \(tcp.* failed"):
            written(config_of(state), tmp_path / "out", fold=fold)
    assert not (tmp_path / "out" / "report.html").exists()


def test_interrupted_report_continues_with_the_command_that_it_names(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scheduler ends in the middle of a report up to now; what was folded is not folded again."""
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    since, until = "2026-11-02T00:00:00.123456Z", "2026-11-04T19:30:01.987654Z"
    local, out = tmp_path / "local", tmp_path / "dask"
    command(monkeypatch, "report", "--since", since, "--until", until, "--state", str(copy), "--out", str(local))
    monkeypatch.setattr(dask_workers, "_AHEAD", 1)
    each = dask_workers.DaskWorkers.each
    words = ("report", "--state", str(copy), "--out", str(out))
    folded: list[int] = []

    def counted(workers: Any, function: Any, todo: Any, shared: Any) -> Any:
        for result in each(workers, function, todo, shared):
            folded[-1] += 1
            yield result
            if len(folded) == 1 and folded == [7]:
                first.close()

    monkeypatch.setattr(dask_workers.DaskWorkers, "each", counted)
    shown = f"--since {since} --until {until} continues"
    for interrupted in (True, False):
        with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as first:
            match = re.search(r"--since (\S+) --until (\S+) continues", shown)
            assert match is not None, shown
            folded.append(0)
            period = ("--since", match[1], "--until", match[2])
            code = command(monkeypatch, *words, *period, "--dask", first.scheduler_address)
            shown = capsys.readouterr().err
            assert bool(code) is interrupted
            assert "Traceback" not in shown
    assert folded[0] == 7
    with closing(SampleStore(copy / "history")) as store:
        index = samples.read_index(store, START, NOW, max_gap_steps=3)
        assert sum(folded) == len(list(kernel.ranges_of(index)))
    assert not list((copy / "partial-totals").iterdir())
    summaries = [json.loads((directory / "summary.json").read_text()) for directory in (local, out)]
    for summary in summaries:
        del summary["generated"], summary["query"]
    assert summaries[0] == summaries[1]


def test_ranges_cover_all_rows_in_order(state: Path) -> None:
    """Each range begins and ends with a piece, of the same source."""
    with closing(SampleStore(state / "history")) as store:
        index = samples.read_index(store, START, NOW, max_gap_steps=3)
        ranges = list(kernel.ranges_of(index, most_rows=3000))
    assert [item.row for item in ranges] == [0, *(interval.end for interval in ranges[:-1])]
    assert ranges[-1].end == index.rows
    assert {interval.end for interval in ranges} <= set(index.pieces.end.tolist())


def add_engines(directory: Path) -> None:
    """Store samples of four engines."""
    rows = [
        {"time": START + timedelta(seconds=15 * i), "cluster": "c", "address": f"n{number}:8000", "node": f"n{number}",
         "job": str(number), "engine": "vllm", "running": float(i % (3 + number)), "kv_usage": 0.5,
         "waiting": float(max(0, i - 100 * number))}
        for number in range(4) for i in range(400)
    ]  # fmt: skip
    with closing(engine_store(config_of(directory).serving_dir)) as store:
        store.ingest(conform(pl.DataFrame(rows), ENGINE_SAMPLES), source="engines")


def test_engines_examined_by_workers_are_those_of_one_machine(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``serving list --dask`` prints the same."""
    add_engines(tmp_path)
    shown = []
    for more in ((), ("--dask", cluster.scheduler_address)):
        command(monkeypatch, "serving", "list", "--state", str(tmp_path), "--json", *more)
        captured = capsys.readouterr()
        shown.append(captured.out)
        assert "Traceback" not in captured.err
    assert len(json.loads(shown[0])["engines"]) == 4
    assert shown[0] == shown[1]


COMMANDS = {
    "zombies list": ("zombies", "list", "--since", "2026-11-03T00:00Z", "--until", "2026-11-04T17:40Z",
                     "--window", "10m", "--min-score", "0"),
    "whatif": ("whatif", "--since", "2026-11-02T12:00Z", "--until", "2026-11-05T00:00Z", "--suspend-idle", "15m",
               "--sweep", "5m,10m,30m", "--gpus", "1"),
}  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_output_of_a_command_with_workers_is_that_of_one_machine(  # noqa: PLR0917 - fixtures and parameters
    cluster: LocalCluster,
    state: Path,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With several groups of devices, and with use before the interval."""
    copy = tmp_path / "state"  # commands write to it
    shutil.copytree(state, copy)
    monkeypatch.setattr(samples, "TASK_ROWS", 9000)
    monkeypatch.setattr(samples, "TASK_ROWS_OF_DAY", 1000)
    tasks: list[str] = []
    submit = dask_workers.Client.submit

    def counted(client: Any, task: Any, function: Any, *arguments: Any, **more: Any) -> Any:
        tasks.append(getattr(getattr(function, "args", [function])[0], "__name__", "?"))
        return submit(client, task, function, *arguments, **more)

    monkeypatch.setattr(dask_workers.Client, "submit", counted)
    shown = []
    for more in ((), ("--dask", cluster.scheduler_address)):
        command(monkeypatch, *words, "--state", str(copy), "--json", *more)
        captured = capsys.readouterr()
        shown.append(captured.out)
        assert "Traceback" not in captured.err
    assert shown[0] == shown[1]
    result = json.loads(shown[0])
    if "findings" in result:
        assert {finding["kind"] for finding in result["findings"]} >= {"idle-allocation", "orphan-memory"}
    else:
        assert result["clusters"][0]["gpu_hours_returned"] > 0
    expected = (
        {"_follow_task", "_figures_since_free"}
        if "findings" in result
        else {"_follow_task", "_windows", "_replay_pool"}
    )
    assert set(tasks) == expected
    assert min(tasks.count(name) for name in expected) > 2


CLIENT = """
import os, signal, sys
from slurm_affinode.analysis import samples
from slurm_affinode.analysis.join import kernel
from slurm_affinode.cli.main import main
from slurm_affinode.engines.diagnosis import examination
from slurm_affinode.pipeline import dask_workers

samples.TASK_ROWS, samples.TASK_ROWS_OF_DAY, examination.ROWS = 9000, 1000, 400
kernel.ranges_of.__kwdefaults__["most_rows"] = 1000
log, most, *words = sys.argv[1:]
each = dask_workers.DaskWorkers.each
count = 0

def counted(workers, function, todo, shared):
    global count
    for result in each(workers, function, todo, shared):
        yield result
        count += 1  # it is kept
        with open(log, "a") as file:
            print(getattr(function, "args", [function])[0].__name__, file=file)
        if count == int(most):
            os.kill(os.getpid(), signal.SIGKILL)

dask_workers.DaskWorkers.each = counted
sys.argv = ["slurm-affinode", *words]
main()
"""
"""A client with small tasks that is killed when it has so many results."""
RESUMED = {
    "report": (("report", "--since", "2026-11-02T00:00Z", "--until", "2026-11-05T00:00Z", "--trend", "0"), 7),
    "zombies list, first tasks": (COMMANDS["zombies list"], 2),
    "zombies list, last tasks": (COMMANDS["zombies list"], 5),
    "whatif, idle periods": (COMMANDS["whatif"], 6),
    "whatif, replays": (COMMANDS["whatif"], 10),
    "serving list": (("serving", "list"), 2),
}


class Clients:
    """Processes that run a command with workers, each with hashes of its own."""

    def __init__(self, address: str, state: Path, words: tuple[str, ...]) -> None:
        self._words = (*words, "--json", "--state", str(state), "--dask", address)
        self._directory = state
        self.tasks: list[str] = []
        self.out = self.err = ""

    def run(self, *, most: int = 0) -> int:
        """Run the command, until it has ``most`` results; return its exit status. ``tasks``: those of this process."""
        log = self._directory / "tasks"
        log.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-c", CLIENT, str(log), str(most), *self._words], capture_output=True, text=True,
            check=False, env={**os.environ, "PYTHONHASHSEED": str(most)},
        )  # fmt: skip
        self.tasks = log.read_text().split() if log.exists() else []
        self.out, self.err = done.stdout, done.stderr
        assert "Traceback" not in self.err, self.err
        return done.returncode

    def kept(self) -> list[Path]:
        """Return the files of partial results."""
        return sorted((self._directory / "partial-totals").glob("*"))


@pytest.mark.parametrize(("words", "most"), RESUMED.values(), ids=RESUMED)
def test_command_whose_client_was_killed_computes_only_what_is_missing(
    cluster: LocalCluster,
    state: Path,
    words: tuple[str, ...],
    most: int,
    tmp_path: Path,
) -> None:
    """The same command in another process has the output of one that was not killed, byte for byte."""
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    add_engines(copy)
    if words[0] == "report":
        words = (*words, "--out", str(tmp_path / "out"))
    clients = Clients(cluster.scheduler_address, copy, words)
    clients.run()
    whole, shown, notes = Counter(clients.tasks), clients.out, clients.err
    assert clients.kept() == []
    assert clients.run(most=most) == -signal.SIGKILL
    first = Counter(clients.tasks)
    assert first.total() == most
    directory = copy / "partial-totals"
    assert {path.stat().st_mode & 0o077 for path in (directory, *clients.kept())} == {0}
    clients.run()
    assert first + Counter(clients.tasks) == whole
    assert without_times(clients.out) == without_times(shown)
    assert clients.err == notes
    assert clients.kept() == []


def without_times(text: str) -> Any:
    """Return JSON output without the time at which it was made."""
    return {name: value for name, value in json.loads(text).items() if name != "generated"}


def test_command_reports_damaged_and_foreign_results_and_computes_them(
    cluster: LocalCluster, state: Path, tmp_path: Path
) -> None:
    """Results of other samples are not used either."""
    copy = tmp_path / "state"
    shutil.copytree(state, copy)
    clients = Clients(cluster.scheduler_address, copy, COMMANDS["whatif"])
    clients.run()
    whole, shown = Counter(clients.tasks), clients.out
    clients.run(most=3)
    (path,) = clients.kept()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    clients.run()
    assert Counter(clients.tasks).total() == whole.total() - 2
    assert clients.out == shown
    assert clients.err == f"{path}: partial results are damaged after 2 tasks: the others are ignored\n"
    clients.run(most=3)
    (path,) = clients.kept()
    with closing(SampleStore(copy / "history")) as history:
        history.ingest(samples_of(range(1), 1440, late_s=30), source="more")
    clients.run()
    assert Counter(clients.tasks)["_follow_task"] == whole["_follow_task"]
    assert clients.err == f"{path}: partial results are of other samples, jobs or options: ignored, and deleted\n"
    assert clients.kept() == []


def test_jobs_of_slurm_and_only_they_reach_the_scheduler(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address is on the network: without the keys, which their owner alone can read, a client is refused."""
    sbatch = tmp_path / "sbatch"
    start = f"cp $1 {tmp_path}/job\nbash {tmp_path}/job >{tmp_path}/log 2>&1 &\n"
    sbatch.write_text(f"#!/bin/sh\n{start}echo Submitted batch job $$\n")
    sbatch.chmod(0o755)
    (tmp_path / "scancel").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    local = written(config_of(state), tmp_path / "local")
    python = tmp_path / "python of $HOME"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    settings = DaskConfig(jobs=1, cores=1, memory_gib=0.5, wait="1m", python=str(python))
    quoted = tmp_path / "a state's directory"
    quoted.mkdir()
    with dask_workers.connected("slurm", settings, quoted) as workers:
        assert_same(local, written(config_of(state), tmp_path / "dask", fold=workers.fold))
        address = workers._client.scheduler_info()["address"]
        keys = [path for path in quoted.glob("dask-*/*") if path.is_file()]
        assert keys
        assert {path.stat().st_mode & 0o077 for path in keys} == {0}
        assert address.startswith("tls://")
        monkeypatch.setattr(dask_workers, "CONNECT_S", 2.0)
        for stranger in (address, address.replace("tls://", "tcp://")):
            with pytest.raises(UnreachableError), dask_workers.connected(stranger):
                pass
    assert not list(quoted.glob("dask-*"))


def test_missing_extra_is_named_after_the_command(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the option and its value, which are no part of the command."""
    monkeypatch.setitem(sys.modules, "dask", None)
    monkeypatch.delitem(sys.modules, "slurm_affinode.pipeline.dask_workers")
    monkeypatch.delattr("slurm_affinode.pipeline.dask_workers")
    assert command(monkeypatch, "report", "--state", str(state), "--dask", "tcp://localhost:1")
    assert capsys.readouterr().err.startswith("slurm-affinode: report: needs the extra scale")
