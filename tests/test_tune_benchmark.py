"""benchmarks/tune.py: the spaces that are swept, and how they are judged. Nothing is started."""

import pytest
from rich.console import Console

from benchmarks.tune import CASES, Case, Outcome, _duel, _keep, _sweep, every_job, page
from paceline.config.job import Job
from paceline.tune.candidates import Question
from paceline.tune.settings import differences
from tests.tune.fake import FakeMeasurer
from tests.tune.jobs import job

FACTS = {
    "cores": 2, "device": "here", "load_average_before": [0.1], "date": "today", "commit": "abc",
    "versions": {"torch": "2"}, "command": "python",
}  # fmt: skip
CASE = Case("small", "a test", 2, (), ("layout.bucket_mib", "layout.recompute"))


def space() -> list[Job]:
    return list(every_job(Question(job(), CASE.freedom)))


def test_a_space_is_every_value_of_what_is_free_and_nothing_else():
    jobs = space()
    assert len(jobs) == 3 * 8  # recompute, and seven sizes of buckets beside the given one
    assert len({(one.layout, one.comm) for one in jobs}) == len(jobs)
    assert job() in jobs
    assert all(set(differences(job(), one)) <= set(CASE.free) for one in jobs)


def test_forms_of_few_bits_begin_with_exact_steps():
    case = CASES["link"]
    jobs = list(every_job(Question(job(), case.freedom)))
    warm_ups = {one.comm.dp.compress: one.comm.warmup_steps for one in jobs}
    assert warm_ups == {"none": 0, "bf16": 0, "int8": 0, "int4": 30, "quinary": 30}


def step_s(one: Job) -> float:
    return {"none": 1.0, "selective": 1.2, "full": 2.0}[one.layout.recompute] * (
        0.9 if one.layout.bucket_mib == 4.0 else 1.0
    )


def test_the_regret_is_what_the_best_of_all_gains_over_the_choice():
    jobs = space()
    choice = job(recompute="none")
    gains, times = _sweep(FakeMeasurer(step_s), choice, jobs, Console(quiet=True))
    assert len(gains) == len(jobs) - 1  # all but the choice itself
    assert times[-1] == 1.0
    best = min(gains, key=lambda at: gains[at])
    assert times[best] == pytest.approx(0.9)
    regret, _, at = _duel(FakeMeasurer(step_s), choice, [jobs[best]])
    assert (regret, at) == (pytest.approx(1 / 0.9 - 1), 0)
    assert _duel(FakeMeasurer(step_s), jobs[best], [choice]) == (0.0, 0.0, None)


def outcome(regret: float, trials: int, name: str = "small") -> Outcome:
    figures = (24, trials, 1.0, 2.0, 2.0, 1.0, regret, 0.01)
    return Outcome(name, "a test", *figures, ["a=1"], [], "it was enough")


def test_a_case_is_reached_within_the_margin_in_a_third_of_the_trials():
    assert outcome(0.04, 8).is_reached
    assert not outcome(0.06, 8).is_reached
    assert not outcome(0.04, 9).is_reached
    assert "| small | 2000 ms | 1000 ms | 4.0% ± 1.0% | 8 | 24 |" in page([outcome(0.04, 8)], FACTS)


def test_cases_measured_before_stay_with_their_own_facts(tmp_path):
    _keep([outcome(0.04, 8), outcome(0.01, 8, "other")], FACTS, tmp_path)
    file = _keep([outcome(0.02, 7)], {**FACTS, "commit": "def"}, tmp_path)
    pages = file.read_text().split("| case |")[1:]
    assert len(pages) == 2
    new, old = (next(one for one in pages if commit in one) for commit in ("def", "abc"))
    assert "| small | 2000 ms | 1000 ms | 2.0%" in new
    assert "| other |" in old
    assert "| small |" not in old
