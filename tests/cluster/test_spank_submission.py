"""The option at submission: error messages, help, #SBATCH lines, limits of the site."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.driver import Cluster, wait_until
from cluster.spank import outcome

pytestmark = pytest.mark.cluster

PLUGSTACK = "/etc/slurm/plugstack.conf.d/slurm-affinode.conf"
PLUGIN = "optional /usr/local/lib/slurm/slurm_affinode.so"

WRONG = {
    "abc": "window 'abc': allowed 90s, 15m, 2h, or Slurm's MINUTES, MM:SS, HH:MM:SS, DAYS-HH[:MM[:SS]]",
    "0": "window '0': allowed 90s",
    "-5m": "window '-5m': allowed 90s",
    "9d": "window '9d': this site allows 1s to 7d",
    "util=5": "no WINDOW before 'util=5': allowed is WINDOW[,key=value...]",
    "15m,": "unknown key '': allowed are util=, mode=, wake=, when=, signal=",
    "15m,color=red": "unknown key 'color': allowed are util=, mode=, wake=, when=, signal=",
    "15m,util=120": "util '120': allowed is a percentage from 0 to 100",
    "15m,util": "util has no value: write util=VALUE",
    "15m,mode=kill": "mode 'kill': allowed are requeue, inplace",
    "15m,when=later": "when 'later': allowed are pressure, always",
    "15m,wake=someday": "wake 'someday': allowed are auto, hold, or a time: 2h, now+2hours",
    "15m,signal=USR1": "signal 'USR1': allowed is NAME@SECONDS, such as USR1@60",
    "15m,signal=KILL@5": "signal 'KILL@5': allowed is NAME@SECONDS",
    "15m,mode=requeue,mode=requeue": "mode is given twice",
    "15m\nmode=inplace": "no WINDOW before '15m?mode=inplace'",
}


@pytest.fixture
def site(cluster: Cluster) -> Iterator[str]:
    """Return the path of the login node's plugstack.conf, which is restored after the test."""
    saved = cluster.exec("login", "cat", PLUGSTACK)
    yield PLUGSTACK
    cluster.exec("login", "tee", PLUGSTACK, stdin=saved)


def refused(cluster: Cluster, *argv: str) -> str:
    """Return the error of a submission that must fail."""
    done = cluster.run("login", *argv, user="alice")
    assert done.returncode != 0, done.stdout
    assert "Submitted" not in done.stdout
    return done.stderr


def test_invalid_value_is_refused_with_allowed_values(cluster: Cluster) -> None:
    """No job is submitted; one line names the value and the allowed ones."""
    for value, reason in WRONG.items():
        printed = refused(cluster, "sbatch", f"--gpu-suspend-idle={value}", "--wrap=true")
        assert printed.splitlines()[0].startswith(f"sbatch: error: --gpu-suspend-idle: {reason}")
    assert cluster.exec("login", "squeue", "--noheader", "--user=alice") == ""


def test_help_describes_option(cluster: Cluster) -> None:
    """The help of each command contains it, with every key."""
    purpose = "checkpoint and requeue the job when its GPUs have been idle for WINDOW"
    keys = ("util=PCT", "mode=requeue|inplace", "wake=auto|hold|TIME", "when=pressure|always", "signal=NAME@SECONDS")
    for command in ("sbatch", "salloc", "srun"):
        printed = " ".join(cluster.exec("login", command, "--help").split())
        assert f"--gpu-suspend-idle=WINDOW[,key=value...] {purpose}" in printed
        assert [key for key in keys if key not in printed] == []


def test_sbatch_line_sets_option(cluster: Cluster) -> None:
    """`#SBATCH --gpu-suspend-idle=...` works, and an invalid value is refused."""
    line = "#!/bin/bash\n#SBATCH --gpu-suspend-idle={}\n#SBATCH --partition=gpu\necho $PPID\n"
    job = cluster.submit(script=line.format("90s,util=5"))
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.output(job) == "1\n"
    done = cluster.run("login", "sbatch", user="alice", stdin=line.format("90s,util=x"))
    assert done.returncode != 0
    assert "--gpu-suspend-idle: util 'x'" in done.stderr


def test_valid_values_are_accepted(cluster: Cluster) -> None:
    """The value may be omitted, and the environment need not be exported; each job runs under a shepherd."""
    values = ("", "=90s", "=20", "=1:30", "=01:00:00", "=1-0", "=2h,util=2.5,wake=now+1hour,when=always")
    jobs = {value: cluster.submit(f"--gpu-suspend-idle{value}", wrap="echo $PPID") for value in values}
    jobs["--export=NONE"] = cluster.submit("--export=NONE", "--gpu-suspend-idle=15m", wrap="echo $PPID")
    assert {what: outcome(cluster, job).state for what, job in jobs.items()} == dict.fromkeys(jobs, "COMPLETED")
    assert {what: cluster.output(job) for what, job in jobs.items()} == dict.fromkeys(jobs, "1\n")


def test_site_limits_are_enforced(cluster: Cluster, site: str) -> None:
    """Windows and modes that plugstack.conf does not allow are refused; the site's default is valid."""
    cluster.exec(
        "login", "tee", site, stdin=f"{PLUGIN} default=20m,util=3 min_window=10m max_window=2h modes=requeue\n"
    )
    sbatch = ("sbatch", "--wrap=true", "--test-only")
    assert "window '9m': this site allows 10m to 2h" in refused(cluster, *sbatch, "--gpu-suspend-idle=9m")
    assert "window '3h': this site allows 10m to 2h" in refused(cluster, *sbatch, "--gpu-suspend-idle=3h")
    assert "mode 'inplace': this site allows requeue" in refused(
        cluster, *sbatch, "--gpu-suspend-idle=10m,mode=inplace"
    )
    cluster.exec("login", *sbatch, "--gpu-suspend-idle", user="alice")
    cluster.exec("login", *sbatch, "--gpu-suspend-idle=10m", user="alice")


def test_site_partitions_are_enforced(cluster: Cluster, site: str) -> None:
    """A partition that is not allowed is refused on the command line, in the script and in the environment."""
    cluster.exec("login", "tee", site, stdin=f"{PLUGIN} min_window=1s partitions=gpu,gpu-preempt\n")
    sbatch = ("sbatch", "--gpu-suspend-idle=15m", "--test-only")
    message = "--gpu-suspend-idle: partition 'cpu': this site allows gpu, gpu-preempt"
    assert message in refused(cluster, *sbatch, "--wrap=true", "--partition=cpu")
    assert message in refused(cluster, *sbatch, "--wrap=true", "-p", "gpu,cpu")
    assert message in refused(cluster, "env", "SBATCH_PARTITION=cpu", *sbatch, "--wrap=true")
    done = cluster.run("login", *sbatch, user="alice", stdin="#!/bin/bash\n#SBATCH -p cpu\ntrue\n")
    assert message in done.stderr
    cluster.exec("login", *sbatch, "--wrap=true", "--partition=gpu", user="alice")
    cluster.exec("login", "sbatch", "--test-only", "--wrap=true", "--partition=cpu", user="alice")


def test_default_partition_is_checked_on_node(cluster: Cluster) -> None:
    """The default partition is known only at the start: the job runs without the option and prints the reason."""
    saved = cluster.exec("cpu1", "cat", PLUGSTACK)
    cluster.exec("cpu1", "tee", PLUGSTACK, stdin=f"{PLUGIN} partitions=gpu\n")
    try:
        job = cluster.submit("--gpu-suspend-idle=15m", wrap="echo ran; [ $PPID -gt 1 ]")
        assert outcome(cluster, job).state == "COMPLETED"
        printed = cluster.output(job)
    finally:
        cluster.exec("cpu1", "tee", PLUGSTACK, stdin=saved)
    assert printed.endswith("--gpu-suspend-idle has no effect: partition 'cpu': this site allows gpu\nran\n")


def test_invalid_plugin_argument_is_reported_and_ignored(cluster: Cluster, site: str) -> None:
    """A mistake in plugstack.conf is reported and does not prevent a submission."""
    cluster.exec("login", "tee", site, stdin=f"{PLUGIN} color=red min_window=10m\n")
    done = cluster.run("login", "sbatch", "--test-only", "--wrap=true", "--gpu-suspend-idle=10m", user="alice")
    assert done.returncode == 0
    assert "slurm-affinode: plugstack.conf: 'color=red' is ignored: unknown; known are default" in done.stderr
    assert "this site allows 10m" in refused(cluster, "sbatch", "--wrap=true", "--gpu-suspend-idle=5m")


WARNINGS = {
    ("--gres=gpu:1",): None,
    ("--gpus=h100:1",): None,
    ("--gres=shard:4", "--nodes=1"): None,
    ("--gres=gpu:1", "--nodes=2"): "it requests several nodes",
    ("--gres=gpu:1", "-N", "2-4"): "it requests several nodes",
    ("--gres=gpu:1", "--no-requeue"): "it may not be requeued",
    (): "it requests no GPUs",
}


def test_job_that_cannot_be_suspended_is_warned_of(cluster: Cluster) -> None:
    """One line at submission says why; the job is submitted nevertheless."""
    for options, why in WARNINGS.items():
        sbatch = ("sbatch", "--partition=gpu", "--gpu-suspend-idle=15m", "--wrap=true", "--hold", *options)
        done = cluster.run("login", *sbatch, user="alice")
        assert done.returncode == 0
        warnings = [line for line in done.stderr.splitlines() if "gpu-suspend-idle" in line]
        expected = [] if why is None else [f"sbatch: --gpu-suspend-idle: the job will not be suspended: {why}"]
        assert [line.partition(" (")[0] for line in warnings] == expected


def test_job_in_place_needs_shares_and_no_requeue(cluster: Cluster) -> None:
    """On a whole GPU, no other job could use the memory of a sleeper: ``when=pressure`` never applies."""
    for gres, when, warned in (("shard:4", "pressure", False), ("gpu:1", "always", False), ("gpu:1", "pressure", True)):
        sbatch = ("sbatch", "--test-only", f"--gres={gres}", "--partition=gpu", "--no-requeue", "--wrap=true")
        done = cluster.run("login", *sbatch, f"--gpu-suspend-idle=15m,mode=inplace,when={when}", user="alice")
        assert ("will not be suspended: with mode=inplace it keeps its GPUs" in done.stderr) is warned
        assert done.stderr.count("will not be suspended") == warned


INTERACTIVE = (("salloc", "true"), ("srun", "true"), ("srun", "--pty", "bash"))


def test_interactive_job_is_rejected(cluster: Cluster) -> None:
    """One line gives the alternatives, and no job is created."""
    before = cluster.submit("--partition=cpu", wrap="true")
    line = "--gpu-suspend-idle: only batch jobs can be suspended: submit this one with sbatch, or omit the option"
    for mode in ("requeue", "inplace"):
        for program, *rest in INTERACTIVE:
            printed = refused(cluster, program, f"--gpu-suspend-idle=15m,mode={mode}", "--partition=cpu", *rest)
            assert printed == f"{program}: error: {line}\n"
    after = cluster.submit("--partition=cpu", wrap="true")
    assert int(after) == int(before) + 1


STEPS = """
srun --gpu-suspend-idle=15m echo own step
srun --jobid=$SLURM_JOB_ID --overlap --gpu-suspend-idle=15m echo same job
env | grep SPANK
sbatch --parsable --partition=cpu --wrap='echo $PPID'
"""


@pytest.mark.parametrize("start", ["sbatch", "salloc"])
def test_step_with_option_is_started(cluster: Cluster, start: str) -> None:
    """Steps allocate nothing, so the option has no effect on them, and jobs do not inherit it."""
    if start == "salloc":
        done = cluster.run("login", "salloc", "--partition=cpu", "bash", "-c", STEPS, user="alice")
        printed = done.stdout
        assert "error" not in done.stderr
    else:
        job = cluster.submit("--partition=cpu", "--gpu-suspend-idle=15m", script=f"#!/bin/bash\n{STEPS}")
        assert outcome(cluster, job).state == "COMPLETED"
        printed = cluster.output(job)
    lines = printed.splitlines()
    assert lines[:2] == ["own step", "same job"]
    inner = lines[-1]
    assert len(lines) == 3
    assert outcome(cluster, inner).state == "COMPLETED"
    assert int(cluster.output(inner)) > 1


def test_step_in_job_of_another_host_is_started(cluster: Cluster) -> None:
    """srun --jobid from the login node joins a job, as an attached terminal does."""
    job = cluster.submit("--partition=cpu", wrap="echo ready; sleep 60")
    cluster.wait_for_output(job, "ready")
    done = cluster.run(
        "login", "srun", f"--jobid={job}", "--overlap", "--gpu-suspend-idle=15m", "echo", "joined", user="alice"
    )
    assert (done.returncode, done.stdout) == (0, "joined\n")


def test_renamed_sbatch_is_recognized(cluster: Cluster) -> None:
    """The option works, without any message, if a wrapper of the site calls the renamed sbatch."""
    cluster.shell("login", "cp $(command -v sbatch) /usr/local/bin/sbatch.slurm")
    done = cluster.run(
        "login", "/usr/local/bin/sbatch.slurm", "--parsable", "--partition=gpu", "--gres=gpu:1", "--gpu-suspend-idle",
        "--wrap=echo $PPID", user="alice",
    )  # fmt: skip
    assert done.stderr == ""
    job = done.stdout.strip()
    assert outcome(cluster, job).state == "COMPLETED"
    assert cluster.output(job) == "1\n"


@pytest.fixture
def crontabs(cluster: Cluster) -> Iterator[str]:
    """Enable scrontab until the end of the test; yield the path for a crontab of alice's."""
    for machine in ("slurmctld", "login"):
        cluster.shell(machine, "echo ScronParameters=enable >>/etc/slurm/slurm.conf")
    cluster.exec("slurmctld", "scontrol", "reconfigure")
    yield "/tmp/crontab"  # noqa: S108 - in a container of the test
    cluster.run("login", "scrontab", "-r", user="alice")
    for machine in ("slurmctld", "login"):
        cluster.shell(machine, "sed -i /ScronParameters=enable/d /etc/slurm/slurm.conf")
    cluster.exec("slurmctld", "scontrol", "reconfigure")


def test_scrontab_warns_that_option_has_no_effect(cluster: Cluster, crontabs: str) -> None:
    """scrontab parses the option but does not apply it; an invalid value is refused nevertheless."""
    entry = "#SCRON --gpu-suspend-idle={}\n0 0 1 1 * true\n"
    cluster.exec("login", "tee", crontabs, stdin=entry.format("15m"))
    done = cluster.run("login", "scrontab", crontabs, user="alice")
    assert "--gpu-suspend-idle has no effect here: scrontab does not hand it on" in done.stderr
    cluster.exec("login", "tee", crontabs, stdin=entry.format("soon"))
    assert "--gpu-suspend-idle: window 'soon'" in cluster.run("login", "scrontab", crontabs, user="alice").stderr


def test_job_without_option_is_unchanged(cluster: Cluster) -> None:
    """The process tree of a job is slurmstepd, script, command: no shepherd, no namespace."""
    job = cluster.submit("--partition=gpu", "--nodelist=c1", wrap="echo ready; sleep 1234")
    cluster.wait_for_output(job, "ready")
    step = cluster.shell("c1", 'pgrep -f "slurmstepd: \\[$1.batch\\]"', job).split()
    assert len(step) == 1
    tree = wait_until(
        "the command runs",
        lambda: cluster.shell(
            "c1", 'ps -o comm= --ppid "$1"; ps -o comm= --ppid "$(pgrep --parent "$1")"', step[0]
        ).split(),
        lambda names: len(names) == 2,
    )
    assert tree == ["slurm_script", "sleep"]
    same = cluster.shell("c1", 'readlink /proc/1/ns/pid "/proc/$(pgrep --parent "$1")/ns/pid"', step[0]).split()
    assert same[0] == same[1]
