"""Explaining as a whole: Runs, windows, terms, what-if, terminal. Pure, then the command."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli import app
from paceline.config.errors import InputError
from paceline.explain.changes import changed_job
from paceline.explain.difference import difference, show_difference
from paceline.explain.explain import explain, explain_subject
from paceline.explain.rules import RESIDUALS, RULES
from paceline.explain.show import show
from paceline.explain.subject import Subject
from paceline.explain.traffic import CollectiveTraffic, Flow, bus_factor
from paceline.explain.waterfall import waterfall
from paceline.explain.what_if import predicted, what_if
from paceline.explain.windows import joined
from tests.explain.accounts import account, job, line, run_folder, subject
from tests.plan.planned import cluster

WORK = {"matmul": 60.0, "host_gap": 15.0, "exposed_comm.dp": 20.0, "data_wait": 5.0}


def test_the_terms_sum_to_the_step_that_nobody_recorded() -> None:
    told = waterfall(subject(account([WORK, WORK]), job(2), step_ms=85))
    assert told.step_s == pytest.approx(0.085)
    terms = {row.term: row.measured_s for row in told.rows}
    assert sum(terms.values()) == pytest.approx(0.085)
    # Recording lengthened the work, 75 ms instead of 60, and no wait.
    assert terms["matmul"] == pytest.approx(0.048)
    assert terms["data_wait"] == pytest.approx(0.005)


def test_the_ideal_step_does_the_model_s_flops_at_the_peak() -> None:
    lines = [line(step, 100, mfu=0.4) for step in range(1, 11)]
    told = waterfall(subject(account([WORK, WORK]), job(2), lines=lines))
    assert told.ideal_s == pytest.approx(0.040)
    assert told.below_peak_s == pytest.approx(0.020)


def test_the_plan_stands_beside_by_term() -> None:
    plan = {
        "layouts": [
            {"step_s": 0.08, "interval_s": [0.07, 0.09], "time_s": {"matmul": 0.06, "bubble": 0.02}}
        ]
    }
    told = waterfall(subject(account([WORK, WORK]), job(2), plan=plan))
    predicted = {row.term: row.predicted_s for row in told.rows}
    assert predicted["matmul"] == 0.06
    assert predicted["bubble"] == 0.02
    assert predicted["data_wait"] == 0.0
    beyond = subject(account([WORK, WORK]), job(2), plan=plan)
    rest = RESIDUALS["slower-than-planned"](beyond, 0.004)
    assert rest is not None
    assert rest.gain_s == pytest.approx(0.100 - 0.090 - 0.004)


def test_profiled_first_and_disturbed_steps_are_not_steady() -> None:
    lines = [line(step, 500 if step < 4 else 100) for step in range(1, 21)]
    lines[9] |= {"profiled": True, "step_time_s": 0.3}
    lines[10] |= {"step_time_s": 0.9}  # waits for the account of the window
    of = subject(None, job(2), lines=lines)
    assert {each["step_time_s"] for each in of.steady} == {0.1}
    assert of.step_s == 0.1


def test_windows_of_a_run_are_one_account_whatever_their_names() -> None:
    gap = {"name": "late", "duration_ms": 3}
    one = account([WORK, WORK], gaps=[gap], syncs=[{"name": "first", "duration_ms": 1}])
    other = account([WORK, WORK], syncs=[{"name": "second", "duration_ms": 1}], gaps=[gap])
    shifted = replace(other, steps=other.steps.copy(), gaps=other.gaps.copy())
    shifted.steps["step"] += 100
    shifted.gaps["step"] += 100
    both = joined([one, shifted])
    assert len(both.steps) == 16
    assert both.steps["rank"].tolist() == sorted(both.steps["rank"].tolist())
    assert {both.names[name] for name in both.gaps["name"]} == {"late"}
    assert [both.names[name] for name in np.unique(both.syncs["name"])] == ["first", "second"]


def test_bus_bandwidth_is_that_of_nccl_tests_after_the_last_rank_came() -> None:
    sent = {"name": "all_reduce", "axis": "dp", "group_size": 4, "bytes": 4_000_000}
    made = account([WORK], collectives=[{**sent, "duration_ms": 10, "wait_ms": 4}])
    (flow,) = CollectiveTraffic.of(made).flows()
    assert flow.link_s == pytest.approx(0.006)
    assert flow.bus_bytes_per_s == pytest.approx(4e6 * 1.5 / 0.006)
    assert bus_factor("all_gather", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1.0


def test_without_collectives_a_step_is_shorter_by_what_its_least_held_up_rank_lost() -> None:
    number = {"name": "all_reduce", "axis": "dp", "bytes": 8}
    rows = [{**number, "rank": 0, "duration_ms": 9}, {**number, "rank": 1, "duration_ms": 2}]
    traffic = CollectiveTraffic.of(account([WORK, WORK], collectives=rows))
    assert traffic.removed_s(np.ones(len(traffic.rows), bool)) == pytest.approx(0.002)


def test_what_if_scales_the_measured_step_by_the_planner_s_ratio() -> None:
    of = job(8, cluster=cluster(nodes=1), batch=64, recompute="full")
    made = subject(None, of, step_ms=200)
    asked = what_if(made, ("layout.recompute=none",))
    assert asked is not None
    before, after = (predicted(each) for each in (of, changed_job(of, ("layout.recompute=none",))))
    # Without profiled steps, all of it: a pass of four less, and the host's hooks around blocks.
    assert asked.gain_s / 0.2 == pytest.approx(1 - after.step_s / before.step_s)
    assert 0.1 < asked.gain_s / 0.2 < 0.5
    assert what_if(made, ("layout.micro_batch=7",)) is None  # doesn't divide the batch
    assert what_if(subject(None, job(2), step_ms=200), ("layout.micro_batch=4",)) is None


def test_a_run_without_windows_says_how_to_get_some(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", job(2), [line(step, 100) for step in range(1, 11)])
    told = explain(run)
    assert told.findings is not None
    assert any("observe.profile_every" in note for note in told.notes)


def test_what_is_no_run_and_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        Subject.of(tmp_path / "nowhere")
    run = run_folder(tmp_path / "run", job(2))
    with pytest.raises(InputError, match="no finished step"):
        explain(run)


def test_the_terminal_shows_terms_findings_and_settings() -> None:
    again = {**WORK, "recompute": 20.0}
    out = StringIO()
    told = explain_subject(subject(account([again, again]), job(2, recompute="full")))
    show(told, Console(file=out, width=100), 5, all_findings=True)
    for words in ("recompute-not-needed", "--set 'layout.recompute=none'", "exposed_comm.dp"):
        assert words in out.getvalue()
    assert out.getvalue().index("recompute-not-needed") < out.getvalue().index("peak-missing")
    json.dumps(told.to_json())


def test_a_narrow_terminal_folds_names_and_cuts_no_figure() -> None:
    told = explain_subject(subject(account([WORK, WORK]), job(2)))
    name = f"ncclDevKernel_Generic<{'x' * 60}>"
    flow = Flow("dp", name, 8, 2.0, 23.4e6, 0.0157, 0.0157, 0.0117)
    out = StringIO()
    show(replace(told, flows=(flow,)), Console(file=out, width=80), 5, all_findings=False)
    for figure in ("23.4 MB", "15.7 ms", "11.7 ms", "1.3 GB/s", "on the link", "bus rate"):
        assert figure in out.getvalue()
    assert "…" not in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_against_another_one_settings_and_terms_differ() -> None:
    one = explain_subject(subject(account([WORK, WORK]), job(2)))
    slower = {**WORK, "recompute": 10.0}
    other = explain_subject(subject(account([slower, slower]), job(2, recompute="full")))
    found = difference(one, other)
    assert found.settings == (("layout.recompute", "full", "none"),)
    terms = {term: (was_s, now_s) for term, was_s, now_s in found.terms_s}
    assert terms["recompute"] == (pytest.approx(0.01), 0.0)
    out = StringIO()
    show_difference(one, other, Console(file=out, width=100))
    assert "-10 ms" in out.getvalue()


def test_the_page_tells_of_every_rule_and_of_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
    told = re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.M)
    assert sorted(told) == sorted([*RULES, *RULES, *RESIDUALS])  # in two tables


def test_the_command(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", job(2), [line(s, 100, between_s=0.03) for s in range(1, 11)])
    told = CliRunner().invoke(app, ["explain", str(run), "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.output.splitlines()[-1])["findings"][0]["name"] == "logging-stall"
    with pytest.raises(InputError):
        CliRunner().invoke(app, ["explain", str(tmp_path / "nowhere")], catch_exceptions=False)
