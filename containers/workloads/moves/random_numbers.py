#!/usr/bin/python3
"""A page that is empty in children, as of libraries for random numbers, and random numbers of parent and child."""

import mmap
import os

from moving import require, run

WIPE_ON_FORK = 18
page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
page.madvise(WIPE_ON_FORK)
page[:5] = b"state"
os.urandom(8)


def in_child(call):
    """Return what a call returns in a child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, call())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as file:
        return file.read()


def check():
    require(page[:5] == b"state", "the page has other contents")
    require(in_child(lambda: page[:5]) == bytes(5), "the page of the child is not empty")
    require(in_child(lambda: os.urandom(16)) != os.urandom(16), "parent and child have the same random numbers")


run(check)
