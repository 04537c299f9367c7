#!/usr/bin/python3
"""Timers, and clocks: none goes backwards, and a periodic timer continues, also if it has expired and was not read."""

import ctypes
import os
import select
import signal
import time

from moving import require, run, same

CLOCKS = (time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME)  # CPU time starts again at 0
beats = 0
signal.signal(signal.SIGALRM, lambda *_: globals().__setitem__("beats", beats + 1))
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
LIBC = ctypes.CDLL(None)
timer = LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
LIBC.timerfd_settime(timer, 0, (ctypes.c_long * 4)(0, 1_000_000, 0, 1_000_000), None)
last = [time.clock_gettime(clock) for clock in CLOCKS]


def check():
    before = beats
    for number, clock in enumerate(CLOCKS):
        now = time.clock_gettime(clock)
        require(now >= last[number], f"clock {clock} went from {last[number]} to {now}")
        last[number] = now
    began = time.monotonic()
    while beats == before and time.monotonic() - began < 30:
        time.sleep(0.06)
    require(beats > before, "the interval timer has stopped")
    same(select.select([timer], [], [], 30)[0], [timer], "the file of a timer that has expired")
    same(len(os.read(timer, 8)), 8, "the number of its expirations")
    same(signal.getitimer(signal.ITIMER_REAL)[1], 0.05, "the interval")


run(check)
signal.setitimer(signal.ITIMER_REAL, 0)
