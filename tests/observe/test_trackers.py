"""Trackers: each with its real library where that is installed; what fails or hangs ends no run."""

import json
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

import pytest

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.observe import trackers as trackers_module
from paceline.observe.run import Run
from paceline.observe.trackers import Trackers, require_installed
from paceline.train.command import train_job
from tests.small_job import work_in, write_small_job

SECRET = "secret-of-a-test"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A Run of a Job that ran."""
    work_in(tmp_path, monkeypatch)
    run = Run(tmp_path / "runs" / "small")
    train_job(read_job(write_small_job(tmp_path)), run, fresh=False)
    return run


def line(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, "terms": {"matmul": 0.5}, "mfu": None, "lr": 1e-3}


def track(run: Run, name: str, *steps: int, has_failed: bool = False) -> list[str]:
    """A start of the run that makes these steps; returns what it says."""
    trackers = Trackers(run, [name], "tokens")
    said = [sentence for step in steps for sentence in trackers.log(line(step))]
    return said + trackers.close(has_failed=has_failed)


def their_names(run: Run) -> dict[str, str]:
    return json.loads((run.path / "trackers.json").read_text())


# ---- each with its library -----------------------------------------------------------------------


def test_mlflow_has_every_step_in_one_run_over_two_starts(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra paceline[mlflow] is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert track(run, "mlflow", 1, 2, has_failed=True) == []
    client, known = mlflow.MlflowClient(), their_names(run)["mlflow"]
    assert client.get_run(known).info.status == "FAILED"
    assert track(run, "mlflow", 2, 3) == []
    (experiment,) = client.search_experiments(filter_string="name = 'paceline'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == known
    assert found.info.run_name == "small"
    assert found.info.status == "FINISHED"
    assert found.data.params["train.steps"] == "4"
    history = client.get_metric_history(known, "loss")
    assert {each.step: each.value for each in history} == {1: 1.0, 2: 0.5, 3: 1 / 3}
    assert found.data.metrics["terms/matmul"] == 0.5
    assert "mfu" not in found.data.metrics


def test_wandb_goes_on_in_one_run_and_keeps_no_secret(run, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra paceline[wandb] is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    try:
        for steps in ((1, 2), (3,)):
            assert track(run, "wandb", *steps) == []
    finally:
        wandb.teardown()
    known = their_names(run)["wandb"]
    files = sorted((run.path / "wandb").glob(f"offline-run-*/run-{known}.wandb"))
    assert len({file.parent for file in files}) == len(files) >= 1
    written = b"".join(file.read_bytes() for file in files)
    assert b"terms/matmul" in written
    for file in run.path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_trackio_goes_on_in_one_run(run, tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio", reason="the extra paceline[trackio] is not installed")
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio")
    for steps in ((1, 2), (3,)):
        assert track(run, "trackio", *steps) == []
    known = their_names(run)["trackio"]
    assert known.startswith("small-")
    (found,) = trackio.Api().runs("paceline")
    assert found.name == known


def test_opentelemetry_has_gauges_with_the_runs_name(run, monkeypatch):
    sdk = pytest.importorskip(
        "opentelemetry.sdk.metrics", reason="the extra paceline[opentelemetry] is not installed"
    )
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    for steps in ((1, 2), (3,)):
        assert track(run, "opentelemetry", *steps) == []
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    points = {each.name: list(each.data.data_points) for each in scope.metrics}
    (loss,), (step,) = points["paceline.loss"], points["paceline.step"]
    assert (loss.value, step.value) == (1 / 3, 3)
    assert points["paceline.terms/matmul"][0].value == 0.5
    known = their_names(run)["opentelemetry"]
    assert loss.attributes == {"paceline.run": "small", "paceline.run_id": known}
    provider.shutdown()


@pytest.mark.parametrize("fails_at", [0, 1], ids=["never takes any", "goes away"])
def test_opentelemetry_says_that_the_collector_took_nothing(run, monkeypatch, fails_at):
    otlp = pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http.metric_exporter",
        reason="the extra paceline[opentelemetry] is not installed",
    )
    export = otlp.OTLPMetricExporter.export
    begun = Event()
    results = [otlp.MetricExportResult.SUCCESS] * fails_at

    def answer(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        return results.pop() if results else export(*args, **kwargs)

    monkeypatch.setattr(otlp.OTLPMetricExporter, "export", answer)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100" if fails_at else "60000")
    trackers = Trackers(run, ["opentelemetry"], "tokens")
    said = trackers.log(line(1))
    assert not fails_at or begun.wait(60)
    said += trackers.close(has_failed=False)
    assert said == [
        'the tracker "opentelemetry" is switched off (ConnectionError: the collector did not take '
        "the numbers; the log of rank 0 says why); the run goes on without."
    ]


# ---- what goes wrong -----------------------------------------------------------------------------


class Kept:
    """A tracker in memory."""

    opened: ClassVar[list["Kept"]] = []

    def __init__(self, run: Any) -> None:
        self.id, self.known, self.steps = "theirs", run.their_id, []
        self.opened.append(self)

    def log(self, step: int, numbers: Any) -> None:
        self.steps.append(step)

    def close(self, *, has_failed: bool) -> None:
        self.has_failed = has_failed


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    """Stands for MLflow."""
    monkeypatch.setattr(Kept, "opened", [])
    monkeypatch.setitem(trackers_module.TRACKERS, "mlflow", (Kept, ["json"]))
    return Kept


def test_a_run_tells_its_trackers_each_step(kept, tmp_path, monkeypatch):
    work_in(tmp_path, monkeypatch)
    job = read_job(write_small_job(tmp_path), ['observe.trackers=["mlflow"]'])
    train_job(job, Run(tmp_path / "runs" / "small"), fresh=False)
    (opened,) = kept.opened
    assert opened.steps == [1, 2, 3, 4]
    assert not opened.has_failed


def test_a_tracker_that_raises_is_said_once_and_the_run_goes_on(kept, tmp_path, monkeypatch):
    def fail(_self: Kept, step: int, _numbers: Any) -> None:
        raise ConnectionError(f"no such host at step {step}.\nand more")

    monkeypatch.setattr(kept, "log", fail)
    work_in(tmp_path, monkeypatch)
    run = Run(tmp_path / "runs" / "small")
    job = read_job(write_small_job(tmp_path), ['observe.trackers=["mlflow"]'])
    train_job(job, run, fresh=False)
    assert len(run.metrics()) == 4
    said = (run.log_folder / "rank0.log").read_text()
    assert said.count("tracker") == 1
    assert (
        'the tracker "mlflow" is switched off (ConnectionError: no such host at step 1); the run '
        "goes on without."
    ) in said


def test_a_tracker_that_hangs_stalls_no_step(run, kept, monkeypatch):
    let_go = Event()
    monkeypatch.setattr(kept, "log", lambda *_: let_go.wait(60))
    monkeypatch.setattr(trackers_module, "_MOST_WAITING", 10)
    monkeypatch.setattr(trackers_module, "_PATIENCE_S", 0.1)
    try:
        said = track(run, "mlflow", *range(1, 1000))
        assert [sentence.split('"')[2].split(",")[0] for sentence in said] == [
            " takes longer than the steps",
            " took too long after the last step",
        ]
    finally:
        let_go.set()


def test_a_tracker_that_never_answers_is_said_to_have_nothing(run, kept, monkeypatch):
    let_go = Event()
    monkeypatch.setattr(kept, "__init__", lambda *_: let_go.wait(60))
    monkeypatch.setattr(trackers_module, "_PATIENCE_S", 0.1)
    try:
        assert track(run, "mlflow", 1) == [
            'the tracker "mlflow" has not answered since the start, and has none of its steps; '
            "the run goes on without."
        ]
    finally:
        let_go.set()


def test_a_damaged_trackers_json_begins_anew(run, kept):
    for text, known in (('{"mlflow": "old"}', "old"), ("{", None), ('{"mlflow": 3}', None)):
        (run.path / "trackers.json").write_text(text)
        assert track(run, "mlflow", 1) == []
        assert kept.opened[-1].known == known
        assert their_names(run) == {"mlflow": "theirs"}


def test_a_missing_library_is_one_sentence(monkeypatch):
    monkeypatch.setattr(trackers_module, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match=r"pip install 'paceline\[wandb\]', or leave it out\.$"):
        require_installed(["wandb"])


def test_an_unknown_tracker_is_refused():
    with pytest.raises(InputError, match=r"observe\.trackers"):
        read_job(None, ['observe.trackers=["neptune"]'])
