"""The dashboard and alerts of serving against a real Prometheus that scrapes a real server."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.command_line import environment
from tests.serve.served import PATIENCE_S, serve
from tests.test_monitoring import DOCS, Prometheus, free_port, metrics_of

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus and promtool are not installed (apt-get install prometheus)",
)
DASHBOARD, ALERTS = DOCS / "serving-dashboard.json", DOCS / "serving-alerts.yml"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A Prometheus with the project's own files, and the server that it scrapes."""
    folder, port = tmp_path_factory.mktemp("monitoring"), free_port()
    with serve() as served:
        served.post(prompt="p" * 60, max_tokens=5)
        config = (DOCS / "prometheus.yml").read_text()
        for text, quick in (
            (":8000", f":{served.address[1]}"),
            (": 15s", ": 1s"),
            (": 5s", ": 1s"),
        ):
            assert text in config
            config = config.replace(text, quick)
        (folder / "prometheus.yml").write_text(config)
        shutil.copy(ALERTS, folder)
        process = subprocess.Popen(
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
        try:
            prometheus = Prometheus(port)
            prometheus.wait_for("paceline_serve_ready")
            served.post(prompt="p" * 60, max_tokens=5)
            prometheus.wait_for("rate(paceline_serve_prompt_tokens_cached_total[5m]) > 0")
            yield prometheus
        finally:
            process.kill()
            process.wait()


def test_every_query_of_the_dashboard_returns_data(server):
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    empty = [each for each in queries if not server.value_of(each.replace("$instance", ".*"))]
    assert len(queries) > 20
    assert not empty


def test_every_alert_is_evaluated_over_metrics_that_a_server_has(server):
    end = time.monotonic() + PATIENCE_S
    while True:
        (group,) = server.ask("rules")["groups"]
        if all(rule["health"] != "unknown" for rule in group["rules"]):
            break
        assert time.monotonic() < end, "the rules are not evaluated"
        time.sleep(0.1)
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    named = {name for rule in group["rules"] for name in metrics_of(rule["query"])}
    assert len(named) >= 7
    assert not {name for name in named if not server.value_of(name)}
    assert {rule["name"] for rule in group["rules"] if rule["state"] == "firing"} == set()


def test_every_metric_has_help_and_a_place_on_the_dashboard_or_in_an_alert(server):
    told = server.ask("targets/metadata", match_target='{job="paceline-serve"}')
    texts = {each["metric"]: each["help"] for each in told if each["metric"].startswith("paceline")}
    assert len(texts) > 15
    assert all(texts.values())
    seen = metrics_of(DASHBOARD.read_text() + ALERTS.read_text())
    endings = ("", "_total", "_info", "_bucket")
    assert not {name for name in texts if not {f"{name}{end}" for end in endings} & seen}


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", str(DOCS / "prometheus.yml")),
        ("check", "rules", str(ALERTS)),
        ("test", "rules", str(Path(__file__).with_name("alerts_test.yml"))),
    ],
    ids=["configuration", "rules", "when each alert fires"],
)
def test_promtool_agrees(command):
    done = subprocess.run(["promtool", *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
