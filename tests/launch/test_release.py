"""What is held for nothing, and giving it back: made-up runs, and jobs of engine "local"."""

from dataclasses import replace

import pytest

from paceline.launch.contract import Observation
from paceline.launch.records import Launch, LaunchRecord
from paceline.launch.release import idle_of, release_idle
from paceline.launch.run_records import RunRecords
from tests.elastic.cluster import job_of
from tests.launch.beds import local_bed
from tests.launch.jobs import jobs_on
from tests.launch.made_run import BEGAN, event, make_run, start, step

WAIT = "trap 'exit 0' TERM; touch ready; for i in {1..2400}; do sleep 0.05; done; exit 9"
HELD = {"n0": BEGAN, "n1": BEGAN, "n2": BEGAN, "n3": BEGAN + 500}


def generation(number: int, at: float, nodes: list[str], active: int) -> dict:
    more = {"nodes": nodes, "num_active": active, "num_ranks": active}
    return event("generation", at, **more) | {"generation": number}


def records(path, events, **elastic):
    settings = job_of(1, 100, 2).elastic.replace(min_nodes=1, **elastic)
    return RunRecords.of(make_run(path, [step(1, 12)], events, elastic=settings))


@pytest.mark.parametrize(
    ("end", "after_s", "is_idle"),
    [
        ({"state": "finished"}, 700, True),
        ({"state": "failed"}, 700, True),
        ({"state": "finished"}, 500, False),
        ({"state": "saved"}, 700, False),
    ],
)
def test_a_job_whose_run_is_over_is_idle_unless_it_comes_again(end, after_s, is_idle, tmp_path):
    found = records(tmp_path / "over", [start(0), event("end", 20, **end)])
    idle = idle_of(found, HELD, 600, BEGAN + 20 + after_s)
    assert (idle is not None) == is_idle
    assert idle is None or (idle.nodes, idle.since) == ((), BEGAN + 20)


def test_a_run_that_began_anew_is_not_over(tmp_path):
    events = [start(0), event("end", 20, state="finished"), start(30)]
    assert idle_of(records(tmp_path / "again", events), HELD, 600, BEGAN + 9000) is None


@pytest.mark.parametrize(
    ("spares", "now", "nodes"),
    [
        (0, 900, ("n2",)),  # n3 has come just now
        (0, 1200, ("n2", "n3")),
        (1, 1200, ("n3",)),  # the Job asks for one that waits
        (2, 9000, ()),
        (0, 650, ()),  # until the newest generation n2 may have trained
    ],
)
def test_nodes_without_a_rank_are_idle_beyond_the_spares_of_the_job(spares, now, nodes, tmp_path):
    events = [
        generation(1, 10, ["n0", "n1", "n2"], 3),
        generation(2, 100, ["n0", "n1", "n2", "n3"], 2),
    ]
    found = records(tmp_path / "spare", events, spares=spares)
    idle = idle_of(found, HELD, 600, BEGAN + now)
    assert (() if idle is None else idle.nodes) == nodes


def test_an_attempt_that_has_yet_to_begin_is_not_idle(tmp_path):
    """Its nodes are others than those of the newest generation, which an earlier attempt made."""
    found = records(tmp_path / "later", [generation(1, 10, ["m0", "m1", "n0"], 3)])
    assert idle_of(found, HELD, 600, BEGAN + 9000) is None


# ---- with an engine ----


@pytest.fixture
def jobs(tmp_path):
    with local_bed(tmp_path) as bed, jobs_on(bed, tmp_path) as made:
        yield made


def launched(jobs, run) -> Launch:
    """A job that goes on, launched for a run."""
    job = jobs.submit(WAIT)
    jobs.until_file("ready")
    record = LaunchRecord(BEGAN, "here", jobs.bed.site, jobs.request(WAIT))
    return Launch(run, 1, record, job)


def test_the_job_of_a_run_that_is_over_is_stopped(jobs, tmp_path):
    run = make_run(tmp_path / "done", [step(1, 12)], [start(0), event("end", 20, state="finished")])
    launch = launched(jobs, run.path)
    assert release_idle(launch, launch.observe(), 600, BEGAN + 300) is None
    assert launch.observe().state == "running"
    said = release_idle(launch, launch.observe(), 600, BEGAN + 20 + 1500)
    assert said == "done ended 25 min 00 s ago and its job went on: it is stopped."
    assert jobs.until_over(launch.job).state == "cancelled"
    assert release_idle(launch, launch.observe(), 600, BEGAN + 9000) is None


def test_an_engine_that_takes_back_whole_jobs_alone_says_so(jobs, tmp_path):
    events = [generation(1, 10, ["n0", "n1"], 1)]
    launch = launched(jobs, records(tmp_path / "few", events).run.path)
    seen = replace(launch.observe(), nodes=("n0", "n1"))
    now = BEGAN + 10**9
    assert release_idle(launch, seen, 600, BEGAN) is None
    assert isinstance(seen, Observation)
    (launch.job.folder / "nodes" / "n1.jsonl").write_text(
        f'{{"attempt": 1, "node": "n1", "started": {BEGAN}, "ended": null, "exit_code": null}}\n'
    )
    said = release_idle(launch, seen, 600, now)
    assert "Engine local takes back whole jobs alone: `paceline stop few`" in said
    assert said.startswith("n1 of few: no rank for ")
    assert launch.observe().state == "running"
