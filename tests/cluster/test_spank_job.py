"""Environment, limits and output of a job are the same with the option as without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.driver import Cluster, wait_until
from cluster.spank import OPTION, outcome, outcomes, outputs, submit_pair

pytestmark = pytest.mark.cluster

PIPE = "/run/spank-pipe"
PARTITION = ("--partition=gpu", "--nodelist=c1")

# Variables that differ between jobs: IDs, times, processes.
JOB_VARIABLES = (
    "SLURM_JOB_ID|SLURM_JOBID|SLURM_JOB_START_TIME|SLURM_JOB_END_TIME|SLURM_TASK_PID|SLURM_TRES_PER_TASK|TMPDIR|_|SLURMD_DEBUG"
    "|SLURM_TOPOLOGY_ADDR|SLURM_JOB_SLUID|SLURM_SLUID"
)

ADDED = "GODEBUG=multipathtcp=0\n"


@pytest.fixture
def small_disk(cluster: Cluster) -> Iterator[str]:
    """Mount a file system of 64 KiB, writable by users, on c1; return its path."""
    path = "/run/small-disk"
    cluster.shell("c1", "mkdir -p $1 && mount -t tmpfs -o size=64k,mode=1777 tmpfs $1", path)
    yield path
    cluster.shell("c1", "umount -l $1", path)


def test_environment_is_unchanged(cluster: Cluster) -> None:
    """Variables have the same values, except those that identify the job; exported shell functions are included.

    One variable is added; the names of all others are the same.
    """
    script = (
        "#!/bin/bash\nmodule() { echo loaded $1; }\nexport -f module\nexport ODD=$'a\\nb=c'\n"
        f"bash -c 'module gcc'\nenv -0 | sort -z | grep -zvE '^({JOB_VARIABLES})=' | tr '\\0' '\\n'\n"
        "env -0 | sed -z 's/=.*//' | sort -z | tr '\\0' '\\n'\n"
    )
    pair = submit_pair(cluster, script, *PARTITION, "--job-name=same")
    outcomes(cluster, pair)
    without, with_option = outputs(cluster, pair)
    assert "loaded gcc" in with_option
    assert "SLURM_JOB_NAME=same" in with_option
    assert with_option.replace(ADDED, "").replace("GODEBUG\n", "") == without


def test_limits_descriptors_signals_and_identity_are_unchanged(cluster: Cluster) -> None:
    """This also applies to umask, nice value, working directory, CPUs, OOM score and cgroups.

    The only difference is the filter that denies io_uring.
    """
    script = """#!/bin/bash
ulimit -a; ls /proc/self/fd | wc -l; readlink /proc/self/fd/0; cd /proc/self; pwd >/dev/null
while read -r line; do  # by no other program: in the moment of a fork glibc blocks all signals of the shell
  [[ $line =~ ^(Sig(Blk|Ign|Cgt)|NoNewPrivs|Seccomp|Cpus|Cap|Uid|Gid|Groups) ]] && echo "$line"
done < status; cat oom_score_adj timerslack_ns; sed -E 's/(job_[0-9]+|s[0-9A-Z]{13})/job/' cgroup
cd; id; umask; nice; pwd
[ "$(ps -o pgid= -p $$)" -eq $$ ] && echo leads its group; tty; echo $0 | sed 's/[0-9]//g'; echo $#
"""
    pair = submit_pair(cluster, script, *PARTITION)
    outcomes(cluster, pair)
    without, with_option = outputs(cluster, pair)
    filtered = ("Seccomp:\t2\n", "Seccomp:\t0\n"), ("Seccomp_filters:\t1\n", "Seccomp_filters:\t0\n")
    for result, expected in filtered:
        assert result in with_option
        with_option = with_option.replace(result, expected)
    assert with_option == without


def test_script_receives_its_arguments(cluster: Cluster) -> None:
    """Arguments are unchanged, including spaces, empty ones and one that looks like an option."""
    cluster.exec("login", "tee", "/home/alice/arguments.sh", user="alice", stdin='#!/bin/bash\nprintf "<%s>" "$@"\n')
    argv = ("sbatch", "--parsable", OPTION, "arguments.sh", "a b", "", "--", "-x", "$HOME")
    job = cluster.exec("login", *argv, user="alice").strip()
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.output(job) == "<a b><><--><-x><$HOME>"


def test_script_runs_in_namespace_of_shepherd(cluster: Cluster) -> None:
    """As documented, the script is a child of PID 1, and the leader of its session.

    The shepherd represents the job to keeper and agent; other processes of the job can be traced as usual.
    """
    script = """#!/bin/bash
echo $$ $PPID $SLURM_TASK_PID $(ps -o sid= -p $$)
cat /proc/1/environ >/dev/null 2>&1 && echo it can be read
sleep 100 & python3 -c 'import ctypes, sys
trace = ctypes.CDLL(None).ptrace
print(*(trace(0x4206, int(pid), 0, 0) for pid in sys.argv[1:]))' 1 $!
kill $!
"""
    job = cluster.submit(*PARTITION, OPTION, script=script)
    assert outcome(cluster, job).state == "COMPLETED"
    ids, traced = cluster.output(job).splitlines()
    pid, parent, task, session = ids.split()
    assert (parent, task, session) == ("1", pid, pid)
    assert traced == "-1 0"


def test_slurm_tracks_processes_in_namespace(cluster: Cluster) -> None:
    """`scontrol listpids` lists the processes of a job with the option; accounting has its memory and CPU time."""
    body = "python3 -c 'import time; x = bytearray(200 << 20); t = time.time()\n"
    # Four seconds for the sampler, which are less CPU time on a busy machine.
    body += "while time.time() < t + 4 or time.process_time() < 1: pass'\n"
    pair = submit_pair(cluster, "#!/bin/bash\necho ready\n" + body, *PARTITION)
    cluster.wait_for_output(pair.with_option, "ready")
    listed = cluster.exec("c1", "scontrol", "listpids", pair.with_option)
    assert len(listed.splitlines()) > 3
    outcomes(cluster, pair)
    argv = ("sacct", "--noheader", "--parsable2", "--units=M", "--format=MaxRSS,TotalCPU")
    for job in pair.both:
        rss, cpu = cluster.exec("login", *argv, f"--jobs={job}.batch").strip().split("|")
        assert 190 < float(rss.rstrip("M")) < 300
        assert 0.3 < float(cpu.split(":")[1]) < 6


@pytest.mark.parametrize("mode", ["truncate", "append"])
def test_open_mode_is_honored(cluster: Cluster, mode: str) -> None:
    """The previous contents of the file are kept or truncated as Slurm specifies."""
    texts = []
    for option in ((), (OPTION,)):
        cluster.shell("login", "echo before >/home/alice/slurm-mode.out", user="alice")
        arguments = ("--output=slurm-mode.out", f"--open-mode={mode}", *option)
        job = cluster.submit(*PARTITION, *arguments, wrap="echo out; echo err >&2; echo out again")
        outcome(cluster, job)
        texts.append(cluster.exec("login", "cat", "/home/alice/slurm-mode.out"))
    assert texts[0] == texts[1]
    assert texts[0].startswith("before\n") == (mode == "append")


def test_file_name_patterns_are_expanded(cluster: Cluster) -> None:
    """Patterns are %j and %x, also in separate error files."""
    options = (OPTION, "--job-name=name", "--output=slurm-%x-%j.out", "--error=slurm-%x-%j-err.out")
    job = cluster.submit(*PARTITION, *options, wrap="echo to out; echo to err >&2")
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.exec("login", "cat", f"/home/alice/slurm-name-{job}.out") == "to out\n"
    assert cluster.exec("login", "cat", f"/home/alice/slurm-name-{job}-err.out") == "to err\n"


def test_output_goes_to_null(cluster: Cluster) -> None:
    """With --output=/dev/null, the job's descriptors are that device."""
    wrap = "readlink /proc/$$/fd/1 | tee /home/alice/slurm-null.out"
    job = cluster.submit(*PARTITION, OPTION, "--output=/dev/null", wrap=wrap)
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.exec("login", "cat", "/home/alice/slurm-null.out") == "/dev/null\n"


def test_large_output_stays_in_order(cluster: Cluster) -> None:
    """Many writes of concurrent children to both streams are equal byte for byte."""
    script = """#!/bin/bash
for i in $(seq 20000); do echo line $i; [ $((i % 100)) -ne 0 ] || echo err $i >&2; done
head -c 3000000 /dev/zero | tr '\\0' x
"""
    pair = submit_pair(cluster, script, *PARTITION)
    outcomes(cluster, pair)
    without, with_option = outputs(cluster, pair)
    assert len(with_option) > 3_000_000
    assert with_option == without


def test_output_before_kill_is_kept(cluster: Cluster) -> None:
    """Output written before SIGKILL is in the file."""
    pair = submit_pair(cluster, "#!/bin/bash\nseq 1000\necho ready\nexec sleep 100\n", *PARTITION)
    for job in pair.both:
        cluster.wait_for_output(job, "ready")
        cluster.exec("login", "scancel", "--signal=KILL", "--full", job)
    expected, result = outcomes(cluster, pair)
    assert result == expected
    without, with_option = outputs(cluster, pair)
    assert with_option == without


def test_full_disk_is_reported_to_script(cluster: Cluster, small_disk: str) -> None:
    """The script gets the error after the same number of bytes as without the option."""
    script = """#!/bin/bash
note() { echo failed $? >/home/alice/slurm-full-$SLURM_JOB_ID.out; exit 28; }
for i in $(seq 100); do head -c 1000 /dev/zero || note; done
"""
    results = []
    for option in ((), (OPTION,)):
        job = cluster.submit(*PARTITION, *option, f"--output={small_disk}/out", script=script)
        result = outcome(cluster, job)
        size = cluster.exec("c1", "stat", "--format=%s", f"{small_disk}/out").strip()
        results.append((result, size, cluster.exec("login", "cat", f"/home/alice/slurm-full-{job}.out")))
        cluster.exec("c1", "rm", f"{small_disk}/out")
    assert results[0] == results[1]
    assert results[0][0].exit_code == "28:0"


def test_output_goes_to_pipe(cluster: Cluster) -> None:
    """The reader of a named pipe sees end of file when the job ends."""
    cluster.shell("c1", f"rm -f {PIPE}; mkfifo -m 666 {PIPE}")
    cluster.shell("c1", f"setsid -f sh -c 'cat {PIPE} >{PIPE}.out; echo end >>{PIPE}.out' >/dev/null 2>&1 </dev/null")
    job = cluster.submit(*PARTITION, OPTION, f"--output={PIPE}", wrap="echo through the pipe")
    assert outcome(cluster, job).state == "COMPLETED"
    # slurmctld may report the end before slurmstepd has closed the pipe.
    wait_until(
        "the reader gets end of file", lambda: cluster.exec("c1", "cat", f"{PIPE}.out"), lambda text: "end" in text
    )
    assert cluster.exec("c1", "cat", f"{PIPE}.out") == "through the pipe\nend\n"
