#!/usr/bin/python3
"""Connections inside of the job, by TCP on the loopback interface and by the name of a socket, and UDP."""

import os
import socket
import tempfile
import threading

from moving import run, same

with tempfile.TemporaryDirectory(dir=os.path.expanduser("~")) as directory:

    def connected(server: socket.socket) -> socket.socket:
        client = socket.socket(server.family)
        client.connect(server.getsockname())
        peer, _ = server.accept()

        def echo():
            while data := peer.recv(4096):
                peer.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        return client

    named = socket.socket(socket.AF_UNIX)
    named.bind(f"{directory}/socket")
    named.listen()
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(type=socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    address, options = tcp.getsockname(), ((socket.SO_REUSEADDR, 1), (socket.SO_KEEPALIVE, 0))
    by_name, kept = connected(named), connected(tcp)

    def check():
        by_name.sendall(b"by name")
        same(by_name.recv(100), b"by name", "an answer by name")
        kept.sendall(b"again")
        same(kept.recv(100), b"again", "an answer over the first TCP connection")
        client = connected(tcp)
        client.sendall(b"over TCP")
        same(client.recv(100), b"over TCP", "an answer over TCP")
        client.close()
        udp.sendto(b"over UDP", udp.getsockname())
        same(udp.recv(100), b"over UDP", "a datagram")
        same(tcp.getsockname(), address, "the address of the server")
        for option, value in options:
            same(tcp.getsockopt(socket.SOL_SOCKET, option), value, f"socket option {option}")

    run(check)
