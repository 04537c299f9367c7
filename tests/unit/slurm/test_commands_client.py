"""The client based on Slurm's commands: the commands it runs and how it reads their output. ``run`` is a fake."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from slurm_affinode.base.errors import AffinodeError, UnreachableError
from slurm_affinode.base.process import Completed
from slurm_affinode.slurm import interface
from slurm_affinode.slurm.commands_client import CommandsClient


class Slurm:
    """Records the commands; replies by their words."""

    parsers = b"data_parser/v0.0.40\ndata_parser/v0.0.42\n"
    listings = 0

    def __init__(self, answers=None, jobs=()):
        self.ran = []
        self.env = None
        self.answers = dict(answers or {})
        text = {"jobs": list(jobs), "steps": [], "last_update": {"set": True, "number": 5 if jobs else 0}}
        self.jobs = json.dumps(text).encode()

    def __call__(self, argv, *, timeout_s, env=None, check=True):
        assert timeout_s > 0
        assert not check
        self.env = env
        if "--json=list" in argv:
            self.listings += 1
            return Completed(tuple(argv), 0, self.parsers, "Possible data_parser plugins:\n")
        self.ran.append(argv)
        for word, (status, out, err) in self.answers.items():
            if word in argv:
                return Completed(tuple(argv), status, out, err)
        if "ping" in argv:
            return Completed(tuple(argv), 0, b"Slurmctld(primary) at head is UP\n", "")
        return Completed(tuple(argv), 0, self.jobs if "show" in argv else b"", "")


def job(number=5, state="RUNNING", **more):
    return {"job_id": number, "job_state": [state], **more}


def test_each_action_is_one_command_with_options_before_the_names():
    slurm = Slurm()
    client = CommandsClient(slurm)
    client.hold("5")
    client.hold("5", by_user=True)
    client.release("5_3")
    client.requeue("5")
    client.requeue("5", hold=True)
    client.requeue("5", hold=True, running=True)
    client.cancel("5_3")
    client.set_comment("5", "-v Priority=0 'x'")
    client.set_admin_comment("5", "")
    client.set_begin("5", datetime(2026, 1, 2, tzinfo=UTC))
    client.set_time_limit("5", 90)
    client.set_required_nodes("5", ["c1", "c2"])
    client.set_required_nodes("5", [])
    client.notify("5", "--json")
    client.drain("c1", "why = --")
    client.resume("c1")
    assert slurm.ran == [
        ["scontrol", "--", "hold", "5"],
        ["scontrol", "--", "uhold", "5"],
        ["scontrol", "--", "release", "5_3"],
        ["scontrol", "--", "requeue", "5"],
        ["scontrol", "--", "requeuehold", "5"],
        ["scontrol", "--", "requeuehold", "incomplete", "5"],
        ["scancel", "--verbose", "--", "5_3"],
        ["scontrol", "--", "update", "JobId=5", "Comment=-v Priority=0 'x'"],
        ["scontrol", "--", "update", "JobId=5", "AdminComment="],
        ["scontrol", "--", "update", "JobId=5", "StartTime=uts1767312000"],
        ["scontrol", "--", "update", "JobId=5", "TimeMin=0", "TimeLimit=90"],
        ["scontrol", "--", "update", "JobId=5", "ReqNodeList=c1,c2"],
        ["scontrol", "--", "update", "JobId=5", "ReqNodeList="],
        ["scontrol", "--", "notify", "5", "--json"],
        ["scontrol", "--", "update", "NodeName=c1", "State=DRAIN", "Reason=why = --"],
        ["scontrol", "--", "update", "NodeName=c1", "State=RESUME"],
    ]


def number(value):
    return {"set": True, "infinite": False, "number": value}


def test_raw_id_means_one_task_even_if_the_array_has_the_same_number():
    """Slurm gives one task of an array the number of the array, and takes that number for all tasks."""
    tasks = [job(raw, array_job_id=number(36), array_task_id=number(task)) for raw, task in ((37, 1), (36, 2))]
    slurm = Slurm(jobs=tasks)
    client = CommandsClient(slurm)
    client.requeue(36, hold=True)
    client.hold(36)
    client.release(37)
    client.cancel(36)
    client.set_comment(36, "x")
    client.set_begin(36, datetime(2026, 1, 2, tzinfo=UTC))
    client.requeue("36")
    assert [argv for argv in slurm.ran if "show" not in argv] == [
        ["scontrol", "--", "requeuehold", "36_2"],
        ["scontrol", "--", "hold", "36_2"],
        ["scontrol", "--", "release", "36_1"],
        ["scancel", "--verbose", "--", "36_2"],
        ["scontrol", "--", "update", "JobId=36_2", "Comment=x"],
        ["scontrol", "--", "update", "JobId=36_2", "StartTime=uts1767312000"],
        ["scontrol", "--", "requeue", "36"],
    ]


def test_unknown_raw_id_is_an_error():
    """No request is sent for it."""
    slurm = Slurm(jobs=[job(5)])
    with pytest.raises(interface.UnknownJobError):
        CommandsClient(slurm).requeue(6)
    assert all("requeue" not in argv for argv in slurm.ran)


def test_environment_of_the_user_does_not_change_the_commands():
    slurm = Slurm()
    env = {"PATH": "/bin", "SLURM_CONF": "/x", "SCANCEL_SIGNAL": "KILL", "SLURM_CLUSTERS": "b", "TZ": "Asia/Kolkata"}
    CommandsClient(slurm, env=env).hold("5")
    assert slurm.env["TZ"] == "UTC"
    assert slurm.env["SLURM_CONF"] == "/x"
    assert not {"SCANCEL_SIGNAL", "SLURM_CLUSTERS"} & set(slurm.env)


def test_whole_queue_is_one_command():
    slurm = Slurm(jobs=[job(n) for n in range(1, 1001)])
    assert len(CommandsClient(slurm).jobs(gpu_detail=True)) == 1000
    assert len(slurm.ran) == 1


def test_error_of_scancel_with_exit_status_0_is_detected():
    for message, kind in (
        ("scancel: error: Kill job error on job id 5: Invalid job id specified", interface.UnknownJobError),
        (
            "scancel: error: Kill job error on job ID 5: Job/step already completing or completed",
            interface.AlreadyDoneError,
        ),
    ):
        slurm = Slurm({"scancel": (0, b"", f"scancel: Terminating job 5\n{message}\n")})
        with pytest.raises(kind):
            CommandsClient(slurm).cancel("5")
    CommandsClient(Slurm({"scancel": (0, b"", "scancel: Terminating job 5\n")})).cancel("5")


def test_controller_that_does_not_respond_once_is_queried_again():
    """``scontrol show`` prints an empty list, while ``scontrol ping`` reaches slurmctld."""
    ping = (1, b"Slurmctld(primary) at head is DOWN\n", "")
    with pytest.raises(interface.ControllerDownError, match="at head is DOWN"):
        CommandsClient(Slurm({"ping": ping})).signal(5, "USR1")
    with pytest.raises(interface.ControllerDownError, match="did not respond"):
        CommandsClient(Slurm()).jobs()
    with pytest.raises(interface.UnknownJobError):
        CommandsClient(Slurm()).job(5)


def test_signal_is_sent_to_running_jobs_only():
    """scancel would wait for a pending job to start."""
    with pytest.raises(interface.InvalidStateError, match="it does not run"):
        CommandsClient(Slurm(jobs=[job(state="PENDING")])).signal(5, "USR1")
    with pytest.raises(interface.AlreadyDoneError, match="COMPLETED"):
        CommandsClient(Slurm(jobs=[job(state="COMPLETED")])).cancel(5, signal=10)
    slurm = Slurm(jobs=[job()])
    CommandsClient(slurm).signal(5, "USR1", to="all")
    assert slurm.ran[-1] == ["scancel", "--verbose", "--signal=10", "--full", "--", "5"]
    array = [job(5, "PENDING", array_job_id=5, array_task_string="2-3"), job(6, array_job_id=5, array_task_id=1)]
    CommandsClient(Slurm(jobs=array)).signal(5, "USR1")


def test_job_is_selected_among_several_records():
    """Of an array, the pending tasks or the requested task; of a heterogeneous job, its component."""
    records = [
        job(5, "PENDING", array_job_id=5, array_task_string="3-9:3,11%2"),
        job(6, array_job_id=5, array_task_id=1),
        job(7, array_job_id=5, array_task_id=2),
        job(8, het_job_id=8, het_job_offset=0),
        job(9, het_job_id=8, het_job_offset=1),
    ]
    client = CommandsClient(Slurm(jobs=records))
    for name, number in (("5", 5), ("5_2", 7), ("5_6", 5), ("5_11", 5), ("7", 7), ("8", 8), ("8+1", 9), ("8+0", 8)):
        assert client.job(name).job_id == number
    for name in ("5_4", "5_12", "8+2", "10"):
        with pytest.raises(interface.UnknownJobError):
            client.job(name)


def test_programs_other_than_slurms_are_refused():
    answers = {"--version": (0, b"scontrol by somebody\n", ""), "show": (1, b"", "unrecognized option '--json'")}
    client = CommandsClient(Slurm(answers))
    with pytest.raises(UnreachableError, match="not Slurm's scontrol"):
        client.version()
    with pytest.raises(interface.SlurmError, match="list jobs: unrecognized option"):
        client.jobs()
    with pytest.raises(interface.SlurmError, match="read the configuration"):
        client.config()


@pytest.mark.parametrize(
    ("listed", "parser"),
    [(b"data_parser/v0.0.42\ndata_parser/v0.0.40\n", "v0.0.42"),
     (b"data_parser/v0.0.44\ndata_parser/v0.0.46\ndata_parser/v0.0.45\n", "v0.0.45")],
)  # fmt: skip
def test_newest_data_parser_of_both_sides_is_requested_once(listed, parser):
    slurm = Slurm(jobs=[job()])
    slurm.parsers = listed
    client = CommandsClient(slurm)
    client.jobs()
    client.steps()
    assert [words[2] for words in slurm.ran if "show" in words] == [f"--json={parser}"] * 2
    assert slurm.listings == 1


def test_output_path_of_newer_parsers_is_without_patterns():
    """From v0.0.43 on, ``standard_output`` has the patterns."""
    (result,) = CommandsClient(
        Slurm(jobs=[job(standard_output="slurm-%j.out", stdout_expanded="/h/slurm-5.out")])
    ).jobs()
    assert result.stdout == "/h/slurm-5.out"


@pytest.mark.parametrize("listed", [b"data_parser/v0.0.46\n", b"data_parser/v0.0.41\n", b"", b"Possible\n"])
def test_slurm_without_a_known_data_parser_is_reported(listed):
    slurm = Slurm(jobs=[job()])
    slurm.parsers = listed
    with pytest.raises(UnreachableError, match=r"no data parser of v0\.0\.42 to v0\.0\.45"):
        CommandsClient(slurm).jobs()


def test_client_is_a_context_manager():
    with CommandsClient(Slurm()) as client:
        assert client.backend == "commands"


def test_data_parser_removed_by_an_upgrade_is_replaced():
    """The client of a daemon outlives an upgrade of Slurm."""
    slurm = Slurm({"--json=v0.0.42": (1, b"", "scontrol: error: load_plugins: unable to find plugin")}, jobs=[job(5)])
    client = CommandsClient(slurm)
    with pytest.raises(AffinodeError, match="unable to find plugin"):
        client.jobs()
    slurm.parsers = b"data_parser/v0.0.43\n"
    assert len(client.jobs()) == 1


def test_pattern_of_the_submission_is_no_path_of_output():
    jobs = CommandsClient(Slurm(jobs=[job(standard_output="slurm-%j.out", stdout_expanded="")])).jobs()
    assert jobs[0].stdout is None
