#!/usr/bin/python3
"""Waits with and without a time limit: none fails with EINTR, as no signal has a handler, and none ends early."""

import ctypes
import os
import select
import threading
import time
from ctypes import byref, c_int, c_long

from moving import require, run

LIMIT_S = 20
LIBC = ctypes.CDLL(None, use_errno=True)
reader, _ = os.pipe()
entry = (c_int * 2)(reader, select.POLLIN)
epoll = select.epoll()
epoll.register(reader, select.EPOLLIN)
events = ctypes.create_string_buffer(12)
semaphore = ctypes.create_string_buffer(32)
LIBC.sem_init(semaphore, 0, 0)
signals = (c_long * 16)(1 << 40)
failures = []


def span(seconds):
    return byref((c_long * 2)(int(seconds), int(seconds % 1 * 1e9)))


def until():
    return span(time.clock_gettime(time.CLOCK_REALTIME) + LIMIT_S)


ENDED, EAGAIN, ETIMEDOUT = 0, 11, 110
WAITS = {
    "poll": (ENDED, lambda: LIBC.poll(entry, 1, LIMIT_S * 1000)),
    "poll without a limit": (None, lambda: LIBC.poll(entry, 1, -1)),
    "ppoll": (ENDED, lambda: LIBC.ppoll(entry, 1, span(LIMIT_S), None)),
    "select": (ENDED, lambda: LIBC.select(0, None, None, None, span(LIMIT_S))),
    "epoll_wait": (ENDED, lambda: LIBC.epoll_wait(epoll.fileno(), events, 1, LIMIT_S * 1000)),
    "epoll_wait without a limit": (None, lambda: LIBC.epoll_wait(epoll.fileno(), events, 1, -1)),
    "nanosleep": (ENDED, lambda: LIBC.nanosleep(span(LIMIT_S), span(0))),
    "usleep": (ENDED, lambda: LIBC.usleep(LIMIT_S * 1_000_000)),
    "sem_timedwait": (ETIMEDOUT, lambda: LIBC.sem_timedwait(semaphore, until())),
    "sigtimedwait": (EAGAIN, lambda: LIBC.sigtimedwait(signals, None, span(LIMIT_S))),
    "sigwaitinfo": (None, lambda: LIBC.sigwaitinfo(signals, None)),
}


def wait(name):
    expected, call = WAITS[name]
    while True:
        began = time.time()
        ctypes.set_errno(0)
        result = call()
        error = ctypes.get_errno() if result < 0 else result
        if error != expected:
            failures.append(f"{name} returned {result}, {os.strerror(error)}")
        elif time.time() - began < LIMIT_S - 1:
            failures.append(f"{name} ended after {time.time() - began} s")


for each in WAITS:
    threading.Thread(target=wait, args=(each,), daemon=True).start()
run(lambda: require(not failures, failures))
