"""The supervisor's end and the node's end of one start script.

On the node a small script starts the start script when it is told to, and passes on what comes in
on its standard input. Where that closes (the supervisor, the ssh connection or this machine is
gone), it ends the command: nothing is left behind that nobody watches.
"""

import asyncio
import re
import shlex
from abc import ABC, abstractmethod
from pathlib import Path

from paceline.launch.contract import ATTEMPT
from paceline.launch.start_script import START_SCRIPT
from paceline.launch.supervision.state import Node

RELAY = "relay.sh"
BUSY = "it has another job"
_READY_S = 60.0
_GONE_S = 10.0
_MOST_SAID = 300
_EXIT = re.compile(r"exit (\d{1,3})")

RELAY_SCRIPT = f"""\
#!/bin/bash
# Keeps {START_SCRIPT} on a node while its standard input is open, whose lines are signals.
# Written by paceline launch. Takes: attempt, node, seconds from SIGTERM to SIGKILL, 1 to lock it.
cd -- "$(dirname -- "$0")" || exit 1
export {ATTEMPT}="$1" PACELINE_NODE="$2"
if [ "$4" = 1 ]; then
  locks=${{XDG_CACHE_HOME:-$HOME/.cache}}/paceline/nodes
  mkdir -p "$locks" && exec 9>"$locks/$2.lock" || exit 1
  flock -n 9 || {{ echo "{BUSY}"; exit 1; }}
fi
exec 3<&0
echo ready
read -r word <&3 && [ "$word" = START ] || exit 1
setsid bash {START_SCRIPT} </dev/null 3<&- 9>&- &
command=$!
(
  exec 9>&- >/dev/null 2>&1
  while read -r word <&3; do
    case $word in
      KILL) kill -s KILL -- "-$command" ;;
      TERM | USR1) kill -s "$word" "$command" ;;
    esac
  done
  kill -s TERM "$command"
  sleep "$3"
  kill -s KILL -- "-$command"
) &
reader=$!
exec 3<&-
wait "$command"
kill -s KILL -- "-$command" 2>/dev/null
kill "$reader"
"""


class Relay(ABC):
    """The supervisor's end of the start script on one node."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Of the node."""
        self.said = ""
        """The last line that was no word of the relay's: why a node can't be had."""
        self.is_ready = False
        self._ready = asyncio.Event()
        self._code: int | None = None
        self._reading = asyncio.ensure_future(self._read())

    @abstractmethod
    def tell(self, word: str) -> None:
        """START, or a signal that is passed on."""

    @abstractmethod
    async def close(self) -> None:
        """Let it go; where the command runs, it is ended."""

    @abstractmethod
    async def _line(self) -> str | None:
        """The next line that comes from the node; None: its end."""

    async def until_ready(self) -> None:
        """Wait until it is ready, or `said` says why it isn't."""
        try:
            async with asyncio.timeout(_READY_S):
                await self._ready.wait()
        except TimeoutError:
            self.said = f"it did not answer within {_READY_S:.0f} s"

    async def ended(self) -> int | None:
        """Wait for the command's end: its exit code, or None where it was lost with its node."""
        await asyncio.shield(self._reading)
        await self.close()
        return self._code

    async def _read(self) -> None:
        while (line := await self._line()) is not None:
            if line == "ready":
                self.is_ready = True
                self._ready.set()
            elif found := _EXIT.fullmatch(line):
                self._code = int(found[1])
            elif line:
                self.said = line[:_MOST_SAID]
        self._ready.set()


class ProcessRelay(Relay):
    """Of a process on this machine, which is the node or leads to it."""

    def __init__(self, node: Node, process: asyncio.subprocess.Process) -> None:
        self._process = process
        super().__init__(node.name)

    @classmethod
    async def open(
        cls, node: Node, folder: Path, attempt: int, grace_s: int, *, is_exclusive: bool
    ) -> "ProcessRelay":
        """Reach a node, and get ready there; `is_ready` says whether it is."""
        words = relay_command(folder, attempt, node.name, grace_s, is_exclusive=is_exclusive)
        if node.prefix:  # a shell there takes one text
            words = [*node.prefix, shlex.join(words)]
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        relay = cls(node, process)
        await relay.until_ready()
        return relay

    def tell(self, word: str) -> None:
        """See `Relay`."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(f"{word}\n".encode())

    async def close(self) -> None:
        """See `Relay`."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_GONE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _line(self) -> str | None:
        output = self._process.stdout
        assert output is not None
        try:
            raw = await output.readline()
        except ValueError:  # a line without end is none of ours
            return ""
        return raw.decode(errors="replace").strip() if raw else None


def relay_command(
    folder: Path, attempt: int, name: str, grace_s: int, *, is_exclusive: bool
) -> list[str]:
    """What runs on the node, below a job's folder."""
    words = ["bash", folder / RELAY, attempt, name, grace_s, int(is_exclusive)]
    return [str(word) for word in words]
