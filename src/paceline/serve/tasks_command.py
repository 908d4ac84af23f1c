"""`paceline evaluate --tasks`: what tasks of lm-evaluation-harness find of a network.

Nothing is fetched: data and metrics that are not on this machine are refused, unless the person
sets HF_HUB_OFFLINE=0.
"""

import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.serving import ServingSettings
from paceline.explain.page import write_report
from paceline.generate.chat import ChatTemplate
from paceline.observe.events import append_line
from paceline.observe.report import TASK_HEADS, task_rows
from paceline.observe.run import Run
from paceline.render.table import Table
from paceline.serve.generate_command import described
from paceline.serve.network import Network, open_network
from paceline.serve.progress import evaluating

_NOTES = Console(stderr=True, highlight=False, soft_wrap=True)
_BOOTSTRAPS = 1000
"""Of a metric whose standard error has no formula."""
_MOST_SHOWN = 300
_SEED = 1234
"""Of the examples before questions: the harness's own."""


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks, and how they ask."""

    tasks: str
    """Names and YAML files, with commas between."""
    fewshot: int | None
    """Examples before each question; None: as each task says."""
    limit: int | None
    """Questions of each task at most."""
    is_chat: bool


def tasks_command(
    path: Path,
    settings: ServingSettings,
    step: int | None,
    options: TaskOptions,
    *,
    as_json: bool,
) -> None:
    """Give a network tasks, print what they found, and keep it in the run.

    Args:
        path: a run or a folder of weights.
        step: of the run's checkpoint; None: the newest good one.

    Raises:
        InputError: no such network or task, data that is not here, or a task that fails.
    """
    with _harness_alone():
        loaded = _load(options)
    network = open_network(path, settings.serve, step)
    if options.is_chat and network.chat_template is None:
        raise InputError(
            f"--chat needs a chat template, and {network.name} has none: leave it out."
        )
    _NOTES.print(described(network), style="dim")
    begun_s = time.perf_counter()
    with _harness_alone():
        lines = _evaluate(network, settings, loaded, options)
    seconds = time.perf_counter() - begun_s
    if as_json:
        told = {"model": network.name, "step": network.step, "tasks": lines, "seconds": seconds}
        print(json.dumps(told))
    else:
        rows = [row[: len(TASK_HEADS) - 1] for line in lines for row in task_rows(line)]
        Console(highlight=False).print(Table(TASK_HEADS[:-1], rows, words=(0, 1)))
    if network.step is not None:
        _keep(Run(path), lines)


@contextmanager
def _harness_alone() -> Iterator[None]:
    """The harness and its libraries say nothing on standard output, and fetch nothing."""
    offline = os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_EVALUATE_OFFLINE", offline)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # a process for each core, for standard errors
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _load(options: TaskOptions) -> dict[str, Any]:
    """The tasks with their data, as the harness's `evaluate` takes them."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise InputError(
            "--tasks needs lm-evaluation-harness: pip install 'paceline[harness]'."
        ) from None
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    files = [name for name in names if name.endswith((".yaml", ".yml"))]
    if not names:
        raise InputError(f"--tasks {options.tasks!r} names none: give names or YAML files.")
    for file in files:
        if not Path(file).is_file():
            raise InputError(f"--tasks {file} is no file: give a task's YAML file, or a name.")
    # Its own tasks are 14,000 files, which take seconds to read.
    manager = TaskManager(include_defaults=len(files) < len(names))
    for name in names:
        if name not in files and name not in manager.task_index:
            close = get_close_matches(name, manager.all_tasks, 3)
            cure = f"did you mean {' or '.join(close)}?" if close else "give a name or a YAML file."
            raise InputError(f"lm-evaluation-harness has no task {name!r}: {cure}")
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
    for name in names:
        with _failures(f"Task {name} can't be read"):
            found = manager.load([name])
        loaded["tasks"] |= found["tasks"]
        loaded["groups"] |= found.get("groups", {})
    for name, task in loaded["tasks"].items():
        _check_metrics(name, task)
        task.set_fewshot_seed(_SEED)
        if options.fewshot is not None or task.config.num_fewshot is None:
            task.set_config("num_fewshot", options.fewshot or 0)
    return loaded


def _check_metrics(name: str, task: Any) -> None:
    """The harness notices only after the network's work that a metric is not here."""
    from lm_eval.api.registry import get_metric

    for metric in (task.config.metric_list or ()) if task.config.process_results is None else ():
        kind = metric["metric"]
        if isinstance(kind, str) and get_metric(kind, metric.get("hf_evaluate", False)) is None:
            raise InputError(
                f"Task {name} needs the metric {kind!r}, which is not on this machine: use one "
                "that lm-evaluation-harness has itself, or set HF_HUB_OFFLINE=0 to fetch it."
            )


def _evaluate(
    network: Network, settings: ServingSettings, loaded: Mapping[str, Any], options: TaskOptions
) -> list[dict[str, Any]]:
    """A line of tasks.jsonl for each task and group."""
    from lm_eval.evaluator import evaluate

    from paceline.serve.harness import ServedNetwork

    template = ChatTemplate(network.chat_template, network.settings) if options.is_chat else None
    engine = network.engine(settings.serve)
    with _failures("A task fails in lm-evaluation-harness"):
        found = evaluate(
            ServedNetwork(engine, network, template, evaluating),
            loaded,
            limit=options.limit,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
            apply_chat_template=options.is_chat,
        )
    engine.close()
    return [
        line
        for name, values in found["results"].items()
        if (line := _line(name, values, found, network, options))["metrics"]
    ]


def _line(
    name: str,
    values: Mapping[str, Any],
    found: Mapping[str, Any],
    network: Network,
    options: TaskOptions,
) -> dict[str, Any]:
    metrics: dict[str, float | None] = {}
    errors: dict[str, float | None] = {}
    for key, value in values.items():
        metric, _, filter_name = key.partition(",")
        if not filter_name or isinstance(value, str):  # the task's own name, or "N/A"
            continue
        known = float(value) if math.isfinite(value) else None
        plain = metric.removesuffix("_stderr")
        shown = plain if filter_name == "none" else f"{plain} ({filter_name})"
        (metrics if plain == metric else errors)[shown] = known
    return {
        "time": time.time(),
        "step": network.step,
        "task": name,
        "metrics": metrics,
        "errors": errors,
        "shots": found["n-shot"].get(name, 0),
        "questions": found["n-samples"].get(name, {}).get("effective"),
        "chat": options.is_chat,
    }


def _keep(run: Run, lines: Sequence[Mapping[str, Any]]) -> None:
    """In the run and its report; a run that can't be written is evaluated all the same."""
    with suppress(OSError):
        for line in lines:
            known = {**line, "checkpoint": run.checkpoint_sum(line["step"])}
            append_line(run.tasks_file, json.dumps(known).encode() + b"\n")
        write_report(run, _NOTES.print)


@contextmanager
def _failures(what: str) -> Iterator[None]:
    """A task is a person's file, and may do anything."""
    try:
        yield
    except (InputError, MemoryError, RuntimeError):
        raise
    except Exception as error:
        problem = " ".join(str(error).split())[:_MOST_SHOWN].rstrip(".")
        raise InputError(
            f"{what} ({type(error).__name__}: {problem}): mend it, put its data on this machine, "
            "or set HF_HUB_OFFLINE=0 to fetch that."
        ) from error
