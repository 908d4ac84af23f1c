"""Which process a number means: a number that was given away again is another process."""

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process of one boot of one machine, by its number and when it was made."""

    host: str
    boot: str
    pid: int
    ticks: int
    """Of the machine's clock since its boot, when the process was made."""

    @classmethod
    def of_this(cls) -> "ProcessIdentity":
        """The calling process."""
        boot = _BOOT_ID.read_text().strip()
        ticks = _ticks(os.getpid())
        assert ticks is not None
        return cls(socket.gethostname(), boot, os.getpid(), ticks)

    @property
    def is_here(self) -> bool:
        """Whether it is, or was, one of this machine's."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether it runs still; only this machine's processes are known."""
        is_this_boot = self.is_here and self.boot == _BOOT_ID.read_text().strip()
        return is_this_boot and _ticks(self.pid) == self.ticks

    def send(self, number: signal.Signals) -> bool:
        """Send it a signal, and nobody else; False: it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            if not self.is_alive:
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True


def _ticks(pid: int) -> int | None:
    """When a process was made; None: there is none, or it has ended and nobody has asked how."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    words = text.rpartition(")")[2].split()
    return None if words[0] in "ZX" else int(words[19])
