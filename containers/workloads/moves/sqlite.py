#!/usr/bin/python3
"""A database with an open transaction, a write-ahead log, and temporary tables."""

import os
import sqlite3
import tempfile

from moving import run, same

with tempfile.TemporaryDirectory(dir=os.path.expanduser("~")) as directory:
    base = sqlite3.connect(f"{directory}/base", isolation_level=None)
    base.execute("pragma journal_mode = wal")
    base.execute("create table numbers (number integer)")
    other = sqlite3.connect(f"{directory}/base", isolation_level=None)
    base.execute("create temporary table mine (number integer)")
    base.executemany("insert into mine values (?)", [(number,) for number in range(1000)])
    base.execute("begin")
    base.executemany("insert into numbers values (?)", [(number,) for number in range(1000)])
    done = 0

    def check():
        global done
        same(base.execute("select count(*), sum(number) from mine").fetchone(), (1000, 499_500), "temporary table")
        same(base.execute("select count(*) from numbers").fetchone(), (1000 * (done + 1),), "rows in a transaction")
        same(other.execute("select count(*) from numbers").fetchone(), (1000 * done,), "rows outside of it")
        base.execute("commit")
        done += 1
        same(base.execute("pragma integrity_check").fetchone(), ("ok",), "the database")
        base.execute("begin")
        base.executemany("insert into numbers values (?)", [(number,) for number in range(1000)])

    run(check)
