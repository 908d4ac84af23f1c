"""`paceline tune` on models that are no decoders: a ResNet, whose replicas the planner prices, and
a recommender, whose work it doesn't know."""

import json

import pytest

from paceline.config.errors import InputError
from paceline.config.job import Job, JobSpec, read_job
from paceline.observe.run import Run
from paceline.plan.resolve import resolve
from paceline.tune.candidates import Question, from_planner, neighbours, prediction_of
from paceline.tune.command import TuneOptions, tune_command
from paceline.tune.goal import Figures, Goal, one_device, reference_of
from paceline.tune.journal import FolderJournal
from paceline.tune.loop import Limits, Loop
from paceline.tune.propose import Proposer
from paceline.tune.settings import Freedom, differences
from tests.tune.fake import FakeMeasurer
from tests.tune.jobs import CLUSTER, figure
from tests.tune.test_loop import Quiet

_DEVICE = CLUSTER.device.replace(memory_bytes=figure(8e9), precisions=("fp64", "fp32", "bf16"))
MODELS = {
    "images": {"family": "resnet", "depth": 18, "num_classes": 4, "image_size": 32},
    "clicks": {
        "family": "dlrm", "tables": [50, 20], "dim": 4, "num_dense": 3, "bottom": [8], "top": [16],
    },
}  # fmt: skip


def job(source: str, embeddings: str = "all_to_all", **layout) -> Job:
    """Badly set: micro-batches and buckets are small."""
    raw = {
        "comm": {"embeddings": {"by": embeddings}},
        "name": source,
        "model": MODELS[source],
        "data": {"source": source},
        "layout": {"micro_batch": 2, "bucket_mib": 1.0, "precision": "fp32", **layout},
        "train": {"steps": 100, "global_batch": 16},
    }
    return resolve(JobSpec.parse(raw), CLUSTER.replace(device=_DEVICE)).job


def changes(found, given: Job) -> list[dict]:
    return [differences(given, one.job) for one in found]


def test_a_resnet_has_the_planners_candidates_and_its_neighbours():
    given = job("images")
    question = Question(given, Freedom.of())
    ranked = from_planner(question)
    assert {one.job.layout.micro_batch for one in ranked} == {2, 4, 8}, "one is no batch to norm"
    assert [one.predicted_s for one in ranked] == sorted(one.predicted_s for one in ranked)
    assert all(one.job.layout.dp == 2 and one.job.layout.bucket_mib == 1.0 for one in ranked)
    beside = changes(neighbours(question, given), given)
    assert {"layout.micro_batch": 8} in beside
    assert {"layout.bucket_mib": 25.0} in beside
    assert {"comm.dp.compress": "int8"} in beside
    assert {"layout.dp": 1, "layout.fsdp": 2, "layout.zero": 1} in beside
    assert not any("layout.tp" in each or "layout.recompute" in each for each in beside)


def test_what_the_planner_doesnt_know_is_expected_to_take_what_is_typical():
    given = job("clicks")
    assert prediction_of(given) is None
    question = Question(given, Freedom.of(["precision"]), typical_s=0.25)
    assert from_planner(question) == []
    found = neighbours(question, given)
    assert {one.predicted_s for one in found} == {0.25}
    beside = changes(found, given)
    assert {"layout.micro_batch": 8} in beside
    assert {"layout.dp": 1, "layout.fsdp": 2, "layout.zero": 1} in beside
    assert {"layout.precision": "bf16"} in beside
    held = Question(given, Freedom.of(keep=["dp"]))
    assert not any("layout.dp" in each for each in changes(neighbours(held, given), given))


def true_s(one: Job) -> float:
    """Large micro-batches and large buckets are what counts."""
    return 0.1 + 0.4 / one.layout.micro_batch + 0.1 / one.layout.bucket_mib


@pytest.mark.parametrize("source", MODELS)
def test_the_loop_mends_what_is_mis_set(source, tmp_path):
    given, journal = job(source), FolderJournal(tmp_path)
    journal.open(given)
    proposer = Proposer(Question(given, Freedom.of()))
    Loop(proposer, Limits(trials=12), FakeMeasurer(true_s), journal, Quiet(), lambda _: ()).run()
    best = journal.known.best
    assert best.job(given).layout.micro_batch == 8
    assert journal.known.seconds(best) < 0.75 * true_s(given)
    figures = Figures.of(journal.known, best)
    assert figures.to_json()["samples_per_s"] == pytest.approx(16 / journal.known.seconds(best))


def test_one_device_has_its_share_of_the_work():
    for source in MODELS:
        single = one_device(job(source))
        assert single.train.global_batch == 8
        assert single.layout.num_ranks == 1
        assert 8 % single.layout.micro_batch == 0
    assert reference_of(job("clicks"), FakeMeasurer(lambda _job: "died")) is None
    predicted = reference_of(job("images"), FakeMeasurer(lambda _job: "died"))
    assert predicted.step_s == pytest.approx(prediction_of(one_device(job("images"))).step_s)


def test_a_goal_is_in_the_units_of_the_model():
    with pytest.raises(InputError, match=r"trained on samples; use samples_per_s"):
        Goal.read("tokens_per_s=5").check(job("images"))
    Goal.read("samples_per_s=5").check(job("images"))


def test_a_module_that_only_a_script_has_is_refused(tmp_path):
    own = job("images").replace(model={"family": "custom"})
    with pytest.raises(InputError, match="only a script has the module"):
        tune_command(own, TuneOptions(), tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("source", "embeddings"),
    [("images", "all_to_all"), ("clicks", "all_to_all"), ("clicks", "server")],
)
def test_trials_run_on_real_ranks(source, embeddings, tmp_path):
    out = tmp_path / "tuned"
    given = job(source, embeddings)
    found = tune_command(given, TuneOptions(trials=2, keep=["dp"]), out)
    assert found["num_trials"] == 2
    assert found["samples_per_s"] == pytest.approx(16 / found["step_s"])
    entries = [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]
    trials = [entry for entry in entries if entry["kind"] == "trial"]
    assert {trial["outcome"] for trial in trials} <= {"measured", "slower"}
    assert all(trial["steps_s"] for trial in trials)
    assert trials[0]["changes"] == {} != trials[1]["changes"]
    best = read_job(out / "job.toml")
    assert (best.train, best.data, best.model) == (given.train, given.data, given.model)
    run = Run(out / "heats" / "0")
    assert run.metrics()[0]["samples"] == 16
    assert run.metrics()[0]["samples_per_s"] == pytest.approx(16 / run.metrics()[0]["step_time_s"])
    layouts = json.loads((run.path / "plan.json").read_text())["layouts"]
    assert [*layouts[0]][4:5] == ["samples_per_s"] if source == "images" else not layouts
    assert (out / "tune.html").exists()
