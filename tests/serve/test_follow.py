"""A run that is served while it trains: newer weights, damaged ones, and no request lost."""

import hashlib
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config.job import read_job
from paceline.config.sampling import Sampling
from paceline.generate.engine import Engine
from paceline.observe.run import Run
from paceline.serve import follow
from paceline.serve.network import load_checkpoint, open_network
from paceline.train.checkpoint.files import FileEntry, encode_manifest
from paceline.train.command import train_job
from paceline.train.kept_weights import checkpoint_of
from tests.serve.served import END, SMALL, serve, wait_until
from tests.small_job import work_in, write_small_job

PROMPT = "the quick"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of four steps, a checkpoint each two."""
    monkeypatch.setattr(follow, "LOOK_EVERY_S", 0.05)
    work_in(tmp_path, monkeypatch)
    write_small_job(tmp_path)
    run = Run(tmp_path / "runs" / "small")
    train_on(run, 4)
    return run


def train_on(run, steps):
    """Go on in this process, fast enough that each step's texts are others."""
    settings = ["checkpoint.every=2", "checkpoint.keep_last=20", "optim.lr=0.05"]
    job = read_job(run.path.parents[1] / "small.toml", [f"train.steps={steps}", *settings])
    train_job(job, run, fresh=False)


def greedy(count):
    return Sampling(max_tokens=count, temperature=0, logit_bias={END: -100.0}, logprobs=0)


def told_at(run, step):
    """Log probabilities of a text by the weights of a step."""
    network = open_network(run.path, step=step)
    engine = Engine(network.decoder, SMALL)
    sequence = engine.submit([*PROMPT.encode()], greedy(12))
    while not engine.is_idle:
        engine.step()
    return [each.chosen for each in sequence.logprobs]


def told_by(served):
    done = served.post(prompt=PROMPT, max_tokens=12, temperature=0, logprobs=0)
    return done.json()["choices"][0]["logprobs"]["token_logprobs"]


def test_newer_weights_are_taken_between_two_steps_and_no_request_is_lost(run, capfd):
    with serve(open_network(run.path), run=run) as served:
        before = told_by(served)
        assert before == pytest.approx(told_at(run, 4), abs=1e-4)
        counts, stop = [], threading.Event()

        def ask():
            while not stop.is_set():
                done = served.post(prompt=PROMPT, max_tokens=20, temperature=0)
                counts.append(done.json()["usage"]["completion_tokens"])

        asking = [threading.Thread(target=ask) for _ in range(3)]
        for each in asking:
            each.start()
        train_on(run, 8)
        wait_until(lambda: served.get("/ready").json()["step"] == 8)
        stop.set()
        for each in asking:
            each.join()
        assert set(counts) == {20}
        after = told_by(served)
        assert after == pytest.approx(told_at(run, 8), abs=1e-4)
        assert after != pytest.approx(before, abs=1e-2)
        metrics = served.metrics()
        assert metrics["weights_step"] == 8
        assert 1 <= metrics["weight_swaps_total"] <= 2
        served.wait_until_idle()
    assert "step 8 is served from now on" in capfd.readouterr().out


def test_a_text_goes_on_with_newer_weights(run):
    network = open_network(run.path, step=2)
    engine = network.engine(SMALL)
    sequence = engine.submit([*PROMPT.encode()], greedy(10))
    for _ in range(4):
        engine.step()
    before = sequence.made
    load_checkpoint(run, network.decoder, 4)
    engine.weights_changed()
    while not engine.is_idle:
        engine.step()
    assert sequence.made[:4] == before
    assert torch.equal(
        next(network.decoder.parameters()), next(open_network(run.path).decoder.parameters())
    )


def test_a_damaged_checkpoint_is_said_and_skipped(run, capfd):
    network = open_network(run.path)
    with serve(network, run=run) as served:
        follower = served.serving._follower
        follower.stop()
        train_on(run, 8)
        (shard,) = (run.checkpoint_folder / "step-8").glob("*.safetensors")
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.write_bytes(data)
        follower._is_over.clear()
        follower.look()
        assert served.get("/ready").json()["step"] == 6
        follower.look()  # and is said once
        assert served.metrics()["damaged_checkpoints_total"] == 1
        assert served.post(prompt=PROMPT, max_tokens=2).status_code == 200
    out = capfd.readouterr().out
    assert out.count("step 8 is skipped") == 1
    assert "step 4 is served on: checkpoint step-8" in out
    assert "step 6 is served from now on" in out


def test_no_weight_is_taken_of_a_checkpoint_that_ends_halfway(run, capfd):
    """Its checksums are right, and the last layer is in none of its files."""
    with serve(open_network(run.path), run=run) as served:
        follower = served.serving._follower
        follower.stop()
        before, weights = told_by(served), copied(served.engine.decoder)
        train_on(run, 6)
        found = checkpoint_of(run, 6)
        (name,) = found.manifest.files
        shard = found.path / name
        last = f"model.blocks.{len(served.engine.decoder.blocks) - 1}."
        held = load_file(shard)
        save_file({key: each for key, each in held.items() if not key.startswith(last)}, shard)
        data = shard.read_bytes()
        entry = FileEntry(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        forged = found.manifest.replace(files={name: entry})
        (found.path / "manifest.json").write_bytes(encode_manifest(forged))
        follower._is_over.clear()
        follower.look()
        assert served.get("/ready").json()["step"] == 4
        after = served.engine.decoder.state_dict()
        assert all(torch.equal(after[key], weights[key]) for key in weights)
        assert told_by(served) == pytest.approx(before, abs=1e-4)
        assert served.metrics()["damaged_checkpoints_total"] == 1
    out = capfd.readouterr().out
    assert out.count("step 6 is skipped, step 4 is served on: checkpoint step-6") == 1


def copied(decoder):
    return {name: each.clone() for name, each in decoder.state_dict().items()}


def test_a_checkpoint_is_taken_as_a_whole_though_the_run_removes_it(run):
    """When it was verified, and waits for the step that is under way."""
    with serve(open_network(run.path), run=run) as served:
        follower, service = served.serving._follower, served.serving.service
        follower.stop()
        train_on(run, 6)
        wanted = told_at(run, 6)
        is_over = threading.Event()
        service.between_steps(is_over.wait)
        wait_until(service._orders.empty)
        follower._is_over.clear()
        looking = threading.Thread(target=follower.look)
        looking.start()
        wait_until(lambda: not service._orders.empty())
        shutil.rmtree(run.checkpoint_folder / "step-6")
        is_over.set()
        looking.join()
        assert served.get("/ready").json()["step"] == 6
        assert told_by(served) == pytest.approx(wanted, abs=1e-4)
