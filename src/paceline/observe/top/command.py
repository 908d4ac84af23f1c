"""`paceline top`: redraw until the person at the terminal has seen enough."""

import json
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from paceline.config.errors import InputError
from paceline.observe.run import Run
from paceline.observe.top.frame import frame, overview
from paceline.observe.top.gpus import GpuStatus, gpus_here
from paceline.observe.top.state import RunState, WatchedRun

# nvidia-smi takes a second on a machine of eight devices.
_GPU_EVERY_S = 5.0


def top_command(paths: Sequence[Path], *, once: bool, every_s: float, as_json: bool) -> None:
    """Show runs again and again; once where the output is no terminal.

    Args:
        paths: directories of runs; none: those in runs/. On a terminal they are waited for.
        once: show one frame and stop.
        every_s: seconds between frames.
        as_json: show one frame, and its figures as the last line.

    Raises:
        InputError: a path is no run, or there is none.
    """
    console = Console(highlight=False)
    if not (once or as_json) and console.is_terminal:
        with suppress(KeyboardInterrupt), _single_keys():
            if watched := _begun(paths, console, every_s):
                _watch(watched, console, every_s)
        return
    watched = [WatchedRun(path) for path in _found(paths)]
    if not watched:
        raise InputError("no run is named and there is none in runs/: name a run's directory.")
    states = [each.look() for each in watched]
    console.print(_picture(states, console, gpus_here()))
    if as_json:
        shown = [state.as_json() for state in states]
        print(json.dumps(shown[0] if len(shown) == 1 else shown))


def _found(paths: Sequence[Path]) -> Sequence[Path]:
    return paths or sorted(path.parent for path in Path("runs").glob("*/job.toml"))


def _begun(paths: Sequence[Path], console: Console, every_s: float) -> list[WatchedRun]:
    """The runs, once all have begun; none where the person doesn't want to wait for that."""
    is_said = False
    while not (found := _found(paths)) or any(_may_begin(path) for path in found):
        if not is_said:
            awaited = ", ".join(str(path) for path in found if _may_begin(path)) or "a run in runs/"
            console.print(f"waiting for {awaited} to begin; q or Ctrl-C ends this", soft_wrap=True)
            is_said = True
        if _key(every_s) == "q":
            return []
    return [WatchedRun(path) for path in found]


def _may_begin(path: Path) -> bool:
    """Whether a run may still come to be there; where a file is none can."""
    return not Run(path).exists and not path.is_file()


def _watch(watched: Sequence[WatchedRun], console: Console, every_s: float) -> None:
    gpus, asked_s = gpus_here(), time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            states = [each.look() for each in watched]
            live.update(_picture(states, console, gpus), refresh=True)
            if _key(every_s) == "q":
                return
            if gpus and time.monotonic() - asked_s > _GPU_EVERY_S:
                gpus, asked_s = gpus_here(), time.monotonic()


def _picture(
    states: Sequence[RunState], console: Console, gpus: Sequence[GpuStatus]
) -> RenderableType:
    if len(states) > 1:
        return overview(states)
    plain = not console.encoding.startswith("utf")
    return frame(states[0], console.width, console.height, gpus, plain=plain)


def _key(patience_s: float) -> str:
    """The key that was pressed within this time, "" where none was."""
    if not sys.stdin.isatty():
        time.sleep(patience_s)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], patience_s)
    return sys.stdin.read(1) if ready else ""


@contextmanager
def _single_keys() -> Iterator[None]:
    """Let keys arrive as they are pressed; the terminal is given back as it was."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
