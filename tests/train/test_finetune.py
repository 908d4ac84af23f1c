"""Adapters: equal to PEFT's, on any layout equal to one rank, and back and forth in its format."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.finetune import Finetune
from paceline.config.job import read_job
from paceline.config.job_sections import Data
from paceline.generate.chat import ChatTemplate
from paceline.models.adapters import adapt, adapted_names, init_adapters, merged
from paceline.models.decoder import Decoder
from paceline.models.peft_format import check_adapters, load_adapters, write_adapters
from paceline.models.weights import read_decoder, write_weights
from paceline.observe.run import Run
from paceline.train.data import prepare
from paceline.train.data.conversations import DEFAULT_TEMPLATE
from paceline.train.data.parts import is_held_out
from paceline.train.kept_weights import KeptWeights, weights_of
from tests.command_line import losses, paceline, ranks, write_tiny_job
from tests.generate.networks import MODELS, built
from tests.train.test_conversations import talks

LORA = Finetune(method="lora", rank=4, alpha=12.0)
DORA = LORA.replace(decomposed=True, targets=("q_proj", "down_proj"))


def adapted(model, finetune, dtype=torch.float64):
    """A network with adapters that have an effect."""
    decoder = built(model, dtype)
    adapt(decoder, finetune)
    decoder.to(dtype)
    init_adapters(decoder, torch.Generator().manual_seed(1))
    stream = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("lora_b.weight"):
                parameter.normal_(std=0.1, generator=stream)
            elif name.endswith("magnitude"):
                parameter.mul_(1 + 0.1 * torch.rand(parameter.shape, generator=stream))
    return decoder


def tokens(model, count=2, length=24, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return torch.randint(model.vocab_size, (count, length), generator=stream)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("finetune", [LORA, LORA.replace(decomposed=True)], ids=["lora", "dora"])
def test_merged_weights_compute_the_same(kind, finetune):
    decoder = adapted(MODELS[kind], finetune)
    plain = Decoder(MODELS[kind]).double()
    plain.load_state_dict(merged(decoder.state_dict(), finetune))
    x = tokens(MODELS[kind])
    found, wanted = plain(x), decoder(x)
    assert (found - wanted).abs().max() < 1e-10
    assert (found - built(MODELS[kind])(x)).abs().max() > 0.1


def test_adapters_begin_without_effect_and_are_all_that_is_trained():
    model = MODELS["grouped"]
    decoder, x = built(model), tokens(model)
    before = decoder(x)
    adapt(decoder, LORA.replace(decomposed=True))
    decoder.double()
    init_adapters(decoder, torch.Generator().manual_seed(1))
    assert (decoder(x) - before).abs().max() < 1e-12
    decoder(x).square().mean().backward()
    trained = {name for name, p in decoder.named_parameters() if p.grad is not None}
    assert trained == {n for n in dict(decoder.named_parameters()) if "lora" in n or "magn" in n}
    assert len(trained) == 3 * 7 * model.num_layers


@pytest.mark.parametrize(("factor", "other"), ["ab", "ba"])
def test_one_of_the_two_matrices_is_trained_and_its_gradient_is_that_of_both(factor, other):
    model = MODELS["grouped"]
    whole, part = adapted(model, LORA), adapted(model, LORA.replace(factors=factor))
    for network in (whole, part):
        network(tokens(model)).square().mean().backward()
    found = dict(part.named_parameters())
    for name, parameter in whole.named_parameters():
        if f"lora_{factor}" in name:
            assert torch.equal(parameter.grad, found[name].grad), name
        elif f"lora_{other}" in name:
            assert parameter.grad is not None
            assert found[name].grad is None


def test_targets_name_matrices_by_their_ends():
    model = MODELS["experts"]
    decoder = Decoder(model)

    def names(*targets):
        return adapted_names(decoder, LORA.replace(targets=targets))

    assert names("q_proj") == [f"blocks.{n}.attention.q_proj" for n in range(3)]
    assert names("attention.*") == [
        f"blocks.{n}.attention.{kind}_proj" for n in range(3) for kind in "qkvo"
    ]
    assert names("blocks.1.*k_proj") == ["blocks.1.attention.k_proj"]
    assert not any("experts" in name or "router" in name for name in names("*_proj"))
    with pytest.raises(
        InputError,
        match=r"'qproj' names no matrix.*down_proj, experts.*gate_up_proj, gate_proj, k_proj",
    ):
        names("q_proj", "qproj")


# --- PEFT


@pytest.mark.filterwarnings("ignore")  # of peft and transformers
@pytest.mark.parametrize("finetune", [LORA, DORA], ids=["lora", "dora"])
def test_steps_are_those_of_peft(tmp_path, finetune):
    """The same batches, of answers only: losses and adapters after three steps of SGD."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = MODELS["grouped"]
    ours = adapted(model, finetune, torch.float32)
    write_weights(tmp_path / "base", model, merged_base(ours))
    write_adapters(tmp_path / "peft", model, ours.state_dict(), finetune, None, torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "peft", is_trainable=True)
    assert (ours(tokens(model)) - theirs(tokens(model)).logits).abs().max() < 1e-4
    number = [sum(p.requires_grad for p in each.parameters()) for each in (ours, theirs)]
    assert number[0] == number[1]
    batches = []
    for step in range(3):
        x = tokens(model, seed=step)
        batches.append((x, torch.where(tokens(model, seed=9 + step) % 2 > 0, x, -100)))
    assert_learns_alike(ours, theirs, batches)
    theirs.save_pretrained(tmp_path / "trained")
    back = adapted(model, finetune, torch.float32)
    assert_comes_back(tmp_path / "trained", model, finetune, back, ours)


def assert_learns_alike(ours, theirs, batches):
    """Steps of SGD of a network of ours and of PEFT's have the same losses, to 1e-5.

    Args:
        batches: (tokens, labels) of each step, as transformers takes them.
    """
    pairs = [
        (network, torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1))
        for network in (ours, theirs)
    ]
    for x, labels in batches:
        own, their = ours(x[:, :-1], targets=labels[:, 1:]), theirs(x, labels=labels).loss
        assert own.item() == pytest.approx(their.item(), rel=1e-5)
        for loss, (_, optimizer) in zip((own, their), pairs, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def assert_comes_back(folder, model, finetune, back, wanted):
    """What PEFT wrote is read into a network, which then is the wanted one, to 1e-5."""
    check_adapters(model, finetune, str(folder))
    load_adapters(back, str(folder))
    for name, tensor in wanted.state_dict().items():
        assert (tensor.double() - back.state_dict()[name].double()).abs().max() < 1e-5, name


def merged_base(decoder):
    """The weights without adapters."""
    return {n: t for n, t in decoder.state_dict().items() if "lora" not in n and "magn" not in n}


@pytest.mark.parametrize("kind", ["grouped", "window", "latent"])
def test_a_written_folder_is_read_back_bit_for_bit(tmp_path, kind):
    decoder = adapted(MODELS[kind], LORA, torch.float32)
    write_adapters(tmp_path / "a", MODELS[kind], decoder.state_dict(), LORA, "x", torch.float32)
    check_adapters(MODELS[kind], LORA, str(tmp_path / "a"))
    other = built(MODELS[kind], torch.float32)
    adapt(other, LORA)
    load_adapters(other, str(tmp_path / "a"))
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": 8}, "finetune.rank = 4, but .* with 8"),
        ({"lora_alpha": 8}, "finetune.alpha = 12.0, but .* with 8"),
        ({"use_dora": True}, "finetune.decomposed = false, but .* with true"),
        ({"use_rslora": True}, "has use_rslora = True"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"peft_type": "IA3"}, "is of 'IA3' adapters"),
    ],
)
def test_adapters_of_other_settings_are_refused(tmp_path, change, words):
    model = MODELS["grouped"]
    decoder = adapted(model, LORA, torch.float32)
    write_adapters(tmp_path / "a", model, decoder.state_dict(), LORA, None, torch.float32)
    config = tmp_path / "a" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(InputError, match=words):
        check_adapters(model, LORA, str(tmp_path / "a"))


def test_adapters_of_other_matrices_or_damaged_ones_are_refused(tmp_path):
    model, few = MODELS["grouped"], LORA.replace(targets=("q_proj",))
    decoder = adapted(model, few, torch.float32)
    write_adapters(tmp_path / "a", model, decoder.state_dict(), few, None, torch.float32)
    with pytest.raises(InputError, match=r"k_proj\.lora_A\.weight is missing"):
        check_adapters(model, LORA, str(tmp_path / "a"))
    file = tmp_path / "a" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match="can't be read as safetensors"):
        check_adapters(model, few, str(tmp_path / "a"))


# --- Jobs


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["finetune.rank=8"], "finetune.rank = 8 has no effect"),
        (["finetune.targets=[]"], "finetune.targets"),
        (["finetune.method=lora", "finetune.factors=a"], "begin as zero"),
        (["finetune.method=lora", "layout.precision=fp8"], 'layout.precision = "fp8"'),
        (["finetune.method=lora", "train.exact_eval=true"], "train.exact_eval = true doesn't"),
    ],
)
def test_settings_without_effect_are_refused(overrides, words):
    with pytest.raises(InputError, match=words):
        read_job(None, overrides)


TUNED = """
name = "tuned"
[model]
hf = "base"
[cluster]
devices_per_node = 1
[data]
source = "talks.jsonl"
records = "chat"
eval_fraction = 0.1
[finetune]
method = "lora"
rank = 4
[optim]
lr = 3e-2
eps = 1e-3
warmup_steps = 1
[train]
weights = true
steps = 6
global_batch = 12
seq_len = 48
eval_batches = 1
[checkpoint]
every = 3
[observe]
tensorboard = false
"""
BASE = ("model.vocab_size=258", "train.steps=60", "optim.lr=2e-2", "checkpoint.every=60")
BASE = tuple(part for each in BASE for part in ("--set", each))
FP64 = ("--set", "layout.param_dtype=fp64", "--set", "layout.precision=fp64")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A base that was trained on text, and a run of adapters on conversations."""
    folder = tmp_path_factory.mktemp("tuned")
    write_tiny_job(folder)
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks(300)))
    (folder / "tuned.toml").write_text(TUNED)
    for command in (
        ("train", "job.toml", *BASE),
        ("export", "runs/tiny", "base"),
        ("train", "tuned.toml", *FP64),
    ):
        done = paceline(*command, folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_a_run_learns_by_its_adapters_alone(tuned):
    run = Run(tuned / "runs" / "tuned")
    base = read_decoder(tuned / "base", torch.float64).state_dict()
    trained = KeptWeights(run).read_as_trained()
    for name, tensor in base.items():
        assert torch.equal(tensor, trained[name])
    assert losses(tuned, "tuned")[6] < losses(tuned, "tuned")[1] - 0.3
    adapters = sum(t.numel() for n, t in trained.items() if n not in base)
    assert run.facts()["num_trained_params"] == adapters
    _, whole = weights_of(run)
    assert whole.keys() == base.keys()
    assert not torch.equal(
        whole["blocks.0.ffn.up_proj.weight"], base["blocks.0.ffn.up_proj.weight"]
    )


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "tp=2", "pp=2", "cp=2"])
def test_two_ranks_are_equal_to_one(tuned, layout):
    name = layout[:2]
    done = paceline(
        "train", "tuned.toml", *FP64, "--set", f"layout.{layout}", "--set", f"name={name}",
        "--set", "layout.micro_batch=3", *ranks(2), folder=tuned,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert losses(tuned, name) == pytest.approx(losses(tuned, "tuned"), rel=1e-10)
    (_, one), (_, two) = (weights_of(Run(tuned / "runs" / each)) for each in ("tuned", name))
    assert all((one[key] - two[key]).abs().max() < 1e-10 for key in one)


def test_it_goes_on_as_if_it_had_never_stopped(tuned):
    settings = (*FP64, "--set", "optim.schedule=constant")

    def train(name, *more):
        return paceline(
            "train", "tuned.toml", *settings, "--set", f"name={name}", *more, folder=tuned
        )

    for name, more in (("once", ()), ("twice", ("--set", "train.steps=3")), ("twice", ())):
        done = train(name, *more)
        assert done.returncode == 0, done.stderr
    assert losses(tuned, "twice") == losses(tuned, "once")
    other = train("twice", "--set", "finetune.rank=8")
    assert other.returncode == 2
    assert "finetune.rank (4 before, 8 now) changed" in other.stderr


@pytest.mark.filterwarnings("ignore")
def test_a_run_leaves_as_adapters_and_merged_and_comes_back(tuned):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    for folder, form in (("merged", ()), ("adapters", ("--format", "peft"))):
        done = paceline("export", "runs/tuned", folder, *form, folder=tuned)
        assert done.returncode == 0, done.stderr
    base = AutoModelForCausalLM.from_pretrained(tuned / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tuned / "adapters")
    config = json.loads((tuned / "adapters" / "adapter_config.json").read_text())
    assert len(config["target_modules"]) == 7
    x = tokens(read_decoder(tuned / "merged").model)
    ours = read_decoder(tuned / "merged")(x)
    assert (ours - theirs(x).logits).abs().max() < 1e-4
    done = paceline(
        "train", "tuned.toml", "--set", "name=back", "--set", "finetune.adapters=adapters",
        "--set", "train.steps=1", "--set", "optim.lr=1e-9", folder=tuned,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, back = weights_of(Run(tuned / "runs" / "back"))
    _, whole = weights_of(Run(tuned / "runs" / "tuned"))
    assert all((back[key] - whole[key]).abs().max() < 1e-5 for key in back)
    assert math.isfinite(losses(tuned, "back")[1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["train.weights=false"], "train.weights"),
        (["finetune.targets=['qproj']"], "'qproj' names no matrix"),
        (["finetune.targets=['blocks.0.*']", "layout.pp=2"], "leaves block 1 without an adapter"),
        (["finetune.decomposed=true", "layout.tp=2"], "needs whole rows"),
        (["finetune.dropout=0.1", "layout.tp=2"], "would differ among ranks"),
        (["finetune.adapters=base"], "adapter_config.json does not exist"),
    ],
)
def test_what_adapters_cannot_have_is_refused_before_anything_is_written(tuned, settings, words):
    changes = [part for each in settings for part in ("--set", each)]
    more = ranks(2) if "layout" in str(settings) else ()
    done = paceline("train", "tuned.toml", "--set", "name=no", *changes, *more, folder=tuned)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert not (tuned / "runs" / "no").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_run_is_that_of_trl(tuned, tmp_path):
    """Three steps over all conversations: packed here, a row each there; losses to 1e-5 in fp32."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = talks(41)
    held_out = [row for row in rows if is_held_out(text_of(row).encode(), 0.01)] or rows[-1:]
    rows = [row for row in rows if row not in held_out]
    (tuned / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks(41)))
    finetune = Finetune(method="lora", rank=4)
    base = read_decoder(tuned / "base")
    adapt(base, finetune)
    init_adapters(base, torch.Generator().manual_seed(3))
    write_adapters(tmp_path / "a", base.model, base.state_dict(), finetune, None, torch.float32)
    settings = (
        "name=likewise", "data.source=few.jsonl", "data.eval_fraction=0.01", "train.steps=3",
        f"finetune.adapters={tmp_path / 'a'}", "optim.schedule=constant", "optim.warmup_steps=0",
        "optim.weight_decay=0.0", "layout.micro_batch=1",
    )  # fmt: skip
    config = Data(
        source=str(tuned / "few.jsonl"), records="chat", tokenizer=str(tuned / "base"),
        eval_fraction=0.01, cache_dir=str(tmp_path),
    )  # fmt: skip
    samples = prepare(config).conversations("train").num_samples(48)
    changes = [part for s in (*settings, f"train.global_batch={samples}") for part in ("--set", s)]
    done = paceline("train", "tuned.toml", *changes, folder=tuned)
    assert done.returncode == 0, done.stderr

    class Recorded(trl.SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            found.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    found = []
    tokenizer = AutoTokenizer.from_pretrained(tuned / "base")
    tokenizer.chat_template = DEFAULT_TEMPLATE
    theirs = AutoModelForCausalLM.from_pretrained(tuned / "base", dtype=torch.float32)
    options = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=len(rows), max_steps=3,
        learning_rate=3e-2, lr_scheduler_type="constant", adam_beta2=0.95, adam_epsilon=1e-3,
        weight_decay=0.0, max_grad_norm=1.0, assistant_only_loss=True, max_length=48, bf16=False,
        gradient_checkpointing=False, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    Recorded(
        model=peft.PeftModel.from_pretrained(theirs, tmp_path / "a", is_trainable=True),
        args=options, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    ).train()  # fmt: skip
    assert list(losses(tuned, "likewise").values()) == pytest.approx(found, rel=1e-5)
    assert found[2] < found[0]


def text_of(row):
    """As the default template has it."""
    template = ChatTemplate(DEFAULT_TEMPLATE, {"eos_token": "<|endoftext|>"})
    return template.conversation(row["messages"]).text


def run_recipe(folder, number):
    """Run a Job of the page, made smaller."""
    page = Path(__file__).parents[2] / "docs" / "finetuning.md"
    recipe = re.findall(r"```toml\n(.*?)```", page.read_text(), re.S)[number]
    (folder / "recipe.toml").write_text(recipe)
    smaller = ("train.seq_len=48", "train.steps=2", "train.global_batch=16", f"name=recipe{number}")
    settings = [part for each in smaller for part in ("--set", each)]
    done = paceline("train", "recipe.toml", *settings, folder=folder)
    assert done.returncode == 0, done.stderr
    assert len(losses(folder, f"recipe{number}")) == 2


@pytest.mark.parametrize("number", [0, 1])
def test_the_recipes_of_the_page_run(tuned, number):
    run_recipe(tuned, number)
