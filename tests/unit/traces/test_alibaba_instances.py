"""Instances of the DLRM trace of 2025, and pods and nodes of the shared-GPU trace of 2023."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_affinode.base.errors import InputError
from slurm_affinode.traces import alibaba_instances, claims, instances

DLRM = "instance_sn,role,app_name,cpu_request,gpu_request,memory_request,creation_time,scheduled_time,deletion_time\n"


def dlrm(path: Path, text: str) -> Path:
    file = path / alibaba_instances.DLRM_FILE
    file.write_text(DLRM + text)
    return file


def test_window_of_the_trace_gives_states(tmp_path: Path) -> None:
    """A synthetic file: empty times are before or after the trace."""
    file = dlrm(
        tmp_path, "i0,HN,a,8,1,40.0,,,\ni1,CN,a,64,0,320.0,5.0,7.0,9.0\ni2,CN,b,64,0,320.0,,,9\ni3,CN,b,64,0,320,5,5,\n"
    )
    rows = alibaba_instances.read_dlrm2025(tmp_path).instances
    assert rows["state"].to_list() == ["whole trace", "within the trace", "began before", "continues after"]
    assert rows["ended"].to_list() == [False, True, True, False]
    assert rows.select("group", "service", "cpus", "gpus", "memory_gib").row(0) == ("HN", "a", 8.0, 1.0, 40.0)
    assert alibaba_instances.read_dlrm2025(file).name == str(file)


def test_unknown_role_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trace\.csv:2: role XN is unknown"):
        alibaba_instances.read_dlrm2025(dlrm(tmp_path, "i0,XN,a,8,1,40.0,,,\n"))


def test_published_instances(shared_data: Path) -> None:
    s = instances.analyse(alibaba_instances.read_dlrm2025(shared_data / "alibaba-gpu-v2025")).summary
    assert {name: group.instances for name, group in s.groups.items()} == {"CN": 16_485, "HN": 7_386}
    t = s.total
    assert t.wait_s is not None
    assert (t.created_inside, t.waits_known, s.services) == (16_591, 16_591, 156)
    assert (round(t.wait_s.mean, 1), t.wait_s.median, int(t.wait_s.p99)) == (187.9, 0, 1651)
    assert t.lives_known + sum(n for state, n in s.states.items() if state != "within the trace") == 23_871
    judged = claims.judge(claims.load("dlrm2025"), claims.flat(s.as_dict()))
    assert {claim.verdict for claim in judged} == {claims.BORNE_OUT}


PAI = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"


def pai(path: Path, text: str, nodes: str = "") -> Path:
    (path / alibaba_instances.PAI_PODS).write_text(PAI + text)
    if nodes:
        (path / alibaba_instances.PAI_NODES).write_text("sn,cpu_milli,memory_mib,gpu,model\n" + nodes)
    return path


def test_requests_are_in_thousandths(tmp_path: Path) -> None:
    """A synthetic list: parts of a GPU, several GPUs, and pods that wait or run."""
    pods = (
        "p0,500,1024,1,250,,LS,Running,0,9,1\np1,1000,2048,4,1000,T4|A10,BE,Failed,0,9,1\n"
        "p2,1000,2048,1,1000,,BE,Pending,0,9,\np3,1000,2048,0,0,,BE,Succeeded,0,9,1\n"
    )
    log = alibaba_instances.read_pai2023(pai(tmp_path, pods, "n0,1,1,8,T4\nn1,1,1,0,\nn2,1,1,2,A10\n"))
    rows = log.instances
    assert rows["group"].to_list() == ["part-of-a-gpu", "several-gpus", "one-gpu", "no-gpu"]
    assert (rows["gpus"].to_list(), rows["cpus"][0], rows["memory_gib"][0]) == ([0.25, 4.0, 1.0, 0.0], 0.5, 1.0)
    assert rows["ended"].to_list() == [False, True, False, True]
    assert (log.capacity, log.gpu_type_constraints) == ({"T4": 8, "A10": 2}, 1)
    s = instances.analyse(log).summary
    assert (s.total.still_waiting, s.total.still_running, s.peak_gpus) == (1, 1, 4.25)
    assert s.gpu_type_constrained_share == pytest.approx(1 / 3)


def test_nodes_may_be_missing(tmp_path: Path) -> None:
    log = alibaba_instances.read_pai2023(pai(tmp_path, "p0,500,1024,1,250,,LS,Running,0,9,1\n"))
    assert instances.analyse(log).summary.capacity_gpus is None


def test_unknown_phase_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"default\.csv:2: phase Lost is unknown"):
        alibaba_instances.read_pai2023(pai(tmp_path, "p0,500,1024,1,250,,LS,Lost,0,9,1\n"))


def test_published_pods(shared_data: Path) -> None:
    """897 pods wait and 5,193 run: neither has a wait or a life of 0."""
    s = instances.analyse(alibaba_instances.read_pai2023(shared_data / "alibaba-gpu-v2023")).summary
    t = s.total
    assert t.wait_s is not None
    assert (t.instances, t.still_waiting, t.still_running, t.waits_known) == (8_152, 897, 5_193, 7_255)
    assert (t.wait_s.median, round(t.wait_s.mean, 1), s.capacity_gpus) == (2, 61.3, 6_212)
    judged = claims.judge(claims.load("pai2023"), claims.flat(s.as_dict()))
    assert [claim.verdict for claim in judged] == [claims.BORNE_OUT, claims.NOT_BORNE_OUT]
