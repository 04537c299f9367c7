"""Simulation of a year of jobs, training of predictors, and published simulators with the same jobs.

    python benchmarks/bench_whatif.py --jobs 1000000
    python benchmarks/bench_whatif.py --jobs 0 --logs DIR --pai DIR --pyss DIR

A log of a year is generated with a fixed seed, in the Standard Workload Format. It is read and simulated once for each
scenario, each in its own process: EASY, EASY-SJBF with the user's last two jobs, conservative backfill, first-fit, and
first-fit with idle jobs that are suspended. Another process trains the predictors of ``predict`` with it. Limits, of
CPU time: 60 s for a scenario and 120 s for the training of a million jobs; 2 GiB. The ratio of a scenario is to a heap
through which as many submissions and ends pass, which any event simulation needs; that of the training is to the time
of LightGBM in it.

Peers that are not in this repository are run where a checkout is given, with the rows of the validation that they can
simulate, from ``philly_pollux.csv.gz`` and ``KTH-SP2-1996-2.swf.gz`` below ``--logs`` (docs/whatif.md says where both
are published): ``--pai`` is the folder ``cluster-trace-gpu-v2020/simulator`` of ``alibaba/clusterdata``, ``--pyss`` the
folder ``simulation/pyss/src`` of ``jad-darrous/predictsim``, which needs Python 2.7 or PyPy 2.7 (``--pyss-python``).
Their mean waits must agree with ours. Times are CPU times from the file of jobs to the figures.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ratios import MISSED, peak_gib, report

from slurm_affinode.pipeline import prediction
from slurm_affinode.prediction import quantile_model
from slurm_affinode.traces import philly, swf
from slurm_affinode.traces.job_log import JobLog
from slurm_affinode.whatif import validation
from slurm_affinode.whatif.figures import figures
from slurm_affinode.whatif.policy import SchedulingPolicy
from slurm_affinode.whatif.simulation import Workload, simulate
from slurm_affinode.whatif.suspension import DUMP_S, RESTORE_S, GpuJob, SuspensionRule, replay
from slurm_affinode.whatif.workload import PreparedLog, Selection, prepare

YEAR_S = 365 * 86_400
LOAD = 0.85
"""Time of the jobs, of the time of all GPUs."""
USERS, APPLICATIONS = 400, 5
LIMIT_S, TRAINING_LIMIT_S, LIMIT_GIB = 60.0, 120.0, 2.0
POLICIES = {
    "EASY": SchedulingPolicy("fcfs", "easy", "requested"),
    "EASY-SJBF, last two": SchedulingPolicy("sjf", "easy", "last-two"),
    "conservative": SchedulingPolicy("fcfs", "conservative", "requested"),
    "first-fit": SchedulingPolicy("fcfs", "first-fit", "actual"),
}
SUSPENDED, TRAINING = "first-fit, suspended after 15m", "training"
PARTS = (*POLICIES, SUSPENDED, TRAINING)
RULE = SuspensionRule(900.0, DUMP_S, RESTORE_S)
TOLERANCE = 1e-6
"""Largest relative difference between the mean waits of a peer and of this simulation."""


def generate(path: Path, jobs: int, seed: int = 1) -> None:
    """Write a log of a year: users with applications of their own, more submissions by day than at night."""
    rng = np.random.default_rng(seed)
    hour = rng.choice(24, jobs, p=_by_hour())
    submit = np.sort(rng.integers(0, 365, jobs) * 86_400 + hour * 3600 + rng.integers(0, 3600, jobs))
    user = np.minimum(rng.zipf(1.3, jobs), USERS) - 1
    application = user * APPLICATIONS + rng.integers(0, APPLICATIONS, jobs)
    typical_s = np.exp(rng.normal(7.5, 1.3, USERS * APPLICATIONS))[application]
    run = np.clip(typical_s * np.exp(rng.normal(0, 0.8, jobs)), 1, 3 * 86_400).astype(np.int64)
    gpus = rng.choice([1, 2, 4, 8, 16, 32], USERS * APPLICATIONS, p=[0.7, 0.1, 0.1, 0.07, 0.02, 0.01])[application]
    request = -(-np.maximum(run, (typical_s * 4).astype(np.int64)) // 3600) * 3600
    capacity = max(32, round(float((run * gpus).sum()) / (LOAD * YEAR_S)))
    columns = np.full((jobs, 18), -1, np.int64)
    for at, values in ((0, np.arange(1, jobs + 1)), (1, submit), (2, 0), (3, run), (4, gpus), (7, gpus), (8, request),
                       (10, 1), (11, user + 1), (13, application + 1)):  # fmt: skip
        columns[:, at] = values
    with path.open("w", encoding="ascii") as out:
        out.write(f"; Version: 2\n; Note: generated\n; MaxProcs: {capacity}\n; UnixStartTime: 1767225600\n")
        np.savetxt(out, columns, fmt="%d")


def _by_hour() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights = 1.0 + 0.8 * np.sin((np.arange(24) - 8) / 24 * 2 * np.pi)
    return weights / weights.sum()


def measure(path: Path, part: str) -> dict[str, float]:
    """Run one part in this process."""
    began = time.process_time()
    if part == TRAINING:
        return _train(path)
    log = swf.read(path)
    assert log.capacity is not None
    policy = POLICIES.get(part, POLICIES["first-fit"])
    prepared = prepare(log, log.capacity, policy, Selection())
    reading_s = time.process_time() - began
    began = time.process_time()
    if part == SUSPENDED:
        returned = replay(_with_idle(prepared.workload), prepared.capacity, policy, RULE)
        result = {"mean_wait_s": float(returned.wait.mean()), "wakes": float(returned.wakes.sum())}
    else:
        starts = simulate(prepared.workload, prepared.capacity, policy)
        shown = figures(prepared.workload, starts, prepared.capacity)
        result = {"mean_wait_s": shown.mean_wait_s, "utilization": shown.utilization}
    seconds = time.process_time() - began
    peak = peak_gib()
    began = time.process_time()
    pass_through_heap(prepared.workload)
    heap_s = time.process_time() - began
    return {"seconds": seconds, "reading_s": reading_s, "gib": peak, "heap_s": heap_s, **result}


def _with_idle(workload: Workload) -> list[GpuJob]:
    """Return the jobs; every second one that runs for an hour or more is idle for the third quarter of its time."""
    rows = zip(*(column.tolist() for column in (workload.submit, workload.run, workload.units, workload.request)),
               strict=True)  # fmt: skip
    return [
        GpuJob(number, None, submit, run, units, request, 0, counted=True,
               idle=((run // 2, run * 3 // 4),) if number % 2 and run >= 3600 else ())
        for number, (submit, run, units, request) in enumerate(rows)
    ]  # fmt: skip


def pass_through_heap(workload: Workload) -> None:
    """Push the submission and the end of each job to a heap, and pop them in the order of time."""
    events = [(time_s, number) for number, time_s in enumerate(workload.submit.tolist())]
    heapq.heapify(events)
    run, submissions = workload.run.tolist(), len(events)
    while events:
        time_s, number = heapq.heappop(events)
        if number < submissions:
            heapq.heappush(events, (time_s + run[number], number + submissions))


def _train(path: Path) -> dict[str, float]:
    """Train the predictors with a log; also return the time of LightGBM in it."""
    library_s = 0.0
    if quantile_model.available():
        import lightgbm  # noqa: PLC0415 - an extra

        original: Callable[..., object] = lightgbm.train

        def timed(*arguments: object, **named: object) -> object:
            nonlocal library_s
            began = time.process_time()
            model = original(*arguments, **named)
            library_s += time.process_time() - began
            return model

        lightgbm.train = timed
    began = time.process_time()
    source = prediction.read_trace("swf", path)
    reading_s = time.process_time() - began
    began = time.process_time()
    prediction.train(source)
    return {"seconds": time.process_time() - began, "reading_s": reading_s, "gib": peak_gib(), "library_s": library_s}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of a simulation: CPU time from the file of jobs on, and mean wait."""

    seconds: float
    mean_wait_s: float


def compared(logs: Path, pai: Path | None, pyss: Path | None, python: str) -> Iterator[tuple[str, Figures, Figures]]:
    """Yield a description, our figures and those of the peer, for each row of the validation that a peer simulates."""
    with tempfile.TemporaryDirectory() as directory:
        for name, capacity, policy, selection, _ in validation.cases():
            if name == "philly" and pai is not None:
                product, prepared, log = _measured(philly.read, _below(logs, name), capacity, policy, selection)
                peer = _pai(pai, Path(directory) / "jobs.csv", log, (capacity, policy, selection))
                what = f"{len(prepared.workload):,} jobs on {capacity} GPUs, {policy.order}"
                yield f"PAI's simulator, {what}", product, peer
            if name == "kth" and pyss is not None and policy.times == "requested" and policy.backfill == "easy":
                product, prepared, _ = _measured(swf.read, _below(logs, name), capacity, policy, selection)
                peer = _pyss((python, pyss), Path(directory), prepared, policy)
                title = "EASY" if policy.order == "fcfs" else "EASY-SJBF"
                yield f"pyss, {len(prepared.workload):,} jobs on {capacity} processors, {title}", product, peer


def _below(directory: Path, log: str) -> Path:
    files = sorted(directory.rglob(validation.FILES[log]))
    if not files:
        raise SystemExit(f"{directory} has no {validation.FILES[log]}")
    return files[0]


def _measured(
    read: Callable[[Path], JobLog], path: Path, capacity: int, policy: SchedulingPolicy, selection: Selection
) -> tuple[Figures, PreparedLog, JobLog]:
    began = time.process_time()
    log = read(path)
    prepared = prepare(log, capacity, policy, selection)
    starts = simulate(prepared.workload, prepared.capacity, policy)
    result = figures(prepared.workload, starts, prepared.capacity)
    return Figures(time.process_time() - began, result.mean_wait_s), prepared, log


_PAI_PROGRAM = """
import json, sys, time, types
plots = types.ModuleType("matplotlib")  # of which it draws charts after a simulation
plots.pyplot = None
sys.modules["matplotlib"] = plots
path, order, gpus, jobs, seed, rate = sys.argv[1], *map(int, sys.argv[2:])
from simulator import Simulator
began = time.process_time()
simulator = Simulator(csv_file=path, alloc_policy=order, preempt_policy=2, sort_node_policy=3, num_nodes=1,
    random_seed=seed, max_time=10**9, num_gpus=gpus, num_cpus=round(23.22 * gpus), num_spare_node=0, pattern=0,
    hetero=False, num_jobs_limit=jobs, arrival_rate=rate, gpu_type_matching=0)
((count, completion, wait, last),) = simulator.simulator_go(repeat=1)
print(json.dumps([time.process_time() - began, wait]))
"""
_PAI_ORDERS = {"sjf": 0, "sjf-user": 1, "fcfs": 8}


def _write_pai(path: Path, log: JobLog) -> None:
    """Write the jobs that the simulator draws from, with four CPUs for each GPU, which never limit."""
    columns = ("number", "submit_s", "units", "run_s", "user", "user_mean_s")
    with path.open("w", encoding="ascii", newline="") as out:
        rows = csv.writer(out)
        rows.writerow(("job_id", "num_inst", "submit_time", "num_cpu", "num_gpu", "gpu_type", "duration", "user",
                       "user_dur"))  # fmt: skip
        for number, submit, gpus, run, user, mean in log.jobs.select(columns).iter_rows():
            if run <= philly.LONGEST_S:
                rows.writerow((number, 1, submit, 4 * gpus, gpus, "MISC", run, user, mean))


def _pai(
    directory: Path, jobs: Path, log: JobLog, rules: tuple[int, SchedulingPolicy, Selection]
) -> Figures:  # fmt: skip
    _write_pai(jobs, log)
    capacity, policy, selection = rules
    numbers = (_PAI_ORDERS[policy.order], capacity, selection.sample, selection.seed, selection.arrivals)
    command = [sys.executable, "-c", _PAI_PROGRAM, str(jobs), *map(str, numbers)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=directory)
    return Figures(*json.loads(done.stdout.splitlines()[-1]))


_PYSS_OPTIONS = {
    "fcfs": {"name": "easy_backfill_scheduler", "predictor": {"name": None}, "corrector": {"name": None}},
    "sjf": {"name": "easy_plus_plus_scheduler", "predictor": {"name": "predictor_reqtime"},
            "corrector": {"name": "reqtime"}},
}  # fmt: skip


def _pyss(program: tuple[str, Path], directory: Path, prepared: PreparedLog, policy: SchedulingPolicy) -> Figures:
    """Simulate the same jobs with pyss. Those without a run time, which it would simulate with 1 s, are not in it."""
    python, source = program
    jobs, options, schedule = (directory / name for name in ("jobs.swf", "options.py", "schedule.swf"))
    work = prepared.workload
    with jobs.open("w", encoding="ascii") as out:
        for number, submit, run, units, request, user in zip(
            prepared.number.tolist(), work.submit.tolist(), work.run.tolist(), work.units.tolist(),
            work.request.tolist(), work.user.tolist(), strict=True,
        ):  # fmt: skip
            out.write(f"{number} {submit} 0 {run} {units} -1 -1 {units} {request} -1 1 {user} -1 -1 -1 -1 -1 -1\n")
    scheduler = {**_PYSS_OPTIONS[policy.order], "progressbar": False}
    options.write_text(f"scheduler = {scheduler!r}\nnum_processors = {prepared.capacity}\nstats = False\n")
    before = _children_s()
    subprocess.run([python, "-O", "run_simulator.py", jobs, options, schedule], check=True, capture_output=True,
                   cwd=source)  # fmt: skip
    seconds = _children_s() - before
    waits = [int(line.split()[2]) for line in schedule.read_text(encoding="ascii").splitlines()
             if not line.startswith(";")]  # fmt: skip
    return Figures(seconds, sum(waits) / len(waits))


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _year(jobs: int, directory: Path) -> bool:
    """Measure all parts with a generated year; return whether the limits are met."""
    path = directory / "year.swf"
    if not path.exists():
        generate(path, jobs)
    this = [sys.executable, __file__, f"--keep={directory}"]
    met = True
    ratios = {}
    print(f"{jobs:,} jobs in a year")
    for part in PARTS:
        done = subprocess.run([*this, f"--only={part}"], check=True, capture_output=True, text=True)
        work = json.loads(done.stdout)
        limit_s = TRAINING_LIMIT_S if part == TRAINING else LIMIT_S
        good = work["seconds"] <= limit_s and work["gib"] <= LIMIT_GIB
        met &= good
        key = part.partition(",")[0].lower().replace("-", "_") + ("_suspended" if part == SUSPENDED else "")
        rest = f"mean wait {work['mean_wait_s']:,.0f} s" if "mean_wait_s" in work else ""
        if part in (*POLICIES, SUSPENDED):
            ratios[f"{key}_to_heap"] = work["seconds"] / work["heap_s"]
        elif work.get("library_s"):
            ratios["training_to_lightgbm"] = work["seconds"] / work["library_s"]
            rest = f"LightGBM {work['library_s']:.1f} s of it"
        print(f"  {part:30} {work['seconds']:6.1f} s (reading {work['reading_s']:.1f} s)  {work['gib']:.2f} GiB, "
              f"limits {limit_s:g} s and {LIMIT_GIB:g} GiB: {'met' if good else 'MISSED'}  {rest}",
              flush=True)  # fmt: skip
    report(**ratios)
    return met


def main() -> int:
    """Measure and print; return ``MISSED`` if a limit is missed, 1 if a peer has another mean wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1_000_000, help="jobs of the generated year; 0: none")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the generated log in DIR, and use it if there")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="public logs, for the peers")
    parser.add_argument("--pai", type=Path, metavar="DIR", help="PAI's simulator")
    parser.add_argument("--pyss", type=Path, metavar="DIR", help="pyss")
    parser.add_argument("--pyss-python", default="python2.7", metavar="PROGRAM", help="interpreter for pyss")
    parser.add_argument("--only", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.pai or options.pyss) and not options.logs:
        parser.error("--pai and --pyss need --logs")
    if options.only:
        print(json.dumps(measure(options.keep / "year.swf", options.only)))
        return 0
    met = True
    if options.jobs:
        with tempfile.TemporaryDirectory() as temporary:
            directory = options.keep or Path(temporary)
            directory.mkdir(parents=True, exist_ok=True)
            met = _year(options.jobs, directory)
    agree = True
    for title, product, peer in compared(options.logs or Path(), options.pai, options.pyss, options.pyss_python):
        difference = abs(peer.mean_wait_s / product.mean_wait_s - 1)
        agree &= difference <= TOLERANCE
        waits = f"mean wait {product.mean_wait_s:,.2f} s, peer {peer.mean_wait_s:,.2f} s"
        times = f"{product.seconds:.2f} s, peer {peer.seconds:.1f} s"
        print(f"  {title}: {waits}; {times}: {peer.seconds / product.seconds:,.0f} times as long", flush=True)
    if not agree:
        return 1
    return 0 if met else MISSED


if __name__ == "__main__":
    sys.exit(main())
