#!/usr/bin/python3
"""A shell in a terminal: its window, modes, foreground group and variables."""

import fcntl
import os
import pty
import struct
import termios

from moving import run, same

pid, terminal = pty.fork()
if pid == 0:
    os.execvp("bash", ["bash", "--norc", "--noediting", "-i"])
fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
modes = termios.tcgetattr(terminal)
modes[3] &= ~termios.ECHO
termios.tcsetattr(terminal, termios.TCSANOW, modes)
modes = termios.tcgetattr(terminal)


def ask(line):
    os.write(terminal, f"{line}; echo =$((1))done\n".encode())
    text = b""
    while b"=1done" not in text:
        text += os.read(terminal, 4096)
    return text


ask("PS1= PS2=; kept=in-the-shell; stty -echo; sleep 100000 & true")


def check():
    same(b"33 77" in ask("stty size"), True, "the size of the window")
    same(b"=in-the-shell" in ask('echo "=$kept"'), True, "the variable of the shell")
    same(b"sleep 100000" in ask("jobs -r"), True, "the job of the shell")
    same(termios.tcgetattr(terminal)[:4], modes[:4], "the modes of the terminal")


run(check)
ask("kill %1")
