#!/usr/bin/python3
"""Descriptors without names: eventfd, epoll, an expired timerfd, memfd, and pipes and sockets with data in them."""

import ctypes
import os
import select
import socket

from moving import run, same

LIBC = ctypes.CDLL(None)
event = os.eventfd(7, os.EFD_NONBLOCK)
memory = os.memfd_create("numbers")
os.write(memory, bytes(range(256)) * 64)
reader, writer = os.pipe()
os.write(writer, b"in the pipe")
near, far = socket.socketpair()
near.send(b"in the socket")
datagrams = socket.socketpair(type=socket.SOCK_DGRAM)
datagrams[0].send(b"one")
datagrams[0].send(b"two")
timer = LIBC.timerfd_create(1, os.O_NONBLOCK)
LIBC.timerfd_settime(timer, 0, (ctypes.c_long * 4)(0, 0, 0, 1), None)
poll = select.epoll()
poll.register(event, select.EPOLLIN)
poll.register(timer, select.EPOLLIN)
duplicate = os.dup(memory)
os.set_inheritable(duplicate, True)


def check():
    same(os.eventfd_read(event), 7, "the count of the eventfd")
    os.eventfd_write(event, 7)
    same(os.pread(memory, 1 << 20, 0), bytes(range(256)) * 64, "the memory file")
    same(os.lseek(duplicate, 0, os.SEEK_CUR), 256 * 64, "the position of a duplicate")
    same((os.get_inheritable(duplicate), os.get_inheritable(memory)), (True, False), "flags of descriptors")
    same(os.read(reader, 100), b"in the pipe", "the pipe")
    os.write(writer, b"in the pipe")
    same(far.recv(100), b"in the socket", "the socket")
    near.send(b"in the socket")
    same((datagrams[1].recv(10), datagrams[1].recv(10)), (b"one", b"two"), "the datagrams")
    datagrams[0].send(b"one")
    datagrams[0].send(b"two")
    ready = {fd for fd, _ in poll.poll()}
    same(ready, {event, timer}, "what epoll reports")


run(check)
