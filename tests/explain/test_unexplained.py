"""Lost time without a cause is told, and what bounds all figures stands first. Pure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.explain.explain import Explanation, explain_subject
from paceline.explain.show import show
from paceline.observe import caveats
from paceline.observe.tables.gaps import BETWEEN_KERNELS
from tests.explain.accounts import account, job, subject
from tests.explain.cases import CASES

IDLE = {"matmul": 10.0, "host_gap": 90.0}


def explained(terms: Mapping[str, float], one: Any = None, **more: Any) -> Explanation:
    return explain_subject(subject(account([terms], is_device=True, **more), one))


def text_of(one: Explanation) -> str:
    console = Console(record=True, width=200)
    show(one, console, 5, all_findings=False)
    return console.export_text()


def test_a_device_that_idles_without_a_cause_is_the_first_line() -> None:
    one = explained(IDLE)
    assert "90% of it is host_gap that no rule explains" in one.headline
    assert "nothing found" not in text_of(one).lower()
    assert "with_stack=True" in text_of(one)
    assert one.to_json()["unexplained"][0]["term"] == "host_gap"


@pytest.mark.parametrize(
    "term", ["exposed_comm", "straggler_wait", "bubble", "idle", "unattributed"]
)
def test_every_lost_term_is_told_and_what_computes_isn_t(term: str) -> None:
    one = explained({"matmul": 70.0, term: 30.0})
    assert f"30% of it is {term} that no rule explains" in one.headline
    assert explained({"other_kernels": 70.0, "matmul": 30.0}).unexplained == ()
    assert explained({"matmul": 91.0, term: 9.0}).unexplained == ()


def test_what_a_finding_explains_is_not_told_again() -> None:
    late = [{"name": "aten::mm", "duration_ms": 85}]
    one = explained(IDLE, gaps=late)
    assert one.unexplained == ()
    assert one.headline.endswith("host-bound costs 85% of it")


def test_the_larger_one_stands_first() -> None:
    late = [{"name": "aten::mm", "duration_ms": 20}]
    told = explained(IDLE, gaps=late).headline
    assert told.index("70% of it is host_gap") < told.index("host-bound costs 20%")


def test_what_the_schedule_makes_of_a_pipeline_is_no_riddle() -> None:
    of = job(2, dp=1, pp=2, schedule="1f1b", micro_batch=16, split=(4, 4))
    half = {"matmul": 60.0, "bubble": 30.0}
    assert explain_subject(subject(account([half, half]), of)).unexplained == ()


def test_kernels_that_were_launched_in_time_ask_for_the_streams() -> None:
    one = explained(IDLE, gaps=[{"name": BETWEEN_KERNELS, "duration_ms": 85}])
    assert "streams wait for each other" in one.unexplained[0].to_record


@pytest.mark.parametrize("kind", [caveats.GRAPH_KERNELS_MISSING, caveats.NO_KERNELS])
def test_what_bounds_all_figures_stands_before_them(kind: str) -> None:
    late = [{"name": "aten::mm", "duration_ms": 85}]
    one = explained(IDLE, gaps=late, caveats=[kind])
    assert one.headline.startswith(f"The trace has {kind}. A step takes")
    assert "host-bound" not in one.headline
    assert one.to_json()["caveats"][0]["kind"] == kind
    assert one.unexplained


def test_other_caveats_are_notes() -> None:
    one = explained(IDLE, caveats=[caveats.CUT])
    assert "The trace has cut." in one.notes
    assert "cut" not in one.headline


def test_one_rank_s_waits_ask_for_the_others() -> None:
    sent = [{"name": "all_reduce", "group_size": 8, "duration_ms": 30}]
    one = explained({"matmul": 70.0, "exposed_comm": 30.0}, collectives=sent)
    assert "Record all ranks" in one.unexplained[0].to_record
    assert "record_shapes=True" in one.unexplained[0].to_record


def test_traces_of_two_jobs_are_told(tmp_path: Path) -> None:
    one = explain_subject(CASES["straggler-rank"].silent["two jobs"](tmp_path))
    assert any("several jobs" in note for note in one.notes)
