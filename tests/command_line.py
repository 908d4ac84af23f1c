"""Run the command line as a person does, in a process of its own, on a Job of a few seconds."""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path

from tests.ranks import WARM

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


def write_tiny_job(folder: Path) -> Path:
    """A job.toml and its text in `folder`."""
    words = ["brown", "dog", "fox", "jumps", "lazy", "over", "quick", "the"]
    pick = random.Random(0)
    lines = [" ".join(pick.choices(words, k=9)) for _ in range(400)]
    (folder / "text.txt").write_text("\n".join(lines))
    job = folder / "job.toml"
    job.write_text(TINY_JOB)
    return job


def environment(folder: Path) -> dict[str, str]:
    """The environment of a command: its own cache, plain output."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "SLURM"))}
    return {**kept, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200", "NO_COLOR": "1"}


def paceline(*arguments: str, folder: Path, timeout_s: float = 120) -> subprocess.CompletedProcess:
    """Run `paceline ARGUMENTS` in `folder` and return what it printed and its exit code.

    In a process of its own that has torch imported already: importing it anew in the command and
    in the process its ranks are forked from takes four fifths of a short run.
    """
    with tempfile.TemporaryDirectory() as printed:
        outputs = [Path(printed, name) for name in ("stdout", "stderr")]
        command = (arguments, folder, environment(folder), outputs)
        process = WARM.Process(target=_run_command, args=command)
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout_s)
        texts = [each.read_text() for each in outputs]
    return subprocess.CompletedProcess(list(arguments), process.exitcode, *texts)


def _run_command(
    arguments: Sequence[str], folder: Path, env: dict[str, str], outputs: Sequence[Path]
) -> None:
    """Be `python -m paceline ARGUMENTS`."""
    for number, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["paceline", *arguments]
    util.spawnv_passfds = _forked_server
    from paceline.cli import main

    main()


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


def start_paceline(*arguments: str, folder: Path) -> subprocess.Popen:
    """Start `paceline ARGUMENTS` in `folder`, in a process group of its own, and don't wait."""
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *arguments],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


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
