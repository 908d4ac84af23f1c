"""The demo, a script and the recommender on a real Slurm: checkpoints, report, bill come back."""

import json
from pathlib import Path

import pytest
import tomli_w

from benchmarks.slurmlab import Laboratory
from paceline.config.job import to_raw
from paceline.launch.records import Launch, newest_launch
from paceline.machine.discovery import this_machine
from paceline.train.checkpoint.loading import newest_good
from paceline.train.checkpoint.lockstep import LockstepRanks
from tests.command_line import paceline
from tests.launch.beds import slurm_laboratory
from tests.launch.waiting import until

RECIPES = Path(__file__).parents[2] / "recipes"
SITES = """
[lab]
engine = "slurm"
partition = "main"
[lab.node_types.cpu]
cluster = "node.toml"
num_nodes = 2
usd_per_device_hour = 3.6
"""
CASES = {
    # Its name -> what is launched, and the Run that comes of it.
    "demo": ((), "demo"),
    "script": ((str(RECIPES / "own_model.py"),), "digits"),
    "recommender": ((str(RECIPES / "dlrm.toml"),), "dlrm"),
}
SHORT = {
    "demo": ("train.steps=6", "optim.warmup_steps=2", "checkpoint.every=3"),
    "script": (),
    "recommender": ("train.steps=60", "comm.embeddings.checkpoint_every=30"),
}


@pytest.fixture(scope="module")
def lab():
    with slurm_laboratory() as made:
        yield made


def sacct_device_seconds(lab: Laboratory, launch: Launch) -> int:
    said = lab.run(
        *("sacct", "-X", "-D", "-n", "-P", "-j", launch.job.id),
        "--format=ElapsedRaw,AllocTRES",
    )
    held = [line.split("|") for line in said.split()]
    return sum(int(s) * int(t.split("gres/gpu=")[1].split(",")[0]) for s, t in held if t)


@pytest.mark.parametrize("case", CASES)
def test_it_comes_back_with_checkpoints_report_and_bill(case, lab, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_ADDRESS", "127.0.0.1")  # nodes of this Slurm are no hosts
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "paceline-sites.toml").write_text(SITES)
    node = this_machine().replace(num_nodes=1, devices_per_node=2)
    (tmp_path / "node.toml").write_text(tomli_w.dumps(to_raw(node)))
    given, name = CASES[case]
    settings = [f"--set={each}" for each in SHORT[case]]
    done = paceline("launch", *given, "--on=lab", "--nodes=1", *settings, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (launched,) = (tmp_path / "runs").iterdir()
    launch = newest_launch(launched)
    until(lambda: launch.observe().state not in ("queued", "running"), 300)
    logs = "".join(file.read_text() for file in launch.engine.logs(launch.job))
    assert launch.observe().state == "finished", logs
    run = tmp_path / "runs" / name
    found, refused = newest_good(run / "checkpoints", LockstepRanks.alone(), print)
    assert found is not None
    assert not refused
    assert found.step == json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert "</html>" in (run / "report.html").read_text()
    assert newest_launch(run).job.id == launch.job.id
    until(lambda: sacct_device_seconds(lab, launch) > 0)
    facts = json.loads((run / "facts.json").read_text())
    assert facts["num_ranks"] == 2  # all devices of the node
    bill = paceline("cost", f"runs/{name}", "--json", folder=tmp_path)
    assert bill.returncode == 0, bill.stderr
    told = json.loads(bill.stdout.splitlines()[-1])
    assert told["total_us"] == sum(told["device_us"].values())
    assert told["held_us"] == 1e6 * sacct_device_seconds(lab, launch)
    assert told["usd"] == pytest.approx(told["held_us"] / 1e9)
    listed = paceline("jobs", folder=tmp_path)
    assert listed.stdout.count("finished") == 1
