"""Preferences: pairs of answers as samples, their loss against trl's, and runs on any layout."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from paceline.config.errors import InputError
from paceline.config.finetune import Dpo
from paceline.config.job import read_job
from paceline.observe.run import Run
from paceline.train.data import prepare
from paceline.train.kept_weights import KeptWeights
from paceline.train.preferences import dpo
from tests.command_line import losses, metrics, paceline, ranks, write_tiny_job
from tests.train.judged import must_be_told_before
from tests.train.test_conversations import answers_of, chat_data
from tests.train.test_finetune import run_recipe

FP64 = ("layout.param_dtype=fp64", "layout.precision=fp64")


def pairs(count):
    """Whoever is asked is to say yes, and not no; answers of several lengths."""
    return [
        {
            "prompt": f"{n}+{n}?",
            "chosen": "yes " * (n % 3) + "yes",
            "rejected": "no " * (n % 2) + "no",
        }
        for n in range(count)
    ]


def settings(*changes):
    return [part for each in changes for part in ("--set", each)]


# --- samples


def test_pairs_stay_together_and_are_held_out_together(tmp_path):
    prepared = prepare(chat_data(tmp_path, pairs(60), records="preferences", eval_fraction=0.2))
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    seen = 0
    for split in ("train", "eval"):
        dataset = prepared.conversations(split)
        ids = np.arange(dataset.num_samples(90))
        documents, rows = dataset.document_ids(ids, 90), dataset.gather(ids, 90)[:, :-1]
        for row, apart in zip(rows, documents, strict=True):
            texts = [
                tokenizer.decode(row[apart == number], skip_special_tokens=False)
                for number in range(apart[-1] + apart[-1] % 2)
            ]
            for better, worse in zip(texts[::2], texts[1::2], strict=True):
                assert better.split("?")[0] == worse.split("?")[0]
                assert "yes" in better and "no" in worse  # noqa: PT018
                seen += 1
    assert seen == prepared.meta.num_documents == 60
    assert prepared.conversations("train").packing(20).num_left_out > 0


def test_messages_are_pairs_too(tmp_path):
    prompt = [{"role": "user", "content": "well?"}]
    row = {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    rows = [row, {**row, "prompt": [{"role": "user", "content": "so?"}]}]
    prepared = prepare(chat_data(tmp_path, rows, records="preferences"))
    end = "<|endoftext|>"
    assert answers_of(prepared) == answers_of(prepared, "eval") == [f"yes{end}no{end}"]


@pytest.mark.parametrize(
    "row", [{"prompt": "x", "chosen": "y"}, {"prompt": [], "chosen": "a", "rejected": "b"}, {}]
)
def test_a_row_that_is_no_preference_is_refused_by_its_name(tmp_path, row):
    with pytest.raises(InputError, match="line 3 is no preference"):
        prepare(chat_data(tmp_path, [*pairs(2), row], records="preferences"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["finetune.objective=dpo"], 'learns from data.records = "preferences"'),
        (["data.records=preferences"], "has no answers that"),
        (["finetune.dpo.beta=0.3"], "finetune.dpo has no effect"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, words):
    with pytest.raises(InputError, match=words):
        read_job(None, overrides)


def test_smoothing_takes_a_part_of_the_pairs_the_wrong_way_round():
    ratios = torch.tensor([[0.3, -0.4]], dtype=torch.float64)
    right, margins = dpo(ratios, Dpo(beta=0.5))
    wrong, _ = dpo(ratios.flip(-1), Dpo(beta=0.5))
    mixed, _ = dpo(ratios, Dpo(beta=0.5, label_smoothing=0.2))
    assert mixed.item() == pytest.approx(0.8 * right.item() + 0.2 * wrong.item(), rel=1e-12)
    assert margins.item() == pytest.approx(0.35)


# --- runs

TUNED = """
name = "dpo"
[model]
hf = "base"
[cluster]
devices_per_node = 1
[data]
source = "pairs.jsonl"
records = "preferences"
eval_fraction = 0.1
[finetune]
objective = "dpo"
dpo.beta = 0.5
dpo.label_smoothing = 0.1
[optim]
lr = 3e-3
eps = 1e-3
warmup_steps = 1
[train]
weights = true
steps = 6
global_batch = 8
seq_len = 48
eval_batches = 1
[checkpoint]
every = 3
[observe]
tensorboard = false
"""
LORA = ("finetune.method=lora", "finetune.rank=4", "optim.lr=3e-2")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A base that was trained on text, and runs on pairs: of all of it, and of adapters."""
    folder = tmp_path_factory.mktemp("tuned")
    write_tiny_job(folder)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs(200)))
    (folder / "dpo.toml").write_text(TUNED)
    for command in (
        ("train", "job.toml", *settings("model.vocab_size=258", "model.num_layers=4")),
        ("export", "runs/tiny", "base"),
        ("train", "dpo.toml", *settings(*FP64)),
        ("train", "dpo.toml", *settings(*FP64, *LORA, "name=lora")),
    ):
        done = paceline(*command, folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", ["dpo", "lora"])
def test_what_is_chosen_becomes_likelier(tuned, name):
    lines = metrics(tuned, name)
    assert lines[0]["figures"]["margin"] == pytest.approx(0, abs=1e-12)
    smoothed = -0.9 * np.log(0.5) - 0.1 * np.log(0.5)
    assert lines[0]["loss"] == pytest.approx(smoothed, rel=1e-12)
    last = lines[-1]["figures"]
    assert last["accuracy"] > 0.9
    assert last["margin"] == pytest.approx(last["reward_chosen"] - last["reward_rejected"])
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    assert lines[-1]["eval_figures"]["accuracy"] > 0.9
    must_be_told_before(tuned, name)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("dpo", "dp=2"), ("dpo", "fsdp=2"), ("dpo", "tp=2"), ("dpo", "pp=2")),
        *(("lora", "fsdp=2"), ("lora", "tp=2"), ("lora", "pp=2")),
    ],
)
def test_two_ranks_are_equal_to_one(tuned, name, layout):
    other = f"{name}-{layout[:2]}"
    changes = (*FP64, *(LORA if name == "lora" else ()), f"name={other}", f"layout.{layout}")
    done = paceline(
        "train", "dpo.toml", *settings(*changes, "layout.micro_batch=2"), *ranks(2), folder=tuned
    )
    assert done.returncode == 0, done.stderr
    assert losses(tuned, other) == pytest.approx(losses(tuned, name), rel=1e-10)
    runs = (Run(tuned / "runs" / each) for each in (name, other))
    for mine, its in zip(metrics(tuned, other), metrics(tuned, name), strict=True):
        assert mine["figures"] == pytest.approx(its["figures"], rel=1e-9, abs=1e-12)
    one, two = (KeptWeights(run).read_as_trained() for run in runs)
    assert all((one[key] - two[key]).abs().max() < 1e-10 for key in one)


def test_it_goes_on_as_if_it_had_never_stopped(tuned):
    constant = (*FP64, "optim.schedule=constant")
    for more in (("name=once",), ("name=twice", "train.steps=3"), ("name=twice",)):
        done = paceline("train", "dpo.toml", *settings(*constant, *more), folder=tuned)
        assert done.returncode == 0, done.stderr
    assert losses(tuned, "twice") == losses(tuned, "once")


def test_several_stages_of_a_rank_are_equal_to_one_rank(tuned):
    changes = (*FP64, "name=zigzag", "layout.pp=2", "layout.schedule=zbv", "layout.micro_batch=1")
    done = paceline("train", "dpo.toml", *settings(*changes), *ranks(2), folder=tuned)
    assert done.returncode == 0, done.stderr
    assert losses(tuned, "zigzag") == pytest.approx(losses(tuned, "dpo"), rel=1e-10)


def test_layouts_that_cut_texts_are_refused(tuned):
    more = settings("name=no", "layout.cp=2")
    done = paceline("train", "dpo.toml", *more, *ranks(2), folder=tuned)
    assert done.returncode == 2, done.stderr
    assert "layout.cp = 2 cuts: set cp = 1." in done.stderr
    assert not (tuned / "runs" / "no").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_that_of_trl(tuned, tmp_path):
    """Three steps over all pairs: packed here, a row each there; losses to 1e-5 in fp32. (Its loss
    "sigmoid" has no smoothing.)"""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = pairs(12)
    (tuned / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = chat_data(tuned, rows, "few.jsonl", records="preferences", tokenizer=str(tuned / "base"))
    prepared = prepare(data)
    samples = prepared.conversations("train").num_samples(48)
    changes = (
        "name=likewise", "data.source=few.jsonl", "data.eval_fraction=0.01", "train.steps=3",
        f"train.global_batch={samples}", "optim.schedule=constant", "optim.warmup_steps=0",
        "optim.weight_decay=0.0", "layout.micro_batch=1", "finetune.dpo.label_smoothing=0",
    )  # fmt: skip
    done = paceline("train", "dpo.toml", *settings(*changes), folder=tuned)
    assert done.returncode == 0, done.stderr
    held_out = held_out_of(prepared)

    class Recorded(trl.DPOTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            found.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    found = []
    rows = [row for row in rows if row["prompt"] not in held_out]
    options = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=len(rows), max_steps=3,
        learning_rate=3e-3, lr_scheduler_type="constant", adam_beta2=0.95, adam_epsilon=1e-3,
        weight_decay=0.0, max_grad_norm=1.0, max_length=48, bf16=False, beta=0.5,
        gradient_checkpointing=False, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    Recorded(
        model=AutoModelForCausalLM.from_pretrained(tuned / "base", dtype=torch.float32),
        ref_model=AutoModelForCausalLM.from_pretrained(tuned / "base", dtype=torch.float32),
        args=options, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(tuned / "base"),
    ).train()  # fmt: skip
    assert list(losses(tuned, "likewise").values()) == pytest.approx(found, rel=1e-5)
    assert found[2] < found[0]


def held_out_of(prepared):
    """Prompts of the held-out pairs."""
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    dataset = prepared.conversations("eval")
    rows = dataset.gather(np.arange(dataset.num_samples(48)), 48)
    texts = " ".join(tokenizer.decode(row, skip_special_tokens=False) for row in rows)
    return [row["prompt"] for row in pairs(12) if row["prompt"] in texts]


def test_the_recipe_of_the_page_runs(tuned):
    run_recipe(tuned, 3)
