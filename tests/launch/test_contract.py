"""What every engine does, on each engine for real: see `beds.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config.errors import EXIT_LEFT_OUT, InputError
from paceline.launch.contract import ID_FILE
from paceline.launch.node_records import node_records
from tests.launch.beds import Bed, bed
from tests.launch.jobs import Jobs, jobs_on
from tests.launch.waiting import until

__all__ = ["bed"]

# Waits for a signal, and is ended soon after the test in any case.
WAIT = "for i in {1..2400}; do sleep 0.05; done; exit 9"


@pytest.fixture
def jobs(bed: Bed, tmp_path: Path) -> Iterator[Jobs]:
    with jobs_on(bed, tmp_path) as made:
        yield made


def test_the_command_runs_once_on_each_node(jobs):
    script = 'echo "$PACELINE_NODE" >>"nodes-$PACELINE_ATTEMPT"; echo "hello of $PACELINE_NODE"'
    job = jobs.submit(script)
    over = jobs.until_over(job)
    assert (over.state, over.exit_code, over.attempt) == ("finished", 0, 1)
    names = sorted((jobs.folder / "nodes-1").read_text().split())
    assert len(set(names)) == len(names) == jobs.bed.num_nodes
    assert sorted(one.node for one in node_records(job.folder)) == names
    assert (job.folder / ID_FILE).read_text() == job.id
    logs = [file.read_text() for file in jobs.bed.engine.logs(job)]
    assert sorted("".join(logs).splitlines()) == [f"hello of {name}" for name in names]


def test_more_nodes_than_there_are_is_refused_and_nothing_is_left(jobs):
    with pytest.raises(InputError):
        jobs.submit("touch ran", num_nodes=jobs.bed.num_nodes + 1)
    assert not [*jobs.folder.iterdir()]


def test_a_command_that_fails_ends_all_nodes_with_its_code(jobs):
    # Where there is one node, it is the first that comes.
    job = jobs.submit(f"mkdir first && exit 3; trap 'exit 75' TERM; {WAIT}")
    over = jobs.until_over(job)
    assert (over.state, over.exit_code) == ("failed", 3)
    (attempt,) = jobs.bed.engine.usage(job)
    assert attempt.exit_code == 3


def test_exit_code_75_starts_it_again(jobs):
    job = jobs.submit('echo "attempt $PACELINE_ATTEMPT"; [ "$PACELINE_ATTEMPT" -ge 3 ] || exit 75')
    over = jobs.until_over(job)
    assert (over.state, over.exit_code, over.attempt) == ("finished", 0, 3)
    said = [file.read_text() for file in jobs.bed.engine.logs(job)]
    assert said == sorted(said)
    assert len(said) == 3 * jobs.bed.num_nodes
    attempts = jobs.bed.engine.usage(job)
    assert [one.number for one in attempts] == [1, 2, 3]
    assert [one.exit_code for one in attempts] == [75, 75, 0]
    times = [at for one in attempts for at in (one.submitted, one.started, one.ended)]
    assert times == sorted(times)
    assert {one.num_devices for one in attempts} == {2 * jobs.bed.num_nodes}
    assert {len(one.nodes) for one in attempts} == {jobs.bed.num_nodes}


def test_without_restarts_a_job_that_saved_stays_saved(jobs):
    over = jobs.until_over(jobs.submit("exit 75", restarts=0))
    assert (over.state, over.exit_code, over.attempt) == ("saved", 75, 1)


def test_a_job_that_is_stopped_has_its_grace_and_does_not_come_back(jobs):
    job = jobs.submit(f"trap 'sleep 0.5; touch saved; exit 75' TERM; touch ready; {WAIT}")
    jobs.until_file("ready")
    assert jobs.see(job).state == "running"
    assert len(jobs.see(job).nodes) == jobs.bed.num_nodes
    jobs.bed.engine.signal(job, "stop")
    over = jobs.until_over(job)
    assert (over.state, over.attempt) == ("cancelled", 1)
    assert (jobs.folder / "saved").exists()
    jobs.bed.engine.signal(job, "stop")  # of one that has ended: nothing
    assert jobs.see(job) == over


def test_a_job_that_does_not_heed_is_killed_after_its_grace(jobs):
    job = jobs.submit(f"trap '' TERM; touch ready; {WAIT}", grace_s=1)
    jobs.until_file("ready")
    jobs.bed.engine.signal(job, "stop")
    assert jobs.until_over(job).state == "cancelled"


def test_a_job_that_is_asked_to_save_goes_on_later(jobs):
    heeds = f'trap "exit 75" USR1; touch "ready-$PACELINE_NODE"; {WAIT}'
    job = jobs.submit(f'[ "$PACELINE_ATTEMPT" = 1 ] || exit 0; {heeds}')
    for name in jobs.until(job, "running").nodes:
        jobs.until_file(f"ready-{name}")
    jobs.bed.engine.signal(job, "save")
    over = jobs.until_over(job)
    assert (over.state, over.attempt) == ("finished", 2)


def test_the_others_go_on_without_a_node_that_they_left_out(jobs):
    if jobs.bed.num_nodes < 2:
        pytest.skip("has one node")
    script = f"mkdir left-out && exit {EXIT_LEFT_OUT}; until [ -e go ]; do sleep 0.05; done"
    job = jobs.submit(script, num_nodes=2, min_nodes=1)
    until(lambda: any(one.exit_code == EXIT_LEFT_OUT for one in node_records(job.folder)))
    jobs.until(job, "running")  # the node that was left out may have been the first to start
    jobs.folder.joinpath("go").touch()
    over = jobs.until_over(job)
    assert (over.state, over.attempt, over.exit_code) == ("finished", 1, 0)


def test_a_program_may_end_with_any_code_where_all_nodes_are_needed(jobs):
    over = jobs.until_over(jobs.submit(f"exit {EXIT_LEFT_OUT}"))
    assert (over.state, over.exit_code) == ("failed", EXIT_LEFT_OUT)


def test_a_job_whose_node_is_lost_starts_again(jobs):
    job = jobs.submit(
        f'[ "$PACELINE_ATTEMPT" = 1 ] || exit 0; touch "ready-$PACELINE_NODE"; {WAIT}', grace_s=2
    )
    nodes = jobs.until(job, "running").nodes
    for name in nodes:
        jobs.until_file(f"ready-{name}")
    jobs.bed.lose(job.folder, nodes[-1])
    over = jobs.until_over(job)
    assert (over.state, over.attempt, over.exit_code) == ("finished", 2, 0)
    first, second = jobs.bed.engine.usage(job)
    assert first.exit_code != 0
    assert first.ended is not None
    assert first.ended <= second.submitted


def test_a_job_waits_for_those_before_it(jobs):
    first = jobs.submit("touch ready; until [ -e go ]; do sleep 0.05; done; echo 1 >>order")
    if not jobs.bed.has_order:
        with pytest.raises(InputError, match="order"):
            jobs.submit("echo 2 >>order", after=(first.id,), num_nodes=1)
        return
    second = jobs.submit("echo 2 >>order", after=(first.id,), num_nodes=1)
    third = jobs.submit("echo 3 >>order", after=(second.id,), num_nodes=1)
    jobs.until_file("ready")
    waits = jobs.see(second)
    assert (waits.state, waits.reason) == ("queued", "dependency")
    jobs.bed.engine.signal(third, "stop")  # before it had a machine
    over = jobs.until_over(third)
    assert over.state == "cancelled"
    (jobs.folder / "go").touch()
    assert jobs.until_over(second).state == "finished"
    assert (jobs.folder / "order").read_text().split() == ["1"] * jobs.bed.num_nodes + ["2"]


def test_a_job_ends_at_its_time_limit(jobs):
    job = jobs.submit(f"trap 'exit 3' TERM; {WAIT}", time_limit_s=1, num_nodes=1)
    over = jobs.until_over(job)
    assert (over.state, over.exit_code) == ("failed", 3)


def test_nodes_answer(jobs):
    answers = jobs.bed.engine.probe(jobs.bed.site, "echo $((6 * 7))")
    assert set(answers.values()) == {"42\n"}
