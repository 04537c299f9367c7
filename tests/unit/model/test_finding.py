"""Findings of the clean-up."""

from __future__ import annotations

from zombie_samples import job, lost, squatter

from slurm_affinode.model.finding import without_repeated_hours


def test_hours_of_a_model_server_and_of_its_idle_job_count_once() -> None:
    """Of several diagnoses of a server, the one with the most hours counts, unless the job has idle GPUs."""
    idle, partly = squatter(held_gpu_hours=4.0), squatter(kind="idle-allocation", held_gpu_hours=1.0)
    servers = [
        squatter(kind="model-server", variant=name, held_gpu_hours=hours, subject=job(job_id=number, id=str(number)))
        for name, hours, number in (
            ("idle", 3.0, 7), ("idle", 2.0, 8), ("squatter-signature", 2.5, 8), ("stalled", None, 8),
        )
    ]  # fmt: skip
    orphan = lost(held_gpu_hours=None)
    assert without_repeated_hours([idle, partly, *servers, orphan]) == [idle, partly, servers[2], orphan]
    assert without_repeated_hours(servers[3:]) == servers[3:]
