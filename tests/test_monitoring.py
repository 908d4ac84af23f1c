"""docs/monitoring against a real Prometheus that scrapes a real run (two ranks, some seconds).

Every query of the dashboard must return data, and every alert's expression must be one that
Prometheus evaluates over metrics the run really has; tests/alerts_test.yml says when each alert
fires. Skipped where Debian's package `prometheus` is not installed.
"""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from paceline.observe.run import Run, json_lines
from tests.command_line import Started, environment, ranks, start_paceline, write_tiny_job
from tests.observe import interrupted

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed (apt-get install prometheus)",
)

DOCS = Path(__file__).parents[1] / "docs" / "monitoring"
# MFU needs a peak, which no CPU here has by itself.
DEVICE = (
    '{name="CPU",kind="cpu",memory_bytes={value=1e12,origin="assumed",source="this test"},'
    'peak_flops={fp32={value=1e11,origin="assumed",source="this test"}}}'
)
# What this run has none of: it trains on tokens, and they are there.
ABSENT = {
    "paceline_samples_per_second",
    "paceline_stream_latency_seconds",
    "paceline_stream_backlog_tokens",
}
_PATIENCE_S = 400.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    """The HTTP API of a server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, **parameters: str) -> dict:
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def value_of(self, expression: str) -> list:
        return self.ask("query", query=expression)["result"]

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            try:
                if self.value_of(expression):
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"no data for {expression} after {_PATIENCE_S} s")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A Prometheus with the project's own files, and the run that it scrapes."""
    folder = tmp_path_factory.mktemp("monitoring")
    run_port, port = free_port(), free_port()
    run = _start_run(folder, run_port)
    server = _start_server(folder, run_port, port)
    try:
        prometheus = Prometheus(port)
        prometheus.wait_for("paceline_steps_total")
        _interrupt(Run(folder / "runs" / "tiny"))
        # A profiled window, a checkpoint, and a late rank: then all of the rest is there.
        names = ("profiled_term_seconds", "last_checkpoint_step", "late_rank", "recovery_seconds")
        for metric in names:
            prometheus.wait_for(f"paceline_{metric}")
        prometheus.wait_for("delta(paceline_run_seconds_total[1h])")  # scraped twice
        yield prometheus
    finally:
        server.kill()
        server.wait()
        run.kill()  # its ranks end with it
        run.communicate()


def _start_run(folder: Path, port: int) -> Started:
    job = write_tiny_job(folder)
    settings = (
        f"cluster.device={DEVICE}",
        "train.steps=100000",
        "train.eval_every=4",
        f"observe.prometheus_port={port}",
        "observe.profile_every=5",
        "comm.dp.compress=int8",
        "comm.compress_from=1",
    )
    arguments = ("train", str(job), *ranks(2), *(f"--set={text}" for text in settings))
    return start_paceline(*arguments, folder=folder)


def _interrupt(run: Run) -> None:
    """Give the run the events of an elastic one that was interrupted earlier."""
    events = interrupted.simulated().events[:-1]
    late_s = time.time() - events[-1]["time"]
    later = ({**event, "time": event["time"] + late_s} for event in events)
    run.write("events.jsonl", json_lines(later))


def _start_server(folder: Path, run_port: int, port: int) -> subprocess.Popen:
    config = (DOCS / "prometheus.yml").read_text()
    for text, quick in ((":9400", f":{run_port}"), (": 15s", ": 1s"), (": 5s", ": 1s")):
        assert text in config
        config = config.replace(text, quick)
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(DOCS / "alerts.yml", folder)
    return subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        env=environment(folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def queries() -> list[tuple[str, str]]:
    """Title and expression of each query of the dashboard, for any run."""
    panels = json.loads((DOCS / "grafana-dashboard.json").read_text())["panels"]
    return [
        (f"{panel['title']} {target['refId']}", target["expr"].replace("$instance", ".*"))
        for panel in panels
        for target in panel["targets"]
    ]


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(r"\bpaceline_\w+", expression))


def test_every_query_of_the_dashboard_returns_data(server):
    empty = [
        title
        for title, expression in queries()
        if not server.value_of(expression) and not metrics_of(expression) <= ABSENT
    ]
    assert len(queries()) > 20
    assert not empty


def test_every_alert_is_evaluated_over_metrics_that_a_run_has(server):
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        (group,) = server.ask("rules")["groups"]
        if all(rule["health"] != "unknown" for rule in group["rules"]):
            break
        assert time.monotonic() < deadline, "the rules are not evaluated"
        time.sleep(0.2)
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert {rule["name"] for rule in group["rules"] if rule["state"] == "firing"} == set()
    named = {name for rule in group["rules"] for name in metrics_of(rule["query"])}
    assert len(named) >= 10
    assert not {name for name in named if not server.value_of(name)}


def test_every_metric_of_the_run_has_help_and_a_place_on_the_dashboard_or_in_an_alert(server):
    told = server.ask("targets/metadata", match_target='{job="paceline"}')
    texts = {each["metric"]: each["help"] for each in told if each["metric"].startswith("paceline")}
    assert texts
    assert all(texts.values())
    used = (DOCS / "grafana-dashboard.json").read_text() + (DOCS / "alerts.yml").read_text()
    seen = metrics_of(used)
    unused = {name for name in texts if not {name, f"{name}_total", f"{name}_info"} & seen}
    assert unused == {"paceline_tokens", "paceline_ranks", "paceline_last_checkpoint_step"}


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", str(DOCS / "prometheus.yml")),
        ("check", "rules", str(DOCS / "alerts.yml")),
        ("test", "rules", str(Path(__file__).with_name("alerts_test.yml"))),
    ],
    ids=["configuration", "rules", "when each alert fires"],
)
def test_promtool_agrees(command):
    done = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
