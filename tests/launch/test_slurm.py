"""What is Slurm's alone, on a real one: see `benchmarks.slurmlab`. What all engines do is in
`test_contract.py`, and what needs no Slurm in `test_slurm_texts.py`."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.slurmlab import Laboratory
from paceline.config.errors import InputError
from paceline.config.site import NodeType, Site
from paceline.launch.contract import Rendered, Request, Submitted
from paceline.launch.engines.slurm import engine
from paceline.launch.node_records import node_records
from tests.command_line import metrics
from tests.launch.beds import Bed, slurm_laboratory
from tests.launch.jobs import Jobs, jobs_on
from tests.launch.test_start_script import NASTY
from tests.launch.waiting import until

WAIT = "for i in {1..2400}; do sleep 0.05; done; exit 9"
AGAIN = '[ "$PACELINE_ATTEMPT" = 1 ] || exit 0'
SITE = Site(engine="slurm", partition="main", spot_partition="spot")


@pytest.fixture(scope="module")
def lab() -> Iterator[Laboratory]:
    with slurm_laboratory() as made:
        yield made


@pytest.fixture
def jobs(lab: Laboratory, tmp_path: Path) -> Iterator[Jobs]:
    with jobs_on(Bed(SITE, len(lab.nodes), lambda _folder, _node: None), tmp_path) as made:
        yield made


def on(jobs: Jobs, site: Site) -> Jobs:
    """The same, on another site of the same Slurm."""
    jobs.bed = Bed(site, jobs.bed.num_nodes, jobs.bed.lose)
    return jobs


def begun(jobs: Jobs, job: Submitted) -> tuple[str, ...]:
    """Wait until the command runs on all nodes, which say so; return their names."""
    nodes = jobs.until(job, "running").nodes
    for name in nodes:
        jobs.until_file(f"{job.folder.name}-{name}")
    return nodes


def heeding(job: str, then: str = WAIT) -> str:
    """Says that it can hear, and saves when it is asked to."""
    return f"trap 'sleep 0.3; touch saved; exit 75' TERM; touch \"{job}-$PACELINE_NODE\"; {then}"


def device_seconds(lab: Laboratory, job: Submitted) -> int:
    """As Slurm accounts for them."""
    fields = "--format=ElapsedRaw,AllocTRES"
    said = lab.run("sacct", "-X", "-D", "-n", "-P", "-j", job.id, fields)
    held = [line.split("|") for line in said.split()]
    return sum(int(s) * int(t.split("gres/gpu=")[1].split(",")[0]) for s, t in held if t)


def test_names_and_paths_are_nobodys_to_interpret(jobs, tmp_path):
    nasty = NASTY.replace("/", "_") + " %j %% Requeue=0 JobState=FAILED \n#SBATCH --nodes=99"
    script = 'printf "%s" "$1"'
    directory = tmp_path / f"d {nasty}"
    directory.mkdir()
    job = jobs.submit(
        "",
        name=nasty,
        command=("bash", "-c", script, "-", nasty),
        folder=directory / "job",
        directory=directory,
        environment={"V": nasty},
    )
    assert jobs.until_over(job).state == "finished"
    assert [file.read_text() for file in jobs.bed.engine.logs(job)] == [nasty] * 4
    assert not [*tmp_path.rglob("pwned")]


@pytest.mark.parametrize(
    ("site", "sentence"),
    [
        ({"partition": "gold"}, "`sinfo` lists"),
        ({"account": "gold"}, "set the site's account"),
        ({"qos": "gold"}, "set the site's qos"),
    ],
)
def test_what_slurm_refuses_is_one_sentence_and_leaves_nothing(jobs, site, sentence):
    with pytest.raises(InputError, match=sentence):
        on(jobs, Site(engine="slurm", **site)).submit("true")
    assert not [*jobs.folder.iterdir()]


def test_a_job_that_its_partition_would_never_start_is_refused(jobs):
    on(jobs, Site(engine="slurm", partition="short"))
    with pytest.raises(InputError, match="short ends jobs after 10:00: lower the site's max_hours"):
        jobs.submit("true", num_nodes=1, time_limit_s=660)
    assert not [*jobs.folder.iterdir()]


DIES = """
import os, signal, sys
from pathlib import Path
from paceline.config.site import Site
from paceline.launch.contract import Request
from paceline.launch.engines.slurm import engine, submission
submission.write_atomic = lambda file, text: (
    os.kill(os.getpid(), signal.SIGKILL) if file.name == "id" else file.write_text(text)
)
folder = Path(sys.argv[1])
folder.mkdir()
request = Request("dies", ("true",), folder, folder, 1, 1)
engine().submit(request, engine().render(request, Site(engine="slurm")))
"""


def test_a_submission_that_dies_half_way_leaves_nothing_queued(lab, tmp_path):
    dies = subprocess.run(
        [sys.executable, "-c", DIES, tmp_path / "job"], timeout=120, capture_output=True, text=True
    )
    assert dies.returncode == -9, dies.stderr
    until(lambda: not lab.run("squeue", "--noheader", "--name=dies"))
    # Slurm had it.
    seen = lab.run("squeue", "--noheader", "--name=dies", "--states=all", "--format=%T")
    assert seen.split() == ["CANCELLED"]


def test_a_preempted_job_saves_comes_back_and_is_accounted_for(lab, jobs):
    job = jobs.submit(f"{AGAIN}; {heeding('job 0')}", spot=True)
    begun(jobs, job)
    # Slurm counts whole seconds: some are to be there.
    until(lambda: time.time() > jobs.bed.engine.usage(job)[0].started + 2)
    first = jobs.submit("sleep 1", num_nodes=3, folder=jobs.folder / "prod")
    assert jobs.see(first).state == "queued"  # main takes nothing from spot
    on(jobs, Site(engine="slurm", partition="prod"))
    prod = jobs.submit("sleep 1", num_nodes=2, folder=jobs.folder / "prod 2")
    assert jobs.until_over(prod).state == "finished"
    over = jobs.until_over(job)
    assert (over.state, over.attempt) == ("finished", 2)
    assert (jobs.folder / "saved").exists()
    held = jobs.bed.engine.usage(job)
    assert [(one.state, one.exit_code) for one in held] == [("REQUEUED", 75), ("COMPLETED", 0)]
    seconds = sum(one.num_devices * (one.ended - one.started) for one in held)
    assert seconds == device_seconds(lab, job) > 0


def test_a_node_that_saves_alone_takes_the_others_with_it(jobs):
    script = f"mkdir first && exit 75; trap 'exit 75' TERM; {WAIT}"
    over = jobs.until_over(jobs.submit(script, num_nodes=2, restarts=0))
    assert (over.state, over.exit_code) == ("saved", 75)


def lose(lab: Laboratory, jobs: Jobs, job: Submitted, which: int) -> str:
    """Take one of its nodes away, and wait until Slurm knows."""
    lost = begun(jobs, job)[which]
    # Slurm's accounting knows an entry by the second of its submission.
    until(lambda: time.time() > jobs.bed.engine.usage(job)[0].submitted + 2)
    lab.kill_node(lost)
    lab.set_down(lost)
    until(lambda: len(jobs.see(job).nodes) == 2)
    return lost


GOES_ON = 'touch "job 0-$PACELINE_NODE"; until [ -e go ]; do sleep 0.05; done'


def test_a_job_that_may_go_on_without_a_node_does(lab, jobs):
    job = jobs.submit(GOES_ON, num_nodes=3, min_nodes=2)
    lost = lose(lab, jobs, job, 1)
    try:
        (jobs.folder / "go").touch()
        over = jobs.until_over(job)
    finally:
        lab.start_node(lost)
    assert (over.state, over.exit_code, over.attempt) == ("finished", 0, 1)
    until(lambda: len(jobs.bed.engine.usage(job)) == 2)  # accounting hears of it later
    held = jobs.bed.engine.usage(job)
    assert [(one.number, one.num_devices) for one in held] == [(1, 6), (1, 4)]
    assert held[0].ended == held[1].started


def test_a_node_is_given_back_and_the_others_go_on(lab, jobs):
    job = jobs.submit(GOES_ON, num_nodes=3, min_nodes=2)
    nodes, asked = begun(jobs, job), jobs.request(GOES_ON, num_nodes=3, min_nodes=2)
    until(lambda: time.time() > jobs.bed.engine.usage(job)[0].submitted + 2)
    with pytest.raises(InputError, match="has the job's batch script"):
        jobs.bed.engine.shrink(job, asked, nodes[:1])
    with pytest.raises(InputError, match=r"elastic\.min_nodes"):
        jobs.bed.engine.shrink(job, jobs.request(GOES_ON, num_nodes=3), nodes[2:])
    assert jobs.see(job).nodes == nodes
    jobs.bed.engine.shrink(job, asked, nodes[2:])
    until(lambda: jobs.see(job).nodes == nodes[:2])
    # Others have it at once.
    other = jobs.submit("true", num_nodes=2)
    assert jobs.until_over(other).state == "finished"
    assert jobs.see(job).state == "running"
    (jobs.folder / "go").touch()
    over = jobs.until_over(job)
    assert (over.state, over.exit_code, over.attempt) == ("finished", 0, 1)
    until(lambda: len(jobs.bed.engine.usage(job)) == 2)  # accounting hears of it later
    held = jobs.bed.engine.usage(job)
    assert [(one.number, one.num_devices) for one in held] == [(1, 6), (1, 4)]


def test_the_node_with_the_batch_script_may_be_the_lost_one(lab, jobs):
    """Only the others can tell Slurm of the end: it is started once more, and ends at once."""
    job = jobs.submit(GOES_ON, num_nodes=3, min_nodes=2)
    lost = lose(lab, jobs, job, 0)
    try:
        (jobs.folder / "go").touch()
        over = jobs.until_over(job)
        assert (over.state, over.exit_code, over.attempt) == ("finished", 0, 2)
        held = jobs.bed.engine.usage(job)
        assert [(one.number, one.num_devices) for one in held] == [(1, 6), (1, 4), (2, 6)]
        times = [at for one in held for at in (one.started, one.ended)]
        assert times == sorted(times)
    finally:
        lab.start_node(lost)


def test_a_job_that_may_have_fewer_nodes_comes_back_with_those_that_are_free(lab, jobs):
    saves = f"trap 'exit 75' USR1; touch \"job 0-$PACELINE_NODE\"; {WAIT}"
    count = 'echo "$PACELINE_NUM_NODES" >>"count-$PACELINE_ATTEMPT"'
    job = jobs.submit(f'{count}; [ "$PACELINE_ATTEMPT" = 1 ] || exit 0; {saves}', fewest=1)
    begun(jobs, job)
    # Slurm's accounting knows an entry by the second of its submission.
    until(lambda: time.time() > jobs.bed.engine.usage(job)[0].submitted + 2)
    other = jobs.submit(WAIT, num_nodes=3)  # waits, and is the first when the job has gone
    jobs.bed.engine.signal(job, "save")
    over = jobs.until_over(job)
    assert (over.state, over.attempt) == ("finished", 2)
    assert jobs.see(other).state == "running"
    assert (jobs.folder / "count-1").read_text().split() == ["4"] * 4
    assert (jobs.folder / "count-2").read_text().split() == ["1"]
    # Accounting hears of it later.
    until(lambda: [one.num_devices for one in jobs.bed.engine.usage(job)] == [8, 2])


def test_a_job_that_started_with_few_nodes_comes_back_with_more(jobs):
    """It starts with the node that is free, and is saved when the others are, too."""
    busy = jobs.submit(WAIT, num_nodes=3)
    jobs.until(busy, "running")
    heeds = f'trap "exit 75" USR1; touch "ready-$PACELINE_NUM_NODES"; {WAIT}'
    job = jobs.submit(
        f'[ "$PACELINE_NUM_NODES" != 4 ] || exit 0; {heeds}',
        fewest=1,
        grow_after_s=1,
    )
    jobs.until_file("ready-1")
    assert len(jobs.see(job).nodes) == 1
    jobs.bed.engine.signal(busy, "stop")
    over = jobs.until_over(job)
    assert (over.state, over.exit_code) == ("finished", 0)
    assert "more nodes are free" in (job.folder / "slurm.log").read_text()


@pytest.mark.parametrize(("bad", "state"), [(2, "finished"), (9, "failed")])
def test_a_node_that_takes_no_step_is_no_fault_of_the_command(jobs, bad, state):
    """srun fails before anything began: another start may have other nodes, but not for ever."""
    request = jobs.request("touch ran", num_nodes=1)
    made = jobs.bed.engine.render(request, jobs.bed.site)
    script = made.files[made.main]
    fails = f'srun() {{ [ "$PACELINE_ATTEMPT" -gt {bad} ] || return 1; command srun "$@"; }}\n'
    script = script.replace("judge() {", f"{fails}judge() {{")
    assert fails in script
    job = jobs.bed.engine.submit(request, Rendered({**made.files, made.main: script}, made.main))
    over = jobs.until_over(job)
    assert over.state == state
    assert (jobs.folder / "ran").exists() == (state == "finished")
    assert over.attempt == min(bad + 1, 4)


def test_limits_and_dependencies_say_what_they_wait_for(jobs):
    on(jobs, Site(engine="slurm", qos="two"))  # all of it together: two devices
    first = jobs.submit(WAIT, num_nodes=1)
    jobs.until(first, "running")
    second = jobs.submit("true", num_nodes=1)
    until(lambda: jobs.see(second).reason == "limit")
    assert "QOSGrpGRES" in jobs.see(second).said
    on(jobs, SITE)
    fails = jobs.submit("exit 1", num_nodes=1)
    never = jobs.submit("true", after=(fails.id,), num_nodes=1)
    assert jobs.until_over(fails).state == "failed"
    until(lambda: jobs.see(never).reason == "unschedulable")


def test_a_wait_is_explained_and_smaller_sizes_are_offered(lab, jobs):
    busy = [
        jobs.submit(WAIT, num_nodes=1, time_limit_s=600, **kept(jobs, name))
        for name in ("n1", "n3")
    ]
    for job in busy:
        jobs.until(job, "running")
    request = jobs.request("true", num_nodes=3, time_limit_s=60)
    now = time.time()
    expected = jobs.bed.engine.expected_start(request, rendered(jobs, request))
    assert now + 500 < expected < now + 900
    job = jobs.bed.engine.submit(request, rendered(jobs, request))
    try:
        until(lambda: jobs.see(job).reason == "resources")
        said = engine().why(job, request, SITE)
        assert said[0] == "No job in main comes first."
        assert (
            "4 of 8 devices are free. It needs 3 nodes with 2 free devices on each; there are 2."
            in said
        )
        assert any("at most 1 are below one switch (leaf" in each for each in said)
        assert said[-1] == "With 2 nodes it would start now."
        # Two nodes, one below each leaf, are no gang below one switch.
        one_leaf = jobs.request("true", num_nodes=2)
        leaf = NodeType(cluster="2xH100-SXM", num_nodes=4, select=("--switches=1@60",))
        site = Site(engine="slurm", node_types={"leaf": leaf})
        apart = jobs.bed.engine.render(one_leaf, site)
        assert jobs.bed.engine.expected_start(one_leaf, apart) > now + 500
    finally:
        jobs.bed.engine.signal(job, "stop")
    assert jobs.see(job).state == "cancelled"
    assert jobs.see(job).exit_code is None  # it never ran


def kept(jobs: Jobs, node: str) -> dict[str, object]:
    """Changes of a request that put it on a node."""
    only = NodeType(cluster="2xH100-SXM", num_nodes=1, select=(f"--nodelist={node}",))
    on(jobs, SITE.replace(node_types={**jobs.bed.site.node_types, node: only}))
    return {"node_type": node}


def rendered(jobs: Jobs, request: Request):
    return jobs.bed.engine.render(request, SITE)


@pytest.mark.parametrize("most", [1, 2])
def test_at_most_so_many_of_a_group_run_at_once(jobs, most):
    many = [
        jobs.submit("sleep 0.7", num_nodes=1, group=f"sweep {most}", at_most=most)
        for _ in range(2 * most)
    ]
    ran = []
    for job in many:
        assert jobs.until_over(job).state == "finished"
        ran += [(one.started, one.ended) for one in node_records(job.folder)]
    at_once = [sum(a <= start < b for a, b in ran) for start, _ in ran]
    assert max(at_once) <= most


def test_a_job_that_slurm_has_forgotten_is_known_by_its_records(jobs):
    job = jobs.submit('[ "$PACELINE_ATTEMPT" = 1 ] && exit 3', num_nodes=2)
    assert jobs.until_over(job).exit_code == 3
    forgotten = Submitted("4000000", job.folder)
    seen = jobs.see(forgotten)
    assert (seen.state, seen.exit_code, seen.attempt) == ("failed", 3, 1)
    (held,) = jobs.bed.engine.usage(forgotten)
    assert (held.num_devices, held.exit_code) == (4, 3)
    assert held.started <= held.ended
    assert jobs.see(Submitted("4000000", jobs.folder / "nothing")).state == "lost"
    jobs.bed.engine.signal(forgotten, "stop")  # nothing


def test_without_slurm_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="no machine of a Slurm cluster"):
        engine().observe(Submitted("1", tmp_path))


def test_an_elastic_training_is_preempted_and_comes_back(lab, jobs):
    # 20 micro-batches a step: Slurm takes seconds to preempt, in which 60 short steps would end.
    size = ("train.global_batch=240", "layout.micro_batch=6")
    job = jobs.train("elastic.save_within_s=9", *size, spot=True)
    on(jobs, Site(engine="slurm", partition="prod"))
    prod = jobs.submit("true", num_nodes=4, folder=jobs.folder / "prod")
    assert jobs.until_over(prod).state == "finished"
    over = jobs.until_over(job)
    logs = "".join(file.read_text() for file in jobs.bed.engine.logs(job))
    assert (over.state, over.attempt) == ("finished", 2), logs
    assert [line["step"] for line in metrics(jobs.folder)] == list(range(1, 61))
    assert "going on after step" in logs
    held = jobs.bed.engine.usage(job)
    assert [one.exit_code for one in held] == [75, 0]
    assert sum(one.num_devices * (one.ended - one.started) for one in held) == device_seconds(
        lab, job
    )
