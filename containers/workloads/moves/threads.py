#!/usr/bin/python3
"""Threads: numbers passed around a ring of them, their names, local data and identifiers."""

import ctypes
import queue
import threading

from moving import run, same

COUNT = 16
rings = [queue.Queue() for _ in range(COUNT + 1)]
local = threading.local()
prctl = ctypes.CDLL(None).prctl


def name_of_thread() -> bytes:
    text = ctypes.create_string_buffer(16)
    prctl(16, text)
    return text.value


def work(number: int) -> None:
    prctl(15, f"ring-{number}".encode())
    local.identity = (number, threading.get_native_id())
    while True:
        value = rings[number].get()
        kept = local.identity == (number, threading.get_native_id()) and name_of_thread() == f"ring-{number}".encode()
        rings[number + 1].put(value + 1 if kept else -1000)


for number in range(COUNT):
    threading.Thread(target=work, args=(number,), daemon=True).start()


def check():
    rings[0].put(5)
    same(rings[COUNT].get(timeout=30), 5 + COUNT, "the number after a round through all threads")


run(check)
