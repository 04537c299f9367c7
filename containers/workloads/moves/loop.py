#!/usr/bin/python3
"""asyncio: tasks, a server with a client, a subprocess with pipes, and timeouts."""

import asyncio
import random

from moving import END, require, same, say


async def main():
    async def echo(reader, writer):
        while line := await reader.readline():
            writer.write(line)
            await writer.drain()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    child = await asyncio.create_subprocess_exec("cat", stdin=-1, stdout=-1)
    later = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(asyncio.wait_for(asyncio.shield(later), 100_000))
    numbers, again = random.Random(5), random.Random(5)
    say("started")
    while not END.exists():
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"over the loop\n")
        same(await reader.readline(), b"over the loop\n", "the answer of the server")
        writer.close()
        child.stdin.write(b"to the child\n")
        same(await child.stdout.readline(), b"to the child\n", "the answer of the child")
        require(not waiting.done(), "a task that waits")
        same(numbers.random(), again.random(), "a random number")
        await asyncio.sleep(0.1)
    later.set_result("set")
    same(await waiting, "set", "the task that waited")
    child.stdin.close()
    same(await child.wait(), 0, "the status of the child")


asyncio.run(main())
