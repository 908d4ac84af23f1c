"""A recommender, from its click log to the AUC that `paceline train` reaches."""

import json
import os
import re
import signal
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score

from paceline.comm.local_part import local_part
from paceline.comm.rendezvous import Ranks
from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.config.recommender import Clicks, Dlrm
from paceline.recommender.click_log import auc, samples
from paceline.recommender.dlrm import DlrmNetwork
from paceline.train.families import task_of
from paceline.train.synthetic import EVAL_START
from paceline.train.this_machine import resolve_on_this_machine
from paceline.train.trainer import Trainer
from tests.command_line import metrics, paceline, start_paceline
from tests.ranks import run_ranks
from tests.train.judged import must_be_told_before

MODEL = Dlrm(family="dlrm", tables=(50, 20, 10), dim=4, num_dense=3, bottom=(8,), top=(16,))
RECIPE = Path(__file__).parents[2] / "recipes" / "dlrm.toml"
SMALL = """
name = "small"
[model]
family = "dlrm"
tables = [50, 20, 10]
dim = 4
num_dense = 3
bottom = [8]
top = [16]
[data]
source = "clicks"
[comm.embeddings]
by = "server"
[optim]
lr = 1e-2
schedule = "constant"
[train]
steps = 8
global_batch = 24
eval_batches = 2
[cluster]
devices_per_node = 2
[checkpoint]
every = 4
[observe]
tensorboard = false
"""


# ---- the click log -------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, EVAL_START), min_size=1, max_size=20), st.integers(0, 2**31))
def test_a_sample_depends_on_seed_and_index_alone(indices, seed):
    together = samples(MODEL, Clicks(), seed, np.asarray(indices, np.int64))
    for number, index in enumerate(indices):
        alone = samples(MODEL, Clicks(), seed, np.asarray([index], np.int64))
        np.testing.assert_allclose(together.dense[number], alone.dense[0])
        np.testing.assert_array_equal(together.ids[number], alone.ids[0])
        np.testing.assert_allclose(together.probability[number], alone.probability[0], rtol=1e-5)
        assert together.clicked[number] == alone.clicked[0]


@pytest.mark.parametrize("power", [0.7, 1.0, 1.6])
def test_ids_follow_the_power_law(power):
    drawn = samples(MODEL, Clicks(power=power), 1, np.arange(60_000)).ids
    assert (drawn >= 0).all()
    assert (drawn < MODEL.tables).all()
    for table, rows in enumerate(MODEL.tables):
        shares = np.bincount(drawn[:, table], minlength=rows) / len(drawn)
        # A whole number stands for the interval from itself to the next.
        edges = np.arange(1, rows + 2, dtype=np.float64)
        integral = np.log(edges) if power == 1 else edges ** (1 - power) / (1 - power)
        expected = np.diff(integral) / (integral[-1] - integral[0])
        np.testing.assert_allclose(shares, expected, atol=4 * np.sqrt(0.25 / len(drawn)))


def test_clicks_come_with_the_probability_that_is_kept():
    log = samples(MODEL, Clicks(), 0, np.arange(40_000))
    bins = np.clip((log.probability * 10).astype(int), 0, 9)
    for part in range(10):
        inside = bins == part
        if inside.sum() > 500:
            assert log.clicked[inside].mean() == pytest.approx(
                log.probability[inside].mean(), abs=4 * 0.5 / np.sqrt(inside.sum())
            )
    assert log.dense.std() == pytest.approx(1, abs=0.02)


def test_no_other_score_ranks_clicks_better_than_their_probability():
    log = samples(MODEL, Clicks(), 0, np.arange(40_000))
    best = auc(log.probability, log.clicked)
    assert 0.65 < best < 0.9
    rng = np.random.default_rng(0)
    for spread in (0.05, 0.2):
        noisy = log.probability + rng.normal(0, spread, len(log.probability))
        assert auc(noisy, log.clicked) < best - 0.001


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=40))
def test_auc_equals_scikit_learns(pairs):
    scores = np.asarray([score for score, _ in pairs], np.float64)
    clicked = np.asarray([click for _, click in pairs], np.float64)
    if len(set(clicked)) < 2:
        assert auc(scores, clicked) is None
    else:
        assert auc(scores, clicked) == pytest.approx(roc_auc_score(clicked, scores))


# ---- the network ---------------------------------------------------------------------------------


def test_the_network_is_dlrm_written_out():
    network = DlrmNetwork(MODEL)
    network.init_weights(torch.Generator().manual_seed(0))
    dense, rows = torch.randn(5, 3), torch.randn(5, 3, 4)
    bottom = network.bottom(dense)
    vectors = [bottom, *rows.unbind(1)]
    products = [
        (vectors[i] * vectors[j]).sum(1, keepdim=True)
        for i in range(len(vectors))
        for j in range(i)
    ]
    expected = network.top(torch.cat([bottom, *products], dim=1)).squeeze(1)
    torch.testing.assert_close(network(dense, rows), expected)
    num_params = sum(p.numel() for p in network.parameters())
    assert num_params == MODEL.num_dense_params
    assert MODEL.num_params == num_params + 80 * 4


# ---- training ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _small_job(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)


def _job(folder, *overrides):
    return read_job(
        Path(folder) / "small.toml", ("layout.micro_batch=6", "layout.precision=fp32", *overrides)
    )


def _train(rank, world_size, folder, overrides):
    """Losses, the whole tables and the dense parameters after 6 steps."""
    job = resolve_on_this_machine(
        _job(folder, f"cluster.devices_per_node={world_size}", *overrides)
    ).job
    ranks = Ranks(rank, world_size, rank, world_size)
    task = task_of(job, ranks)
    trainer = Trainer.of(job, ranks, task)
    assert task.tables is not None
    task.tables.open(Path(folder) / "tables", Path(folder) / "checkpoints", print)
    try:
        task.tables.load(0)
        steps = task.steps_from(0)
        losses = [trainer.step(step, next(steps))().loss for step in range(6)]
        with torch.no_grad():
            ids = torch.arange(10)[:, None].expand(10, 3)
            rows = task.tables.rows(ids).numpy()
        if world_size > 1:
            torch.distributed.barrier()
    finally:
        task.tables.close()
    return losses, rows, [local_part(p).detach().numpy() for p in trainer.module.parameters()]


@pytest.mark.parametrize(("by", "kind"), [("server", "adam"), ("all_to_all", "adagrad")])
def test_two_ranks_equal_one_process(tmp_path, by, kind):
    chosen = f'optim.rows.kind="{kind}"'
    serial = _train(0, 1, tmp_path, ('comm.embeddings.by="all_to_all"', chosen))
    for got in run_ranks(_train, 2, str(tmp_path), (f'comm.embeddings.by="{by}"', chosen)):
        np.testing.assert_allclose(got[0], serial[0], atol=1e-6)
        np.testing.assert_allclose(got[1], serial[1], atol=1e-6)
        for mine, theirs in zip(got[2], serial[2], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_two_shards_equal_one_process(tmp_path):
    tables = 'comm.embeddings.by="all_to_all"'
    losses, rows, _ = _train(0, 1, tmp_path, (tables,))
    for got_losses, got_rows, _ in run_ranks(_train, 2, str(tmp_path), (tables, "layout.fsdp=2")):
        np.testing.assert_allclose(got_losses, losses, atol=1e-6)
        np.testing.assert_allclose(got_rows, rows, atol=1e-6)


def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path):
    plain = paceline("train", "small.toml", "--set", "name=plain", folder=tmp_path)
    assert plain.returncode == 0, plain.stdout + plain.stderr
    for steps in ("4", "8"):
        done = paceline("train", "small.toml", "--set", f"train.steps={steps}", folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    for key in ("loss", "eval_auc"):
        whole = [line.get(key) for line in metrics(tmp_path, "plain")]
        parts = [line.get(key) for line in metrics(tmp_path, "small")]
        assert parts[4:] == pytest.approx(whole[4:], abs=1e-9)
    assert "AUC" in plain.stdout
    must_be_told_before(tmp_path, "plain")
    _assert_exported(tmp_path, "plain")
    facts = json.loads((tmp_path / "runs" / "plain" / "facts.json").read_text())
    assert facts["unit"] == "samples"


def test_tables_that_ranks_hold_are_exported_as_well(tmp_path):
    tables = ("--set", 'comm.embeddings={by="all_to_all"}')
    done = paceline("train", "small.toml", *tables, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    _assert_exported(tmp_path, "small")


def _assert_exported(folder, name):
    """DLRM as its own code writes it, filled from an export, scores as the run did at its end."""
    done = paceline("export", f"runs/{name}", f"{name}-weights", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    stated = json.loads((folder / f"{name}-weights" / "config.json").read_text())
    assert Dlrm.parse(stated) == MODEL
    theirs = _Original(stated)
    theirs.load_state_dict(load_file(folder / f"{name}-weights" / "model.safetensors"))
    held_out = samples(MODEL, Clicks(), 0, EVAL_START + np.arange(2 * 24))
    with torch.no_grad():
        scores = theirs(torch.from_numpy(held_out.dense), torch.from_numpy(held_out.ids))
    last = metrics(folder, name)[-1]
    assert auc(scores.numpy(), held_out.clicked) == pytest.approx(last["eval_auc"], abs=1e-9)
    loss = torch.nn.functional.binary_cross_entropy(scores, torch.from_numpy(held_out.clicked))
    assert loss.item() == pytest.approx(last["eval_loss"], abs=1e-5)


class _Original(torch.nn.Module):
    """The module tree and arithmetic of facebookresearch/dlrm (dlrm_s_pytorch.py)."""

    def __init__(self, stated):
        super().__init__()
        dim, tables = stated["dim"], stated["tables"]
        pairs = (len(tables) + 1) * len(tables) // 2
        bottom = [stated["num_dense"], *stated["bottom"], dim]
        self.bot_l = self._mlp(bottom, torch.nn.ReLU())
        self.top_l = self._mlp([dim + pairs, *stated["top"], 1], torch.nn.Sigmoid())
        self.emb_l = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(rows, dim, mode="sum") for rows in tables
        )

    @staticmethod
    def _mlp(widths, last):
        linear = [torch.nn.Linear(*each) for each in pairwise(widths)]
        layers = [layer for each in linear for layer in (each, torch.nn.ReLU())]
        return torch.nn.Sequential(*layers[:-1], last)

    def forward(self, dense, ids):
        x = self.bot_l(dense)
        rows = [table(ids[:, k : k + 1]) for k, table in enumerate(self.emb_l)]
        vectors = torch.stack([x, *rows], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        below = [(i, j) for i in range(vectors.shape[1]) for j in range(i)]
        flat = torch.stack([products[:, i, j] for i, j in below], dim=1)
        return self.top_l(torch.cat([x, flat], dim=1)).squeeze(1)


def test_a_run_survives_the_kill_of_a_server_and_says_what_is_lost(tmp_path):
    text = SMALL.replace("steps = 8", "steps = 2000").replace("every = 4", "every = 0")
    text = text.replace('by = "server"', 'by = "server"\nmode = "stale"\ncheckpoint_every = 5')
    (tmp_path / "small.toml").write_text(text)
    run = start_paceline("train", "small.toml", folder=tmp_path)
    try:
        servers = _wait_for(lambda: _servers(run.pid) if _num_steps(tmp_path) > 12 else [])
        os.kill(servers[1].pid, signal.SIGKILL)
        killed_at = _num_steps(tmp_path)
        _wait_for(lambda: _num_steps(tmp_path) > killed_at + 20)
        (tmp_path / "runs" / "small" / "stop").touch()
        output, _ = run.communicate(timeout=300)
    finally:
        run.kill()
        run.communicate()
    assert run.returncode == 0, output
    assert "ended by SIGKILL: started again, the workers wait" in output
    found = re.search(r"checkpoint of step (\d+): (?:no update|the updates of .* to (\d+))", output)
    assert found, output
    lost = int(found[2] or found[1]) - int(found[1])
    assert lost < 2 * 5 + 3, "no more than the steps since the checkpoint, which may be in writing"
    _wait_for(lambda: not any(one.is_running() for one in servers))  # they end with their run


def test_stale_rows_and_a_cache_reach_the_best_possible_auc(tmp_path):
    settings = [
        "model.tables=[30,20,10]",
        "model.dim=8",
        "model.bottom=[16]",
        "model.top=[32,32]",
        "data.clicks.power=1.8",
        "comm.embeddings.mode=stale",
        "comm.embeddings.staleness=2",
        "comm.embeddings.cache_rows=32",
        "optim.schedule=cosine",
        "optim.rows.kind=adam",
        "optim.rows.lr=0.02",
        "train.steps=700",
        "train.global_batch=1024",
        "train.eval_batches=20",
        "checkpoint.every=0",
    ]
    sets = [word for setting in settings for word in ("--set", setting)]
    done = paceline("train", "small.toml", *sets, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    last = metrics(tmp_path, "small")[-1]
    assert last["comm"]["cache_hits"] > 0.2
    assert last["eval_auc"] > 0.995 * last["eval_best_auc"]
    assert f"{last['eval_auc']:.4f} of {last['eval_best_auc']:.4f} possible" in done.stdout


def _servers(pid):
    """The server processes among a command's descendants."""
    command = "paceline.recommender.parameter_server.serve"
    children = psutil.Process(pid).children(recursive=True)
    found = [child for child in children if child.is_running() and command in child.cmdline()]
    return found if len(found) == 2 else []


def _num_steps(folder):
    file = folder / "runs" / "small" / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _wait_for(ready, timeout_s=300):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := ready():
            return value
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


# ---- wrong input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ('data.source="text.txt"', 'set data.source = "clicks"'),
        ("comm.embeddings.cache_rows=10", "forbids"),
        ('layout.precision="fp16"', "no loss scale"),
        ("model.tables=[]", "model.tables"),
    ],
)
def test_what_can_not_hold_is_refused(tmp_path, override, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        _job(tmp_path, override)


def test_settings_of_servers_are_refused_where_there_are_none(tmp_path):
    with pytest.raises(InputError, match=r"comm\.embeddings\.servers = 3 has no effect"):
        _job(tmp_path, 'comm.embeddings.by="all_to_all"', "comm.embeddings.servers=3")
    with pytest.raises(InputError, match=r"\[comm\.embeddings\] has no effect"):
        read_job(None, ["comm.embeddings.servers=3"])


def test_the_recipe_is_a_job():
    assert isinstance(read_job(RECIPE).model, Dlrm)
