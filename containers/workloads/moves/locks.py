#!/usr/bin/python3
"""Locks of files: flock(2), and those of fcntl(2) for a process and for an open file."""

import fcntl
import os
import struct
import subprocess
import sys
import tempfile

from moving import require, run

OFD_SETLK = 37
WHOLE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
TRY = f"""
import fcntl, sys
file = open(sys.argv[2], "r+b")
try:
    if sys.argv[1] == "flock":
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        fcntl.fcntl(file, {OFD_SETLK}, {WHOLE!r})
except OSError:
    sys.exit(3)
"""
files = {kind: tempfile.NamedTemporaryFile(dir=os.path.expanduser("~")) for kind in ("flock", "process", "file")}
fcntl.flock(files["flock"], fcntl.LOCK_EX)
fcntl.lockf(files["process"], fcntl.LOCK_EX)
fcntl.fcntl(files["file"], OFD_SETLK, WHOLE)


def check():
    for kind, file in files.items():
        tried = subprocess.run([sys.executable, "-c", TRY, kind, file.name])
        require(tried.returncode == 3, f"the lock {kind} is not held")


run(check)
