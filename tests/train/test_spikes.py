"""Spikes: found alike on all ranks, and what follows from them repeats to the bit."""

import json
import shutil

import pytest
import torch

from paceline.config.elastic import Elastic
from paceline.config.errors import InputError, RunError
from paceline.config.job import read_job
from paceline.train.data.order import sample_ids
from paceline.train.left_out import LeftOut
from paceline.train.spikes import RecentLosses, Spike
from tests.command_line import metrics, python

STEPS, BATCH, LENGTH, SPIKE, EVERY = 50, 4, 400, 31, 8
BAD = int(sample_ids(0, BATCH * (SPIKE - 1), BATCH, LENGTH)[1])

SCRIPT = f"""
import sys
import torch
import paceline.train

generator = torch.Generator().manual_seed(1)
inputs = torch.randn({LENGTH}, 4, generator=generator)
targets = inputs.sum(1, keepdim=True)
targets[{BAD}] += 1000.0
data = list(zip(inputs, targets))

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
    job = {{
        "name": "tiny",
        "train": {{"steps": {STEPS}, "global_batch": {BATCH}}},
        "optim": {{"lr": 1e-3}},
        "checkpoint": {{"every": {EVERY}, "keep_last": 100}},
        "elastic": {{"on_spike": sys.argv[1], "spike": 50}},
        "cluster": {{"devices_per_node": int(sys.argv[2])}},
        "observe": {{"tensorboard": False}},
    }}
    paceline.train(job, model, loss, data)
"""


def _train(folder, policy, num_ranks=2):
    (folder / "script.py").write_text(SCRIPT)
    done = python("script.py", policy, str(num_ranks), folder=folder)
    assert done.returncode == 0, done.stderr
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return {line["step"]: line["loss"] for line in lines}, done.stdout


def _spikes(folder):
    text = (folder / "runs/tiny/events.jsonl").read_text()
    return [event for event in map(json.loads, text.splitlines()) if event["event"] == "spike"]


def test_a_spike_is_told_and_skipped_only_where_that_is_asked_for(tmp_path):
    losses, skipped = {}, {}
    for policy in ("go_on", "skip"):
        folder = tmp_path / policy
        folder.mkdir()
        losses[policy], printed = _train(folder, policy)
        assert [event["step"] for event in _spikes(folder)] == [SPIKE]
        assert f"the loss of step {SPIKE} is a spike" in printed
        skipped[policy] = metrics(folder)[-1]["skipped"]
    assert skipped == {"go_on": 0, "skip": 1}
    before = {step: losses["go_on"][step] for step in range(1, SPIKE + 1)}
    assert before == {step: losses["skip"][step] for step in range(1, SPIKE + 1)}
    assert losses["go_on"][SPIKE + 1] != losses["skip"][SPIKE + 1]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_after_a_roll_back_the_samples_are_left_out_in_every_replay(num_ranks, tmp_path):
    losses, _ = _train(tmp_path, "roll_back", num_ranks)
    run = tmp_path / "runs/tiny"
    back = EVERY * ((SPIKE - 1) // EVERY)
    first, count = BATCH * back, BATCH * (SPIKE - back)
    told = {"first": first, "count": count, "spike": SPIKE, "back_to": back}
    assert json.loads((run / "left_out.json").read_text()) == [told]
    assert [event["step"] for event in _spikes(tmp_path)] == [SPIKE]
    assert max(losses.values()) < 1000
    for kept in (back, 2 * EVERY, 0):  # from where the state came back to, from before, and anew
        for folder in (run / "checkpoints").glob("step-*"):
            if int(folder.name[5:]) > kept or kept == 0:
                shutil.rmtree(folder)
        assert _train(tmp_path, "roll_back", num_ranks)[0] == losses, kept
    assert len(_spikes(tmp_path)) == 1  # what is left out can't be one


def test_a_spike_is_one_of_the_agreed_losses_only():
    recent = RecentLosses(Elastic(on_spike="skip"), torch.device("cpu"))
    given = [2.0] * 9 + [50.0, 2.0, 50.0, float("nan"), float("inf"), 6.1, 5.9]
    found = [recent.see(torch.tensor(loss, dtype=torch.float64)).item() for loss in given]
    assert found == [0.0] * 11 + [2.0, 0.0, 0.0, 2.0, 0.0]  # the first 50 comes too early
    assert recent.state() == [2.0] * 9 + [50.0, 2.0, 5.9]
    other = RecentLosses(Elastic(on_spike="skip"), torch.device("cpu"))
    other.load(recent.state())
    assert torch.equal(other.losses.nan_to_num(), recent.losses.nan_to_num())


def test_negative_losses_have_no_multiple():
    recent = RecentLosses(Elastic(), torch.device("cpu"))
    for _ in range(20):
        assert recent.see(torch.tensor(-1.0, dtype=torch.float64)) == 0
    assert recent.see(torch.tensor(5.0, dtype=torch.float64)) == 0


class _Numbers:
    """A task whose steps are the running numbers of their samples."""

    @staticmethod
    def steps_from(first):
        while True:
            yield list(range(first, first + BATCH))
            first += BATCH


def _read(left_out, done, num):
    steps = left_out.steps_from(_Numbers, done, BATCH)
    return [sample for _ in range(num) for sample in next(steps)]


def test_what_is_left_out_is_so_from_every_step_on():
    left_out = LeftOut()
    left_out.add(Spike(5, 9.0, 1.0), 2, BATCH, most=3)  # samples 8 to 19
    left_out.add(Spike(4, 9.0, 1.0), 2, BATCH, most=3)  # right behind: 20 to 27
    left_out.add(Spike(8, 9.0, 1.0), 7, BATCH, most=3)
    whole = _read(left_out, 0, 12)
    assert whole[:12] == [*range(8), *range(28, 32)]
    assert len(whole) == len(set(whole)) == 48
    for done in range(12):
        assert _read(left_out, done, 12 - done) == whole[BATCH * done :]
        assert left_out.consumed(done, BATCH) == whole[BATCH * done]


def test_a_state_that_comes_back_too_often_ends_the_run():
    left_out = LeftOut()
    for _ in range(2):
        left_out.add(Spike(5, 9.0, 1.0), 2, BATCH, most=2)
    with pytest.raises(RunError, match="2 times already the state of step 2 came back"):
        left_out.add(Spike(5, 9.0, 1.0), 2, BATCH, most=2)


def test_workers_that_meet_in_rounds_have_no_vote():
    settings = ("elastic.on_spike=skip", "comm.local.method=diloco")
    with pytest.raises(InputError, match="needs ranks that agree on the loss of each step"):
        read_job(None, settings)
