"""What the engine of Slurm writes and reads, without a Slurm: options, reasons, free devices."""

import time
from pathlib import Path

import pytest

from paceline.config.errors import InputError
from paceline.config.site import NodeType, Site
from paceline.launch.contract import Request, SilentError, Submitted
from paceline.launch.engines.slurm.commands import environment, refused
from paceline.launch.engines.slurm.job_state import JobState, Row
from paceline.launch.engines.slurm.queue import estimate, must_end_in_time
from paceline.launch.engines.slurm.script import rendered
from paceline.launch.engines.slurm.states import reason_of, state_of
from paceline.launch.engines.slurm.usage import attempts
from paceline.launch.engines.slurm.why import NodeFree, devices_of, free_sentences
from paceline.launch.node_records import NodeRecord


def request(**changes: object) -> Request:
    given = {"name": "big run", "command": ("paceline", "train"), "directory": Path("/shared")}
    shape = {"folder": Path("/shared/job"), "num_nodes": 4, "devices_per_node": 8}
    return Request(**{**given, **shape, **changes})


def options(site: Site, **changes: object) -> list[str]:
    """Those of the batch script."""
    asked = rendered(request(**changes), site)
    lines = asked.files[asked.main].splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]


def test_a_job_may_start_with_fewer_nodes():
    given = options(Site(engine="slurm"), fewest=1)
    assert "--nodes=1-4" in given
    assert "--ntasks-per-node=1" not in given  # of the fewest nodes: Slurm would give no more
    assert {"--nodes=4", "--ntasks-per-node=1"} <= {*options(Site(engine="slurm"), min_nodes=1)}


def test_what_a_site_and_a_request_say_becomes_options():
    kind = NodeType(cluster="8xH100-SXM", num_nodes=16, select=("--constraint=h100&ib",))
    site = Site(
        engine="slurm",
        partition="main",
        spot_partition="spot",
        account="lab",
        qos="high",
        node_types={"h100": kind},
    )
    given = options(site, time_limit_s=3601, grace_s=90, priority=-2, after=("7", "8"))
    assert given == [
        "--job-name=big_run",
        "--output=/dev/null",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--partition=main",
        "--account=lab",
        "--qos=high",
        "--gpus-per-node=8",
        "--exclusive",
        "--mem=0",
        "--constraint=h100&ib",
        "--requeue",
        "--signal=TERM@90",
        "--time=61",
        "--nice=200",
        "--dependency=afterok:7:8",
    ]
    assert "--partition=spot" in options(site, spot=True)
    # A part of a node leaves the rest of it to others.
    assert "--exclusive" not in options(site, devices_per_node=4)
    assert "--no-kill" in options(site, min_nodes=2)


def test_a_site_says_what_else_to_ask_for():
    select = ("--gres=none", "--cpus-per-task=16")
    kind = NodeType(cluster="cpus.toml", num_nodes=2, select=select)
    given = options(Site(engine="slurm", node_types={"c": kind}))
    assert set(select) <= set(given)
    assert not [each for each in given if "gpus" in each]


@pytest.mark.parametrize(
    ("site", "changes", "sentence"),
    [
        ({"partition": "a\n#SBATCH --uid=0"}, {}, "leave out blanks"),
        ({"account": "a b"}, {}, "leave out blanks"),
        ({}, {"after": ("7;rm",)}, "is no job of Slurm's"),
        ({}, {"node_type": "h100"}, "the site has no node type"),
        ({}, {"folder": Path("/a\0b")}, "NUL"),
    ],
)
def test_what_slurm_would_read_otherwise_is_refused(site, changes, sentence):
    with pytest.raises(InputError, match=sentence):
        rendered(request(**changes), Site(engine="slurm", **site))


def test_a_select_that_is_no_option_is_refused():
    kind = NodeType(cluster="8xH100-SXM", num_nodes=1, select=("h100",))
    with pytest.raises(InputError, match="no option of sbatch"):
        rendered(request(), Site(engine="slurm", node_types={"h": kind}))


def test_settings_of_slurms_commands_do_not_reach_them(monkeypatch):
    for name in ("SBATCH_PARTITION", "SLURM_JOB_ID", "SQUEUE_FORMAT", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    kept = environment()
    assert "SLURM_CONF" in kept
    assert not {"SBATCH_PARTITION", "SLURM_JOB_ID", "SQUEUE_FORMAT"} & kept.keys()


@pytest.mark.parametrize(
    ("said", "restarts", "reason"),
    [
        ("Resources", 0, "resources"),
        ("Priority", 0, "priority"),
        ("QOSGrpGRES", 0, "limit"),
        ("QOSMaxJobsPerUserLimit", 0, "limit"),
        ("AssocGrpGRESMinutes", 0, "quota"),
        ("PartitionTimeLimit", 0, "unschedulable"),
        ("PartitionConfig", 0, "unschedulable"),
        ("Dependency", 0, "dependency"),
        ("DependencyNeverSatisfied", 0, "unschedulable"),
        ("JobHeldUser", 0, "held"),
        ("BeginTime", 0, "begin_time"),
        ("BeginTime", 1, "requeued"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", 0, "node_down"),
        ("None", 0, "unknown"),
        ("SomethingOfNextYear", 0, "unknown"),
    ],
)
def test_reasons(said, restarts, reason):
    assert reason_of("PENDING", said, restarts) == reason


def test_states():
    assert state_of("FAILED", 75) == "saved"
    assert state_of("FAILED", 3) == "failed"
    assert state_of("NODE_FAIL", None) == "lost"
    assert state_of("COMPLETING", None) == "running"
    assert reason_of("CONFIGURING", "None", 0) == "starting"
    assert reason_of("SPECIAL_EXIT", "None", 0) == "held"


def test_a_refusal_is_one_sentence_with_a_cure():
    said = "sbatch: error: Batch job submission failed: Invalid qos specification\n"
    assert "set the site's qos" in str(refused(said))
    assert "Slurm says" in str(refused(""))


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect "
        "failure)",
    ],
)
def test_a_silent_controller_is_told_from_a_refusal(said):
    error = refused(said)
    assert isinstance(error, SilentError)
    assert "try again when `scontrol ping` says UP" in str(error)


def test_devices_of_slurms_texts():
    assert devices_of("gpu:a100:8(S:0-1)") == 8
    assert devices_of("gpu:2(IDX:0-1),shard:4,gpu:h100:3(IDX:0,2-3)") == 5
    assert devices_of("(null)") == 0


def test_fragments_are_counted_by_leaf():
    nodes = [NodeFree("a", 8, 8), NodeFree("b", 8, 4), NodeFree("c", 8, 8), NodeFree("d", 8, 0)]
    leaves = {"s1": {"a", "b"}, "s2": {"c", "d"}}
    said = list(free_sentences(nodes, leaves, request()))
    assert said == [
        "20 of 32 devices are free. It needs 4 nodes with 8 free devices on each; there are 2.",
        "4 free devices lie on nodes with fewer than that.",
        "Of these, at most 1 are below one switch (s1).",
    ]


def test_a_change_of_size_is_counted_once(tmp_path):
    """Slurm's entry after it has the start of the one before."""
    (tmp_path / "slurm.json").write_text('{"devices_per_node": 2}')
    at = (tmp_path / "slurm.json").stat().st_mtime
    rows = [
        Row("NODE_FAIL", None, at - 10**6, at, at, ("x",), 9),  # of another job, years ago
        Row("RESIZING", None, at, at + 1, at + 4, ("n1", "n2", "n3"), 6),
        Row("REQUEUED", None, at + 4, at + 1, at + 9, ("n1", "n3"), None),
        Row("PENDING", None, at + 9, None, None, (), None),
    ]
    held = attempts(Submitted("1", tmp_path), rows, (), None)
    assert [(one.number, one.started, one.ended, one.num_devices) for one in held] == [
        (1, at + 1, at + 4, 6),
        (1, at + 4, at + 9, 4),
        (2, None, None, 0),
    ]


def test_accounting_that_is_late_is_caught_up(tmp_path):
    (tmp_path / "slurm.json").write_text('{"devices_per_node": 2}')
    at = (tmp_path / "slurm.json").stat().st_mtime
    job = Submitted("1", tmp_path)
    runs = Row("RUNNING", None, at, at + 1, None, ("n1",), 2)

    def held(*rows: Row, now: JobState) -> list[tuple]:
        found = attempts(job, rows, (), now)
        return [(one.number, one.started, one.ended, one.num_devices, one.state) for one in found]

    over = JobState("COMPLETED", "None", 0, 0, ("n1",), at + 1, at, at + 5, "main", "n1")
    assert held(runs, now=over) == [(1, at + 1, at + 5, 2, "COMPLETED")]
    again = JobState("PENDING", "BeginTime", 1, None, (), at + 99, at + 4, None, "main", "n1")
    waits = (2, None, None, 0, "PENDING")
    assert held(runs, now=again) == [(1, at + 1, at + 4, 2, "REQUEUED"), waits]


def test_an_attempt_of_less_than_a_second_is_not_lost(tmp_path):
    """Slurm's accounting has one entry for it and the next."""
    (tmp_path / "slurm.json").write_text('{"devices_per_node": 2}')
    at = float(int((tmp_path / "slurm.json").stat().st_mtime) + 1)
    rows = [Row("COMPLETED", 0, at, at + 7, at + 8, ("n1",), 2)]
    records = [
        NodeRecord(1, "n1", at + 0.2, at + 0.5, 75),
        NodeRecord(2, "n1", at + 7.1, at + 8, 0),
    ]
    now = JobState("COMPLETED", "None", 1, 0, ("n1",), at + 7, at, at + 8, "main", "n1")
    held = attempts(Submitted("1", tmp_path), rows, records, now)
    assert [(one.number, one.exit_code) for one in held] == [(1, 75), (2, 0)]
    assert sum(one.num_devices * (one.ended - one.started) for one in held) == 2
    times = [time for one in held for time in (one.submitted, one.started, one.ended)]
    assert times == sorted(times)


class FakeSlurm:
    """Commands that say what a test wants."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.says("scontrol", "No reservations in the system")

    def says(self, command: str, words: str) -> None:
        """What one prints on both streams from now on."""
        self.does(command, f"cat >/dev/null\necho '{words}' | tee /dev/stderr")

    def does(self, command: str, script: str) -> None:
        """What one does from now on."""
        file = self._folder / command
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return FakeSlurm(tmp_path)


def starts(at: float, nodes: str = "n1,n4") -> str:
    return (
        f"sbatch: Job 7 to start at {at:.0f} using 16 processors on nodes {nodes} in partition main"
    )


def test_a_start_is_when_the_last_job_ends_on_the_nodes_that_slurm_found(slurm):
    now = round(time.time())
    slurm.says("sbatch", starts(now + 5000))
    slurm.says("squeue", f"{now + 900}|n1\n{now + 1800}|n4")
    assert estimate("#!/bin/sh\n") == now + 1800
    slurm.says("squeue", f"{now + 900}|n1\n{now + 7200}|n4")  # preempted, maybe: Slurm knows why
    assert estimate("#!/bin/sh\n") == now + 5000
    slurm.says("squeue", f"{now + 900}|n1\nN/A|n4")
    assert estimate("#!/bin/sh\n") == now + 5000


@pytest.mark.parametrize(
    ("lines", "listed", "is_refused"),
    [
        ("--time=601\n#SBATCH --partition=short", "short|10:00:00", True),
        ("--time=600\n#SBATCH --partition=short", "short|10:00:00", False),
        ("--time=2881", "main*|2-00:00:00\nlong|infinite", True),
        ("--time=2880", "main*|2-00:00:00\nshort|10:00", False),
        ("--time=2881\n#SBATCH --partition=main,long", "main*|2-00:00:00\nlong|infinite", False),
        ("--time=601\n#SBATCH --partition=short\n#SBATCH --qos=x", "short|10:00:00", False),
        ("--nodes=1", "main*|10:00", False),
    ],
)
def test_more_time_than_a_partition_gives_is_refused(lines, listed, is_refused, slurm):
    slurm.says("sinfo", listed)
    script = f"#!/bin/sh\n#SBATCH {lines}\n"
    if is_refused:
        with pytest.raises(InputError, match="lower the site's max_hours"):
            must_end_in_time(script)
    else:
        must_end_in_time(script)


def test_a_start_is_sooner_on_nodes_that_slurm_passed_over(slurm):
    """It names nodes that are free at the end of its window, not those that were free first."""
    now = round(time.time())
    slurm.does(
        "sbatch",
        f"""case "$*" in
          *--exclude=n1,n2*) echo "allocation failure: Requested nodes not available" ;;
          *--exclude=n1) echo "{starts(now + 5000, "n2")}" ;;
          *) echo "{starts(now + 5000, "n1")}" ;;
        esac >&2""",
    )
    ends = {"n1": now + 3600, "n2": now + 1800, "n3": now + 900}
    slurm.does(
        "squeue",
        f"""case "$*" in
          *--nodelist=n1*) echo {ends["n1"]} ;;
          *--nodelist=n2*) echo {ends["n2"]} ;;
          *) printf '%s\\n' {" ".join(f"'{end}|{node}'" for node, end in ends.items())} ;;
        esac""",
    )
    assert estimate("#!/bin/sh\n") == now + 1800
    assert estimate("#!/bin/sh\n#SBATCH --exclude=n2\n") == now + 3600, "the site's own words"


def test_a_start_on_nodes_that_somebody_reserved_stays_slurms(slurm):
    now = round(time.time())
    slurm.says("sbatch", starts(now + 5000))
    slurm.says("squeue", f"{now + 900}|n4")
    slurm.says("scontrol", "ReservationName=work Nodes=n4,n5 State=INACTIVE")
    assert estimate("#!/bin/sh\n") == now + 5000
    assert estimate("#!/bin/sh\n#SBATCH --reservation=work\n") == now + 900
    slurm.says("scontrol", "ReservationName=work Nodes=n8,n9 State=INACTIVE")
    assert estimate("#!/bin/sh\n") == now + 900
