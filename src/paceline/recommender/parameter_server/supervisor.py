"""Start servers, and bring a dead one back.

One rank of each node is the keeper of that node's servers: it starts them, one thread watches each,
and one that dies is started again at the same port, from its newest checkpoint. Servers end with
their keeper, whatever ends it: their standard input closes. One that can't stay up ends the run by
the workers' time-out.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from paceline.config.errors import RunError
from paceline.recommender.parameter_server.client import Address
from paceline.recommender.parameter_server.serve import ServerSettings

# Started on a loaded machine, a server has to import numpy and to make its rows.
_START_S = 120.0
# One that dies this often in a row without having lived for a while won't get better.
_MOST_RESTARTS = 3
_LIVED_S = 10.0


@dataclass
class SupervisedServer:
    """One server process, and the thread that watches it."""

    settings: ServerSettings
    say: Callable[[str], None]
    process: subprocess.Popen[str] = field(init=False)
    _closing: bool = False
    _watcher: threading.Thread = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.settings = replace(self.settings, port=self._start())
        # From now on it is brought back from its checkpoints.
        self.settings = replace(self.settings, base=0)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self.settings.host, self.settings.port

    def set_base(self, step: int) -> None:
        """Note the checkpoint that the run went on from."""
        self.settings = replace(self.settings, base=step)

    def close(self) -> None:
        """End it."""
        with self._lock:
            self._closing = True
            self.process.kill()
        self._watcher.join()
        self._close_pipes()

    def _start(self) -> int:
        """Start a process with the settings as they are; return the port it listens at.

        Raises:
            RunError: it ends before it listens.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.recommender.parameter_server.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is the launcher's
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        patience = threading.Timer(_START_S, self.process.kill)
        patience.start()
        try:
            self.process.stdin.write(self.settings.to_json() + "\n")
            self.process.stdin.flush()
            word, _, port = self.process.stdout.readline().partition(" ")
        except BrokenPipeError:
            word = ""
        finally:
            patience.cancel()
        if word != "port":
            raise RunError(
                f"server {self.settings.server} of the tables did not start (it ended with "
                f"{self.process.wait()}); its traceback is in the log of the rank that started it."
            )
        return int(port)

    def _watch(self) -> None:
        """Pass on what it says; when it is gone, start it again."""
        restarts = 0
        while True:
            began = time.monotonic()
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.say(f"server {self.settings.server} of the tables {line.strip()}.")
            how = _ending(self.process.wait())
            restarts = 0 if time.monotonic() - began > _LIVED_S else restarts + 1
            with self._lock:
                if self._closing or not self._again(how, restarts):
                    return

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _again(self, how: str, restarts: int) -> bool:
        name = f"server {self.settings.server} of the tables (pid {self.process.pid})"
        if restarts > _MOST_RESTARTS:
            self.say(f"{name} ended {how} again and is given up.")
            return False
        self.say(f"{name} ended {how}: started again, the workers wait.")
        self._close_pipes()
        try:
            self._start()
        except RunError as error:
            self.say(str(error))
            return False
        return True


def _ending(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
