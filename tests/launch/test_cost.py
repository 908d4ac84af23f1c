"""Costs of runs: classes that made-up Runs go into, real runs that lose a rank, and bad input."""

import json
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.elastic.agents import Agents
from benchmarks.elastic.jobs import write_job
from paceline import cli
from paceline.config.errors import InputError
from paceline.config.site import Site
from paceline.launch import cost as bill
from paceline.launch import cost_page
from paceline.launch.contract import Request
from paceline.launch.cost import Price, runs_of, site_price
from paceline.launch.cost_show import got_rows, idle_sentences, to_json
from paceline.launch.records import RECORD_TYPE, LaunchRecord
from paceline.launch.run_records import RunRecords
from paceline.observe.energy import EnergyRecord, energy_of
from paceline.observe.run import Run, json_lines
from tests.command_line import metrics, paceline, ranks, start_paceline, write_tiny_job
from tests.launch.made_run import BEGAN, attempt, event, make_run, start, step
from tests.observe import interrupted

PATIENCE_S = 400.0


def cost_of(run, price=None):
    return bill.cost_of(RunRecords.of(run), price)


def seconds(cost):
    """Device-seconds by class."""
    return {name: us / 1e6 for name, us in cost.ledger.device_us.items()}


def must_be_exact(cost):
    for each in cost.ledger.attempts:
        assert sum(each.device_us.values()) == each.total_us
    assert sum(cost.ledger.device_us.values()) == cost.ledger.total_us


# ---- made-up runs --------------------------------------------------------------------------------


def test_a_run_that_was_started_by_hand_and_finished(tmp_path):
    lines = [step(1, 12), step(2, 14, eval_s=3.0)]
    run = make_run(tmp_path / "plain", lines, [start(0), event("end", 18, state="finished")])
    cost = cost_of(run, Price(3600.0, "a test"))
    assert seconds(cost) == {
        "starting": 20,
        "data_wait": 1,
        "compute": 2 * (2 * 1.0) + 6,
        "exposed_comm": 1,
        "checkpoint_stall": 2 + 2,  # within the steps, and the last one after the evaluation
    }
    must_be_exact(cost)
    assert cost.ledger.goodput == 4 / 18
    assert cost.usd == pytest.approx(36)
    assert cost.per(cost.num_steps) == pytest.approx(18)
    assert dict(got_rows(cost))["samples"] == "4, 9,000,000.00 USD a million"


def test_energy_is_summed_over_starts_and_nodes(tmp_path):
    lines = [step(1, 12), step(2, 14)]
    run = make_run(tmp_path / "plain", lines, [start(0), event("end", 18, state="finished")])
    assert cost_of(run).energy is None
    why = "processors count no energy here"
    EnergyRecord("n0", BEGAN, BEGAN + 5, 1.0e6, 0.5e6).write(run)
    EnergyRecord("n0", BEGAN + 5, BEGAN + 9, 1.0e6, 0.5e6).write(run)
    EnergyRecord("n0", BEGAN + 5, BEGAN + 18, 2.0e6, 1.0e6).write(run)  # anew, of the same start
    EnergyRecord("n1", BEGAN, BEGAN + 18, 1.5e6, None, (why,)).write(run)
    cost = cost_of(run)
    assert (cost.energy.devices_j, cost.energy.hosts_j) == (4.5e6, 1.5e6)
    assert cost.joules_per(cost.num_steps) == 3.0e6
    rows = dict(got_rows(cost))
    assert rows["energy"] == (
        "1.67 kWh: devices 1.25 kWh, processors and memory 0.417 kWh, 3,000,000 J a step, "
        "1,500,000 J a sample"
    )
    assert rows["energy not counted"] == why
    assert to_json(cost)["energy"] == {
        "devices_j": 4.5e6,
        "hosts_j": 1.5e6,
        "j_per_step": 3.0e6,
        "j_per_sample": 1.5e6,
        "missing": [why],
    }


def test_a_damaged_record_of_energy_is_told_and_the_others_count(tmp_path):
    run = make_run(tmp_path / "plain", [step(1, 12)], [start(0)])
    EnergyRecord("n0", BEGAN, BEGAN + 5, None, 5.0).write(run)
    for name, text in (("a", '{"node": "n1"}'), ("b", ""), ("c", "[" * 100_000)):
        (run.path / "energy" / f"{name}.json").write_text(text)
    cost = cost_of(run)
    assert cost.energy.joules == 5.0
    assert len(cost.energy.missing) == 3
    (run.path / "energy" / "a.json").write_text(
        '{"node": "n", "began": 1, "until": 2, "host_j": -1}'
    )
    assert cost_of(run).energy.joules == 5.0


def test_a_run_writes_down_what_it_took_or_why_it_does_not_know(tmp_path):
    write_tiny_job(tmp_path)
    assert paceline("train", "job.toml", "--set", "train.steps=2", folder=tmp_path).returncode == 0
    energy = energy_of(Run(tmp_path / "runs" / "tiny"))
    assert energy.joules is not None or energy.missing
    assert len([*(tmp_path / "runs" / "tiny" / "energy").iterdir()]) == 1


def test_what_is_lost_is_what_was_taken_back_and_what_had_no_line(tmp_path):
    """Killed at 17: of steps 2 and 3 only the checkpoint of step 1 is left."""
    events = [
        start(0),
        start(30, 1),
        event("taken_back", 41, steps=2, began=BEGAN + 12, ended=BEGAN + 16),
    ]
    events.append(event("end", 44, state="finished"))
    attempts = [
        attempt(1, -10, -2, 17.5, state="FAILED", exit_code=137),
        attempt(1, 17.5, 25, 50),  # sacct --duplicates gives the number twice
    ]
    lines = [step(1, 12), step(2, 42)]
    run = make_run(tmp_path / "killed", lines, events, attempts)
    cost = cost_of(run)
    must_be_exact(cost)
    assert [
        {name: us / 2e6 for name, us in each.device_us.items()} for each in cost.ledger.attempts
    ] == [
        {
            "queued": 8,
            "starting": 12,
            "data_wait": 0.25,
            "compute": 1.0,
            "exposed_comm": 0.25,
            "checkpoint_stall": 0.5,
            "lost_work": 5.5,
        },
        {
            "queued": 7.5,
            "data_wait": 0.25,
            "compute": 1.0,
            "exposed_comm": 0.25,
            "checkpoint_stall": 0.5 + 2,
            "restart": 15,
            "idle_held": 6,
        },
    ]
    assert cost.num_lost_steps == 2
    assert cost.usd is None


def test_a_run_that_was_silent_before_it_was_killed_hung(tmp_path):
    attempts = [attempt(1, 0, 0, 1000, exit_code=None, state="TIMEOUT")]
    cost = cost_of(make_run(tmp_path / "hung", [step(1, 12)], [start(0)], attempts))
    assert seconds(cost)["lost_work"] == 2 * 2 * 2.0  # two steps may have had no line yet
    assert seconds(cost)["hang"] == 2 * (1000 - 12 - 4)
    must_be_exact(cost)


def test_after_a_notice_what_is_left_is_preempted(tmp_path):
    events = [
        start(0),
        event("notice", 13, within_s=30.0),
        event("end", 16, state="saved", exit_code=75),
    ]
    attempts = [attempt(1, 0, 0, 20, exit_code=75, state="PREEMPTED")]
    cost = cost_of(make_run(tmp_path / "spot", [step(1, 12)], events, attempts))
    assert seconds(cost)["preempted"] == 2 * (20 - 13)
    assert seconds(cost)["checkpoint_stall"] == 2 * (0.5 + 1)
    must_be_exact(cost)


def test_devices_that_are_held_and_do_nothing_are_named(tmp_path):
    lines = [step(at, 10 + 2 * at) for at in range(1, 5)]
    events = [start(0), event("end", 18, state="finished")]
    attempts = [attempt(1, 0, 0, 7218, devices=3, nodes=["n0", "n1"])]
    cost = cost_of(make_run(tmp_path / "idle", lines, events, attempts), Price(2.0, "a test"))
    assert idle_sentences(cost) == [
        "2 devices of attempt 1 (n0, n1) were held and did nothing for 2 h 00 min from 2025-11-20 "
        "09:13 UTC on, 8.00 USD.",
        "1 device of attempt 1 (n0, n1) was held and did nothing for 2 h 00 min from 2025-11-20 "
        "09:13 UTC on, 4.01 USD.",
    ]


def test_an_elastic_run_is_accounted_for_as_its_generations_are(tmp_path):
    made = interrupted.started_again(interrupted.simulated())
    run = make_run(tmp_path / "elastic", made.lines, made.events)
    run.write(
        "job.toml", (run.path / "job.toml").read_text().replace("num_nodes = 1", "num_nodes = 5")
    )
    cost = cost_of(run)
    must_be_exact(cost)
    assert [each.attempt.num_devices for each in cost.ledger.attempts] == [10, 4]
    # All losses were in generations of eight ranks; the ranks of the second start are four.
    assert seconds(cost)["lost_work"] == pytest.approx(8 * made.seconds["recomputed"])
    kept = sum(each.kept_wall_us for each in cost.ledger.attempts) / 1e6
    assert kept == pytest.approx(made.seconds["kept"])
    assert "hang" not in seconds(cost)
    assert cost.num_lost_steps == 3


def test_a_rank_that_was_stuck_is_a_hang(tmp_path):
    made = interrupted.Simulated()
    made.claim(["n0", "n1"], 2, "start")
    made.recover("start", 0)
    made.train(10)
    made.lose(20.0, 10.0, 0, node="n1", rank=2, **{"class": "stuck"})
    made.decide("replace")
    made.claim(["n0", "n1"], 2, "stuck")
    made.recover("live", 0)
    made.train(10)
    made.tell("end", state="finished", exit_code=0)
    cost = cost_of(make_run(tmp_path / "stuck", made.lines, made.events))
    assert seconds(cost)["hang"] == pytest.approx(4 * (20.0 + 10.0))
    must_be_exact(cost)


# ---- real runs -----------------------------------------------------------------------------------

JOB = """
name = "struck"
[model]
family = "decoder"
vocab_size = 257
hidden_size = 32
ffn_size = 64
num_layers = 2
num_heads = 4
max_seq_len = 32
[layout]
precision = "fp32"
micro_batch = 1
fsdp = 2
zero = 3
[data]
source = "text.txt"
tokenizer = "bytes"
[train]
steps = 30
global_batch = 8
seq_len = 32
eval_batches = 1
[checkpoint]
every = 0
[observe]
tensorboard = false
[elastic]
min_nodes = 1
copy_every = 10
"""


def test_an_elastic_run_that_lost_a_rank_accounts_for_the_steps_it_did_again(tmp_path):
    """Held against stamps of steps that the ranks themselves wrote, by another clock."""
    job, _ = write_job(JOB, tmp_path)
    with Agents(2, 1, job, tmp_path, [], {"PACELINE_MEASURE": "off"}) as agents:
        for node in range(2):
            agents.start(node)
        end = time.monotonic() + PATIENCE_S
        while agents.step() < 15:
            assert time.monotonic() < end, agents.outputs()
            time.sleep(0.01)
        (victim,) = [pid for rank, pid in agents.rank_pids().items() if rank == 1]
        agents.send_one(victim, signal.SIGKILL)
        assert agents.wait(PATIENCE_S) == {0: 0, 1: 0}, agents.outputs()
        stamps, run = agents.stamps(), Run(agents.run)
    cost = cost_of(run, Price(2.0, "a test"))
    must_be_exact(cost)
    (held,) = cost.ledger.attempts
    assert held.total_us == 2 * (held.end_us - held.begin_us)
    assert held.attempt.state == "finished"
    assert len([*(run.path / "energy").iterdir()]) == 2  # one of each agent

    survivor = [stamp for stamp in stamps if stamp.pid != victim and stamp.node == 0]
    first = {stamp.step: stamp.time_s for stamp in reversed(survivor)}
    again = sorted(step for step in first if sum(one.step == step for one in survivor) > 1)
    assert again, "the copy was of the last step: nothing was lost"
    assert cost.num_lost_steps == len(again)
    # From the end of the last step that was kept to the end of the last that was done again.
    at_least_s = first[again[-1]] - first[again[0] - 1]
    noticed = next(one["time"] for one in run.events().lines if one["event"] == "lost")
    kept = run.metrics()[again[0] - 2]
    lost_s = seconds(cost)["lost_work"] / 2
    assert lost_s == pytest.approx(noticed - kept["time"], abs=1e-4)
    assert lost_s > 0.8 * at_least_s
    assert seconds(cost)["restart"] > 0
    assert cost.usd == pytest.approx(2.0 * held.held_us / 3.6e9)


def test_a_run_that_was_killed_tells_what_it_does_again(tmp_path):
    write_tiny_job(tmp_path)
    settings = ("--set", "checkpoint.every=40", *ranks(2))
    first = start_paceline(
        "train", "job.toml", "--set", "train.steps=100000", *settings, folder=tmp_path
    )
    end = time.monotonic() + PATIENCE_S
    while len(metrics(tmp_path)) < 60:
        assert time.monotonic() < end
        time.sleep(0.01)
    first.kill()
    first.communicate()
    before = metrics(tmp_path)
    run = Run(tmp_path / "runs" / "tiny")
    restored = max(int(path.name[5:]) for path in run.checkpoint_folder.glob("step-*[0-9]"))
    steps = f"train.steps={len(before) + 20}"
    second = paceline("train", "job.toml", "--set", steps, *settings, folder=tmp_path)
    assert second.returncode == 0, second.stderr
    cost = cost_of(run)
    must_be_exact(cost)
    lost = [line for line in before if line["step"] > restored]
    assert cost.num_lost_steps == len(lost) > 0
    lost_s = lost[-1]["time"] - (lost[0]["time"] - lost[0]["step_time_s"])
    assert seconds(cost)["lost_work"] == pytest.approx(2 * lost_s, abs=1e-4)
    assert [each.attempt.state for each in cost.ledger.attempts] == ["lost", "finished"]
    assert {"starting", "restart", "compute", "checkpoint_stall"} <= seconds(cost).keys()
    assert cost.planned_us is None or cost.planned_us > 0
    assert 0 < cost.num_epochs < 1e6


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_prints_a_page_and_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    make_run(Path("runs/a"), [step(1, 12)], [start(0), event("end", 14, state="finished")])
    make_run(Path("runs/b"), [step(1, 12)], [start(0)], [attempt(1, -5, 0, 14)])
    cli_of(monkeypatch, "cost", "--price", "2.5", "--html", "cost.html", "--json")
    out = capsys.readouterr().out
    *shown, last = out.splitlines()
    assert max(map(len, shown)) <= 80
    for words in ("a: 0.0194 USD, 28.0 device-s in 1 attempt", "queued", "lost work", "a kept"):
        assert words in out.replace("A kept", "a kept") or words == "a kept"
    told = json.loads(last)
    assert [one["run"] for one in told] == ["runs/a", "runs/b"]
    assert sum(told[1]["device_us"].values()) == told[1]["total_us"] == 2 * 19_000_000
    assert "Cost of 2 runs" in Path("cost.html").read_text()


def test_the_page_draws_in_a_browser(tmp_path, browser):
    run = make_run(
        tmp_path / "a", [step(1, 12)], [start(0)], [attempt(1, 0, 1, 7200, exit_code=None)]
    )
    page = tmp_path / "cost.html"
    page.write_text(cost_page.render([cost_of(run, Price(2.0, "<i>"))], page))
    drawn = browser(page, "--dump-dom")
    assert "CONSOLE" not in drawn.stderr
    for words in ("Cost of", "hang", "Held", "2 USD a device-hour"):
        assert words in drawn.stdout
    assert "(<i>)" not in drawn.stdout
    assert "(&lt;i&gt;)" in drawn.stdout


def cli_of(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["paceline", *arguments])
    cli.main()


# ---- prices and bad input ------------------------------------------------------------------------

SITES = """
[lab]
engine = "slurm"
[lab.node_types.h100]
cluster = "8xH100-SXM"
num_nodes = 4
usd_per_device_hour = 2.5
spot_usd_per_device_hour = 1.0
[lab.node_types.a100]
cluster = "8xA100-80"
num_nodes = 4
"""


def test_a_site_says_what_its_devices_cost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("paceline-sites.toml").write_text(SITES)
    assert site_price("lab/h100") == Price(2.5, "site lab, h100")
    assert site_price("lab/h100", spot=True).usd == 1.0
    for place, words in {
        "lab": r"name one of its node types \(lab/h100, lab/a100\)",
        "lab/b200": "is not one kind of machine",
        "lab/a100": "site lab has no price for a100: give usd_per_device_hour there",
        "local": "it has none",
        "nope": "no site 'nope' is in paceline-sites.toml",
    }.items():
        with pytest.raises(InputError, match=words):
            site_price(place)


def test_the_jobs_own_price_is_taken_where_none_is_given(tmp_path):
    run = make_run(tmp_path / "a", [step(1, 12)], [start(0)])
    text = (run.path / "job.toml").read_text()
    priced = "[cluster.prices.usd_per_device_hour]\nvalue = 4.0\norigin = 'assumed'\nsource = 'x'\n"
    run.write("job.toml", text + priced)
    assert cost_of(run).price == Price(4.0, "job.toml, x")


def test_launches_that_made_no_run_are_billed_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("failed", "script"):
        folder = tmp_path / "runs" / name / "launch" / "1"
        folder.mkdir(parents=True)
        request = Request(name, ("true",), tmp_path, folder, 1, 2)
        record = LaunchRecord(0.0, "lab", Site(engine="local"), request)
        (folder / "request.json").write_bytes(RECORD_TYPE.dump_json(record))
        (folder / "id").write_text(str(folder))
        (folder / "attempts.jsonl").write_text(json_lines([attempt(1, 0, 1, 10)]))
    made = make_run(Path("runs/made"), [step(1, 3)], [start(2)])
    made.launch_folder.mkdir()
    (made.launch_folder / "1").symlink_to("../../script/launch/1")
    assert [run.path.name for run in runs_of([])] == ["failed", "made"]
    cli_of(monkeypatch, "cost", "failed", "--price", "3600", "--json")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["device_us"]["starting"] == told["held_us"] == 18_000_000
    assert (told["usd"], told["steps"]) == (18.0, 0)
    cli_of(monkeypatch, "cost", "--price", "3600", "--json")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(one["run"], one["held_us"]) for one in told] == [
        ("runs/failed", 18_000_000),
        ("runs/made", 18_000_000),
    ]


def test_of_all_runs_a_damaged_one_is_left_out_and_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        make_run(Path("runs") / name, [step(1, 12)], [start(0), event("end", 14, state="finished")])
    Path("runs/b/job.toml").write_text("[[[")
    cli_of(monkeypatch, "cost", "--json")
    out = capsys.readouterr().out
    assert "b is left out: " in out
    assert json.loads(out.splitlines()[-1])["run"] == "runs/a"
    Path("runs/a/job.toml").write_text("[[[")
    for given in ([], ["runs/b"]):  # nothing is left, or it was asked for
        with pytest.raises(SystemExit) as refused:
            cli_of(monkeypatch, "cost", *given)
        assert refused.value.code == 2
        assert "job.toml" in capsys.readouterr().err


def test_what_is_no_run_is_refused_in_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no run is named and there is none in runs/"):
        runs_of([])
    with pytest.raises(InputError, match="nowhere is not a run"):
        cost_of(Run(Path("nowhere")))
    for arguments in (["--price", "1", "--site", "lab"], ["--spot"]):
        with pytest.raises(SystemExit):
            cli_of(monkeypatch, "cost", "runs/a", *arguments)
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("name", ["job.toml", "facts.json", "plan.json", "launch/1/attempts.jsonl"])
def test_a_damaged_file_is_one_sentence_or_left_out(name, tmp_path):
    run = make_run(tmp_path / "a", [step(1, 12)], [start(0)], [attempt(1, 0, 0, 20)])
    for text in ("", "{", '{"number": 1e400}', "\0\xff", "[" * 10_000):
        (run.path / name).write_text(text)
        with suppress(InputError):
            must_be_exact(cost_of(run))
    (run.path / name).unlink()
    (run.path / name).mkdir()
    with pytest.raises(InputError, match=name if run.exists else "is not a run") as refusal:
        cost_of(run)
    assert "\n" not in str(refusal.value)


def test_wild_numbers_in_lines_and_attempts_break_no_sum(tmp_path):
    wild = [
        {"step": 1, "time": -1e300, "step_time_s": 1e300, "terms": {"data_wait": -5.0}},
        {"step": 2, "time": 1e307, "step_time_s": 1e307},
        {"step": 3, "time": None, "step_time_s": 1.0},
        step(4, 8, eval_s=-3.0, terms={"data_wait": 1e9, "exposed_comm.x": None}),
    ]
    attempts = [attempt(1, 100, 50, 20), attempt(2, 0, None, None), attempt(9, 0, 0, 0)]
    run = make_run(tmp_path / "wild", wild, [start(0)], attempts)
    cost = cost_of(run)
    must_be_exact(cost)
    json.dumps(to_json(cost), allow_nan=False)
