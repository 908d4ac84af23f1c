"""Trackers: services of others to which rank 0 gives the numbers of each step as well.

TRACKERS is the table of them; an adapter opens the tracker's run, gives it numbers, and closes it.
Each works in a thread of its own, with a library that is imported there: a step waits for none of
them. One that raises is said once and switched off, and one that is too slow loses steps; neither
is a reason for a run to fail, for metrics.jsonl is its record.

The name under which a tracker knows the run stands in the Run's trackers.json, so that a run that
is started again goes on in the same one. Addresses and credentials are the trackers' own, from the
environment (MLFLOW_TRACKING_URI, WANDB_API_KEY, ...); none is read or written here.
"""

import math
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from paceline.config import files
from paceline.config.errors import InputError
from paceline.config.job import dotted, to_raw
from paceline.config.job_sections import TrackerName
from paceline.observe.metrics import Line, numbers_of
from paceline.observe.run import Run

FILE = "trackers.json"
_NAMES = TypeAdapter(dict[str, str])
_PROJECT = "paceline"
# Steps that may wait for a slow tracker, and how long the end of a run waits for it.
_MOST_WAITING, _PATIENCE_S = 1000, 20.0
# MLflow takes so many parameters at once, of so many characters.
_MOST_PARAMETERS, _MOST_CHARACTERS = 100, 500


class Tracker(Protocol):
    """A tracker's run, open. Every method may raise anything, and may take long."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step, which may be one that came before."""

    def close(self, *, has_failed: bool) -> None:
        """Send what is left; the run may be opened again."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run."""

    name: str
    folder: Path
    settings: Mapping[str, Any]
    """The Job, by section."""
    id: str
    """Ours, in any case; a tracker that gives out its own is asked for that."""
    their_id: str | None
    """What a tracker called it at an earlier start."""


class _Mlflow:
    """An MLflow run, in the experiment MLFLOW_EXPERIMENT_NAME, else "paceline"."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        if run.their_id is not None:
            self.id = run.their_id
            self._client.update_run(self.id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        known = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self.id = self._client.create_run(known, run_name=run.name).info.run_id
        told = dotted(run.settings).items()
        parameters = [Param(key, str(value)[:_MOST_CHARACTERS]) for key, value in told]
        for at in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self.id, params=parameters[at : at + _MOST_PARAMETERS])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(key, value, now_ms, step) for key, value in numbers.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def close(self, *, has_failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if has_failed else "FINISHED")


class _Wandb:
    """A run of Weights & Biases, in the project WANDB_PROJECT, else "paceline"."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        # Of this machine it is told nothing: a git remote or an argument may hold a secret.
        quiet = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        self.id = run.their_id or run.id
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.name,
            id=self.id,
            resume="allow",
            dir=run.folder,
            config=dict(run.settings),
            settings=quiet,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, *, has_failed: bool) -> None:
        self._run.finish(exit_code=int(has_failed))


class _Trackio:
    """A run of trackio, in the project TRACKIO_PROJECT, else "paceline"."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self.id = run.their_id or f"{run.name}-{run.id[:8]}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=self.id,
            resume="allow",
            config=dict(run.settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, *, has_failed: bool) -> None:
        self._run.finish()


class _OpenTelemetry:
    """Gauges of OpenTelemetry: through the program's own MeterProvider where it has set one, else
    by OTLP over HTTP to where OTEL_EXPORTER_OTLP_ENDPOINT says."""

    def __init__(self, run: TrackedRun) -> None:
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider

        self.id = run.their_id or run.id
        self._attributes = {"paceline.run": run.name, "paceline.run_id": self.id}
        found = metrics.get_meter_provider()
        self._taken: list[bool | None] = []
        self._own = None if isinstance(found, MeterProvider) else _otlp_provider(self._taken)
        self._meter = (self._own or found).get_meter(_PROJECT)
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if False in self._taken and True not in self._taken:
            raise ConnectionError(_NOT_TAKEN)
        for key, value in {**numbers, "step": step}.items():
            if key not in self._gauges:
                name = re.sub(r"[^\w./-]", "_", f"{_PROJECT}.{key}", flags=re.ASCII)
                self._gauges[key] = self._meter.create_gauge(name)
            self._gauges[key].set(value, self._attributes)

    def close(self, *, has_failed: bool) -> None:
        if self._own is not None:
            self._own.shutdown(timeout_millis=_PATIENCE_S * 500)
            if self._gauges and self._taken[-1:] != [True]:
                raise ConnectionError(_NOT_TAKEN)


_NOT_TAKEN = "the collector did not take the numbers; the log of rank 0 says why"


def _otlp_provider(taken: list[bool | None]) -> Any:
    """One that notes of each export whether it was taken (None: it is under way), since the library
    only logs that."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader

    class Exporter(OTLPMetricExporter):
        def export(self, *args: Any, **kwargs: Any) -> MetricExportResult:
            taken.append(None)
            result = MetricExportResult.FAILURE
            try:
                result = super().export(*args, **kwargs)
            finally:
                taken[-1] = result is MetricExportResult.SUCCESS
            return result

    return MeterProvider([PeriodicExportingMetricReader(Exporter())])


TRACKERS: Mapping[TrackerName, tuple[Callable[[TrackedRun], Any], Sequence[str]]] = {
    "mlflow": (_Mlflow, ["mlflow"]),
    "wandb": (_Wandb, ["wandb"]),
    "trackio": (_Trackio, ["trackio"]),
    "opentelemetry": (_OpenTelemetry, ["opentelemetry.sdk", "opentelemetry.exporter.otlp"]),
}
"""Each one's adapter, which has the `id` besides, and what it imports; its extra has its name."""


def require_installed(names: Sequence[TrackerName]) -> None:
    """Refuse trackers whose library is missing.

    Raises:
        InputError: one sentence, for the first of them.
    """
    for name in names:
        if not all(map(_is_installed, TRACKERS[name][1])):
            raise InputError(
                f'observe.trackers has "{name}", whose library is not installed: '
                f"pip install 'paceline[{name}]', or leave it out."
            )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


class Trackers:
    """The trackers of a run, on rank 0."""

    def __init__(self, run: Run, names: Sequence[TrackerName], unit: str) -> None:
        """Begin to open them.

        Args:
            run: the Run; its Job stands there.
            names: of them.
            unit: what the run counts, "tokens" or "samples".
        """
        self._run, self._unit = run, unit
        self._known = _read_names(run) if names else {}
        self._keeping = threading.Lock()
        settings = to_raw(run.job()) if names else {}
        self._feeds = [
            _Feed(name, TRACKERS[name][0], self._told(name, settings), self._keep) for name in names
        ]

    def log(self, line: Line) -> list[str]:
        """Hand over a step's numbers; returns at once, with what is to be said."""
        if not self._feeds:
            return []
        numbers = numbers_of(line, self._unit)
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}
        for feed in self._feeds:
            feed.put(line["step"], finite)
        return self._take_sentences()

    def close(self, *, has_failed: bool, patience_s: float | None = None) -> list[str]:
        """Wait for what is on its way; returns what is to be said.

        Args:
            has_failed: whether the run ends by an error.
            patience_s: how long; None: as long as the end of a run may take.
        """
        for feed in self._feeds:
            feed.end(has_failed=has_failed)
        deadline = time.monotonic() + (_PATIENCE_S if patience_s is None else patience_s)
        for feed in self._feeds:
            feed.join(deadline)
        return self._take_sentences()

    def _take_sentences(self) -> list[str]:
        return [sentence for feed in self._feeds for sentence in feed.take_sentences()]

    def _told(self, name: str, settings: Mapping[str, Any]) -> TrackedRun:
        known = self._known.get(name)
        return TrackedRun(self._run.path.name, self._run.path, settings, uuid.uuid4().hex, known)

    def _keep(self, name: str, their_id: str) -> None:
        with self._keeping:
            if self._known.get(name) != their_id:
                self._known[name] = their_id
                self._run.write_json(FILE, self._known)


def _read_names(run: Run) -> dict[str, str]:
    """What trackers called the run before; none where that can't be read: then they begin anew."""
    try:
        return files.read_json(run.path / FILE, _NAMES, "remove it")
    except InputError:
        return {}


class _Feed:
    """The thread that gives one tracker what it is to have."""

    def __init__(
        self,
        name: str,
        adapter: Callable[[TrackedRun], Any],
        run: TrackedRun,
        keep: Callable[[str, str], None],
    ) -> None:
        self._name, self._adapter, self._told, self._keep = name, adapter, run, keep
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | bool] = queue.Queue()
        self._sentences: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_open, self._is_off, self._is_slow = False, False, False
        self._thread = threading.Thread(target=self._feed, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._is_off:
            return
        if self._waiting.qsize() < _MOST_WAITING:
            self._waiting.put((step, numbers))
        elif not self._is_slow:
            self._is_slow = True
            self._say("takes longer than the steps, and loses some of them")

    def end(self, *, has_failed: bool) -> None:
        self._waiting.put(has_failed)

    def join(self, deadline: float) -> None:
        """Wait for its end until a moment of the monotonic clock."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            return
        if self._is_open:
            self._say("took too long after the last step, and lacks some")
        else:
            self._say("has not answered since the start, and has none of its steps")

    def take_sentences(self) -> list[str]:
        return [self._sentences.get() for _ in range(self._sentences.qsize())]

    def _say(self, what: str) -> None:
        self._sentences.put(f'the tracker "{self._name}" {what}; the run goes on without.')

    def _feed(self) -> None:
        try:
            tracker = self._adapter(self._told)
            self._keep(self._name, tracker.id)
            self._is_open = True
            while not isinstance(item := self._waiting.get(), bool):
                tracker.log(*item)
            tracker.close(has_failed=item)
        except (Exception, SystemExit) as error:  # some libraries leave like programs
            self._is_off = True
            reason = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
            self._say(f"is switched off ({type(error).__name__}: {reason})")
