"""Tests of the launcher of local steps below a real shepherd, with a program in place of Slurm's srun."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from namespace_job import needs_root
from waiting import wait_until

SPANK = Path(__file__).resolve().parents[2] / "spank"
PACKET = struct.Struct("<Iiiiq")
LOCAL = "window=900,util=0,mode=requeue,wake=auto,when=pressure,steps=local"
TMP = Path("/tmp")  # noqa: S108 - the launcher uses it
JOB = 700000000 + os.getpid()
"""Different for each test process: the launcher keeps a file per job."""
GPUS = {"SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1", "GPU_DEVICE_ORDINAL": "0,1", "SLURM_GPUS_ON_NODE": "2"}

pytestmark = needs_root


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a batch script."""

    out: str
    err: str
    status: int


@dataclass(frozen=True, slots=True)
class Site:
    """An installed shepherd and launcher, and the program that stands for Slurm's srun."""

    root: Path
    shepherd: Path

    @property
    def launcher(self) -> Path:
        """The directory that the plugin puts in front of the job's PATH."""
        return self.root / "steps"

    def start(
        self,
        script: str,
        *,
        option: str = LOCAL,
        restarts: int = 0,
        stdin: bytes | None = None,
        socket_path: str = "/no/such.sock",
        **variables: str,
    ) -> subprocess.Popen[bytes]:
        """Start a batch script below the shepherd."""
        keeper_end, shepherd_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.set_inheritable(shepherd_end.fileno(), True)
        argv = ("unshare", "--pid", "--fork", "--mount-proc", str(self.shepherd), str(shepherd_end.fileno()), str(JOB),
                str(restarts), "0", "300", socket_path, option, "--", "/bin/bash", "-c", script)  # fmt: skip
        env = {
            "PATH": f"{self.launcher}:{self.root}/slurm:/usr/bin:/bin", "HOME": "/", "SLURM_JOB_ID": str(JOB),
            "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_CPUS_PER_NODE": "4", "SLURMD_NODENAME": "gpu01",
            "SLURM_JOB_NAME": "train", "SLURM_JOB_USER": "alice", "SLURM_CPUS_ON_NODE": "4", **variables,
        }  # fmt: skip
        with shepherd_end:
            process = subprocess.Popen(
                argv, pass_fds=(shepherd_end.fileno(),), env=env, cwd=self.root, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            )  # fmt: skip
        KEEPERS[process.pid] = keeper_end
        if stdin is not None:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
            process.stdin = None
        return process

    def run(self, script: str, **options: object) -> Ended:
        """Run a batch script to its end."""
        return self.end(self.start(script, **options))  # type: ignore[arg-type]

    def end(self, process: subprocess.Popen[bytes]) -> Ended:
        """Wait for the end of a batch script."""
        out, err = process.communicate(timeout=240)
        with KEEPERS.pop(process.pid) as keeper:
            status = os.waitstatus_to_exitcode(PACKET.unpack(keeper.recv(64))[1])
        return Ended(out.decode(), err.decode(), status)


KEEPERS: dict[int, socket.socket] = {}


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """The shepherd as the Makefile builds it, and the launcher as it installs it."""
    for tool in ("make", "gcc"):
        if shutil.which(tool) is None:
            assert os.environ.get("CI") != "true", f"{tool} is not installed"
            pytest.skip(f"{tool} is not installed")
    with tempfile.TemporaryDirectory(dir=TMP) as name:
        root = Path(name)
        root.chmod(0o755)
        shepherd = root / "slurm-affinode-shepherd"
        subprocess.run(("make", "-s", "-C", SPANK, f"BUILD={root}", str(shepherd)), check=True)
        python = Path(sys.base_prefix) / "bin" / "python3"
        subprocess.run(
            ("make", "-s", "-C", SPANK, "install-steps", f"LIBEXECDIR={root}", f"PYTHON={python}"), check=True
        )
        (root / "slurm-affinode-steps").rename(root / "steps")
        real = root / "slurm" / "srun"
        real.parent.mkdir()
        real.write_text('#!/bin/sh\necho "real: $*"\necho "path: $PATH"\nexit 42\n')
        real.chmod(0o755)
        yield Site(root, shepherd)
        for left in TMP.glob(f".slurm-affinode-steps-*-{JOB}-*"):
            left.unlink()


@pytest.fixture(autouse=True)
def new_job(site: Site) -> None:
    """Each test has a job that has started no step."""
    for left in TMP.glob(f".slurm-affinode-steps-*-{JOB}-*"):
        left.unlink()


def variables(text: str) -> dict[str, str]:
    """Parse the output of env(1)."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


# --- tasks and their environment


STEP_ENVIRONMENT = (
    "srun bash -c 'echo $SLURMD_NODENAME $SLURM_JOB_END_TIME $SLURM_JOB_NAME $CUDA_VISIBLE_DEVICES $SLURM_STEP_GPUS'"
)


@pytest.mark.parametrize(
    ("attempts", "script", "expected"),
    [
        ((1, 1), "", "gpu02 200 train 4,5 6,7"),
        ((1, 1), "export SLURM_JOB_NAME=mine;", "gpu02 200 mine 4,5 6,7"),
        ((1, 1), "export CUDA_VISIBLE_DEVICES=1;", "gpu02 200 train 1 6,7"),
        ((1, 1), "unset CUDA_VISIBLE_DEVICES;", "gpu02 200 train 6,7"),
        ((2, 1), "", "gpu01 100 train 0,1 2,3"),
        ((0, 1), "", "gpu01 100 train 0,1 2,3"),  # a file of an earlier job with the same ID
        ((1, None), "", "gpu01 100 train 0,1 2,3"),
    ],
    ids=["restored", "set", "shortened", "unset", "earlier attempt", "not restored", "no file"],
)
def test_step_of_restored_job_has_current_environment(
    site: Site, tmp_path: Path, attempts: tuple[int, int | None], script: str, expected: str
) -> None:
    """The facts in the agent's file, and its lists of GPUs unless the script has shortened them.

    ``attempts``: restart counts of the job, and in the file.
    """
    restarts, written = attempts
    if written is not None:
        (tmp_path / "environment").mkdir()
        (tmp_path / "environment" / str(JOB)).write_text(
            f"export SLURMD_NODENAME=gpu02\nexport SLURM_JOB_END_TIME='200'\nexport SLURM_RESTART_COUNT={written}\n"
            "export SLURM_JOB_GPUS=6,7\nexport CUDA_VISIBLE_DEVICES=4,5\nexport SLURM_JOB_NAME='a \n'\"'\"'b'\n"
        )
    socket_path = str(tmp_path / "shepherd.sock")
    job_variables = {**GPUS, "SLURM_JOB_END_TIME": "100"}
    ended = site.run(script + STEP_ENVIRONMENT, restarts=restarts, socket_path=socket_path, **job_variables)
    assert (ended.out, ended.err, ended.status) == (f"{expected}\n", "", 0)


def test_tasks_have_the_environment_of_a_step(site: Site) -> None:
    """The values are those of a real step of Slurm 24.11; programs such as torchrun read them."""
    ended = site.run(
        "srun true; srun --ntasks=2 -c2 bash -c 'env >env.$SLURM_PROCID; echo $$ >>env.$SLURM_PROCID'", **GPUS
    )
    assert (ended.out, ended.err, ended.status) == ("", "", 0)
    both = [variables((site.root / f"env.{task}").read_text()) for task in range(2)]
    for task, result in enumerate(both):
        expected = {
            "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NODEID": "0", "SLURM_NTASKS": "2",
            "SLURM_NPROCS": "2", "SLURM_GTIDS": "0,1", "SLURM_TASKS_PER_NODE": "2", "SLURM_STEP_ID": "1",
            "SLURM_STEPID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_UMASK": "0022",
            "SLURM_STEP_NODELIST": "gpu01", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "2",
            "SLURM_CPUS_ON_NODE": "4", "SLURM_TRES_PER_TASK": "cpu=2", "SLURM_DISTRIBUTION": "block",
            "SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2", "SRUN_DEBUG": "3",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "SLURM_SRUN_COMM_HOST": "127.0.0.1", "SLURM_JOB_NAME": "train",
        }  # fmt: skip
        assert {name: result.get(name) for name in expected} == expected
        assert (site.root / f"env.{task}").read_text().split()[-1] == result["SLURM_TASK_PID"]
        assert "LC_CTYPE" not in result


@pytest.mark.parametrize(
    ("text", "present", "absent"),
    [
        ("NONE", {"SLURM_JOB_ID": str(JOB), "TMPDIR": "/t"}, {"HOME", "MINE", "PATH"}),
        ("NIL", {"SLURM_JOB_ID": str(JOB)}, {"HOME", "MINE"}),
        ("ALL,X=1", {"MINE": "yes", "X": "1", "HOME": "/"}, set()),
        ("X=1,MINE", {"MINE": "yes", "X": "1", "SLURM_JOB_ID": str(JOB)}, {"HOME"}),
        ("X=1,all,MINE=no", {"MINE": "yes", "X": "1", "HOME": "/"}, set()),
        ("X=1,NONE,Y=1", {"X": "1", "SLURM_JOB_ID": str(JOB)}, {"HOME", "MINE", "Y"}),
        ("\"ALL,X='1,2'\"", {"X": "'1,2'", "MINE": "yes"}, set()),
        ("", {"SLURM_JOB_ID": str(JOB)}, {"HOME", "MINE"}),
    ],
)
def test_export_selects_variables(site: Site, text: str, present: dict[str, str], absent: set[str]) -> None:
    result = variables(site.run(f"srun --export={text} /usr/bin/env", MINE="yes", TMPDIR="/t").out)
    assert present.items() <= result.items()
    assert not absent & result.keys()
    assert variables(site.run("SLURM_EXPORT_ENV=NONE srun /usr/bin/env", MINE="yes").out).get("MINE") is None


@pytest.mark.parametrize(
    ("options", "lists"),
    [
        ("-n2 --gpus-per-task=1", ["0 2", "1 3"]),
        ("-n2 --gpu-bind=single:1", ["0 2", "1 3"]),
        ("-n2 --gpu-bind=single:2", ["0 2", "0 2"]),
        ("-n2 --gpu-bind=map_gpu:1,0", ["1 3", "0 2"]),
        ("-n2 --gpu-bind=mask_gpu:0x2,0x3", ["1 3", "0,1 2,3"]),
        ("-n2 --gpu-bind=none", ["0,1 2,3", "0,1 2,3"]),
        ("-n2 --tres-per-task=gres/gpu:1", ["0 2", "1 3"]),
        ("-n2 --gres=gpu:h100:1", ["0 2", "0 2"]),
        ("-n1 --gpus=1", ["0 2"]),
        ("-n1 --gres=none", [" "]),
    ],
)
def test_tasks_are_bound_to_gpus(site: Site, options: str, lists: list[str]) -> None:
    ended = site.run(f"srun -l {options} bash -c 'echo $CUDA_VISIBLE_DEVICES $SLURM_STEP_GPUS'", **GPUS)
    assert sorted(ended.out.splitlines()) == [
        f"{task}: {text}".rstrip() + (" " if not text.strip() else "") for task, text in enumerate(lists)
    ]


def test_tasks_are_bound_to_cpus(site: Site) -> None:
    """Only where the job itself has no more CPUs than its allocation."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    show = "bash -c 'grep Cpus_allowed_list /proc/self/status'"
    script = (
        f"taskset -cp {cpus[0]},{cpus[1]} $$ >/dev/null; srun -l -n2 -c1 {show}; srun -n1 -c1 --cpu-bind=none {show}"
    )
    lines = [line.split()[-1] for line in sorted(site.run(script, SLURM_JOB_CPUS_PER_NODE="2").out.splitlines())]
    assert lines[:2] == [str(cpu) for cpu in cpus]
    wide = site.run(f"taskset -cp {cpus[0]},{cpus[1]} $$ >/dev/null; srun -n1 -c1 {show}", SLURM_JOB_CPUS_PER_NODE="1")
    assert wide.out.split()[-1] != str(cpus[0])


def test_count_of_tasks_is_read_from_the_job(site: Site) -> None:
    """SLURM_NTASKS, unless the option is given; abbreviations and attached values as in getopt_long."""
    assert site.run("srun echo x", SLURM_NTASKS="3").out == "x\n" * 3
    assert site.run("srun -n 1 echo x", SLURM_NTASKS="3").out == "x\n"
    assert site.run("srun --cpus-per-t 1 --ntasks=2 echo x").out == "x\n" * 2
    assert site.run("srun -ln2 -- echo -n x").out.splitlines() in (["0: x", "1: x"], ["1: x", "0: x"])
    assert site.run("srun echo x", SLURM_NTASKS_PER_NODE="2").out == "x\n" * 2
    more = site.run("srun --ntasks-per-node=1 echo x", SLURM_NTASKS="2")
    assert more.out == "x\n" * 2
    assert more.err.startswith("srun: warning: can't honor --ntasks-per-node set to 1 which doesn't match")
    assert site.run("srun --tasks-per-node=2 --whole --cpu_bind=none echo x").out == "x\n" * 2
    assert site.run("srun true; srun -n1 bash -c 'echo $SLURM_CPUS_ON_NODE'", SLURM_CPUS_PER_TASK="2").out == "2\n"


def test_as_many_tasks_start_as_their_cpus_allow(site: Site) -> None:
    """As with srun, if only the number of CPUs per task is known."""
    assert site.run("srun -c2 echo x").out == "x\n" * 2
    assert site.run("srun -c3 echo x").out == "x\n"
    assert site.run("srun echo x", SLURM_CPUS_PER_TASK="1").out == "x\n" * 4
    assert site.run("srun -c2 -n1 echo x").out == "x\n"
    assert site.run("srun -c2 --ntasks-per-node=1 echo x").out == "x\n"
    assert site.run("srun -c2 echo x", SLURM_NTASKS="1").out == "x\n"


def test_cpus_are_counted_by_gpu(site: Site) -> None:
    """``--cpus-per-gpu`` implies ``--exact``: a step has the CPUs of its GPUs."""
    assert site.run("srun --cpus-per-gpu=1 bash -c 'echo $SLURM_CPUS_PER_GPU'", **GPUS).out == "1\n"
    show = "bash -c 'echo $SLURM_CPUS_ON_NODE $CUDA_VISIBLE_DEVICES'"
    of_job = {"SLURM_CPUS_PER_GPU": "2", **GPUS}
    assert site.run(f"srun {show}", **of_job).out == "4 0,1\n"
    assert site.run(f"srun --gpus=1 {show}", **of_job).out == "2 0\n"
    assert site.run(f"srun --gpus=1 --cpus-per-gpu=1 {show}", **of_job).out == "1 0\n"
    assert site.run(f"srun -n1 -c3 --gpus=1 {show}", **of_job).out == "3 0\n"
    by_task = {"SLURM_CPUS_PER_TASK": "3", "SLURM_TRES_PER_TASK": "cpu=3", **GPUS}
    assert site.run(f"srun --gpus=1 --cpus-per-gpu=1 {show}", **by_task).out == "1 0\n"
    assert site.run(f"srun -n1 --cpus-per-gpu=1 {show}", **by_task).out == "2 0,1\n"
    assert site.run(f"srun -n1 --tres-per-task=cpu:3 {show}", **of_job).out == "3 0,1\n"


# --- exit status and messages


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("-n2 bash -c 'exit $((SLURM_PROCID * 3))'", 3, "srun: error: gpu01: task 1: Exited with exit code 3\n"),
        ("-n2 bash -c 'sleep 0.2; exit 3'", 3, "srun: error: gpu01: tasks 0-1: Exited with exit code 3\n"),
        ("bash -c 'ulimit -c 0; kill -SEGV $$'", 139, "srun: error: gpu01: task 0: Segmentation fault\n"),
        (
            "-n2 bash -c 'sleep 0.2; [ $SLURM_PROCID = 0 ] && kill -TERM $$; exit 5'", 143,
            "srun: error: gpu01: task 0: Terminated\nsrun: error: gpu01: task 1: Exited with exit code 5\n"
            f"srun: Force Terminated StepId={JOB}.0\n",
        ),
        (
            "nosuch", 2,
            "slurmstepd-gpu01: error: execve(): nosuch: No such file or directory\n"
            "srun: error: gpu01: task 0: Exited with exit code 2\n",
        ),
        (
            "/etc/passwd", 13,
            "slurmstepd-gpu01: error: execve(): /etc/passwd: Permission denied\n"
            "srun: error: gpu01: task 0: Exited with exit code 13\n",
        ),
        (
            "-n2 bash -c 'sleep 0.2; [ $SLURM_PROCID = 0 ] && kill -KILL $$; exit 255'", 137,
            "srun: error: gpu01: task 0: Killed\nsrun: error: gpu01: task 1: Exited with exit code 255\n"
            f"srun: Force Terminated StepId={JOB}.0\n",
        ),
        ("bash -c 'exit 143'", 143, "srun: error: gpu01: task 0: Exited with exit code 143\n"),
        ("-Q false", 1, "srun: error: gpu01: task 0: Exited with exit code 1\n"),
    ],
)  # fmt: skip
def test_exit_status_is_that_of_the_worst_task(site: Site, command: str, status: int, message: str) -> None:
    """Status and messages are those of Slurm 24.11: the highest signal, or else the highest exit code."""
    ended = site.run(f"srun {command}")
    assert (ended.status, ended.err) == (status, message)


def test_bad_exit_kills_the_step(site: Site) -> None:
    assert site.run("srun -n2 --kill bash -c '[ $SLURM_PROCID = 0 ] && exit 4; sleep 60'").status == 143
    ended = site.run("srun -n2 -K bash -c '[ $SLURM_PROCID = 0 ] && exit 4; sleep 60'")
    assert ended.status == 143
    lines = ended.err.splitlines()
    assert lines[:2] == ["srun: error: gpu01: task 0: Exited with exit code 4", f"srun: Terminating StepId={JOB}.1"]
    assert lines[2].startswith(f"slurmstepd-gpu01: error: *** STEP {JOB}.1 ON gpu01 CANCELLED AT 20")
    assert lines[3:] == ["srun: error: gpu01: task 1: Terminated", f"srun: Force Terminated StepId={JOB}.1"]


def test_step_is_killed_some_time_after_its_first_task(site: Site) -> None:
    ended = site.run("srun -n2 -W1 bash -c '[ $SLURM_PROCID = 0 ] && exit 0; sleep 60'")
    assert ended.status == 137
    assert "srun: First task exited 1s ago\n" in ended.err
    assert "srun: error: gpu01: task 1: Killed\n" in ended.err


def test_processes_of_a_task_end_with_the_step(site: Site) -> None:
    ended = site.run("srun bash -c 'sleep 1000 & echo $!' >pid; ps -o stat= -p $(cat pid) | grep -v Z; echo over")
    assert ended.out == "over\n"


# --- signals


@pytest.mark.parametrize("name", ["USR1", "USR2", "ALRM"])
def test_signal_is_forwarded_to_the_tasks(site: Site, name: str) -> None:
    script = f"""
srun -n2 bash -c 'trap "exit 7" {name}; touch ready.$SLURM_PROCID; while :; do sleep 0.05; done' & pid=$!
while [ ! -e ready.0 ] || [ ! -e ready.1 ]; do sleep 0.05; done; rm ready.*
kill -{name} $pid; wait $pid; echo $?
"""
    ended = site.run(script)
    assert ended.out.splitlines()[-1] == "7"
    assert "tasks 0-1: Exited with exit code 7" in ended.err


@pytest.mark.parametrize("name", ["TERM", "HUP", "QUIT"])
def test_termination_signal_ends_the_step(site: Site, name: str) -> None:
    """The tasks get SIGTERM, and SIGKILL later."""
    script = f"""
srun bash -c 'trap "echo caught; exit 8" TERM; touch ready; while :; do sleep 0.05; done' & pid=$!
while [ ! -e ready ]; do sleep 0.05; done; rm ready
kill -{name} $pid; wait $pid; echo $?
"""
    ended = site.run(script)
    assert ended.out.split()[-2:] == ["caught", "8"]
    assert "srun: forcing job termination\n" in ended.err


def test_second_interrupt_ends_the_step(site: Site) -> None:
    script = """
srun bash -c 'trap "exit 9" INT; touch ready; while :; do sleep 0.05; done' & pid=$!
while [ ! -e ready ]; do sleep 0.05; done; rm ready
kill -INT $pid; sleep 0.3; kill -INT $pid; wait $pid; echo $?
"""
    ended = site.run(script)
    assert ended.out == "9\n"
    assert ended.err.startswith(
        f"srun: interrupt (one more within 1 sec to abort)\nsrun: StepId={JOB}.0 task 0: running\n"
        f"srun: sending Ctrl-C to StepId={JOB}.0\nsrun: forcing job termination\n"
    )


@pytest.mark.parametrize(("option", "forced"), [("-X", 0), ("--quit-on-interrupt", 1)])
def test_first_interrupt_goes_to_the_tasks(site: Site, option: str, forced: int) -> None:
    script = f"""
srun {option} bash -c 'trap "exit 9" INT; touch ready; while :; do sleep 0.05; done' & pid=$!
while [ ! -e ready ]; do sleep 0.05; done; rm ready
kill -INT $pid; wait $pid; echo $?
"""
    ended = site.run(script)
    assert ended.out == "9\n"
    assert ended.err.startswith(f"srun: sending Ctrl-C to StepId={JOB}.0\n")
    assert ended.err.count("srun: forcing job termination\n") == forced


def test_tasks_start_with_default_signals(site: Site) -> None:
    """A shell ignores SIGINT in background commands, and the interpreter ignores SIGPIPE.

    Signals 32 and 33 belong to the C library: no program can change them, and they are inherited from the test runner.
    """
    ended = site.run("srun bash -c 'grep -E \"^Sig(Ign|Blk)\" /proc/self/status' & wait")
    others = ~(1 << 31 | 1 << 32)
    assert [int(line.split()[1], 16) & others for line in ended.out.splitlines()] == [0, 0]


def test_signal_of_slurm_reaches_a_task_once(site: Site) -> None:
    """Slurm signals all processes of the job, tasks and launcher alike."""
    script = """
srun bash -c 'trap "echo caught" USR1; touch ready; for i in $(seq 20); do sleep 0.05; done'
rm ready
"""
    process = site.start(f"trap : USR1\n{script}")
    wait_until("the task has started", (site.root / "ready").exists)
    namespace = (Path(f"/proc/{process.pid}") / "ns/pid_for_children").readlink()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(process.pid):
            try:
                inside = (entry / "ns/pid").readlink() == namespace
                name = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if inside and name in ("bash", "affinode-srun"):
                os.kill(int(entry.name), signal.SIGUSR1)
    assert site.end(process).out == "caught\n"


# --- standard streams


def test_output_is_labelled(site: Site) -> None:
    """Whole lines with the number of the task; a last line without its end gets one."""
    ended = site.run("srun -l -n2 bash -c 'printf \"a\\nb\"; echo err >&2'")
    assert sorted(ended.out.splitlines()) == ["0: a", "0: b", "1: a", "1: b"]
    assert sorted(ended.err.splitlines()) == ["0: err", "1: err"]
    wide = site.run("srun -O -l -n11 echo x")
    assert sorted(wide.out.splitlines()) == sorted(f"{task:>2}: x" for task in range(11))
    assert site.run("SLURM_LABELIO=1 srun echo x").out == "0: x\n"


def test_tasks_end_with_the_reader_of_their_output(site: Site) -> None:
    """As without the launcher, which forwards SIGPIPE."""
    assert site.run("srun -l yes | head -n1; srun -n2 yes | head -n1; srun yes | head -n1").out == "0: y\ny\ny\n"


def test_lines_of_tasks_are_not_mixed(site: Site) -> None:
    """Without --unbuffered, each line of output stays whole."""
    writer = 'for i in range(300): sys.stdout.write("x" * 50); sys.stdout.flush(); sys.stdout.write("y" * 50 + chr(10))'
    (site.root / "writer.py").write_text(f"import sys\n{writer}\n")
    lines = site.run(f"srun -n2 {sys.executable} writer.py").out.splitlines()
    assert lines == ["x" * 50 + "y" * 50] * 600


def test_output_goes_to_files(site: Site) -> None:
    """Patterns, one file per task or for all, a single task, no output."""
    pattern = "%j.%J.%s.%t.%n.%N.%u.%x.%A.%a.%%.%2t"
    site.run(f"srun -n2 -o out.{pattern} bash -c 'echo out; echo err >&2'")
    for task in range(2):
        name = f"out.{JOB}.{JOB}.0.0.{task}.0.gpu01.alice.train.{JOB}.4294967294.%.0{task}"
        assert (site.root / name).read_text() == "out\nerr\n"
    site.run("srun -n2 -o both -e err.%t bash -c 'echo out; echo err >&2'")
    assert (site.root / "both").read_text() == "out\nout\n"
    assert (site.root / "err.1").read_text() == "err\n"
    site.run("srun --output=both --open-mode=append echo more; srun --output=both.%t true")
    assert (site.root / "both").read_text() == "out\nout\nmore\n"
    assert site.run("srun -n2 -o 1 bash -c 'echo $SLURM_PROCID'").out == "1\n"
    assert site.run("srun -n2 -o none bash -c 'echo out; echo err >&2'") == Ended("", "", 0)
    site.run("srun -n2 -o logs/%t/out echo out; srun -o logs/all echo out")
    assert {(site.root / "logs" / name).read_text() for name in ("0/out", "1/out", "all")} == {"out\n"}
    site.run("srun -D logs -o here echo out; srun -D logs -o there.%t echo out")
    assert (site.root / "here").exists()
    assert (site.root / "logs" / "there.0").exists()
    failed = site.run("srun -o /dev/null/x echo out")
    assert failed.status == 1
    assert failed.err == "srun: error: slurm-affinode: Could not open /dev/null/x: Not a directory\n"


def test_input_goes_to_all_tasks(site: Site) -> None:
    """From a file or a pipe, as srun does; or to one task, or to none."""
    (site.root / "in").write_text("one\ntwo\n")
    assert sorted(site.run("srun -n2 cat <in").out.split()) == ["one", "one", "two", "two"]
    assert sorted(site.run("srun -n2 cat", stdin=b"a\n" * 50000).out.split()) == ["a"] * 100000
    assert sorted(site.run("srun -n2 -i in cat").out.split()) == ["one", "one", "two", "two"]
    assert site.run("srun -n2 -i 1 cat <in").out == "one\ntwo\n"
    assert site.run("srun -n2 -i none cat <in").out == ""
    assert site.run("srun cat", stdin=b"x\n").out == "x\n"
    assert site.run("srun -n2 true", stdin=b"x\n" * 10).status == 0


def test_working_directory_is_changed(site: Site) -> None:
    assert site.run("srun -D /usr pwd").out == "/usr\n"
    failed = site.run("srun -D /nosuch pwd")
    assert failed.out == f"{TMP}\n"
    assert "couldn't chdir to `/nosuch': No such file or directory: going to /tmp instead" in failed.err


# --- steps at the same time


def test_steps_wait_for_cpus(site: Site) -> None:
    """A step has all CPUs unless it says otherwise; it then waits for others, and --overlap does not."""
    step = "bash -c 'mkdir busy && sleep 0.5 && rmdir busy'"
    ended = site.run(f"srun {step} & srun {step} & wait")
    assert "exist" not in ended.err
    assert "srun: Step created for StepId=" in ended.err
    assert "exist" in site.run(f"srun --overlap {step} & srun --overlap {step} & wait").err
    assert "exist" in site.run(f"srun --exact -n2 {step} & srun --exact -n2 {step} & wait").err


def test_steps_get_different_gpus(site: Site) -> None:
    step = "srun --exact -n1 --gpus=1 bash -c 'echo $CUDA_VISIBLE_DEVICES; sleep 0.5'"
    assert sorted(site.run(f"{step} & {step} & wait", **GPUS).out.split()) == ["0", "1"]
    three = site.run(f"{step} & {step} & {step} & wait", **GPUS).out.split()
    assert set(three) == {"0", "1"}
    assert len(three) == 3


def test_step_after_a_restore_gets_a_gpu_that_no_step_has(site: Site, tmp_path: Path) -> None:
    """The step that was restored has the first GPU of the job, whose numbers are other ones now."""
    script = """
srun -n1 --exact --gpus=1 bash -c 'touch ready; while [ ! -e end ]; do sleep 0.05; done' &
while [ ! -e ready ]; do sleep 0.05; done
export SLURM_JOB_GPUS=0,2
srun -n1 --exact --gpus=1 bash -c 'echo $SLURM_STEP_GPUS'
touch end; wait; rm ready end
"""
    assert site.run(script, **GPUS).out == "2\n"


def test_ids_of_steps_differ_after_a_restore(site: Site) -> None:
    """They count from 0, and from another thousand if the job was restored on another node."""
    show = "srun bash -c 'echo $SLURM_STEP_ID'"
    assert site.run(f"{show}; {show}").out == "0\n1\n"
    assert site.run(show).out == "2\n"
    next(TMP.glob(f".slurm-affinode-steps-*-{JOB}-0")).unlink()
    assert site.run(f"{show}; {show}", restarts=2).out == "2000\n2001\n"
    assert site.run(show, restarts=2, SLURM_RESTART_COUNT="2").out == "0\n"


def test_options_of_gpus_replace_those_of_the_job(site: Site) -> None:
    """A job with --gpus-per-task sets variables; an option of the step selects in their place."""
    job_variables = {
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_TRES_PER_TASK": "gres/gpu=1,cpu=1",
        "SLURM_CPUS_PER_TASK": "1",
        **GPUS,
    }
    show = "bash -c 'echo $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE'"
    assert sorted(site.run(f"srun -n2 {show}", **job_variables).out.splitlines()) == ["0 2", "1 2"]
    assert site.run(f"srun -n2 --gpus=2 {show}", **job_variables).out == "0,1 2\n" * 2
    assert site.run(f"srun -n1 --gres=gpu:1 {show}", **job_variables).out == "0 1\n"


def test_signal_ends_a_launcher_that_waits(site: Site) -> None:
    script = """
srun bash -c 'touch busy; while [ -e busy ]; do sleep 0.05; done' &
while [ ! -e busy ]; do sleep 0.05; done
bash -c 'trap - INT; exec srun true' & pid=$!
sleep 0.5; kill -TERM $pid; wait $pid; echo $?; rm busy; wait
"""
    assert site.run(script) == Ended("143\n", "", 0)


@pytest.mark.parametrize("kind", ["file", "link", "fifo", "directory"])
def test_file_of_another_user_is_not_used(site: Site, kind: str) -> None:
    """Another user who has taken the name prevents no local step: it would keep the job from being suspended."""
    path = TMP / f".slurm-affinode-steps-0-{JOB}-0"
    taken = [path, path.with_name(f"{path.name}.0123")]
    for item in taken:
        if kind == "link":
            item.symlink_to("/etc/passwd")
        elif kind == "fifo":
            os.mkfifo(item)
        elif kind == "directory":
            item.mkdir()
        else:
            item.touch()
        os.chown(item, 12345, 12345, follow_symlinks=False)
    try:
        show = "srun bash -c 'echo $SLURM_STEP_ID'"
        assert site.run(f"{show}; {show}") == Ended("0\n1\n", "", 0)
        assert site.run(f"{show} & {show}; wait").out in ("2\n3\n", "3\n2\n")
        (new_file,) = (entry for entry in TMP.glob(f"{path.name}.*") if entry not in taken)
        assert (new_file.stat().st_uid, new_file.read_text()) == (os.getuid(), "4")
    finally:
        for item in taken:
            item.rmdir() if kind == "directory" else item.unlink()


# --- Slurm's srun


@pytest.mark.parametrize(
    "arguments",
    [
        "--pty bash", "-N2 hostname", "--het-group=0 x", "--mpi=pmix x", "--bcast=/x y", "--container=/x y",
        "--unknown x", "--jobid=1 --overlap x", "-n99 x", "-nx y", "--nt=2 x", "a : b", "--gpus=3 x", "-t 5 x", "-Z x",
        "--gpu-bind=closest x", "--cpus-per-gpu=1 -c1 x", "--cpus-per-gpu=3 x", "--multi-prog file", "--ntasks",
        "-w other x", "--gres=license:1 x", "--cpu-bind=map_cpu:0 x",
    ],
)  # fmt: skip
def test_other_steps_run_under_slurms_srun(site: Site, arguments: str) -> None:
    """With one message, the same arguments, and an environment without the launcher."""
    ended = site.run(f"srun {arguments}", **GPUS)
    assert ended.out == f"real: {arguments}\npath: {site.root}/slurm:/usr/bin:/bin\n"
    assert ended.status == 42
    if arguments != "--ntasks":
        assert ended.err.startswith("srun: slurm-affinode: ")
    assert ended.err.count("\n") <= 1


@pytest.mark.parametrize("arguments", ["--help", "--usage", "--version", "-V", "--vers", ""])
def test_questions_are_answered_by_slurms_srun(site: Site, arguments: str) -> None:
    ended = site.run(f"srun {arguments}")
    assert ended.err == ""
    assert ended.out.startswith(f"real: {arguments}\n")


def test_variables_select_slurms_srun(site: Site) -> None:
    for name, value in (
        ("SLURM_MPI_TYPE", "pmi2"), ("SLURM_TASK_PROLOG", "/x"), ("SLURM_JOB_NUM_NODES", "2"), ("SLURM_SIGNAL", "USR1"),
    ):  # fmt: skip
        assert site.run("srun x", **{name: value}).status == 42
    both = {"SLURM_CPUS_PER_GPU": "1", "SLURM_CPUS_PER_TASK": "1"}
    assert site.run("srun x", **both, **GPUS).status == 42
    assert site.run("srun true", SLURM_MPI_TYPE="none").status == 0


def test_srun_of_another_job_is_slurms(site: Site) -> None:
    """PATH is inherited by jobs that this job submits, and by jobs without the option."""
    for ended in (
        site.run("srun echo x", option=LOCAL.replace("local", "slurm")),
        site.run("srun echo x", option=LOCAL.removesuffix(",steps=local")),
        site.run("srun echo x", SLURM_JOB_ID="1"),
    ):
        assert (ended.status, ended.err) == (42, "")


def test_remembered_srun_is_used(site: Site) -> None:
    """The plugin passes its path, in case that the script changes PATH."""
    remembered = {"SLURM_AFFINODE_SRUN": f"{site.root}/slurm/srun", "PATH": f"{site.launcher}:/usr/bin:/bin"}
    assert site.run("srun --pty x", **remembered).status == 42
    ended = site.run("srun --pty x", PATH=f"{site.launcher}:/usr/bin:/bin")
    if shutil.which("srun") is None:
        assert (ended.status, ended.err.splitlines()[-1]) == (
            1,
            "srun: error: slurm-affinode: Slurm's own srun is not in PATH",
        )


def test_python_of_the_user_has_no_effect(site: Site) -> None:
    """The interpreter is isolated from PYTHON* variables and from modules in the working directory."""
    (site.root / "select.py").write_text("raise SystemExit('mine')\n")
    try:
        script = "srun bash -c 'echo $PYTHONPATH $PYTHONSTARTUP'"
        ended = site.run(script, PYTHONPATH=str(site.root), PYTHONSTARTUP="/x", PYTHONHOME="/nosuch")
    finally:
        (site.root / "select.py").unlink()
    assert (ended.out, ended.err) == (f"{site.root} /x\n", "")
