"""A TCP relay on loopback.

    python relay.py PORT TARGET_PORT [BYTES_PER_SEC]

What comes back from the target is held to a rate that all connections share; without one it passes as it comes. Ends with
its standard input, so that it cannot outlive who started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time

PIECE = 8192


class Line:
    """A line of a certain width, which pieces pass one after the other."""

    def __init__(self, bytes_per_sec: float | None):
        self.bytes_per_sec = bytes_per_sec
        self.free_at = 0.0

    async def carry(self, num_bytes: int) -> None:
        """Return when the piece has passed."""
        if self.bytes_per_sec is None:
            return
        self.free_at = max(self.free_at, time.monotonic()) + num_bytes / self.bytes_per_sec
        await asyncio.sleep(self.free_at - time.monotonic())


async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, line: Line) -> None:
    """Move what comes until one side ends."""
    with contextlib.suppress(OSError):
        while piece := await source.read(PIECE):
            await line.carry(len(piece))
            target.write(piece)
            await target.drain()
    with contextlib.suppress(OSError):
        target.close()


async def serve(port: int, target_port: int, bytes_per_sec: float | None) -> None:
    """Relay for ever."""
    back, forth = Line(bytes_per_sec), Line(None)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_target, to_target = await asyncio.open_connection("127.0.0.1", target_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, to_target, forth), pump(from_target, writer, back))

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    await server.serve_forever()


def end_with_input() -> None:
    """Leave as soon as the one who holds the other end of the standard input is gone."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_input, daemon=True).start()
    rate = float(sys.argv[3]) if len(sys.argv) > 3 else None
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), rate))
