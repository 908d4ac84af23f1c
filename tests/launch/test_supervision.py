"""Jobs that a supervisor keeps: what happens to them where it, a node or a submission goes away."""

import os
import signal
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from paceline.config.errors import InputError
from paceline.config.site import Site
from paceline.launch.contract import Rendered, Submitted
from paceline.launch.engines import engine_named
from paceline.launch.supervision.process import ProcessIdentity
from paceline.launch.supervision.state import STATE, STATE_TYPE, read_state
from tests.launch.beds import local_bed, ssh_bed
from tests.launch.jobs import jobs_on
from tests.launch.waiting import until

WAIT = "for i in {1..2400}; do sleep 0.05; done; exit 9"


@pytest.fixture
def local(tmp_path):
    with local_bed(tmp_path) as bed, jobs_on(bed, tmp_path) as jobs:
        yield jobs


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with ssh_bed(tmp_path_factory.mktemp("ssh")) as bed:
        yield bed


def test_a_command_ends_with_its_supervisor_and_the_job_is_lost(local):
    job = local.submit(f"echo $$ >pid; trap 'exit 75' TERM; {WAIT}")
    until(lambda: (local.folder / "pid").exists() and (local.folder / "pid").read_text())
    pid = int((local.folder / "pid").read_text())
    os.kill(read_state(job.folder).supervisor.pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid))
    now = local.see(job)
    assert (now.state, now.nodes) == ("lost", ())
    assert "is gone" in now.said
    (attempt,) = local.bed.engine.usage(job)
    assert attempt.ended is not None
    local.bed.engine.signal(job, "stop")  # reaches nobody


def test_a_pid_that_was_given_away_is_not_signalled():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        me = ProcessIdentity.of_this()
        assert me.is_alive
        for other in (
            replace(me, ticks=me.ticks - 1),
            replace(me, boot="b"),
            replace(me, host="h"),
        ):
            assert not other.is_alive
            assert not other.send(signal.SIGUSR1)
        assert heard == []
        assert me.send(signal.SIGUSR1)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_job_of_another_machine_is_seen_and_not_signalled(local):
    job = local.submit("true")
    local.until_over(job)
    found = read_state(job.folder)
    elsewhere = replace(
        found,
        supervisor=replace(found.supervisor, host="login2"),
        now=replace(found.now, state="running"),
    )
    (job.folder / STATE).write_bytes(STATE_TYPE.dump_json(elsewhere))
    assert local.see(job).state == "running"
    with pytest.raises(InputError, match="login2"):
        local.bed.engine.signal(job, "stop")
    (job.folder / STATE).write_bytes(STATE_TYPE.dump_json(found))
    (job.folder / STATE).write_text('{"now": 3}')
    with pytest.raises(InputError, match=r"supervisor\.json"):
        local.see(job)
    (job.folder / STATE).write_bytes(STATE_TYPE.dump_json(found))


def test_a_submission_that_fails_leaves_nothing(local):
    request = local.request("touch ran")
    rendered = local.bed.engine.render(request, local.bed.site)
    broken = Rendered({**rendered.files, rendered.main: "{}"}, rendered.main)
    with pytest.raises(InputError, match="did not start"):
        local.bed.engine.submit(request, broken)
    assert not request.folder.exists()
    assert local.see(Submitted("x", request.folder)).state == "lost"
    with pytest.raises(InputError, match="id of no job"):
        local.submit("touch ran", after=("nothing",))
    with pytest.raises(InputError, match="no spot"):
        local.submit("touch ran", spot=True)
    assert not (local.folder / "ran").exists()


def test_who_submits_may_die_and_a_supervisor_without_an_id_does_not_begin(local, monkeypatch):
    """It hears no "go": its pipe closes instead."""
    request = local.request("touch ran")
    rendered = local.bed.engine.render(request, local.bed.site)
    written = []

    def die(file, text):
        written.append(file)
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.launch.supervision.engine.write_atomic", die)
    with pytest.raises(KeyboardInterrupt):
        local.bed.engine.submit(request, rendered)
    assert written
    until(lambda: not _supervisors(request.folder))
    assert not (local.folder / "ran").exists()
    assert not request.folder.exists()


def test_jobs_of_a_group_take_turns(local, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wait = "until [ -e go ]; do sleep 0.05; done"
    first = local.submit(f"touch ready; {wait}", group="sweep 1", at_most=1)
    local.until_file("ready")
    second = local.submit("true", group="sweep 1", at_most=1)
    other = local.submit("true", group="sweep 2", at_most=1)
    assert local.until_over(other).state == "finished"
    until(lambda: local.see(second).reason == "limit")
    (local.folder / "go").touch()
    assert local.until_over(first).state == "finished"
    assert local.until_over(second).state == "finished"


def test_hosts_are_all_there_or_nothing_starts(hosts, tmp_path):
    names = ("n0", "gone", "n1")
    with jobs_on(replace_site(hosts, hosts=names), tmp_path) as jobs:
        job = jobs.submit("touch ran", num_nodes=3)
        until(lambda: jobs.see(job).reason == "node_down")
        assert "gone: ssh: connect to host" in jobs.see(job).said
        jobs.bed.engine.signal(job, "stop")
        assert jobs.until_over(job).state == "cancelled"
        assert not (tmp_path / "ran").exists()
        # With one to spare, the job goes round it.
        spared = jobs.submit("touch ran", num_nodes=2)
        over = jobs.until_over(spared)
        assert over.state == "finished"
        assert jobs.bed.engine.usage(spared)[0].nodes == ("n0", "n1")
        assert jobs.bed.engine.probe(jobs.bed.site, "echo here") == {
            "n0": "here\n",
            "gone": "",
            "n1": "here\n",
        }


def test_a_host_takes_one_job_at_a_time(hosts, tmp_path):
    with jobs_on(replace_site(hosts, hosts=("n2",)), tmp_path) as jobs:
        first = jobs.submit("touch ready; until [ -e go ]; do sleep 0.05; done", num_nodes=1)
        jobs.until_file("ready")
        second = jobs.submit("true", num_nodes=1)
        until(lambda: jobs.see(second).reason == "resources")
        (tmp_path / "go").touch()
        assert jobs.until_over(first).state == "finished"
        assert jobs.until_over(second).state == "finished"


def test_others_go_on_where_they_can_and_the_lost_node_comes_back(hosts, tmp_path):
    with jobs_on(hosts, tmp_path) as jobs:
        script = 'echo "$PACELINE_NODE" >>began; until [ -e go ]; do sleep 0.05; done'
        job = jobs.submit(script, num_nodes=2, min_nodes=1, grace_s=2)
        began = tmp_path / "began"
        until(lambda: began.exists() and len(began.read_text().split()) == 2)
        hosts.lose(job.folder, "n1")
        until(lambda: len(began.read_text().split()) == 3)
        until(lambda: len(jobs.see(job).nodes) == 2)
        now = jobs.see(job)
        assert (now.state, now.attempt) == ("running", 1)
        (tmp_path / "go").touch()
        assert jobs.until_over(job).state == "finished"
        (attempt,) = jobs.bed.engine.usage(job)
        assert attempt.exit_code == 0


def test_all_start_again_where_one_has_saved(hosts, tmp_path):
    """Also one that took a lost node's place, and that nobody told."""
    with jobs_on(hosts, tmp_path) as jobs:
        script = (
            'echo "$PACELINE_NODE" >>began; [ "$PACELINE_ATTEMPT" = 1 ] || exit 0; '
            'trap "exit 75" TERM; while :; do [ -e go ] && [ $PACELINE_NODE = n0 ] && exit 75; '
            "sleep 0.05; done"
        )
        job = jobs.submit(script, num_nodes=2, min_nodes=1)
        began = tmp_path / "began"
        until(lambda: began.exists() and len(began.read_text().split("\n")) == 3)
        (tmp_path / "go").touch()
        over = jobs.until_over(job)
        assert (over.state, over.attempt) == ("finished", 2)
        assert [one.exit_code for one in hosts.engine.usage(job)] == [75, 0]


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ({}, "needs hosts"),
        ({"hosts": ("-oProxyCommand=x",)}, "no host that ssh takes"),
        ({"hosts": ("a b",)}, "no host that ssh takes"),
        ({"hosts": ("n@a", "n_a")}, "a name of its own"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(site, said):
    with pytest.raises(InputError, match=said):
        engine_named("ssh").nodes_of(Site(engine="ssh", **site))


def replace_site(bed, **changes):
    return replace(bed, site=bed.site.replace(**changes))


def _supervisors(folder) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.Error):
            if str(folder) in (process.info["cmdline"] or ()):
                found.append(process.pid)
    return found
