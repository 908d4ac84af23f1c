"""The supervisor's end and the node's end of one start script.

On the node a small script starts the start script when it is told to, and passes on what comes in
on its standard input. Where that closes (the supervisor, the ssh connection or this machine is
gone), it ends the command: nothing is left behind that nobody watches.
"""

import asyncio
import re
import shlex
from collections.abc import Sequence
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


class Relay:
    """The supervisor's end."""

    def __init__(self, node: Node, process: asyncio.subprocess.Process) -> None:
        self.node = node
        self.said = ""
        """The last line that was no word of the relay's: why a node can't be had."""
        self.is_ready = False
        self._process = process
        self._ready = asyncio.Event()
        self._code: int | None = None
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def open(
        cls, node: Node, folder: Path, attempt: int, grace_s: int, *, is_exclusive: bool
    ) -> "Relay":
        """Reach a node, and get ready there; `is_ready` says whether it is."""
        words = [attempt, node.name, grace_s, int(is_exclusive)]
        relay = cls(node, await _start(node, ["bash", folder / RELAY, *words]))
        try:
            async with asyncio.timeout(_READY_S):
                await relay._ready.wait()
        except TimeoutError:
            relay.said = f"it did not answer within {_READY_S:.0f} s"
        return relay

    def tell(self, word: str) -> None:
        """START, or a signal that is passed on."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(f"{word}\n".encode())

    async def ended(self) -> int | None:
        """Wait for the command's end: its exit code, or None where it was lost with its node."""
        await asyncio.shield(self._reading)
        await self.close()
        return self._code

    async def close(self) -> None:
        """Let it go; where the command runs, it is ended."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_GONE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _read(self) -> None:
        output = self._process.stdout
        assert output is not None
        while True:
            try:
                raw = await output.readline()
            except ValueError:  # a line without end is none of ours
                continue
            if not raw:
                break
            line = raw.decode(errors="replace").strip()
            if line == "ready":
                self.is_ready = True
                self._ready.set()
            elif found := _EXIT.fullmatch(line):
                self._code = int(found[1])
            elif line:
                self.said = line[:_MOST_SAID]
        self._ready.set()


async def _start(node: Node, words: Sequence[object]) -> asyncio.subprocess.Process:
    command = [str(word) for word in words]
    if node.prefix:  # a shell there takes one text
        command = [*node.prefix, shlex.join(command)]
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
