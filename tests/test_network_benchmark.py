"""The network benchmark: its arithmetic (pure), then that its ways train the same (gloo ranks)."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.network_cell import (
    LEAST_STEPS,
    MOST_STEPS,
    Block,
    Way,
    contender_of,
    losses_of,
    steps_of_a_block,
    turns,
)
from benchmarks.network_table import (
    CONTROL,
    PEER,
    cell_lines,
    loss_lines,
    rows,
    summary,
    table_lines,
)
from benchmarks.network_ways import LOCAL, WAYS, form_of, job_of, possible, predicted_s
from paceline.comm.rendezvous import Ranks
from paceline.config.curves import AttentionCurve, DeviceCurves, MatmulCurve, MemoryCurve
from paceline.config.device import Device
from paceline.config.figure import Figure
from paceline.config.hardware import Cluster, Tier
from paceline.config.job import Job, read_job
from paceline.elastic.local_rounds import RoundSchedule
from paceline.machine.discovery import this_machine
from paceline.plan.resolve import resolve
from tests.command_line import write_tiny_job
from tests.ranks import run_ranks


def _blocks() -> list[Block]:
    """The machine is half as fast in round 1; int8 takes half of DDP's time."""
    times = {CONTROL: 1.0, PEER: 4.0, "int8": 2.0}
    return [
        Block(way, number, [step_s * (1 + number)] * 2, 100.0 * number)
        for number in (0, 1)
        for way, step_s in times.items()
    ]


def test_ratios_are_taken_within_a_round():
    control, peer, int8 = rows(_blocks())
    assert [row.way for row in (control, peer, int8)] == [CONTROL, PEER, "int8"]
    assert (int8.speed_up, int8.efficiency) == (2.0, 0.5)
    assert (peer.speed_up, peer.efficiency) == (1.0, 0.25)
    assert int8.step_s == (3.0, 2.0, 4.0)
    assert int8.sent_bytes == 50


def test_a_round_of_workers_is_the_mean_of_its_steps():
    """One step in four takes 5 s more than the others."""
    steps_s = [6.0, 1.0, 1.0, 1.0]
    control = [Block(CONTROL, number, [1.0, 1.0, 4.0], 0.0) for number in (0, 1)]
    workers = [Block("diloco", number, steps_s, 10.0, is_round=True) for number in (0, 1)]
    found = {row.way: row for row in rows([*control, *workers])}
    assert found["diloco"].step_s == (2.25, 2.25, 2.25)
    assert found["diloco"].efficiency == pytest.approx(1 / 2.25)
    assert found[CONTROL].step_s[0] == 1.0


def test_nothing_is_under_way_when_a_round_of_workers_ends():
    for way in LOCAL:
        table = RoundSchedule.of(job_of(way, 2, 100).comm.local)
        last_step = table.every - 1
        for fragment in range(table.num_fragments):
            sent = [done for done in range(1, 2 * table.every) if table.is_sent(fragment, done)]
            assert max(sent) + table.overlap_steps <= table.every + last_step


def test_a_line_says_where_it_was_taken():
    line = table_lines(2, 200e6, rows(_blocks()))[2]
    text = ("2", "200 Mbit/s", "int8", "", "3.000 (2.000 – 4.000)", "0.00", "2.00", "50%", "", "")
    assert line == text


def test_predictions_stand_beside_what_was_measured():
    table = [replace(row, predicted_s=3.6) for row in rows(_blocks())]
    cell = {"num_hosts": 2, "rate_bits_per_s": None, "rows": [asdict(row) for row in table]}
    line = cell_lines(cell)[2]
    assert line[-2:] == ("3.600", "+20%")
    assert "off by 40.0% (median of 3 rows)" in summary([cell])


def test_the_planner_prices_every_way_of_ours_by_a_cluster_and_knows_the_control():
    jobs = {way.name: job_of(way, 2, 1000, cluster=_slow_cluster()) for way in WAYS}
    seconds = {way.name: predicted_s(way, jobs[way.name]) for way in WAYS}
    assert seconds["DDP fp16 hook"] is None
    assert seconds[CONTROL] < seconds["int8"] < seconds["none"]
    assert seconds["auto"] <= min(seconds[name] for name in ("none", "bf16", "int8", "int4")) * 1.03
    chosen = next(way for way in WAYS if way.name == "auto")
    assert form_of(chosen, jobs["auto"]).startswith(jobs["auto"].comm.dp.compress + ", ")
    assert jobs["auto"].comm.dp.compress != "auto"
    assert seconds[CONTROL] < seconds["streaming"] < seconds["int4"]
    assert form_of(LOCAL[1], jobs["streaming"]) == "int4, every 20"


def _slow_cluster() -> Cluster:
    """A core of 54 GFLOP/s on 50 Mbit/s."""

    def figure(value: float) -> Figure:
        return Figure(value=value, origin="assumed", source="this test")

    curves = DeviceCurves(
        matmul={"fp32": MatmulCurve(m=(1,), n=(1,), k=(1,), share=(0.9,), source="this test")},
        attention={
            "flash": AttentionCurve(
                seq_len=(128,), head_dim=(64,), forward=(0.5,), backward=(0.4,), source="this test"
            )
        },
        memory=MemoryCurve(bytes=(1e3, 1e9), seconds=(1e-7, 0.1), source="this test"),
    )
    core = Device(
        name="core",
        kind="cpu",
        memory_bytes=figure(8e9),
        precisions=("fp32",),
        peak_flops={"fp32": figure(60e9)},
        curves=curves,
    )
    wire = Tier(name="network", num_devices=2, latency_s=figure(3e-4), bytes_per_s=figure(50e6 / 8))
    return Cluster(device=core, devices_per_node=1, num_nodes=2, tiers=(wire,))


def test_every_way_is_first_in_its_turn():
    order = [name for _, name in turns(["a", "b", "c"], 3)]
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


@pytest.mark.parametrize(("step_s", "steps"), [(100, LEAST_STEPS), (0.5, 4), (0.01, MOST_STEPS)])
def test_slow_ways_get_fewer_steps(step_s, steps):
    assert steps_of_a_block(step_s) == steps


def test_losses_stand_beside_those_of_the_same_seed():
    found = {
        PEER: {"loss": [2.0, 4.0], "eval_loss": [2.0, 4.0]},
        "int8": {"loss": [2.0, 4.0], "eval_loss": [2.2, 4.4]},
    }
    assert loss_lines(found)[1] == ("int8", "3.0000", "3.3000 (2.2000 – 4.4000)", "+10.00%")


def test_what_this_version_refuses_is_left_out_and_said():
    said: list[str] = []
    ways = [*WAYS[:2], Way("odd", "paceline", settings={"comm.dp.compress": "gzip"})]
    assert possible(ways, 2, said.append) == list(WAYS[:2])
    assert len(said) == 1
    assert said[0].startswith("left out: odd (")
    assert "gzip" in said[0]


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_a_rank_has_one_micro_batch_on_each_host(num_hosts):
    job = job_of(WAYS[1], num_hosts, 100, seed=3)
    assert (job.layout.dp, job.layout.micro_batch, job.accumulation) == (num_hosts, 8, 1)
    assert (job.cluster.num_nodes, job.train.seed) == (num_hosts, 3)
    assert 10e6 < job.model.num_params < 20e6


def _losses(rank: int, size: int, way: Way, job: Job) -> dict:
    ranks = Ranks(rank, size, rank, size)
    return losses_of(*contender_of(way, job, ranks), job.train.steps)


def test_ways_that_send_everything_train_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = _tiny(write_tiny_job(tmp_path))
    ddp, ours = (
        run_ranks(_losses, 2, way, job)[0] for way in (Way("peer", "ddp"), Way("ours", "paceline"))
    )
    assert ours["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert ours["eval_loss"] == pytest.approx(ddp["eval_loss"], rel=1e-5)
    assert ddp["losses"][-1] < ddp["losses"][0]


def _workers(rank: int, size: int, way: Way, job: Job) -> tuple[dict, list]:
    contender, task = contender_of(way, job, Ranks(rank, size, rank, size))
    trained = losses_of(contender, task, 5)
    supply = task.steps_from(0)
    sent = []
    for _ in range(2):
        contender.pass_a_round()
        for _ in range(contender.round_steps):
            contender.step(next(supply))
            sent.append(contender._trainer.replicas.sent_bytes > 0)
    return {**trained, "known": len(contender.losses)}, sent


def test_workers_pass_a_round_and_then_send_at_the_same_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = _tiny(
        write_tiny_job(tmp_path),
        *("comm.local.method=streaming", "comm.local.every=4", "comm.local.fragments=2"),
        *("comm.local.overlap_steps=1", "train.steps=100"),
    )
    found, sent = run_ranks(_workers, 2, Way("streaming", "paceline"), job)[0]
    assert len(found["losses"]) == 4, "those of the fifth step are known when they meet again"
    assert sent == 2 * [True, False, True, False]
    assert found["known"] == 5 + 2 * 4 - 3


def test_hooks_change_the_sums_and_the_control_sends_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = _tiny(write_tiny_job(tmp_path))
    ways = [Way("peer", "ddp"), Way("fp16", "ddp", "fp16"), Way("r1", "ddp", "powersgd:1")]
    exact, half, rank_one = (run_ranks(_losses, 2, way, job)[0]["losses"] for way in ways)
    assert half != exact
    assert half == pytest.approx(exact, rel=1e-2)
    assert rank_one[:2] == pytest.approx(exact[:2]), "it begins exactly"
    assert rank_one != pytest.approx(exact, rel=1e-4)
    alone = run_ranks(_losses, 2, replace(ways[0], kind="alone"), job)[0]["losses"]
    assert alone[0] == pytest.approx(exact[0])
    assert alone != pytest.approx(exact, rel=1e-4)


def _tiny(file: Path, *more: str) -> Job:
    settings = ("layout.dp=2", "layout.micro_batch=6", "layout.precision=fp32", *more)
    machine = this_machine().replace(devices_per_node=2)
    return resolve(read_job(file, settings), machine).job
