"""The load of slurmdbd by ``ingest sacct``: ``python benchmarks/bench_slurmdbd.py [--jobs 1000000] [--days 100]``.

It runs in a container of the image of the cluster (``make cluster-up`` builds it; ``--image`` names it), with its
slurmdbd, MariaDB, sacct and slurm-affinode, and no other daemon. The accounting is generated: jobs at equal intervals,
each with two steps, are written into the tables of slurmdbd. Then a few days are ingested, each of which is a window,
and other days are queried with sacct alone. CPU time is that of the two daemons; MariaDB has a buffer pool of 1 GiB.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

WORK = Path("/tmp/slurmdbd")  # noqa: S108 - of a container of its own
CONFIG = {
    "slurm.conf": (
        "ClusterName=bench", "SlurmctldHost=localhost", "SlurmUser=slurm",
        "AccountingStorageType=accounting_storage/slurmdbd", "AccountingStorageHost=localhost",
    ),
    "slurmdbd.conf": (
        "AuthType=auth/munge", "DbdHost=localhost", "SlurmUser=slurm", f"PidFile={WORK}/slurmdbd.pid",
        "StorageType=accounting_storage/mysql", "StorageHost=127.0.0.1", "StorageUser=slurm", "StoragePass=slurm",
        "StorageLoc=slurm_acct_db",
    ),
}  # fmt: skip
START_S = 120
FIRST_JOB = 1000
BATCH, EXTERN = -5, -4
"""Numbers of the steps in the tables of slurmdbd (slurm.h: SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT)."""
COMPLETE = 3
MEMORY = ("VmRSS", "VmHWM")


def sql(statement: str, *, database: str = "slurm_acct_db") -> list[list[str]]:
    """Run statements as the administrator of the database, and return the rows of their results."""
    done = subprocess.run(
        ["mariadb", f"--socket={WORK}/socket", "--batch", "--skip-column-names", database],
        input=statement, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"MariaDB: {done.stderr.strip()}")
    return [line.split("\t") for line in done.stdout.splitlines()]


def awaited(what: str, argv: list[str]) -> None:
    """Repeat a command until it succeeds."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            if subprocess.run(argv, capture_output=True, timeout=5, check=False).returncode == 0:
                return
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline:
            sys.exit(f"{what} does not respond")
        time.sleep(0.5)


def started(name: str, *argv: str) -> int:
    """Start a daemon in the foreground; return its PID."""
    with (WORK / f"{name}.log").open("wb") as log:
        return subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT).pid


def start() -> dict[str, int]:
    """Start MariaDB and slurmdbd with an empty database; return their PIDs."""
    data, munge = WORK / "data", Path("/etc/munge")
    for directory, user in ((WORK, "mysql"), (munge, "munge"), (Path("/run/munge"), "munge")):
        directory.mkdir(exist_ok=True, parents=True)
        shutil.chown(directory, user)
    install = ["mariadb-install-db", "--user=mysql", f"--datadir={data}", "--skip-test-db"]
    install.append("--auth-root-authentication-method=normal")
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    options = [f"--datadir={data}", f"--socket={WORK}/socket", "--bind-address=127.0.0.1", "--user=mysql"]
    options += ["--innodb-buffer-pool-size=1G", "--innodb-lock-wait-timeout=900", "--innodb-snapshot-isolation=OFF"]
    mariadb = started("mariadb", "mariadbd", *options, "--innodb-flush-log-at-trx-commit=2")
    awaited("MariaDB", ["mariadb", f"--socket={WORK}/socket", "--execute=SELECT 1"])
    sql("CREATE DATABASE slurm_acct_db; CREATE USER slurm@'%' IDENTIFIED BY 'slurm';"
        "GRANT ALL ON slurm_acct_db.* TO slurm@'%'", database="mysql")  # fmt: skip
    key = munge / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    munge.chmod(0o700)
    shutil.chown(key, "munge", "munge")
    subprocess.run(["munged"], user="munge", group="munge", extra_groups=[], check=True)
    for name, lines in CONFIG.items():
        path = WORK / name
        path.write_text("\n".join((*lines, "")), encoding="ascii")
        path.chmod(0o600 if name == "slurmdbd.conf" else 0o644)
        shutil.chown(path, "slurm")
    os.environ["SLURM_CONF"] = str(WORK / "slurm.conf")
    WORK.chmod(0o777)  # slurmdbd writes its PID there
    slurmdbd = started("slurmdbd", "slurmdbd", "-D")
    awaited("slurmdbd", ["sacctmgr", "show", "cluster"])
    for words in ("cluster bench", "account lab", "user alice account=lab"):
        subprocess.run(["sacctmgr", "-i", "add", *words.split()], check=True, stdout=subprocess.DEVNULL)
    return {"slurmdbd": slurmdbd, "MariaDB": mariadb}


def insert(table: str, values: dict[str, str], source: str) -> None:
    """Insert generated rows. Releases of Slurm differ in columns: those that are missing are left out.

    Those without a value and a default are empty, or 0.
    """
    known = sql(f"SELECT column_name, data_type, is_nullable, column_default, extra FROM information_schema.columns "
                f"WHERE table_name = '{table}'")  # fmt: skip
    columns = {}
    for name, kind, nullable, default, extra in known:
        if name in values:
            columns[name] = values[name]
        elif nullable == "NO" and default == "NULL" and "auto_increment" not in extra:
            columns[name] = "''" if "text" in kind else "0"
    names = ", ".join(f"`{name}`" for name in columns)
    sql(f"INSERT INTO {table} ({names}) SELECT {', '.join(columns.values())} FROM {source}")


def fill(jobs: int, begin: datetime, days: int) -> None:
    """Write the jobs and steps into the tables of slurmdbd."""
    (assoc,) = sql("SELECT id_assoc FROM bench_assoc_table WHERE user = 'alice'")
    submit = f"{int(begin.timestamp())} + seq * {days * 86_400} DIV {jobs}"
    job = {
        "job_db_inx": "1 + seq", "account": "'lab'", "cpus_req": "16", "job_name": "CONCAT('train-', seq MOD 977)",
        "id_assoc": assoc[0], "id_job": f"{FIRST_JOB} + seq", "id_user": "1000 + seq MOD 500", "id_group": "1000",
        "mem_req": "122880", "nodelist": "CONCAT('gpu', seq MOD 2000)", "nodes_alloc": "1", "partition": "'gpu'",
        "priority": "1", "state": str(COMPLETE), "timelimit": "720", "time_submit": submit, "time_eligible": submit,
        "time_start": f"{submit} + 120", "time_end": f"{submit} + 180 + seq * 7919 MOD 30000",
        "work_dir": "CONCAT('/home/user', seq MOD 500, '/project')",
        "submit_line": "CONCAT('sbatch --gpus=1 train.sh --seed=', seq)",
        "tres_alloc": "'1=16,2=122880,4=1,5=16'", "tres_req": "'1=16,2=122880,4=1,5=16'",
    }  # fmt: skip
    of_jobs = "bench_job_table"
    insert(of_jobs, job, f"seq_0_to_{jobs - 1}")
    same = ("job_db_inx", "nodelist", "nodes_alloc", "state", "time_start", "time_end", "tres_alloc")
    for number, name in ((BATCH, "batch"), (EXTERN, "extern")):
        step = dict.fromkeys(same, "") | {name: f"`{name}`" for name in same}
        step |= {"id_step": str(number), "step_name": f"'{name}'", "task_cnt": "1", "user_sec": "3000"}
        step["tres_usage_in_max"] = "'1=3000000,2=4294967296'"
        insert("bench_step_table", step, of_jobs)
    sql(f"ANALYZE TABLE {of_jobs}, bench_step_table")


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> dict[str, float]:
    """Return the memory of a process now and at its peak."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return {name: int(match[1]) / 1024 for name in MEMORY if (match := re.search(rf"^{name}:\s+(\d+) kB", text, re.M))}


def measured(what: str, daemons: dict[str, int], work: Callable[[], str]) -> None:
    """Print what ``work`` returns, its time, and the CPU time of the daemons meanwhile."""
    before = {name: cpu_s(pid) for name, pid in daemons.items()}
    begin = time.perf_counter()
    result = work()
    took = time.perf_counter() - begin
    load = ", ".join(f"{name} {cpu_s(pid) - before[name]:.1f} CPU s" for name, pid in daemons.items())
    memory = memory_mib(daemons["slurmdbd"])
    print(f"{what}: {result}, {took:.1f} s; {load}; slurmdbd {memory['VmRSS']:.0f} MiB, "
          f"peak {memory['VmHWM']:.0f} MiB", flush=True)  # fmt: skip


def ingest(since: datetime, until: datetime) -> str:
    """Ingest an interval; return the numbers of windows, runs and steps."""
    words = ["slurm-affinode", "ingest", "sacct", "--cluster", "bench", "--since", since.isoformat()]
    words += ["--until", until.isoformat(), "--state", str(WORK / "state")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.strip())
    lines = [line.replace(",", "").split() for line in done.stdout.splitlines() if line.startswith("sacct ")]
    runs, steps = (sum(int(line[column]) for line in lines) for column in (3, 4))
    return f"{len(lines)} windows, {runs:,} runs, {steps:,} steps, with the pauses"


def sacct(since: datetime, until: datetime) -> str:
    """Query an interval; return the number of records."""
    words = ["sacct", "--allusers", "--duplicates", "--parsable2", "--noheader", "--format=ALL"]
    words += [f"--starttime={since:%FT%T}", f"--endtime={until:%FT%T}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "TZ": "UTC"})
    return f"{done.stdout.count(chr(10)):,} records"


def plan_of_jobs(since: datetime, until: datetime) -> list[str]:
    """Return how MariaDB reads the tables for slurmdbd's query of the jobs of an interval."""
    sql("SET GLOBAL log_output = 'TABLE'; SET GLOBAL general_log = 1", database="mysql")
    sacct(since, until)
    sql("SET GLOBAL general_log = 0", database="mysql")
    texts = sql("SELECT REPLACE(argument, '\\n', ' ') FROM general_log WHERE argument LIKE 'select%bench_job_table%'",
                database="mysql")  # fmt: skip
    if not texts:
        return ["slurmdbd made no query"]
    plans = sql(f"SET SESSION sql_mode = 'ANSI_QUOTES'; EXPLAIN {texts[-1][0]}")
    return [f"table {table}: access {access}, index {index}, {int(rows):,} rows"
            for _, _, table, access, _, index, _, _, rows, *_ in plans]  # fmt: skip


def inside(jobs: int, days: int, windows: int) -> None:
    """Measure, in the container."""
    os.environ["TZ"] = "UTC"
    end = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    begin, day = end - timedelta(days=days), timedelta(days=1)
    release = subprocess.run(["slurmdbd", "-V"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{release}, generated accounting: {jobs:,} jobs with two steps each in {days} days", flush=True)
    daemons = start()
    took = time.perf_counter()
    fill(jobs, begin, days)
    print(f"filled in {time.perf_counter() - took:.0f} s", flush=True)
    middle = begin + days // 2 * day
    for number in range(windows):
        since = middle + number * day
        measured("sacct alone, a day", daemons, lambda since=since: sacct(since, since + day))  # type: ignore[misc]
    since = middle + windows * day
    measured(f"ingest of {windows} days", daemons, lambda: ingest(since, since + windows * day))
    for name, of_plan in (("middle", middle), ("last", end - day)):
        for line in plan_of_jobs(of_plan, of_plan + day):
            print(f"query of jobs, {name} day: {line}", flush=True)


def main() -> None:
    """Start the container, and print the measurements made in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--days", type=int, default=100)
    parser.add_argument("--windows", type=int, default=2, help="days that are ingested")
    parser.add_argument("--image", default="slurm-affinode/cluster:24.11")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.windows * 2 + 1 > arguments.days // 2:
        parser.error("--days is too short for --windows")
    if arguments.inside:
        inside(arguments.jobs, arguments.days, arguments.windows)
        return
    words = [f"--{name}={getattr(arguments, name)}" for name in ("jobs", "days", "windows")]
    container = ["docker", "run", "--rm", "--interactive", "--init", "--hostname=localhost", "--entrypoint=python3"]
    with Path(__file__).open("rb") as program:
        done = subprocess.run([*container, arguments.image, "-", "--inside", *words], stdin=program, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
