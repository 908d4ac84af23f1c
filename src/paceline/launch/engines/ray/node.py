"""The actor on a node: a pipe to the relay that runs there.

Ray sends this file's code to the node: nothing but Python's own library is needed there.
"""

import asyncio
import os
import socket
from collections.abc import Sequence


class NodeActor:
    """Of one node of a job. With its process goes the pipe, and then the relay ends the command."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def host(self) -> str:
        """The name of the machine."""
        return socket.gethostname()

    async def open(self, words: Sequence[str]) -> None:
        """Start the relay. Ray's workers compute with one thread; the command does not."""
        told = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._process = await asyncio.create_subprocess_exec(
            *words,
            env=told,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )

    async def tell(self, word: str) -> None:
        """A line for the relay."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{word}\n".encode())

    async def line(self) -> str | None:
        """The next line that it says; None: its end."""
        if self._process is None or self._process.stdout is None:
            return None
        try:
            raw = await self._process.stdout.readline()
        except ValueError:  # a line without end is none of the relay's
            return ""
        return raw.decode(errors="replace").strip() if raw else None

    async def close(self) -> None:
        """Close the pipe, and wait until the command is gone."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()
