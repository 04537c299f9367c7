"""Expected demand for checkpoint images, updated and read by several threads."""

from __future__ import annotations

import threading

from slurm_affinode.checkpoint.store.retention import SharedDemand


def test_concurrent_updates_and_reads_do_not_fail() -> None:
    """The state is saved while another thread suspends a job."""
    demand, stop, failed = SharedDemand(), threading.Event(), list[BaseException]()

    def tell() -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                demand.requested(str(number % 5000), 2000.0 * number)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        for number in range(300):
            state = demand.state()
            assert SharedDemand.restored(state).state() == state
            demand.rates(state["marks"], 0.0)
            demand.keep([str(number)] if number % 50 == 0 else list(state["marks"]))
    finally:
        stop.set()
        thread.join()
    assert not failed
