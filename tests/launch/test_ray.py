"""What only Ray does: a lost machine whose place is taken while the others go on, groups that wait,
and an elastic training on it."""

from pathlib import Path

import pytest

from paceline.config.errors import InputError
from paceline.config.site import NodeType, Site
from paceline.launch.engines.ray import engine
from tests.command_line import metrics
from tests.launch.beds import ray_bed
from tests.launch.jobs import jobs_on
from tests.launch.waiting import until

WAIT = "for i in {1..2400}; do sleep 0.05; done; exit 9"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ray_bed(tmp_path_factory.mktemp("ray")) as bed:
        yield bed


@pytest.fixture
def jobs(cluster, tmp_path):
    with jobs_on(cluster, tmp_path) as made:
        yield made


def bundles(jobs, **site):
    return engine().places(jobs.request("true"), Site(engine="ray", **site)).resources


def test_what_a_machine_gives_follows_from_its_type(jobs):
    assert bundles(jobs) == {"GPU": 2}
    selected = NodeType(cluster="8xH100-SXM", num_nodes=2, select=("GPU=8", "big=0.5"))
    assert bundles(jobs, node_types={"gpu": selected}) == {"GPU": 8, "big": 0.5}
    with pytest.raises(InputError, match="write NAME=AMOUNT"):
        bundles(jobs, node_types={"gpu": selected.replace(select=("--gres=gpu:8",))})


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "head:port", "head:1; true", ""])
def test_an_address_that_is_none_is_refused(jobs, address):
    with pytest.raises(InputError, match="is no address of a Ray cluster"):
        bundles(jobs, ray_address=address)


def test_a_cluster_that_is_not_there_is_one_sentence_and_nothing_is_left(jobs):
    request = jobs.request("true", num_nodes=1)
    site = Site(engine="ray", ray_address="127.0.0.1:1")
    with pytest.raises(InputError, match=r"no Ray cluster can be reached at 127\.0\.0\.1:1"):
        engine().submit(request, engine().render(request, site))
    assert not request.folder.exists()


def test_a_job_that_waits_says_for_what_and_who_is_ahead(jobs):
    first = jobs.submit(WAIT)
    jobs.until(first, "running")
    second = jobs.submit("true", num_nodes=2)
    until(lambda: jobs.see(second).reason == "resources")
    assert "2 nodes of GPU 2 are wanted; free in all: GPU 0" in jobs.see(second).said
    said = "\n".join(engine().why(second, jobs.request("true", num_nodes=2), jobs.bed.site))
    assert "GPU: 0 of 6 is free" in said
    assert "that hold machines: paceline job 0" in said
    assert "that wait for machines: paceline job 1" in said
    jobs.bed.engine.signal(second, "stop")
    assert jobs.until_over(second).state == "cancelled"
    jobs.bed.engine.signal(first, "stop")
    assert jobs.until_over(first).state == "cancelled"


def test_a_lost_machine_is_replaced_while_the_others_go_on(jobs):
    script = 'touch "at-$PACELINE_NODE-$$"; until [ -e go ]; do sleep 0.05; done'
    job = jobs.submit(script, num_nodes=2, min_nodes=1)

    def number_started() -> int:
        return len([*jobs.folder.glob("at-*")])

    until(lambda: number_started() == 2)
    jobs.bed.lose(job.folder, jobs.see(job).nodes[1])
    until(lambda: number_started() == 3)
    (jobs.folder / "go").touch()
    over = jobs.until_over(job)
    assert (over.state, over.exit_code, over.attempt) == ("finished", 0, 1)


def test_an_elastic_training_loses_a_machine_and_goes_on(jobs):
    job = jobs.train()
    jobs.bed.lose(job.folder, jobs.see(job).nodes[1])
    over = jobs.until_over(job)
    logs = "".join(Path(file).read_text() for file in jobs.bed.engine.logs(job))
    assert (over.state, over.attempt) == ("finished", 1), logs
    assert [line["step"] for line in metrics(jobs.folder)] == list(range(1, 61))
    (held,) = jobs.bed.engine.usage(job)
    assert held.exit_code == 0
