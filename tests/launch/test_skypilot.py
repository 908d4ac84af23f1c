"""What only engine "skypilot" does: its tasks, its words for a wait, its refusals.

The service is a stand-in (`fake_skypilot`), which holds tasks against the fields of SkyPilot's
schemas; where SkyPilot itself is installed, so does that.
"""

import json
import shlex
from pathlib import Path

import pytest

from paceline.config.errors import InputError
from paceline.config.site import NodeType, Site
from paceline.launch.contract import Request, Submitted
from paceline.launch.engines.skypilot import engine
from paceline.launch.engines.skypilot.client import job_named
from paceline.launch.node_records import node_records
from tests.command_line import metrics
from tests.launch.beds import skypilot_bed
from tests.launch.fake_skypilot import RefusedError, validate
from tests.launch.jobs import jobs_on
from tests.launch.waiting import until

WAIT = "for i in {1..2400}; do sleep 0.05; done; exit 9"
H100 = NodeType(
    cluster="8xH100-SXM",
    num_nodes=4,
    select=("accelerators=H100:8", "disk_size=500", "infra=aws/us-east-1", "infra=gcp"),
)
SITE = Site(
    engine="skypilot",
    shared="/shared",
    claim="team",
    buckets={"/copies": "s3://copies"},
    container="registry/image:1",
    setup=("pip install paceline", "echo 'ü😀'"),
    node_types={"h100": H100},
)


def request(**changes: object) -> Request:
    given = {
        "name": "Big Run",
        "command": ("paceline", "train"),
        "directory": Path("/shared/me"),
        "folder": Path("/shared/me/runs/it's big/launch/1"),
        "num_nodes": 4,
        "devices_per_node": 8,
    }
    return Request(**{**given, **changes})


def task(site: Site = SITE, **changes: object) -> dict:
    rendered = engine().render(request(**changes), site)
    return json.loads(rendered.files[rendered.main])


def test_what_a_site_and_a_request_say_becomes_a_task():
    made = task(spot=True, priority=5000)
    resources = made["resources"]
    assert made["num_nodes"] == 4
    assert made["volumes"] == {"/shared": "team"}
    assert made["file_mounts"] == {"/copies": {"source": "s3://copies", "mode": "MOUNT_CACHED"}}
    assert made["setup"] == "pip install paceline\necho 'ü😀'"
    assert made["run"] == "exec bash " + shlex.quote("/shared/me/runs/it's big/launch/1/node.sh")
    assert (resources["accelerators"], resources["disk_size"]) == ("H100:8", 500)
    assert resources["any_of"] == [{"infra": "aws/us-east-1"}, {"infra": "gcp"}]
    assert resources["use_spot"] is True
    assert resources["job_recovery"]["recover_on_exit_codes"] == [75]
    assert resources["image_id"] == "docker:registry/image:1"
    assert resources["priority"] == 1000
    one = NodeType(cluster="8xH100-SXM", num_nodes=4, select=H100.select[:3])
    assert task(SITE.replace(node_types={"h100": one}))["resources"]["infra"] == "aws/us-east-1"


def test_what_the_job_sets_stands_in_no_task():
    rendered = engine().render(request(environment={"NAME": "value"}), SITE)
    assert "NAME=value" in rendered.files["start.sh"]
    assert "value" not in rendered.files["task.yaml"]


def test_skypilot_itself_takes_the_task():
    sky = pytest.importorskip("sky", reason="no SkyPilot is installed")
    made = task()
    made.pop("volumes")  # it would ask for the volume
    assert sky.Task.from_yaml_config(made).num_nodes == 4


def test_the_stand_in_refuses_what_the_schemas_do_not_know():
    with pytest.raises(RefusedError, match="replicas"):
        validate({**task(), "replicas": 2})


@pytest.mark.parametrize(
    ("site", "changes", "words"),
    [
        ({"shared": ""}, {}, "needs shared"),
        ({"node_types": {}}, {}, "needs node_types"),
        ({"node_types": {"a": H100, "b": H100}}, {}, "name one of a, b"),
        ({"buckets": {"/shared/x": "s3://b"}}, {}, "beside, for checkpoint.copy_to"),
        ({"buckets": {"/copies": "bucket"}}, {}, "names no bucket"),
        ({"buckets": {"copies": "s3://b"}}, {}, "names no bucket"),
        ({}, {"directory": Path("/home/me")}, "below /shared"),
        ({}, {"num_nodes": 5}, "has 4"),
        ({}, {"devices_per_node": 16}, "H100:8 has 8 devices"),
        ({}, {"fewest": 2}, "only Slurm"),
        ({}, {"after": ("x",)}, "order"),
        ({}, {"at_most": 2}, "at_most"),
    ],
)
def test_what_can_not_be_is_refused_in_a_sentence(site, changes, words):
    with pytest.raises(InputError, match=words):
        task(SITE.replace(**site), **changes)


@pytest.mark.parametrize(
    "words",
    [
        ("H100:8",),
        ("accelerators=H100:eight",),
        ("accelerators=H100:8", "accelerators=A100:8"),
        ("memory=900+",),
        ("accelerators=H100:8", "infra="),
        ("envs=1", "cpus=2"),
    ],
)
def test_a_word_of_select_that_is_no_resource_is_refused(words):
    kind = NodeType(cluster="8xH100-SXM", num_nodes=4, select=words)
    with pytest.raises(InputError, match="select"):
        task(SITE.replace(node_types={"h100": kind}))


# ---- with the stand-in ----


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with skypilot_bed(tmp_path_factory.mktemp("skypilot")) as bed:
        yield bed


@pytest.fixture
def jobs(service, tmp_path):
    with jobs_on(service, tmp_path) as made:
        yield made


def test_where_nothing_was_launched_there_is_no_job(service, tmp_path):
    assert job_named("none") is None
    (tmp_path / "skypilot.json").write_text('{"num_nodes": 1, "devices_per_node": 2}')
    gone = service.engine.observe(Submitted("none", tmp_path))
    assert (gone.state, gone.said) == ("lost", "SkyPilot has no job of this name")


def test_words_reach_the_command_as_they_are(jobs):
    words = ["a b", "'", '"', "$(touch bad)", "$HOME", "two\nlines", "`id`"]
    script = f"printf '%s\\0' {shlex.join(words)} >said"
    assert jobs.until_over(jobs.submit(script, num_nodes=1)).state == "finished"
    assert (jobs.folder / "said").read_text().split("\0")[:-1] == words
    assert not (jobs.folder / "bad").exists()


def test_machines_know_each_other_and_which_they_are(jobs):
    said = 'echo "$SKYPILOT_NODE_RANK $PACELINE_ADDRESS $PACELINE_NODE" >>who'
    job = jobs.submit(said)
    assert jobs.until_over(job).state == "finished"
    rows = sorted(line.split() for line in (jobs.folder / "who").read_text().splitlines())
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert len({row[1] for row in rows}) == 3
    assert all(row[1] == row[2] for row in rows)


def test_no_machine_is_killed_while_another_has_saved_already(jobs):
    script = '[ "$PACELINE_ATTEMPT" = 2 ] && exit 0; sleep "$SKYPILOT_NODE_RANK"; exit 75'
    job = jobs.submit(script)
    assert jobs.until_over(job).state == "finished"
    first = jobs.bed.engine.usage(job)[0]
    assert (first.exit_code, len(first.nodes)) == (75, 3)
    assert [one.exit_code for one in node_records(job.folder)] == [75, 75, 75, 0, 0, 0]


def test_a_job_that_is_stopped_before_it_has_machines_is_cancelled(jobs):
    job = jobs.submit(f"touch ran; {WAIT}", num_nodes=1)
    jobs.bed.engine.signal(job, "stop")
    assert jobs.until_over(job).state == "cancelled"


def test_a_setup_that_fails_is_a_failure(jobs):
    site = jobs.bed.site.replace(setup=("exit 3",))
    asked = jobs.request("true")
    job = jobs.bed.engine.submit(asked, jobs.bed.engine.render(asked, site))
    over = jobs.until_over(job)
    assert (over.state, over.exit_code) == ("failed", None)
    assert over.said == "FAILED_SETUP: see the logs"
    assert jobs.bed.engine.why(job, asked, site) == ("SkyPilot: launching", "SkyPilot: recovering")


def test_a_submission_that_is_refused_leaves_nothing(jobs, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        program = tmp_path / "bin" / "sky"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\necho 'Volume team not found.' >&2\nexit 1\n")
        program.chmod(0o755)
        patch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        asked = jobs.request("true")
        with pytest.raises(InputError, match="Volume team not found"):
            jobs.bed.engine.submit(asked, jobs.bed.engine.render(asked, jobs.bed.site))
        assert not asked.folder.exists()
        program.write_text("#!/bin/sh\necho 'no table'\n")
        with pytest.raises(InputError, match="no list of jobs"):
            job_named("x")
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(InputError, match="no sky here"):
            job_named("x")


def test_an_elastic_training_loses_a_machine_and_goes_on_with_others(jobs):
    job = jobs.train("checkpoint.every=5")
    file = jobs.folder / "runs" / "tiny" / "checkpoints" / "latest"
    until(file.exists, 300)
    jobs.bed.lose(job.folder, jobs.see(job).nodes[1])
    over = jobs.until_over(job)
    logs = "".join(file.read_text() for file in jobs.bed.engine.logs(job))
    assert (over.state, over.attempt) == ("finished", 2), logs
    assert [line["step"] for line in metrics(jobs.folder)] == list(range(1, 61))
