#!/usr/bin/python3
"""Alarms that expire once: a far one stays set, and a near one arrives."""

import signal
import time

from moving import require, run

FAR_S = 100_000
arrived = 0
signal.signal(signal.SIGVTALRM, lambda *_: globals().__setitem__("arrived", arrived + 1))
signal.alarm(FAR_S)


def check():
    left_s, _ = signal.getitimer(signal.ITIMER_REAL)
    require(0 < left_s <= FAR_S, f"{left_s} s are left of the alarm")
    before = arrived
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.02)
    began = time.monotonic()
    while arrived == before and time.monotonic() - began < 30:
        pass
    require(arrived == before + 1, f"{arrived - before} alarms have arrived")


run(check)
signal.alarm(0)
