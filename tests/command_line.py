"""Run the command line as a person does, in a process of its own, on a Job of a few seconds."""

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import get_context, util
from multiprocessing.connection import Connection, wait
from pathlib import Path

from paceline.train import launch
from tests.ranks import WARM, keep_one_thread

COMMAND = str(Path(sys.executable).parent / "paceline")
_start = util.spawnv_passfds

# Small enough that a step takes milliseconds; bytes as tokens, so that nothing is trained first.
TINY_JOB = """
name = "tiny"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 32
ffn_size = 64
num_layers = 2
num_heads = 4
num_kv_heads = 2
max_seq_len = 64
[data]
source = "text.txt"
tokenizer = "bytes"
eval_fraction = 0.1
[optim]
lr = 3e-3
warmup_steps = 2
[train]
steps = 12
global_batch = 12
seq_len = 32
eval_batches = 1
[checkpoint]
every = 4
[observe]
tensorboard = false
"""


def write_tiny_job(folder: Path, num_lines: int = 400) -> Path:
    """A job.toml and its text, of so many lines of 45 bytes, in `folder`."""
    words = ["brown", "dog", "fox", "jumps", "lazy", "over", "quick", "the"]
    pick = random.Random(0)
    lines = [" ".join(pick.choices(words, k=9)) for _ in range(num_lines)]
    (folder / "text.txt").write_text("\n".join(lines))
    job = folder / "job.toml"
    job.write_text(TINY_JOB)
    return job


def environment(folder: Path) -> dict[str, str]:
    """The environment of a command: its own cache, plain output."""
    given = os.environ.items()
    kept = {k: v for k, v in given if not k.startswith(("RANK", "WORLD", "SLURM_"))}
    if "SLURM_CONF" in os.environ:  # where Slurm is, and not whose step this is
        kept["SLURM_CONF"] = os.environ["SLURM_CONF"]
    return {**kept, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200", "NO_COLOR": "1"}


def paceline(*arguments: str, folder: Path, timeout_s: float = 400) -> subprocess.CompletedProcess:
    """Run `paceline ARGUMENTS` in `folder` and return what it printed and its exit code."""
    return python(COMMAND, *arguments, folder=folder, timeout_s=timeout_s)


def start_paceline(*arguments: str, folder: Path) -> "Started":
    """Start `paceline ARGUMENTS` in `folder`, in a process group of its own, and don't wait."""
    return Started([COMMAND, *arguments], folder, num_outputs=1)


def python(*arguments: str, folder: Path, timeout_s: float = 400) -> subprocess.CompletedProcess:
    """Run `python ARGUMENTS` in `folder`: a script, or -m and a module, and what they are given.

    Ranks of a script are forks of it, so it shouldn't compute with threads before it trains.
    """
    process = Started(arguments, folder, num_outputs=2)
    try:
        printed = process.communicate(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(list(arguments), process.returncode, *printed)


class Started:
    """A program under way, as much of a `subprocess.Popen` as the tests need.

    In a process of its own that has torch imported already: importing it anew in the command and
    in the process its ranks are forked from takes four fifths of a short run.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        num_outputs: int,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            arguments: of python.
            folder: where it runs.
            num_outputs: 2, or 1 where what goes to stderr is to come with stdout.
            variables: of its environment, besides the usual ones.
        """
        self._arguments = list(arguments)
        ours, theirs = zip(*(WARM.Pipe(duplex=False) for _ in range(num_outputs)), strict=True)
        self._printed = dict.fromkeys(ours, b"")
        what = (self._arguments, folder, {**environment(folder), **(variables or {})}, theirs)
        self._process = WARM.Process(target=_be_python, args=what)
        self._process.start()
        for each in theirs:
            each.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = 400) -> tuple[str, str]:
        """What it printed to stdout and stderr, once it and all that it started have ended."""
        deadline = time.monotonic() + timeout
        while still_open := [each for each in self._printed if not each.closed]:
            ready = wait(still_open, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(self._arguments, timeout)
            for each in ready:
                part = os.read(each.fileno(), 1 << 16)
                self._printed[each] += part
                if not part:
                    each.close()
        self._process.join()
        stdout, *stderr = (text.decode() for text in self._printed.values())
        return stdout, "".join(stderr)


def _be_python(
    arguments: Sequence[str], folder: Path, env: dict[str, str], outputs: Sequence[Connection]
) -> None:
    """Be `python ARGUMENTS` in a session of its own."""
    os.setsid()
    keep_one_thread()
    # A fork inherits its parent's handlers, a new program doesn't.
    for number in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, output in zip((1, 2), (*outputs, *outputs), strict=False):
        os.dup2(output.fileno(), number)
    for output in outputs:
        output.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    # What `paceline.train` runs again in each rank.
    sys.orig_argv = [sys.executable, *arguments]
    util.spawnv_passfds = _forked_server
    launch.start_program = _ForkedRank
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).absolute().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except Exception:  # as an interpreter ends, and not as multiprocessing's process does
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


class _ForkedRank:
    """Stands for the Popen with which the launcher starts a script's rank: a fork of it."""

    def __init__(self, program: Sequence[str], env: dict[str, str]) -> None:
        what = (program[1:], Path.cwd(), env, ())
        self._process = get_context("fork").Process(target=_be_python, args=what)
        self._process.start()
        self.pid = self._process.pid
        self.kill = self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode


def _forked_server(path: bytes, arguments: Sequence[str], kept: Sequence[int]) -> int:
    """Stands for multiprocessing's start of a process: its forkserver is a fork of this one."""
    if "forkserver" not in arguments[-1]:
        return _start(path, arguments, kept)
    pid = os.fork()
    if pid:
        return pid
    low = 3
    for high in (*sorted(kept), os.sysconf("SC_OPEN_MAX")):
        os.closerange(low, high)
        low = high + 1
    try:
        exec(arguments[-1], {})
    finally:
        os._exit(0)


def metrics(folder: Path, name: str = "tiny") -> list[dict]:
    """The lines of metrics.jsonl so far, whole ones only."""
    file = folder / "runs" / name / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(folder: Path, name: str = "tiny") -> dict[int, float]:
    """Step -> loss, exactly as written."""
    lines = metrics(folder, name)
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1)), f"not one line a step: {steps}"
    return {line["step"]: line["loss"] for line in lines}


def ranks(count: int) -> tuple[str, str]:
    """The option that asks for this many CPU ranks."""
    return "--set", f"cluster.devices_per_node={count}"


def settings(*changes: str) -> list[str]:
    """The options that change a Job so."""
    return [part for each in changes for part in ("--set", each)]
