"""Notices at random moments: is a run always saved in time, and what does it lose?

    python benchmarks/preemption.py --notices 20 --within 10 --seed 0

A run that nobody disturbs gives the losses that are to be got. Then the same run is told again and
again that its machine goes away: SIGTERM or SIGUSR1, to its launcher or to every process of it,
once or twice, or by the Run's stop file, at a moment in one of the phases below, both drawn from
the seed. Each time it must end within the notice with exit code 75, leave no half-written file and
no process, and when it is started again go on where it was. Python dies of a signal in the tenths
of a second before the command runs: such a start has done nothing, and is counted as one that ended
before it began. In the end losses and evaluations must be those of the undisturbed run, as floats,
each step once.

Prints one line a notice, and at the end one JSON object; the exit code is 1 if anything is wrong.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PHASES = ("start", "step", "checkpoint", "evaluation", "end")
WAYS = ("launcher", "everyone", "twice", "usr1", "file")
_JOB = """
name = "run"
[model]
family = "decoder"
vocab_size = 257
hidden_size = {hidden}
ffn_size = {ffn}
num_layers = 2
num_heads = 4
num_kv_heads = 2
max_seq_len = 64
[data]
source = "text.txt"
tokenizer = "bytes"
eval_fraction = 0.1
[optim]
warmup_steps = 2
[train]
steps = {steps}
global_batch = 12
seq_len = 32
eval_every = 5
eval_batches = 40
[checkpoint]
every = 7
[observe]
tensorboard = false
[elastic]
save_within_s = {within}
"""


class Preempted:
    """A run in a folder, started and told to stop again and again."""

    def __init__(self, folder: Path, job: str, num_ranks: int) -> None:
        self.folder, self._num_ranks = folder, num_ranks
        folder.mkdir()
        words = ["brown", "dog", "fox", "jumps", "lazy", "over", "quick", "the"]
        pick = random.Random(0)
        lines = [" ".join(pick.choices(words, k=9)) for _ in range(2000)]
        (folder / "text.txt").write_text("\n".join(lines))
        (folder / "job.toml").write_text(job)
        self.run = folder / "runs" / "run"

    def start(self) -> subprocess.Popen[str]:
        """`paceline train`, in a session of its own."""
        ranks = f"cluster.devices_per_node={self._num_ranks}"
        return subprocess.Popen(
            [str(Path(sys.executable).parent / "paceline"), "train", "job.toml", "--set", ranks],
            cwd=self.folder,
            env={**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def lines(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, whole ones."""
        with suppress(FileNotFoundError):
            text = (self.run / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(True) if line.endswith("\n")]
        return []

    def results(self) -> list[tuple[int, float, float | None]]:
        """Step, loss and loss of the evaluation, as written."""
        return [(line["step"], line["loss"], line.get("eval_loss")) for line in self.lines()]

    def is_writing(self) -> bool:
        """Whether a checkpoint is under way."""
        return any((self.run / "checkpoints").glob("*.tmp"))

    def newest(self) -> int:
        """The step of the newest checkpoint, 0 where there is none."""
        found = (self.run / "checkpoints").glob("step-*[0-9]/manifest.json")
        return max((int(each.parent.name[5:]) for each in found), default=0)


def moment(phase: str, run: Preempted, steps: int, pick: random.Random) -> Callable[[float], bool]:
    """What says, given the seconds since the start, that it is time for the notice."""
    begun, late_s = len(run.lines()), pick.uniform(0, 0.05)
    if phase == "start":
        after_s = pick.uniform(0.3, 6)
        return lambda since: since > after_s
    if phase == "checkpoint":
        return lambda _since: run.is_writing() and len(run.lines()) > begun
    ahead = {"step": pick.randint(1, 6), "evaluation": 5 - begun % 5 - 1 or 5, "end": steps - begun}
    reached_at: list[float] = []

    def is_time(since: float) -> bool:
        if len(run.lines()) >= begun + ahead[phase] - (phase == "end"):
            reached_at.append(since)
        return bool(reached_at) and since > reached_at[0] + late_s

    return is_time


def give(way: str, process: subprocess.Popen[str], run: Preempted) -> None:
    """The notice."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        if way == "everyone":
            launcher = psutil.Process(process.pid)
            for each in [launcher, *launcher.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    each.send_signal(signal.SIGTERM)
        elif way == "file" and (run.run / "job.toml").exists():
            (run.run / "stop").write_text("10 a cloud takes the machine\n")
        else:
            process.send_signal(signal.SIGUSR1 if way == "usr1" else signal.SIGTERM)
            if way == "twice":
                time.sleep(0.2)
                process.send_signal(signal.SIGTERM)


def preempt(run: Preempted, phase: str, way: str, within_s: float, is_time) -> dict[str, Any]:
    """Start it, give notice, and see how it ends."""
    before, process, began = run.newest(), run.start(), time.monotonic()
    descendants: list[psutil.Process] = []
    while process.poll() is None and not is_time(time.monotonic() - began):
        time.sleep(0.002)
    was_over = process.poll() is not None
    if not was_over:
        descendants = psutil.Process(process.pid).children(recursive=True)
    told = time.monotonic()
    give(way, process, run)
    printed = ""
    try:
        printed, _ = process.communicate(timeout=within_s + 5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
    took_s = time.monotonic() - told
    _, alive = psutil.wait_procs(descendants, timeout=3)
    steps_written = max((step for step, *_ in run.results()), default=0)
    found = {
        "phase": phase,
        "way": way,
        "exit_code": process.returncode,
        "seconds": round(took_s, 2),
        "from_step": before,
        "saved_step": run.newest(),
        "steps_lost": max(0, steps_written - run.newest()),
        "orphans": len(alive),
        "half_written": run.is_writing() and took_s < within_s,
    }
    in_time = took_s <= within_s and not alive and not found["half_written"]
    found["before_it_began"] = process.returncode == -signal.SIGTERM and not printed
    ended = found["before_it_began"] or process.returncode in ((0,) if was_over else (0, 75))
    found["ok"] = ended and in_time and found["steps_lost"] == 0
    if not found["ok"]:
        found["printed"] = printed[-2000:]
    return found


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--notices", type=int, default=20)
    parser.add_argument("--within", type=float, default=10.0, help="seconds of a notice")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.parse_args()
    pick = random.Random(options.seed)
    sizes = {"hidden": options.hidden, "ffn": 2 * options.hidden, "steps": options.steps}
    job = _JOB.format(within=options.within, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        whole = Preempted(Path(folder) / "whole", job, options.ranks)
        printed, _ = (first := whole.start()).communicate()
        if first.returncode != 0:
            sys.exit(printed)
        told: list[dict[str, Any]] = []
        number = 0
        while len(told) < options.notices:  # one run may take several; a finished one is begun anew
            run = Preempted(Path(folder) / f"run-{number}", job, options.ranks)
            number += 1
            is_done = False
            while not is_done and len(told) < options.notices:
                phase, way = PHASES[len(told) % len(PHASES)], pick.choice(WAYS)
                is_time = moment(phase, run, options.steps, pick)
                told.append(preempt(run, phase, way, options.within, is_time))
                print(json.dumps(told[-1]), flush=True)
                is_done = told[-1]["exit_code"] == 0
            if not is_done:
                run.start().communicate()
            told[-1]["same_losses"] = run.results() == whole.results()
    wrong = [one for one in told if not one["ok"] or one.get("same_losses") is False]
    summary = {
        "notices": len(told),
        "saved_in_time": sum(one["ok"] for one in told),
        "before_they_began": sum(one["before_it_began"] for one in told),
        "runs": number,
        "runs_with_the_same_losses": sum(one.get("same_losses", False) for one in told),
        "slowest_s": max(one["seconds"] for one in told),
        "seed": options.seed,
    }
    print(json.dumps(summary))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
