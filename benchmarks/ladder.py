"""The ladder against what it predicts: a run ten times as large as its largest small run.

How it works: `paceline ladder` makes its small runs of a decoder on Python's own texts (bytes as
tokens) and predicts the size, the learning rate, the loss and the time of a run of `--params`. Then

- that run is trained as the ladder's job.toml says, its loss and the seconds of its steps are held
  against the prediction;
- it is trained with other learning rates, each the root of two times the one before, until the best
  has two on either side; a parabola over the logarithm of the rate through these five is the swept
  best;
- Optuna's TPE with Hyperband searches the learning rate of the same network, from 1e-4 to 1e-1,
  until a whole trial's loss is at most 1.002 times that of the ladder's run, or until it has had
  five times the CPU-seconds of the ladder and its run together.

CPU-seconds are user and system time. The ladder's are those of its command, with the start of
Python, the measuring of the machine and all that it started. Optuna's are its trials and its own
thinking: it has one process for all trials, whose imports don't count, and it is given the network,
the length and the range. The ladder and its run have the machine to themselves, on one core, since
their time is judged; of the other runs and the searches there are two at a time, each on a core of
its own. The held-out text is the same for all. All read the text less than once.

What it doesn't say: anything about larger extrapolations than this one, or about other texts; and
one run is one seed, which alone moves a loss by some 0.3 %.

    python -m benchmarks.ladder [--keep FOLDER]
    python -m benchmarks.ladder --largest 3e6 --params 3e7 --batch 4 --minutes 24 --share 0.3

    python -m benchmarks.ladder --again 1 2 3 4 5

The first form takes 27 minutes on two quiet cores with `--limit 600`; the second is that of
larger runs and takes six times `--minutes` or so with `--limit 2400`. Its batches are small, since
a run of few tokens in large ones ends while losses still fall as no law says. The third makes
ladder and run anew with each of these seeds, two at a time: how far are predicted losses off? With
`--keep` a run that was killed goes on with the parts that it has. Needs Linux and the extra
`search`. Keeps results/<device>/ladder.{json,md}, of the second form ladder_30m.{json,md}, and of
the third ladder_seeds.{json,md}.
"""

import argparse
import ctypes
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.contest import JudgedTrials, hyperband_study, one_core_each, used_cpu_s
from benchmarks.provenance import folder_of, keep, parser_of, signature, taken_with
from benchmarks.tables import markdown
from paceline.comm.forkserver_start import TRAINING, warm_up_ranks
from paceline.config.errors import InputError
from paceline.config.job import read_job, to_toml
from paceline.observe.run import Run, write_atomic
from paceline.search.trial_run import as_trial

JOB = """\
name = "small"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 128
ffn_size = 256
num_layers = 5
num_heads = 16
max_seq_len = 64
tie_embeddings = false
[data]
source = "text.txt"
tokenizer = "bytes"
eval_fraction = 0.02
[optim]
lr = 1e-2
warmup_steps = 50
schedule = "cosine"
[train]
steps = 1000
global_batch = {batch}
seq_len = 64
eval_batches = 16
[layout]
precision = "fp32"
[checkpoint]
every = 0
[observe]
tensorboard = false
"""
LOW_RATE, HIGH_RATE = 1e-4, 1e-1
PARAMS = 2.5e5
EQUAL = 1.002
TIMES = 5
"""CPU-seconds of Optuna over the ladder's that are wanted, at least."""
_STEP, _AROUND = 2**0.5, range(-2, 3)
_NEIGHBOURS, _MOST_RATES = 2, 13
_RUNGS, _FACTOR = 9, 3
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_LIBC = ctypes.CDLL(None)


# ---- the parts -----------------------------------------------------------------------------------


def climb(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """The ladder, from the beginning: what it predicts, and its CPU-seconds."""
    shutil.rmtree(folder / "ladder", ignore_errors=True)
    budget = f"{asked.minutes / 60:.6f} hours"
    done = paceline(
        folder, "ladder", "ladder", "job.toml", "--budget", budget, "--share", f"{asked.share}",
        "--largest", f"{asked.largest}", "--params", f"{asked.params}", "--out", "ladder", "--json",
    )  # fmt: skip
    if done["code"]:
        raise RuntimeError(_why(folder, "ladder"))
    found = json.loads(done["said"].splitlines()[-1])
    return {"cpu_s": done["cpu_s"], "wall_s": done["wall_s"], "found": found}


def train(folder: Path, name: str, rate: float) -> dict[str, Any]:
    """The ladder's run with a learning rate; its loss is None where it fails."""
    job = read_job(folder / "ladder/job.toml")
    job = job.replace(name=name, optim=job.optim.replace(lr=rate))
    write_atomic(folder / f"{name}.toml", to_toml(job))
    done = paceline(folder, name, "train", f"{name}.toml", "--fresh")
    lines = [] if done["code"] else Run(folder / "runs" / name).metrics()
    return {
        "rate": rate,
        "loss": lines[-1]["eval_loss"] if lines else None,
        "steps_s": sum(line["step_time_s"] for line in lines),
        "cpu_s": done["cpu_s"],
        "wall_s": done["wall_s"],
    }


def paceline(folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Run a command in a folder; its errors go to NAME.log.

    Returns:
        its exit code, what it printed, and the CPU-seconds of it and all that it started.
    """
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that what outlives it is waited for here
    before_s, began = used_cpu_s(), time.perf_counter()
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "paceline", *arguments], cwd=folder, stdout=subprocess.PIPE,
            stderr=log, text=True, check=False, preexec_fn=_die_with_parent,
        )  # fmt: skip
        log.write(done.stdout)
    wall_s = time.perf_counter() - began
    with suppress(ChildProcessError):
        while True:
            os.wait()
    cpu_s = used_cpu_s() - before_s
    return {"code": done.returncode, "said": done.stdout, "cpu_s": cpu_s, "wall_s": wall_s}


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _why(folder: Path, name: str) -> str:
    return f"{name} failed:\n{(folder / f'{name}.log').read_text()[-2000:]}"


def search(folder: Path, seed: int, wanted: float, limit_s: float) -> dict[str, Any]:
    """Optuna alone, for the learning rate of the ladder's run.

    Args:
        folder: has the ladder.
        seed: of TPE.
        wanted: held-out loss of a whole trial that ends the search.
        limit_s: CPU-seconds that end it.
    """
    import optuna

    trials_folder = folder / f"optuna-{seed}"
    shutil.rmtree(trials_folder, ignore_errors=True)
    target = read_job(folder / "ladder/job.toml")
    steps = target.train.steps
    first = max(1, steps // _RUNGS)
    warm_up_ranks(TRAINING)
    began_s, trials_s = time.process_time(), 0.0
    study, whole, evaluated = hyperband_study(seed, first, steps, _FACTOR), [], 0

    def spent_s() -> float:
        return trials_s + time.process_time() - began_s

    with JudgedTrials() as trials:
        while spent_s() < limit_s and not any(one["loss"] <= wanted for one in whole):
            trial = study.ask()
            rate = trial.suggest_float("lr", LOW_RATE, HIGH_RATE, log=True)
            seen: list[float] = []
            is_pruned = False

            def judge(
                step: int, loss: float, cpu_s: float, trial: Any = trial, rate: float = rate,
                seen: list[float] = seen,
            ) -> bool:  # fmt: skip
                nonlocal is_pruned
                seen.append(loss)
                if step == steps:
                    whole.append({"rate": rate, "loss": loss, "cpu_s": spent_s() + cpu_s})
                    return True
                trial.report(loss, step)
                is_pruned = trial.should_prune()
                return not is_pruned and spent_s() + cpu_s < limit_s

            name = f"{trial.number:04}"
            job = as_trial(target, name, first)
            text = to_toml(job.replace(optim=job.optim.replace(lr=rate)))
            trials_s += trials.train(Run(trials_folder / name), text, judge)
            evaluated += len(seen)
            if is_pruned:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            elif seen:
                study.tell(trial, seen[-1])
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
    equal = [one["cpu_s"] for one in whole if one["loss"] <= wanted]
    return {
        "seed": seed,
        "cpu_s": spent_s(),
        "equal_cpu_s": equal[0] if equal else None,
        "trials": len(study.trials),
        "evaluations": evaluated,
        "whole": whole,
    }


# ---- what they come to ---------------------------------------------------------------------------


def to_sweep(trained: Mapping[int, dict[str, Any]]) -> list[int]:
    """Exponents of the rates that are still wanted: those around the ladder's, and then as many
    beyond them as the best one lacks neighbours."""
    best = min(trained, key=lambda at: _or_inf(trained[at]["loss"]))
    wanted = {*_AROUND, *range(best - _NEIGHBOURS, best + _NEIGHBOURS + 1)}
    return sorted(wanted - {*trained})[: _MOST_RATES - len(trained)]


def swept_best(trained: Mapping[int, dict[str, Any]]) -> float:
    """The least of a parabola, over the logarithm of the rate, through the best and its
    neighbours by least squares; the best itself where they don't bend upwards."""
    best = min(trained, key=lambda at: _or_inf(trained[at]["loss"]))
    near = [
        one
        for at, one in sorted(trained.items())
        if abs(at - best) <= _NEIGHBOURS and one["loss"] is not None
    ]
    x = np.log([one["rate"] for one in near])
    bend, slope, _ = np.polyfit(x - x[0], [one["loss"] for one in near], 2)
    if bend <= 0:
        return float(trained[best]["rate"])
    return float(np.exp(np.clip(x[0] - slope / (2 * bend), x[0], x[-1])))


def _or_inf(loss: float | None) -> float:
    return math.inf if loss is None else loss


def figures(
    ladder: dict[str, Any], trained: Mapping[int, dict[str, Any]], searches: Sequence[Any]
) -> dict[str, Any]:
    """What the page says."""
    advice, target = ladder["found"]["advice"], trained[0]
    best = min((one for one in trained.values()), key=lambda one: _or_inf(one["loss"]))
    optuna_s = [one["equal_cpu_s"] or one["cpu_s"] for one in searches]
    return {
        "loss": target["loss"] / advice["loss"],
        "time": target["steps_s"] / advice["train_s"],
        "rate": advice["lr"] / swept_best(trained),
        "swept_best": swept_best(trained),
        "loss_over_swept": target["loss"] / best["loss"],
        "ladder_over_optuna": [ladder["cpu_s"] / each for each in optuna_s],
        "with_the_run": [(ladder["cpu_s"] + target["cpu_s"]) / each for each in optuna_s],
    }


def page(
    ladder: dict[str, Any],
    trained: Mapping[int, dict[str, Any]],
    searches: Sequence[dict[str, Any]],
    about: dict[str, Any],
) -> str:
    """What was predicted beside what was measured; then the sweep, and the searches."""
    found, advice, target = (
        figures(ladder, trained, searches),
        ladder["found"]["advice"],
        trained[0],
    )
    loss = f"{advice['loss']:.4f} ({advice['loss_low']:.4f} – {advice['loss_high']:.4f})"
    seconds = "{train_s:.1f} ({train_low_s:.1f} – {train_high_s:.1f})".format(**advice)
    rate = "{lr:.3g} ({lr_low:.3g} – {lr_high:.3g})".format(**advice)
    lines = [
        ["held-out loss", loss, f"{target['loss']:.4f}", f"{found['loss']:.4f}", "0.99 – 1.01"],
        ["seconds of all steps", seconds, f"{target['steps_s']:.1f}", f"{found['time']:.3f}",
         "0.90 – 1.10"],
        ["learning rate, best of a sweep", rate, f"{found['swept_best']:.3g}",
         f"{1 / found['rate']:.3f}", "0.80 – 1.25"],
    ]  # fmt: skip
    titles = ["", "predicted (90 % of runs)", "measured", "measured / predicted", "wanted"]
    both = ladder["cpu_s"] + target["cpu_s"]
    costs = [
        [
            f"seed {one['seed']}",
            f"{one['equal_cpu_s']:.0f}" if one["equal_cpu_s"] else f"more than {one['cpu_s']:.0f}",
            f"{one['trials']}, {len(one['whole'])}",
            _best_of(one),
            _under(one, ladder["cpu_s"]),
            _under(one, both),
        ]
        for one in searches
    ]
    cost_titles = [
        "Optuna", "CPU-s to equal loss", "trials, whole ones", "best loss (rate)",
        "ladder / Optuna", "ladder and run / Optuna",
    ]  # fmt: skip
    rates = [
        [f"{one['rate']:.3g}", "failed" if one["loss"] is None else f"{one['loss']:.4f}",
         f"{one['steps_s']:.1f}"]
        for _, one in sorted(trained.items())
    ]  # fmt: skip
    small = ladder["found"]["runs"]
    return (
        f"A run of {advice['params']:,} parameters ({advice['multiplied']:,} of blocks and head) "
        f"on {advice['tokens']:,.0f} tokens, predicted from small runs of at most "
        f"{advice['largest']:,} parameters and {max(one['tokens'] for one in small):,} tokens.\n\n"
        f"{markdown(titles, lines, titles[:1])}\n"
        f"At the ladder's rate the loss is {found['loss_over_swept']:.4f} times the least of the "
        f"sweep. The ladder took {ladder['cpu_s']:.0f} CPU-seconds, its run "
        f"{target['cpu_s']:.0f}. Optuna's TPE with Hyperband looked for at most {EQUAL} times its "
        f"loss; at most a fifth of Optuna's CPU-seconds is wanted of the ladder.\n\n"
        f"{markdown(cost_titles, costs, cost_titles[:1])}\n"
        f"{markdown(['learning rate', 'held-out loss', 'seconds'], rates)}\n"
        f"Two at a time but for the ladder's own run, each on a core of its own. "
        f"{signature(about)}\n"
    )


def _best_of(search: dict[str, Any]) -> str:
    if not search["whole"]:
        return "none"
    best = min(search["whole"], key=lambda one: one["loss"])
    return f"{best['loss']:.4f} ({best['rate']:.3g})"


def _under(search: dict[str, Any], cpu_s: float) -> str:
    """A share of the search's CPU-seconds, which is less where the search never ended."""
    if search["equal_cpu_s"]:
        return f"{cpu_s / search['equal_cpu_s']:.3f}"
    return f"less than {cpu_s / search['cpu_s']:.3f}"


# ---- the order of things -------------------------------------------------------------------------


def prepare(folder: Path, asked: argparse.Namespace, seed: int | None = None) -> None:
    """The text and the Job, with another seed where it is given; a folder of another benchmark is
    refused."""
    form = {
        name: getattr(asked, name)
        for name in ("largest", "params", "batch", "minutes", "share", "limit")
    }
    file = folder / "form.json"
    if file.exists() and json.loads(file.read_text()) != form:
        sys.exit(f"{folder} has parts of a run with other options: give another --keep.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "text.txt", library_text())
    job = JOB.format(batch=asked.batch).replace("text.txt", str(folder / "text.txt"))
    if seed is not None:
        job = job.replace("[train]\n", f"[train]\nseed = {seed}\n")
    write_atomic(folder / "job.toml", job)
    write_atomic(file, json.dumps(form))


def library_text() -> str:
    """Python's own library, without tests and tables: some 8 MB."""
    library, left_out = Path(sysconfig.get_path("stdlib")), {
        "site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data",
    }  # fmt: skip
    files = [
        file
        for file in sorted(library.rglob("*.py"))
        if left_out.isdisjoint(file.relative_to(library).parts)
    ]
    return "\n".join(file.read_text(errors="ignore") for file in files)


def measured(folder: Path, tasks: Mapping[str, Callable[[], dict[str, Any]]]) -> dict[str, Any]:
    """What tasks come to, two at a time; each is kept when it is there, and not done again."""
    found, futures = {}, {}
    with one_core_each() as pool:
        for name, task in tasks.items():
            file = folder / "parts" / f"{name}.json"
            if file.exists():
                found[name] = json.loads(file.read_text())
            else:
                futures[pool.submit(task)] = name
        if futures:
            print(f"{', '.join(futures.values())} ...", flush=True)
        for future in as_completed(futures):
            name = futures[future]
            found[name] = future.result()
            write_atomic(folder / "parts" / f"{name}.json", json.dumps(found[name], indent=1))
            told = {key: value for key, value in found[name].items() if key != "found"}
            print(f"{name}: {json.dumps(told)}", flush=True)
    return found


def run(folder: Path, asked: argparse.Namespace, about: dict[str, Any]) -> str:
    """All parts, one after another.

    Returns:
        the page.
    """
    prepare(folder, asked)
    ladder = measured(folder, {"ladder": partial(climb, folder, asked)})["ladder"]
    advice = ladder["found"]["advice"]
    length = (folder / "text.txt").stat().st_size
    if advice["tokens"] > 0.95 * length:
        sys.exit(
            f"the run would read {advice['tokens']:,.0f} tokens, and the text has {length:,}: give "
            "fewer --minutes, or more --params."
        )
    trained: dict[int, dict[str, Any]] = {}
    coming: Sequence[int] = [0]
    while coming:
        tasks = {
            _name(at): partial(train, folder, _name(at), advice["lr"] * _STEP**at) for at in coming
        }
        done = measured(folder, tasks)
        trained |= {at: done[_name(at)] for at in coming}
        if trained[0]["loss"] is None:
            sys.exit(_why(folder, _name(0)))
        coming = to_sweep(trained)
    limit_s = asked.limit or TIMES * (ladder["cpu_s"] + trained[0]["cpu_s"])
    wanted = EQUAL * trained[0]["loss"]
    searches = measured(
        folder,
        {f"optuna-{seed}": partial(search, folder, seed, wanted, limit_s) for seed in asked.seeds},
    )
    found = [searches[f"optuna-{seed}"] for seed in asked.seeds]
    text = page(ladder, trained, found, about)
    kept = {
        "facts": about,
        "figures": figures(ladder, trained, found),
        "ladder": ladder,
        "sweep": [one for _, one in sorted(trained.items())],
        "searches": found,
    }
    return f"{text}\nresults: {keep(folder_of(asked.results, about), _form(asked), kept, text)}"


def again(folder: Path, asked: argparse.Namespace, about: dict[str, Any]) -> str:
    """Ladder and run with each of some seeds.

    Returns:
        the page.
    """
    for seed in asked.again:
        prepare(folder / f"seed-{seed}", asked, seed)
    tasks = {
        f"seed-{seed}": partial(climb_and_train, folder / f"seed-{seed}", asked)
        for seed in asked.again
    }
    done = measured(folder, tasks)
    lines, ratios = [], []
    for name in tasks:
        advice, loss = done[name]["found"]["advice"], done[name]["loss"]
        ratios.append(loss / advice["loss"])
        lines.append(
            (
                name.removeprefix("seed-"),
                f"{advice['params']:,}",
                f"{advice['tokens']:,.0f}",
                f"{advice['lr']:.3g}",
                f"{advice['loss']:.4f} ({advice['loss_low']:.4f} – {advice['loss_high']:.4f})",
                f"{loss:.4f}",
                f"{ratios[-1]:.4f}",
            )
        )
    titles = [
        "seed", "parameters", "tokens", "learning rate", "predicted loss (90 % of runs)",
        "measured", "measured / predicted",
    ]  # fmt: skip
    off = [abs(ratio - 1) for ratio in ratios]
    text = (
        f"Ladder and run with {len(lines)} seeds, each from the measuring of the machine on.\n\n"
        f"{markdown(titles, lines)}\n"
        f"The predicted loss is off by {median(off):.2%} in the median, {max(off):.2%} at most; "
        f"measured / predicted has the mean {fmean(ratios):.4f}.\n\n"
        f"Two at a time, each on a core of its own. {signature(about)}\n"
    )
    kept = {"facts": about, "seeds": {name: done[name] for name in tasks}}
    name = f"{_form(asked)}_seeds"
    return f"{text}\nresults: {keep(folder_of(asked.results, about), name, kept, text)}"


def climb_and_train(folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """A ladder, and its run."""
    ladder = climb(folder, asked)
    trained = train(folder, "run", ladder["found"]["advice"]["lr"])
    if trained["loss"] is None:
        raise RuntimeError(_why(folder, "run"))
    return ladder | trained


def _form(asked: argparse.Namespace) -> str:
    """Name of the files that keep what runs of this size came to."""
    return "ladder" if asked.params == PARAMS else f"ladder_{asked.params / 1e6:g}m"


def _name(at: int) -> str:
    return f"rate-{_STEP**at:.3g}x" if at else "run"


def main() -> None:
    """Climb, train, sweep and search."""
    parser = parser_of(__doc__)
    parser.add_argument("--largest", type=float, default=2.5e4, help="parameters of a small run")
    parser.add_argument("--params", type=float, default=PARAMS, help="of the run that is predicted")
    parser.add_argument("--batch", type=int, default=16, help="samples of 64 tokens in a step")
    parser.add_argument("--minutes", type=float, default=4, help="of the ladder and its run")
    parser.add_argument("--share", type=float, default=0.37, help="of them, for the ladder")
    parser.add_argument("--seeds", type=int, nargs="+", help="of Optuna; left out: 0 and 1")
    parser.add_argument(
        "--limit", type=float, help="CPU-seconds of Optuna; left out: five times ladder and run"
    )
    parser.add_argument(
        "--again", type=int, nargs="+", help="seeds of the Job; ladder and run alone are made"
    )
    parser.add_argument("--keep", type=Path, help="folder of the parts; left out: none is kept")
    asked = parser.parse_args()
    if asked.again and (asked.seeds or asked.limit):
        parser.error("--again looks for nothing by Optuna: leave --seeds and --limit out.")
    asked.seeds = asked.seeds or [0, 1]
    os.environ["OMP_NUM_THREADS"] = "1"
    about = {**taken_with("benchmarks.ladder", "optuna"), "job": JOB.format(batch=asked.batch)}
    with tempfile.TemporaryDirectory() if asked.keep is None else nullcontext(asked.keep) as place:
        folder = Path(place).resolve()
        # What the machine was measured to do, and the tokens: of this run, not of an earlier one.
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        try:
            print((again if asked.again else run)(folder, asked, about))
        except (RuntimeError, InputError) as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
