"""The loop with a fake measurer and the real planner: choice, failures, stopping, going on."""

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.stack import Stack
from paceline.explain.finding import Evidence, Finding
from paceline.tune import candidates, propose
from paceline.tune.candidates import Question, neighbours, predicted, untried
from paceline.tune.goal import Goal
from paceline.tune.journal import FolderJournal
from paceline.tune.loop import Limits, Loop
from paceline.tune.narrative import paragraph, parts
from paceline.tune.page import render
from paceline.tune.propose import LEAST_GAIN, Proposer
from paceline.tune.settings import Freedom
from paceline.tune.trial import Outcome
from tests.tune.fake import FakeMeasurer
from tests.tune.jobs import job

SURE = (Evidence("host", "Seen."), Evidence("clock", "Timed."))

GIVEN = job()


@pytest.fixture(autouse=True, scope="module")
def _planned_once():
    """The planner gives the same answers in all of these tests, so each is asked for once."""
    known: dict[object, object] = {}

    def once(function, key):
        def answer(*arguments):
            at = (function, key(*arguments))
            if at not in known:
                known[at] = function(*arguments)
            return known[at]

        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            candidates,
            "prediction_of",
            once(candidates.prediction_of, lambda one: (one.comm, one.layout)),
        )
        patch.setattr(
            propose, "from_planner", once(propose.from_planner, lambda asked: asked.freedom)
        )
        yield


def true_s(one: Job) -> float:
    """As the planner has it, but for what it doesn't know: pipelines are twice as slow here."""
    return predicted(one, "").predicted_s * (2.0 if one.layout.pp != 1 else 1.0)


@dataclass
class Quiet:
    rounds: list[list[str]] = field(default_factory=list)

    def round_begins(self, number, candidates) -> None:
        self.rounds.append([one.why for one in candidates])

    def progress(self, candidate, what) -> None:
        pass

    def round_ended(self, known) -> None:
        pass


def believed(_cases, stack, _origin):
    """Fitting takes seconds, and what is true here is the planner's with these constants."""
    return stack


def tuned(
    folder: Path,
    step_s=true_s,
    *,
    freedom=None,
    findings=(),
    clock=None,
    calibrate=believed,
    **limits,
):
    """A journal after a tuning, its measurer, and the decision that ended it."""
    measurer, journal = FakeMeasurer(step_s), FolderJournal(folder)
    journal.open(GIVEN)
    folder.mkdir(exist_ok=True)
    for heat in range(9):  # as if each had left a Run
        place = journal.run_folder(heat)
        place.mkdir(parents=True, exist_ok=True)
        (place / "job.toml").touch()
    loop = Loop(
        Proposer(Question(GIVEN, freedom or Freedom.of()), calibrate),
        Limits(**limits),
        measurer,
        journal,
        Quiet(),
        lambda _folder: findings,
        **({"clock": clock} if clock else {}),
    )
    return journal, measurer, loop.run()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tuned(tmp_path_factory.mktemp("whole"))


def test_what_is_mis_set_is_mended_in_few_trials(whole):
    journal, _, last = whole
    best = journal.known.best.job(GIVEN)
    assert best.layout.recompute == "none"
    assert best.layout.micro_batch > 1
    assert best.train == GIVEN.train
    assert last.ends
    assert "promises" in last.text or "gained nothing" in last.text
    assert len(journal.known.trials) < 20


def test_no_single_change_would_be_faster_by_much(whole):
    """It ends near an optimum of what is true, not of what is predicted."""
    journal, _, _ = whole
    best = journal.known.best.job(GIVEN)
    others = [true_s(one.job) for one in neighbours(Question(GIVEN, Freedom.of()), best)]
    assert min(others) > 0.97 * true_s(best)


def test_every_result_is_kept_before_the_next_heat_and_gone_on_from(tmp_path):
    journal, first, _ = tuned(tmp_path, trials=4)
    assert len(journal.known.trials) == 4
    reread, second, _ = tuned(tmp_path, trials=8)
    assert reread.known.trials[:4] == journal.known.trials
    tried = [str(one.layout) + str(one.comm) for one in first.tried]
    again = [str(one.layout) + str(one.comm) for one in second.tried]
    assert len(reread.known.trials) == 8
    best_so_far = tried.index(again[0])
    assert best_so_far >= 0  # what is held against the new ones
    assert not set(again[1:4]) & set(tried)
    assert (tmp_path / "job.toml").exists()


def test_the_planner_learns_from_the_trials(tmp_path):
    """Its constants are fitted to the first trial round, and again when there is twice as much."""
    fitted = Stack(constants={"launch_us": 50.0})
    cases: list[int] = []

    def calibrate(some, _stack, _origin):
        cases.append(len(some))
        return fitted

    _, measurer, _ = tuned(tmp_path, calibrate=calibrate, trials=9)
    assert cases[:2] == [4, 8] or cases == [4]
    assert measurer.tried[0].cluster.stack is None
    assert measurer.tried[4].cluster.stack == fitted


def test_a_tuning_that_ended_has_nothing_more_to_do(tmp_path):
    tuned(tmp_path, trials=4)
    _, again, last = tuned(tmp_path, trials=4)
    assert again.tried == []
    assert last.text == "4 trials were made"


def test_another_job_in_the_same_folder_is_refused(tmp_path):
    FolderJournal(tmp_path).open(GIVEN)
    with pytest.raises(InputError, match="has the trials of another Job"):
        FolderJournal(tmp_path).open(job(samples=16))


def test_memory_that_was_lacking_is_not_asked_for_again(tmp_path):
    """All that is predicted to take as much as what failed is left out from then on."""

    least = predicted(GIVEN, "").peak_bytes

    def lacks(one: Job) -> float | Outcome:
        return true_s(one) if predicted(one, "").peak_bytes <= least else "out of memory"

    journal, _, _ = tuned(tmp_path, lacks, trials=12)
    failed = [one for one in journal.known.trials if one.outcome == "out of memory"]
    assert len({one.heat for one in failed}) > 1
    for one in journal.known.trials:
        before = [other.peak_bytes for other in failed if other.heat < one.heat]
        assert one.peak_bytes < min(before, default=math.inf)
    assert "activations" in failed[0].note
    assert journal.known.best is not None


def test_a_job_that_dies_as_it_was_given_is_mended(tmp_path):
    def dies(one: Job) -> float | Outcome:
        return "died" if one.layout.recompute == "full" else true_s(one)

    journal, _, _ = tuned(tmp_path, dies, trials=6)
    assert journal.known.trials[0].outcome == "died"
    assert journal.known.best is not None
    assert "did not run" in paragraph(journal.known)


def test_nothing_runs(tmp_path):
    journal, _, last = tuned(tmp_path, lambda _job: "hung")
    assert journal.known.best is None
    assert (last.best, last.text) == (-1, "nothing ran in 3 trial rounds")
    assert paragraph(journal.known).startswith("Nothing ran")
    assert "<html" in render(journal.known, tmp_path)


def test_it_ends_at_the_goal(tmp_path):
    def much_faster(one: Job) -> float:
        return 1.0 if one.layout.recompute == "full" else 0.1

    goal = Goal("tokens_per_s", 2500)
    journal, _, last = tuned(tmp_path, much_faster, goal=goal)
    assert last.text == "tokens_per_s=2500 is reached"
    assert journal.known.num_rounds == 1


def test_it_ends_when_another_heat_would_take_too_long(tmp_path):
    ticks = iter(range(0, 100_000, 10))  # whoever asks for the time lets it pass
    journal, _, last = tuned(tmp_path, seconds=35, clock=lambda: next(ticks))
    assert last.text.startswith("another trial round would take longer")
    assert 1 <= journal.known.num_rounds <= 3


class Hesitant(Proposer):
    """Promises nothing after the first trial round, and little when asked for less."""

    asked: list[float]

    def next(self, known, num, least=LEAST_GAIN):
        self.asked.append(least)
        if known.trials and least == LEAST_GAIN:
            return []
        sizes = (8.0, 4.0) if known.trials else (16.0,)
        found = [predicted(job(bucket_mib=size), f"buckets of {size}") for size in sizes]
        return untried(found, [one.job(GIVEN) for one in known.trials], lambda _one: False)


@pytest.mark.parametrize("gain", [0.0, 0.1])
def test_little_promises_get_one_heat_for_each_best(tmp_path, gain):
    """A neighbour that is a tenth faster than predicted is found; then it is looked beside that."""
    proposer = Hesitant(Question(GIVEN, Freedom.of()), believed)
    proposer.asked = []
    journal = FolderJournal(tmp_path)
    journal.open(GIVEN)
    measurer = FakeMeasurer(lambda one: 1.0 - gain * (one.layout.bucket_mib == 4.0))
    loop = Loop(proposer, Limits(), measurer, journal, Quiet(), lambda _folder: ())
    assert "promises" in loop.run().text
    assert (journal.known.best.job(GIVEN).layout.bucket_mib == 4.0) == bool(gain)
    assert journal.known.num_rounds == 2
    looks = 1 + bool(gain)
    assert proposer.asked.count(LEAST_GAIN) == 1 + looks + (not gain)
    assert len(proposer.asked) == proposer.asked.count(LEAST_GAIN) + looks


def test_a_finding_that_names_the_change_is_tried_at_once(tmp_path):
    """The planner thinks nothing of it: only the profile shows it."""

    def slow_unless_set(one: Job) -> float:
        return true_s(one) * (0.5 if one.layout.bucket_mib == 3.0 else 1.0)

    finding = Finding(
        "small-buckets", "t", SURE, 0.4, 0.4, ("layout.bucket_mib=3.0",), "", "measured"
    )
    freedom = Freedom.of(keep=["dp", "recompute", "micro_batch"])
    journal, _, _ = tuned(tmp_path, slow_unless_set, freedom=freedom, findings=[finding])
    assert journal.known.best.why == "finding small-buckets"
    assert journal.known.best.heat == 1


def test_what_is_kept_is_never_changed(tmp_path):
    _, measurer, _ = tuned(tmp_path, freedom=Freedom.of(keep=["recompute", "dp"]), trials=8)
    assert {one.layout.recompute for one in measurer.tried} == {"full"}
    assert {one.layout.dp for one in measurer.tried} == {2}


def test_rounded_gradients_must_win_by_more(tmp_path):
    """Two per cent are not worth rounding what is learnt; ten are."""
    for gain, wanted in ((0.02, "none"), (0.1, "int8")):

        def step_s(one: Job, gain: float = gain) -> float:
            return 1.0 - gain * (one.comm.dp.compress == "int8")

        folder = tmp_path / wanted
        freedom = Freedom.of(keep=["dp", "micro_batch", "recompute", "bucket_mib"])
        finding = Finding("slow-link", "t", (), gain, gain, ("comm.dp.compress=int8",))
        journal, measurer, _ = tuned(folder, step_s, freedom=freedom, findings=[finding])
        assert any(one.comm.dp.compress == "int8" for one in measurer.tried)
        assert journal.known.best.job(GIVEN).comm.dp.compress == wanted


def test_the_parts_lead_from_the_first_to_the_best(whole):
    journal, _, _ = whole
    left = 1.0
    for part in parts(journal.known):
        left *= 1 - part.gain
    assert left == pytest.approx(math.exp(journal.known.best.relative), rel=1e-6)
    text = paragraph(journal.known)
    assert "layout.recompute full -> none" in text
    assert f"in {len(journal.known.trials)} trials" in text


def test_the_page_is_complete_and_loads_nothing(whole, tmp_path):
    journal, _, _ = whole
    text = render(journal.known, tmp_path)
    assert text.count('<tr><td class="n">') == len(journal.known.trials)
    assert "http://" not in text.split("<script>")[0]
