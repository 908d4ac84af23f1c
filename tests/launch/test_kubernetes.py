"""What only engine "kubernetes" does: its manifests, its words for a wait, its refusals.

The cluster is a stand-in (`fake_kubernetes`), which holds manifests against Kubernetes' schemas.
"""

import json
import shlex
from pathlib import Path

import pytest

from paceline.config.errors import InputError
from paceline.config.site import NodeType, Site
from paceline.launch.contract import ID_FILE, Request
from paceline.launch.engines.kubernetes import engine
from paceline.launch.engines.kubernetes.states import first_in_queue, wait_of
from tests.command_line import metrics
from tests.launch.beds import kubernetes_bed
from tests.launch.jobs import jobs_on
from tests.launch.waiting import until

WAIT = "for i in {1..2400}; do sleep 0.05; done; exit 9"
SITE = Site(
    engine="kubernetes",
    container="registry/image:1",
    claim="data",
    shared="/shared",
    partition="team",
    spot_partition="spot",
    qos="high",
    topology="topology/rack",
    node_types={
        "h100": NodeType(
            cluster="8xH100-SXM",
            num_nodes=4,
            select=("gpu.product=H100", "limits.memory=900Gi"),
        )
    },
)


def request(**changes: object) -> Request:
    given = {
        "name": "Big Run",
        "command": ("paceline", "train"),
        "directory": Path("/shared/me"),
        "folder": Path("/shared/me/runs/big/launch/1"),
        "num_nodes": 4,
        "devices_per_node": 8,
    }
    return Request(**{**given, **changes})


def jobset(site: Site = SITE, **changes: object) -> dict:
    rendered = engine().render(request(**changes), site)
    return json.loads(rendered.files[rendered.main])


def job_of(manifest: dict) -> dict:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def test_what_a_site_and_a_request_say_becomes_a_jobset():
    made = jobset(restarts=3)
    job = job_of(made)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert made["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert made["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (4, 4, 0)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "900Gi"}
    assert pod["nodeSelector"] == {"gpu.product": "H100"}
    assert pod["terminationGracePeriodSeconds"] == 60
    assert job["template"]["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-preferred-topology": "topology/rack"
    }
    assert jobset(spot=True)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "spot"


def test_the_name_tells_jobs_apart_and_is_one_of_kubernetes():
    names = {
        jobset(name="9 lives of $(me)")["metadata"]["name"],
        jobset(name="9 lives of $(me)", folder=Path("/shared/other"))["metadata"]["name"],
        jobset(name="x" * 200)["metadata"]["name"],
    }
    assert len(names) == 3
    assert all(len(name) <= 40 and name.replace("-", "").isalnum() for name in names)
    assert all(name[0].isalpha() and name == name.lower() for name in names)


def test_where_nodes_may_go_on_a_lost_pod_is_put_in_place_and_else_the_job_starts_again():
    def action_of_loss(**changes: object) -> str:
        rules = job_of(jobset(**changes))["podFailurePolicy"]["rules"]
        return next(rule["action"] for rule in rules if "onPodConditions" in rule)

    assert action_of_loss(min_nodes=2) == "Ignore"
    assert action_of_loss(min_nodes=4) == action_of_loss() == "Count"


@pytest.mark.parametrize(
    ("site", "changes", "words"),
    [
        ({"container": ""}, {}, "needs container"),
        ({"claim": ""}, {}, "needs claim"),
        ({"shared": ""}, {}, "needs shared"),
        ({"partition": "a b"}, {}, "partition"),
        ({}, {"directory": Path("/home/me")}, "below /shared"),
        ({}, {"num_nodes": 5}, "has 4"),
        ({}, {"fewest": 2}, "only Slurm"),
        ({}, {"after": ("x",)}, "order"),
        ({}, {"at_most": 2}, "at_most"),
        ({"spot_partition": ""}, {"spot": True}, "spot_partition"),
    ],
)
def test_what_can_not_be_is_refused_in_a_sentence(site, changes, words):
    with pytest.raises(InputError, match=words):
        jobset(SITE.replace(**site), **changes)


@pytest.mark.parametrize("word", ["gpu", "a b=c", "limits.memory=lots", "limits.=1", "x=$(id)"])
def test_a_word_of_select_that_is_neither_a_label_nor_a_limit_is_refused(word):
    kind = NodeType(cluster="8xH100-SXM", num_nodes=4, select=(word,))
    with pytest.raises(InputError, match="select"):
        jobset(SITE.replace(node_types={"h100": kind}))


def test_why_a_job_waits_in_the_words_of_the_contract():
    waits = {"spec": {"suspend": True}, "metadata": {"uid": "1"}}

    def reason(**conditions: str) -> str:
        listed = [
            {"type": kind, "status": status, "message": message}
            for kind, (status, message) in conditions.items()
        ]
        return wait_of(waits, (), {"status": {"conditions": listed}})[0]

    assert reason(QuotaReserved=("False", "insufficient unused quota for nvidia.com/gpu")) == (
        "resources"
    )
    assert reason(QuotaReserved=("False", "LocalQueue team doesn't exist")) == "unschedulable"
    assert reason(
        Evicted=("True", "Preempted to accommodate a workload"),
        QuotaReserved=("False", "Preempted"),
    ) == ("requeued")
    assert reason(QuotaReserved=("True", "reserved")) == "starting"
    assert wait_of(waits, (), None)[0] == "unknown"
    running = {"spec": {"suspend": False}}
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}
    pod = {"status": {"conditions": [unscheduled]}}
    assert wait_of(running, (pod,), None) == ("resources", "0/4 nodes are available")
    pull = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    pod = {"status": {"containerStatuses": [pull]}}
    assert wait_of(running, (pod,), None) == ("starting", "ErrImagePull: no such image")


def test_who_comes_first_in_a_queue():
    def workload(name: str, made: str, priority: int, queue: str = "team") -> dict:
        return {
            "metadata": {"name": name, "creationTimestamp": made},
            "spec": {"queueName": queue, "priority": priority},
        }

    own = workload("own", "2026-01-02", 0)
    others = [
        workload("later", "2026-01-03", 0),
        workload("earlier", "2026-01-01", 0),
        workload("higher", "2026-01-03", 5),
        workload("elsewhere", "2026-01-01", 5, "other"),
    ]
    assert first_in_queue(own, [own, *others]) == ["higher", "earlier"]


# ---- with a cluster ----


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with kubernetes_bed(tmp_path_factory.mktemp("kubernetes")) as bed:
        yield bed


@pytest.fixture
def jobs(cluster, tmp_path):
    with jobs_on(cluster, tmp_path) as made:
        yield made


def test_words_reach_the_command_as_they_are(jobs):
    words = ["a b", "'", '"', "$(touch bad)", "$HOME", "$$(HOSTNAME)", "two\nlines", "`id`"]
    script = f"printf '%s\\0' {shlex.join(words)} >said"
    assert jobs.until_over(jobs.submit(script, num_nodes=1)).state == "finished"
    assert (jobs.folder / "said").read_text().split("\0")[:-1] == words
    assert not (jobs.folder / "bad").exists()


def test_a_job_that_waits_says_for_what_and_who_comes_first(jobs):
    first = jobs.submit(f"touch ready; trap 'exit 0' TERM; {WAIT}")
    jobs.until_file("ready")
    second, third = jobs.submit("true"), jobs.submit("true")
    until(lambda: jobs.see(third).reason == "resources")
    seen = jobs.see(third)
    assert (seen.state, seen.nodes) == ("queued", ())
    assert "insufficient unused quota" in seen.said
    (said,) = jobs.bed.engine.why(third, jobs.request("true"), jobs.bed.site)
    assert f"1 job comes first in queue queue: jobset-{second.id}." == said
    jobs.bed.engine.signal(first, "stop")
    assert jobs.until_over(third).state == "finished"


def test_a_submission_that_is_refused_leaves_nothing(jobs):
    site = jobs.bed.site.replace(namespace="elsewhere")
    asked = jobs.request("true")
    with pytest.raises(InputError, match="JobSet installed"):
        jobs.bed.engine.submit(asked, jobs.bed.engine.render(asked, site))
    assert not [*jobs.folder.iterdir()]


def test_a_cluster_that_is_silent_is_a_sentence(jobs, tmp_path, monkeypatch):
    job = jobs.submit(f"trap 'exit 0' TERM; {WAIT}")
    config = tmp_path / "config"
    server = {"server": "https://127.0.0.1:1"}
    config.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": server}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "namespace": "lab"}}],
                "current-context": "c",
            }
        )
    )
    with monkeypatch.context() as patch:
        patch.setenv("KUBECONFIG", str(config))
        with pytest.raises(InputError, match="has no credentials"):
            jobs.see(job)
        kept = json.loads(config.read_text())
        kept["users"] = [{"name": "me", "user": {"token": "x"}}]
        kept["contexts"][0]["context"]["user"] = "me"
        config.write_text(json.dumps(kept))
        with pytest.raises(InputError, match="kubectl get jobsets"):
            jobs.see(job)
        # Her credentials' program is not found: that is not "there is no such job".
        kept["users"][0]["user"] = {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1beta1",
                "command": "no-such-program",
                "interactiveMode": "Never",
            }
        }
        config.write_text(json.dumps(kept))
        with pytest.raises(InputError, match="no-such-program"):
            jobs.see(job)
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(InputError, match="no kubectl here"):
            jobs.see(job)


def test_a_damaged_folder_is_a_sentence(jobs):
    job = jobs.submit("true", num_nodes=1)
    jobs.until_over(job)
    file = job.folder / "kubernetes.json"
    kept = file.read_text()
    file.write_text('{"context": 3}')
    with pytest.raises(InputError, match=r"kubernetes\.json"):
        jobs.see(job)
    file.write_text(kept)
    assert (job.folder / ID_FILE).read_text() == job.id


def test_an_elastic_training_loses_a_pod_and_goes_on(jobs):
    job = jobs.train()
    jobs.bed.lose(job.folder, jobs.see(job).nodes[1])
    over = jobs.until_over(job)
    logs = "".join(file.read_text() for file in jobs.bed.engine.logs(job))
    assert (over.state, over.attempt) == ("finished", 1), logs
    assert [line["step"] for line in metrics(jobs.folder)] == list(range(1, 61))
