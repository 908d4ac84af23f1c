"""The writers of a run's metrics: pure text, then files, then a port of the loopback."""

import json
import math
import resource
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.config.errors import InputError
from paceline.config.job_sections import Observe
from paceline.observe.metrics import Metrics, drop_from, to_json, truncate_after
from paceline.observe.run import Run, json_lines
from tests.observe import interrupted, synthetic

QUIET = Observe(tensorboard=False)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "runs" / "demo")


def write(run, lines, settings=QUIET, resume_step=0, unit="tokens"):
    metrics = Metrics(run, settings, unit, resume_step)
    for line in lines:
        metrics.record(line)
    metrics.close()
    return metrics


def test_numbers_that_are_not_finite_become_null():
    line = {"step": 1, "loss": math.nan, "mfu": None, "terms": {"matmul": math.inf, "x": 0.5}}
    text = to_json(line)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "mfu": None,
        "terms": {"matmul": None, "x": 0.5},
    }
    assert math.isnan(line["loss"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"step": 1}\n{"step": 2}\n{"step": 3}\n', '{"step": 1}\n{"step": 2}\n'),
        ('{"step": 1}\n{"step": 2, "lo', '{"step": 1}\n'),
        ('{"step": 1}\n{"step": 2}', '{"step": 1}\n{"step": 2}\n'),
        ('{"step": 1}\n\0\0\0\0', '{"step": 1}\n'),
        ('{"step": 1, "a": 1}\n{"step": 1, "a": 2}\n', '{"step": 1, "a": 2}\n'),
        ('{"step": 3}\n', ""),
        ("", ""),
    ],
    ids=["later", "cut", "no newline", "zeros", "twice", "all later", "empty"],
)
def test_only_whole_lines_up_to_the_step_are_kept(tmp_path, before, after):
    file = tmp_path / "metrics.jsonl"
    file.write_text(before)
    truncate_after(file, 2)
    assert file.read_text() == after
    assert list(tmp_path.iterdir()) == [file]


def test_a_whole_file_is_not_written_again(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    before = file.stat()
    truncate_after(file, 1)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    truncate_after(tmp_path / "absent.jsonl", 1)
    assert not (tmp_path / "absent.jsonl").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"step": 2}\n{"step": 4}\n{"step": 6}\n', '{"step": 2}\n'),
        ('{"step": 2}\n{"step": 3, "texts"', '{"step": 2}\n'),
        ('{"step": 1}\n{"st\n{"step": 3}\n{"step": 9}\n', '{"step": 1}\n{"st\n{"step": 3}\n'),
        ('{"step": 4}\n{"step": 6}\n{"step": 2}\n', ""),
        ("[3]\n\n", "[3]\n\n"),
        ("", ""),
    ],
    ids=["later", "cut", "damaged", "all later", "no number", "empty"],
)
def test_samples_that_are_made_anew_are_cut_off(tmp_path, before, after):
    file = tmp_path / "samples.jsonl"
    file.write_text(before)
    drop_from(file, "step", 4)
    assert file.read_text() == after
    drop_from(tmp_path / "absent.jsonl", "step", 1)
    assert not (tmp_path / "absent.jsonl").exists()


def test_of_a_long_file_the_end_alone_is_read(run, monkeypatch):
    lines = [{"step": step, "pad": "x" * 90} for step in range(1, 20_001)]
    run.write("metrics.jsonl", json_lines(lines))
    num_bytes = run.metrics_file.stat().st_size

    def read_all(*_arguments):
        pytest.fail("all of it is read")

    with monkeypatch.context() as patch:
        patch.setattr("paceline.observe.run.read_lines", read_all)
        patch.setattr("paceline.observe.metrics.read_lines", read_all)
        truncate_after(run.metrics_file, 20_000)
        assert run.metrics_file.stat().st_size == num_bytes
        truncate_after(run.metrics_file, 19_500)
        assert [line["step"] for line in run.newest_steps()][-1000:] == [*range(18_501, 19_501)]
        assert len(run.newest_steps()) < 3000
        assert run.step(19_000)["step"] == 19_000
    assert run.step(5)["step"] == 5
    assert run.step(19_501) is None
    truncate_after(run.metrics_file, 100)  # it doesn't stand in the end
    assert run.metrics() == lines[:100]


def test_each_step_can_be_read_as_soon_as_it_is_recorded(run):
    lines = synthetic.lines(3)
    metrics = Metrics(run, QUIET, "tokens", 0)
    for num_recorded, line in enumerate(lines, start=1):
        metrics.record(line)
        assert run.metrics() == lines[:num_recorded]
    metrics.close()
    metrics.close()


def test_a_resumed_run_has_one_object_per_step(run):
    lines = synthetic.lines(10)
    write(run, lines[:7])
    with run.metrics_file.open("a") as file:
        file.write('{"step": 8, "loss": 4.')
    write(run, lines[4:], resume_step=4)
    assert run.metrics() == lines


def test_a_new_run_forgets_what_was_there(run):
    write(run, synthetic.lines(5))
    write(run, synthetic.lines(2))
    assert [line["step"] for line in run.metrics()] == [1, 2]


def scalars(run, tag):
    events = EventAccumulator(str(run.tensorboard_folder), {"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def tags(run):
    events = EventAccumulator(str(run.tensorboard_folder))
    events.Reload()
    return set(events.Tags()["scalars"])


def test_tensorboard_reads_every_scalar(run):
    lines = synthetic.lines(6, profile_every=2)
    lines[3]["loss"] = math.nan
    lines[3]["mfu"] = 0.43
    write(run, lines, Observe())
    assert tags(run) == {
        *("loss", "eval_loss", "eval_perplexity", "lr", "grad_norm", "step_time_s", "mfu"),
        *("tokens_per_s", "memory_bytes"),
        *(f"terms/{term}" for term in lines[1]["terms"]),
    }
    assert scalars(run, "lr") == [(line["step"], pytest.approx(line["lr"])) for line in lines]
    assert scalars(run, "mfu") == [(4, pytest.approx(0.43))]
    assert math.isnan(dict(scalars(run, "loss"))[4])


STATED = {"acc": 0.5, "top-5": 0.75, "top 5": 0.25, 'é "x"\\\n': 2.0, "2nd": 3.0, "seen_total": 4.0}
"""What a loss states, under names that no Prometheus takes, two of which it can't tell apart."""


def stating():
    """Two steps, of which the first has an evaluation."""
    lines = [{**line, "figures": STATED} for line in synthetic.lines(2)]
    lines[0]["eval_figures"] = {**STATED, "acc": 0.625}
    lines[0] |= {"eval_accuracy": 0.25, "eval_auc": 0.75, "eval_best_auc": 0.875}
    lines[1]["figures"] = {**STATED, "acc": 0.125}
    return lines


def test_tensorboard_shows_what_the_loss_states(run):
    write(run, stating(), Observe())
    assert {f"{key}/{name}" for key in ("figures", "eval_figures") for name in STATED} <= tags(run)
    assert scalars(run, "figures/acc") == [(1, 0.5), (2, 0.125)]
    assert scalars(run, "figures/top-5") == [(1, 0.75), (2, 0.75)]
    assert scalars(run, "eval_figures/acc") == [(1, 0.625)]
    for tag, value in (("eval_accuracy", 0.25), ("eval_auc", 0.75), ("eval_best_auc", 0.875)):
        assert scalars(run, tag) == [(1, value)]


def test_tensorboard_forgets_the_steps_after_a_resume(run):
    lines = synthetic.lines(10)
    write(run, [{**line, "loss": 99.0} for line in lines[:7]], Observe())
    write(run, lines[4:8], Observe(), resume_step=4)
    losses = scalars(run, "loss")
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [loss == 99.0 for _, loss in losses] == [True] * 4 + [False] * 4


def test_samples_are_counted_as_samples(run):
    write(run, synthetic.lines(2, unit="samples"), Observe(), unit="samples")
    assert "samples_per_s" in tags(run)


def test_without_tensorboard_nothing_of_it_is_written_or_imported(run):
    write(run, synthetic.lines(2))
    assert not run.tensorboard_folder.exists()
    code = "import sys, paceline.observe.metrics; print({'tensorboard', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scrape(port, accept="text/plain"):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_scrapes_the_last_step(run, port):
    settings = Observe(tensorboard=False, prometheus_port=port)
    metrics = Metrics(run, settings, "tokens", 0)
    assert 'paceline_run_info{name="demo"} 1.0' in scrape(port)
    lines = synthetic.lines(12, profile_every=11)
    for line in lines[:11]:
        metrics.record(line)
    text = scrape(port).splitlines()
    metrics.close()
    last = lines[10]
    for sample in (
        "paceline_steps_total 11.0",
        f"paceline_tokens_total {float(last['tokens'])}",
        f"paceline_loss {last['loss']}",
        f"paceline_step_time_seconds {last['step_time_s']}",
        f'paceline_term_seconds{{term="exposed_comm.dp"}} {last["terms"]["exposed_comm.dp"]}',
        # The last evaluation was before the last step.
        f"paceline_eval_loss {lines[9]['eval_loss']}",
    ):
        assert sample in text
    assert not any(sample.startswith("paceline_mfu") for sample in text)


def test_prometheus_scrapes_what_interruptions_cost(run, port):
    """Three processes write the run, of which the newest one is scraped."""
    made = interrupted.simulated()
    interrupted.write(run.path, made)
    (run.path / "job.toml").unlink()
    before, now = made.lines[:-40], made.lines[-40:]
    run.write("metrics.jsonl", json_lines(before))
    settings = Observe(tensorboard=False, prometheus_port=port)
    metrics = Metrics(run, settings, "tokens", before[-1]["step"])
    for line in now:
        metrics.record(line)
        if line is now[20]:
            scrape(port)
    text = scrape(port)
    metrics.close()
    seconds = {name: value for name, value in made.seconds.items() if value}
    kept = seconds["kept"] / sum(seconds.values())
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in prometheus(text)
        for sample in family.samples
    }
    assert found["paceline_generation",] == 5
    assert found["paceline_nodes", "active"] == 4
    assert found["paceline_nodes", "spare"] == 0
    assert found["paceline_goodput_ratio",] == pytest.approx(kept)
    assert found["paceline_effective_training_time_ratio",] == pytest.approx(kept)
    assert found["paceline_losses_total", "dead"] == 2
    assert found["paceline_losses_total", "vanished"] == 1
    assert found["paceline_losses_total", "slow"] == 0
    assert found["paceline_steps_recomputed_total",] == 3
    for name, value in seconds.items():
        assert found["paceline_run_seconds_total", name] == pytest.approx(value, abs=1e-3)
    assert found["paceline_recovery_seconds", "decide"] == pytest.approx(0.3)
    assert found["paceline_recovery_seconds", "restore"] == pytest.approx(0.15)


def test_a_run_that_is_not_elastic_has_no_metric_of_generations(run, port):
    metrics = Metrics(run, Observe(tensorboard=False, prometheus_port=port), "tokens", 0)
    metrics.record(synthetic.lines(1)[0])
    text = scrape(port)
    run.events_file.mkdir()
    assert scrape(port) == text
    metrics.close()
    assert "paceline_steps_total" in text
    for word in ("generation", "goodput", "losses", "recover", "nodes", "run_seconds"):
        assert word not in text


@pytest.mark.parametrize(
    ("accept", "parse"),
    [("text/plain", prometheus), ("application/openmetrics-text; version=1.0.0", openmetrics)],
    ids=["text", "openmetrics"],
)
def test_prometheus_parses_what_the_loss_states(run, port, accept, parse):
    metrics = Metrics(run, Observe(tensorboard=False, prometheus_port=port), "samples", 0)
    for line in stating():
        metrics.record(line)
    text = scrape(port, accept)
    metrics.close()
    families = [family for family in parse(text) if "_figure_" in family.name]
    assert all(family.documentation and family.type == "gauge" for family in families)
    found = {
        (sample.name, sample.labels["name"]): sample.value
        for family in families
        for sample in family.samples
    }
    expected = {
        "acc": "acc", "top-5": "top_5", "top 5": "top_5", 'é "x"\\\n': "___x___", "2nd": "2nd",
        "seen_total": "seen_total",
    }  # fmt: skip
    # The last evaluation was before the last step.
    for prefix, acc in (("paceline_figure", 0.125), ("paceline_eval_figure", 0.625)):
        for stated, name in expected.items():
            value = acc if stated == "acc" else STATED[stated]
            assert found.pop((f"{prefix}_{name}", stated)) == value
    assert not found
    assert "\npaceline_eval_accuracy_ratio 0.25\n" in text
    assert "\npaceline_eval_auc_ratio 0.75\n" in text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_own_parser_takes_what_the_loss_states(run, port):
    metrics = Metrics(run, Observe(tensorboard=False, prometheus_port=port), "samples", 0)
    for line in stating():
        metrics.record(line)
    text = scrape(port)
    metrics.close()
    assert "paceline_eval_figure_top_5" in text
    check = ["promtool", "check", "metrics"]
    done = subprocess.run(check, input=text, capture_output=True, text=True, timeout=300)
    assert "error while linting" not in done.stderr, done.stderr
    assert done.returncode in (0, 3), done.stderr  # 3: it would choose other names


def test_a_port_in_use_is_one_sentence_and_leaves_the_run_as_it_was(run, port):
    write(run, synthetic.lines(3))
    settings = Observe(prometheus_port=port)
    metrics = Metrics(run, settings, "tokens", 3)
    with pytest.raises(InputError, match=f"observe.prometheus_port = {port} can't be opened"):
        Metrics(run, settings, "tokens", 0)
    metrics.close()
    assert len(run.metrics()) == 3
    Metrics(run, settings, "tokens", 3).close()


def test_a_full_disk_keeps_lines_in_memory_until_there_is_room(tmp_path):
    """RLIMIT_FSIZE stands for the full disk: a write beyond it fails, as ENOSPC does."""
    run = Run(tmp_path)
    metrics = Metrics(run, Observe(tensorboard=False), "tokens", 0)
    assert metrics.record({"step": 1, "loss": 1.0}) is None
    size = run.metrics_file.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, before[1]))
    try:
        assert "metrics.jsonl can't be written" in metrics.record({"step": 2, "loss": 2.0})
        assert run.metrics_file.stat().st_size == size, "half a line was left"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert metrics.record({"step": 3, "loss": 3.0}) is None
    metrics.close()
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
