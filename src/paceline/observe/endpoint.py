"""The Prometheus endpoint of a run: a scrape turns the last line into samples.

A step only replaces the line. Names follow Prometheus' conventions (base units, `_total` for what
only grows); docs/monitoring/ has rules and a dashboard that use them. What a person's loss states
besides has a name made from theirs, and theirs as a label. A run that goes on from a
checkpoint counts on from there, so its counters may fall a little: `delta`, not `increase`.

Source: https://prometheus.io/docs/practices/naming/
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.job_sections import Observe
from paceline.observe.generations import LOSS_CLASSES, PHASES, Generations, GenerationsSoFar
from paceline.observe.rank_spread import slowest_rank, spread_of
from paceline.observe.run import Run

Line = Mapping[str, Any]

# Key of a line -> name and help text of the endpoint, in the units the names say.
_GAUGES = {
    "loss": ("paceline_loss", "Training loss of the last step."),
    "eval_loss": ("paceline_eval_loss", "Loss on the held-out split, at the last evaluation."),
    "eval_accuracy": ("paceline_eval_accuracy_ratio", "Held-out images classified right, 0 to 1."),
    "eval_auc": ("paceline_eval_auc_ratio", "Held-out area under the ROC curve, 0 to 1."),
    "lr": ("paceline_learning_rate", "Learning rate of the last step."),
    "grad_norm": ("paceline_gradient_norm", "Global gradient norm before clipping."),
    "step_time_s": ("paceline_step_time_seconds", "Wall-clock time of the last step."),
    "gc_s": ("paceline_garbage_collection_seconds", "Of Python's collector, in the last step."),
    "tokens_per_s": ("paceline_tokens_per_second", "Tokens a second over all ranks."),
    "samples_per_s": ("paceline_samples_per_second", "Samples a second over all ranks."),
    "stream_latency_s": (
        "paceline_stream_latency_seconds",
        "From the arrival of the last step's oldest token to its training.",
    ),
    "stream_backlog_tokens": (
        "paceline_stream_backlog_tokens",
        "Tokens that have arrived and no step has had.",
    ),
    "mfu": ("paceline_mfu_ratio", "Model FLOPs over the peak of the devices, 0 to 1."),
    "memory_bytes": ("paceline_memory_bytes", "Peak memory of rank 0."),
    "time": ("paceline_last_step_timestamp_seconds", "Unix time at which the last step ended."),
}
_COUNTERS = {
    "step": ("paceline_steps", "Optimizer steps done."),
    "tokens": ("paceline_tokens", "Tokens trained on."),
    "samples": ("paceline_samples", "Samples trained on."),
    "skipped": ("paceline_skipped_steps", "Steps skipped for a non-finite loss or gradient."),
}
_STATED = {
    "figures": ("paceline_figure", "A mean that the loss states, of the last step."),
    "eval_figures": ("paceline_eval_figure", "A mean that the loss states, last evaluation."),
}
_OF_RANKS = {
    "busy_s": (
        "paceline_rank_busy_seconds",
        "Of the last step in which the rank did not wait for others.",
    ),
    "core_wait_s": (
        "paceline_rank_core_wait_seconds",
        "Of the last step in which the rank's main thread was ready and had no core.",
    ),
    "memory_bytes": ("paceline_rank_memory_bytes", "Peak memory of the rank; resident on a CPU."),
}

# With more steps between two scrapes metrics.jsonl is read anew.
_MOST_LINES = 1000


class Endpoint:
    """Serves the samples of one run, from a thread of its own."""

    def __init__(self, run: Run, settings: Observe) -> None:
        """Open the port.

        Raises:
            InputError: it can't be opened.
        """
        self._run = run
        self._planned = list(_planned(run.job())) if run.exists else []
        self._line: Line = {}
        self._profiled: Line = {}
        # Taken at a scrape, on the server's thread: a step pays nothing for them.
        self._newest: deque[Line] = deque(maxlen=_MOST_LINES)
        self._generations = GenerationsSoFar(run)
        registry = CollectorRegistry()
        registry.register(self)
        host, port = settings.prometheus_host, settings.prometheus_port
        assert port is not None
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise InputError(
                f"observe.prometheus_port = {port} can't be opened on {host}: {error.strerror}; "
                "choose a free port of this machine, or leave the setting out."
            ) from None

    def update(self, line: Line) -> None:
        """Take the line of a step."""
        # Merged, because an evaluation's numbers stay true until the next one.
        self._line = {**self._line, **line}
        if line.get("profiled"):
            self._profiled = line
        if "generation" in line:
            self._newest.append(line)

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets; called by prometheus_client on the server's thread."""
        line = self._line
        yield InfoMetricFamily("paceline_run", "The run.", {"name": self._run.path.name})
        yield from self._planned
        yield from _of_keys(line, _GAUGES, GaugeMetricFamily)
        yield from _of_keys(line, _COUNTERS, CounterMetricFamily)
        for key, (name, text) in _STATED.items():
            yield from _stated(name, text, line.get(key, {}))
        yield _terms("paceline_term_seconds", "Part of the last step's time, by term.", line)
        yield _terms(
            "paceline_profiled_term_seconds",
            "Part of the last profiled step's time, by term.",
            self._profiled,
        )
        yield _sent(line)
        yield from _ranks(line.get("ranks") or {})
        yield from _checkpoint(self._run.last_checkpoint())
        with suppress(InputError):  # the next start says it
            self._generations.take(list(self._newest))
            if (found := self._generations.look()) is not None:
                yield from _interruptions(found)

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _planned(job: Job) -> Iterator[Metric]:
    """What the Job says, for what is measured to be compared with."""
    yield GaugeMetricFamily("paceline_planned_steps", "The last step of the run.", job.train.steps)
    yield GaugeMetricFamily("paceline_ranks", "Ranks of the run.", job.layout.num_ranks)
    memory = job.cluster.device.memory_bytes
    if memory is not None:
        text = "Memory of a device; on a CPU the host's, divided by its ranks."
        yield GaugeMetricFamily("paceline_memory_limit_bytes", text, memory.value)


def _of_keys(
    line: Line, names: Mapping[str, tuple[str, str]], family: Callable[..., Metric]
) -> Iterator[Metric]:
    for key, (name, text) in names.items():
        if line.get(key) is not None:
            yield family(name, text, line[key])


def _stated(prefix: str, text: str, figures: Mapping[str, float]) -> Iterator[Metric]:
    """What the loss states. Two names may become one: they are told apart by the label."""
    families: dict[str, GaugeMetricFamily] = {}
    for stated, value in figures.items():
        name = f"{prefix}_{re.sub('[^a-zA-Z0-9_]', '_', stated)}"
        family = families.setdefault(name, GaugeMetricFamily(name, text, labels=["name"]))
        family.add_metric([stated], value)
    yield from families.values()


def _terms(name: str, text: str, line: Line) -> Metric:
    return _by_label(GaugeMetricFamily, name, text, "term", line.get("terms", {}))


def _sent(line: Line) -> Metric:
    text = "What rank 0 sent in a compressed or local form in the last step, by mesh axis."
    sent = GaugeMetricFamily("paceline_step_sent_bytes", text, labels=["axis"])
    for name, count in line.get("comm", {}).items():
        axis, _, unit = name.partition(".")
        if unit == "bytes":
            sent.add_metric([axis], count)
    return sent


def _ranks(figures: Mapping[str, Any]) -> Iterator[Metric]:
    """Each rank's figures; of many ranks those of the one that stands out."""
    for key, (name, text) in _OF_RANKS.items():
        family = GaugeMetricFamily(name, text, labels=["rank"])
        figure, spread = figures.get(key), spread_of(figures.get(key))
        if isinstance(figure, list):
            for rank, value in enumerate(figure):
                family.add_metric([str(rank)], value)
        elif spread is not None:
            family.add_metric([str(spread.at)], spread.most)
        yield family
    if (late := slowest_rank(figures.get("busy_s"))) is not None:
        rank, lag_s = late
        yield GaugeMetricFamily("paceline_late_rank", "The rank that others wait for.", rank)
        text = "By how much the late rank's busy time exceeds that of a typical one."
        yield GaugeMetricFamily("paceline_late_rank_lag_seconds", text, lag_s)


def _checkpoint(last: tuple[int, float] | None) -> Iterator[Metric]:
    if last is None:
        return
    step, written = last
    yield GaugeMetricFamily("paceline_last_checkpoint_step", "Of the newest checkpoint.", step)
    text = "Unix time at which the newest checkpoint was written."
    yield GaugeMetricFamily("paceline_last_checkpoint_timestamp_seconds", text, written)


def _interruptions(found: Generations) -> Iterator[Metric]:
    newest = found.newest
    yield GaugeMetricFamily("paceline_generation", "Number of the generation.", newest.number)
    nodes = GaugeMetricFamily("paceline_nodes", "Nodes of the generation.", labels=["state"])
    nodes.add_metric(["active"], len(newest.nodes))
    nodes.add_metric(["spare"], len(newest.spares))
    yield nodes
    if found.goodput is not None and found.effective_ratio is not None:
        text = "Time of steps that were kept over that of all starts, 0 to 1."
        yield GaugeMetricFamily("paceline_goodput_ratio", text, found.goodput)
        text = "The same over all time since the first start, that between starts included."
        name = "paceline_effective_training_time_ratio"
        yield GaugeMetricFamily(name, text, found.effective_ratio)
    counts = {**dict.fromkeys(LOSS_CLASSES, 0), **found.num_losses}
    yield _by_label(
        CounterMetricFamily, "paceline_losses", "Losses of all starts.", "class", counts
    )
    text = "Steps done again, of all starts."
    yield CounterMetricFamily("paceline_steps_recomputed", text, found.recomputed)
    text = "Of all starts, by what they went into."
    yield _by_label(CounterMetricFamily, "paceline_run_seconds", text, "class", found.seconds)
    if (last := found.last_recovery) is not None:
        phases = {phase: last.recovery_s.get(phase, 0.0) for phase in PHASES}
        text = "Of the last recovery, by phase."
        yield _by_label(GaugeMetricFamily, "paceline_recovery_seconds", text, "phase", phases)


def _by_label(
    family: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    made = family(name, text, labels=[label])
    for key, value in values.items():
        made.add_metric([key], value)
    return made
