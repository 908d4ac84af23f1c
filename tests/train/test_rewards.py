"""Rewards: the loss against trl's on the same completions, and runs whose reward rises."""

import json
import shutil
import sys
import types
from collections import defaultdict
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.finetune import Grpo
from paceline.config.job import read_job
from paceline.kernels.loss import IGNORED
from paceline.observe.run import Run
from paceline.train.data import prepare
from paceline.train.kept_weights import KeptWeights
from paceline.train.rewards import Completions, _criterion, advantages_of
from paceline.train.rollouts import load_reward
from tests.command_line import losses, metrics, paceline, ranks, write_tiny_job
from tests.train.judged import must_be_told_before
from tests.train.test_conversations import chat_data
from tests.train.test_finetune import run_recipe
from tests.train.test_preferences import settings

FP64 = ("layout.param_dtype=fp64", "layout.precision=fp64")


# --- the loss


def completions(settings, seed=0):
    """Two groups of three completions of several lengths, and logits for them."""
    stream = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 9, 11, generator=stream)
    targets = torch.randint(11, (6, 9), generator=stream)
    for row in range(6):
        targets[row, :2] = IGNORED
        targets[row, 4 + row % 4 :] = IGNORED
    rewards = torch.randn(6, generator=stream)
    old, reference = (torch.randn(6, 9, generator=stream) * 0.3 for _ in range(2))
    log_probs = (logits / settings.temperature).log_softmax(-1)
    taken = log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    counted = targets != IGNORED
    return logits, Completions(
        torch.zeros_like(targets),
        targets,
        advantages_of(rewards.view(2, 3)).flatten(),
        rewards,
        torch.where(counted, taken + old, 0) if settings.updates > 1 else None,
        torch.where(counted, taken + reference, 0) if settings.beta else None,
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "changes", [{}, {"updates": 4, "clip": 0.1}, {"beta": 0.3}, {"temperature": 0.7, "updates": 2}]
)
def test_the_loss_and_its_gradient_are_those_of_trl(changes):
    """Its own method, on the same completions, in fp32."""
    trl = pytest.importorskip("trl")
    ours = Grpo(**changes)
    logits, batch = completions(ours)
    own_logits = logits.clone().requires_grad_()
    own = _criterion(ours, own_logits, batch).loss
    own.backward()
    their_logits = logits.clone().requires_grad_()
    mask = (batch.targets != IGNORED).long()

    def per_token(*_args, **_kwargs):
        scaled = (their_logits / ours.temperature).log_softmax(-1)
        log_probs = scaled.gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
        return log_probs, torch.zeros_like(log_probs), None

    gathers = types.SimpleNamespace(
        gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, *_a, **_k: x
    )
    them = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=per_token, aux_loss_enabled=False,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level="token", beta=ours.beta, loss_type="grpo",
        epsilon_low=ours.clip, epsilon_high=ours.clip, use_vllm=False,
        current_gradient_accumulation_steps=1, accelerator=gathers, _entropy_bonus_enabled=False,
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False),
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    inputs = {
        "prompt_ids": batch.tokens[:, :1], "prompt_mask": batch.tokens[:, :1] + 1,
        "completion_ids": batch.targets.clamp(min=0), "completion_mask": mask,
        "advantages": batch.advantages,
    }  # fmt: skip
    if batch.made_with is not None:
        inputs["old_per_token_logps"] = batch.made_with
    if batch.reference is not None:
        inputs["ref_per_token_logps"] = batch.reference
    their = trl.GRPOTrainer._compute_loss(them, None, inputs)
    their.backward()
    assert own.item() == pytest.approx(their.item(), rel=1e-5, abs=1e-6)
    assert (own_logits.grad - their_logits.grad).abs().max() < 1e-6
    assert own_logits.grad.abs().max() > 1e-3


def test_advantages_compare_completions_of_one_prompt():
    rewards = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0]])
    found = advantages_of(rewards)
    assert found[0].tolist() == pytest.approx([-1, 0, 1], abs=1e-3)
    assert found[1].tolist() == [0, 0, 0]


# --- prompts


def test_prompts_keep_the_columns_that_are_asked_for(tmp_path):
    rows = [{"prompt": f"{n}+1=", "answer": [n + 1], "other": 3} for n in range(30)]
    data = chat_data(tmp_path, rows, records="prompts", columns=("answer",), eval_fraction=0.2)
    prepared = prepare(data)
    seen = {}
    for split in ("train", "eval"):
        prompts = prepared.prompts(split)
        for prompt in prompts.read(np.arange(prompts.num_samples(20)), 20):
            seen[bytes(prompt.tokens).decode()] = prompt.columns
    assert seen == {f"{n}+1=": {"answer": [n + 1]} for n in range(30)}
    with pytest.raises(InputError, match="leaves no room for an answer"):
        prepared.prompts("train").num_samples(2)


@pytest.mark.parametrize(
    ("row", "words"),
    [({"answer": 3}, "line 3 has no prompt"), ({"prompt": "x"}, "line 3 has no 'answer'")],
)
def test_a_row_that_is_no_prompt_is_refused_by_its_name(tmp_path, row, words):
    rows = [{"prompt": "x", "answer": 1}, {"prompt": "y", "answer": 2}, row]
    with pytest.raises(InputError, match=words):
        prepare(chat_data(tmp_path, rows, records="prompts", columns=("answer",)))


def test_a_column_that_is_no_json_is_refused_by_its_row(tmp_path):
    rows = {"prompt": ["x", "y"], "day": [date(2020, 1, 1)] * 2}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    data = chat_data(tmp_path, [], records="prompts", columns=("day",))
    with pytest.raises(InputError, match="row 0 can't be kept for the reward function"):
        prepare(data.replace(source=str(tmp_path / "rows.parquet")))


GRPO = ("finetune.objective=grpo", "data.records=prompts")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["finetune.objective=grpo"], 'learns from data.records = "prompts"'),
        (["data.columns=['x']"], "data.columns are told to a reward function"),
        ([*GRPO], "needs finetune.grpo.reward"),
        ([*GRPO, "finetune.grpo.reward=a.py:b", "finetune.grpo.group=7"], "no multiple of"),
        ([*GRPO, "finetune.grpo.reward=a.py:b", "finetune.grpo.clip=0.1"], "has no effect"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, words):
    with pytest.raises(InputError, match=words):
        read_job(None, overrides)


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("none.py:f", "names no file"),
        ("f", "names no file"),
        ("own.py:missing", "has no function 'missing'"),
        ("broken.py:f", "can't be read"),
    ],
)
def test_functions_that_are_none_are_refused(tmp_path, monkeypatch, named, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def f(prompt, completion): return 1\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(InputError, match=words):
        load_reward(named)
    assert load_reward("own.py:f")("", "") == 1


def test_a_file_of_rewards_is_a_module_like_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "beside_the_reward.py").write_text("BONUS = 2\n")
    (tmp_path / "own.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from beside_the_reward import BONUS\n"
        "@dataclass\n"
        "class Rule:\n"
        "    weight: float\n"
        "def f(prompt, completion): return Rule(3).weight * BONUS\n"
    )
    assert load_reward(f"{tmp_path / 'own.py'}:f")("", "") == 6


# --- runs: a completion is worth as much as it has of the letter that its prompt names

REWARD = '''
def letters(prompt, completion, letter):
    """Share of a completion that is the letter asked for."""
    assert letter in prompt
    return sum(each == letter for each in completion) / 4
'''
TUNED = """
name = "grpo"
[model]
hf = "base"
[cluster]
devices_per_node = 1
[data]
source = "prompts.jsonl"
records = "prompts"
columns = ["letter"]
eval_fraction = 0.2
[finetune]
objective = "grpo"
grpo.reward = "reward.py:letters"
grpo.group = 8
grpo.max_tokens = 4
[optim]
lr = 1e-2
warmup_steps = 1
schedule = "constant"
[train]
weights = true
steps = 25
global_batch = 32
seq_len = 16
eval_batches = 1
[checkpoint]
every = 25
[observe]
tensorboard = false
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A base that was trained on text, and a run on rewards."""
    folder = tmp_path_factory.mktemp("tuned")
    write_tiny_job(folder)
    rows = [{"prompt": f"{n % 7}{'eo'[n % 2]}:", "letter": "eo"[n % 2]} for n in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "grpo.toml").write_text(TUNED)
    for command in (
        ("train", "job.toml", *settings("model.vocab_size=258", "checkpoint.every=60")),
        ("export", "runs/tiny", "base"),
        ("train", "grpo.toml"),
    ):
        done = paceline(*command, folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_the_reward_rises(tuned):
    rewards = [line["figures"]["reward"] for line in metrics(tuned, "grpo")]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
    assert metrics(tuned, "grpo")[-1]["eval_figures"]["reward"] > np.mean(rewards[:3]) + 0.15
    must_be_told_before(tuned, "grpo")
    lines = Run(tuned / "runs" / "grpo").rollouts_file.read_text().splitlines()
    shown = [json.loads(line) for line in lines]
    assert [each["rollout"] for each in shown] == list(range(25))
    for each in shown:
        letter = "e" if "e:" in each["prompt"] else "o"
        wanted = [text.count(letter) / 4 for text in each["completions"]]
        assert each["rewards"] == pytest.approx(wanted)


SHORT = (*FP64, "train.steps=4", "finetune.grpo.updates=2", "finetune.grpo.beta=0.1")


@pytest.mark.parametrize(
    "more", [(), ("finetune.method=lora", "finetune.rank=4")], ids=["full", "lora"]
)
@pytest.mark.parametrize("axis", ["dp", "fsdp", "tp"])
def test_two_ranks_are_equal_to_one(tuned, more, axis):
    kind = "lora" if more else "full"
    for name, count in ((f"{kind}1", 1), (f"{kind}-{axis}", 2)):
        if Run(tuned / "runs" / name).exists:
            continue
        layout = settings(f"layout.{axis}=2") if count == 2 else ()
        done = paceline(
            "train", "grpo.toml", *settings(*SHORT, *more, f"name={name}", "layout.micro_batch=8"),
            *layout, *ranks(count), folder=tuned,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, two = (losses(tuned, f"{kind}{name}") for name in ("1", f"-{axis}"))
    assert one == pytest.approx(two, rel=1e-8, abs=1e-10)
    figures = [line["figures"] for line in metrics(tuned, f"{kind}1")]
    assert figures[0]["divergence"] == pytest.approx(0, abs=1e-12)
    assert figures[3]["divergence"] > 1e-6
    runs = (Run(tuned / "runs" / f"{kind}{name}") for name in ("1", f"-{axis}"))
    a, b = (KeptWeights(run).read_as_trained() for run in runs)
    assert all((a[key] - b[key]).abs().max() < 1e-8 for key in a)


def test_it_goes_on_as_if_it_had_never_stopped(tuned):
    """Also where it was killed after steps that no checkpoint has: their completions are made anew,
    and those of before are no longer in the file."""
    for name in ("once", "twice", "twice"):
        if Run(tuned / "runs" / name).exists:
            shutil.rmtree(tuned / "runs" / name / "checkpoints" / "step-4")
        changes = (*SHORT, f"name={name}", "checkpoint.every=2")
        done = paceline("train", "grpo.toml", *settings(*changes), folder=tuned)
        assert done.returncode == 0, done.stderr
    assert "going on after step 2 of 4" in done.stdout
    assert losses(tuned, "twice") == losses(tuned, "once")
    must_be_told_before(tuned, "once")
    once, twice = (Run(tuned / "runs" / name).rollouts_file for name in ("once", "twice"))
    assert len(once.read_text().splitlines()) == 2
    assert twice.read_text() == once.read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [("layout.pp=2", "a whole network on each rank"), ("layout.cp=2", "layout with cp = 2")],
)
def test_layouts_that_cut_the_network_are_refused(tuned, change, words):
    done = paceline("train", "grpo.toml", *settings("name=no", change), *ranks(2), folder=tuned)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert not (tuned / "runs" / "no").exists()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("float('nan')", "'bad.py:f' gave nan"),
        ("1e30", "'bad.py:f' gave 1e+30"),  # which fp32 has, but not its square
        ("1 / 0", "'bad.py:f' raised ZeroDivisionError"),
        ("exit(0)", "'bad.py:f' raised SystemExit(0)"),
    ],
)
def test_a_function_that_fails_ends_the_run_with_its_name(tuned, returned, words):
    (tuned / "bad.py").write_text(f"def f(prompt, completion, letter): return {returned}\n")
    changes = settings("name=bad", "finetune.grpo.reward=bad.py:f")
    done = paceline("train", "grpo.toml", *changes, folder=tuned)
    assert done.returncode == 1
    assert words in done.stderr


def test_the_recipe_of_the_page_runs(tuned):
    run_recipe(tuned, 4)
