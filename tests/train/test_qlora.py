"""Adapters beside matrices in 4 bits: as PEFT's over bitsandbytes', and on any layout alike."""

import json

import pytest
import torch

from paceline.config.finetune import Finetune, narrow_bytes
from paceline.machine.discovery import this_machine
from paceline.models import nf4
from paceline.models.adapters import adapt, adapted_layers, init_adapters, merged
from paceline.models.decoder import Decoder
from paceline.models.peft_format import write_adapters
from paceline.models.weights import load_weights, read_decoder, write_weights
from paceline.observe.run import Run
from paceline.train.kept_weights import KeptWeights, weights_of
from tests.command_line import losses, paceline, ranks, settings, write_tiny_job
from tests.generate.networks import MODELS, built
from tests.train.test_conversations import talks
from tests.train.test_finetune import (
    assert_comes_back,
    assert_learns_alike,
    run_recipe,
    tokens,
)

MODEL = MODELS["grouped"].replace(hidden_size=64, head_dim=32, ffn_size=128, num_layers=2)
QLORA = Finetune(method="lora", rank=4, alpha=12.0, base="nf4")
FORMS = ["nf4", "nf4_double"]


def adapted(folder, finetune, dtype=torch.float32):
    """A network over weights of a folder, with adapters that have an effect."""
    decoder = Decoder(MODEL)
    adapt(decoder, finetune)
    decoder.to(dtype)
    load_weights(decoder, folder)
    init_adapters(decoder, torch.Generator().manual_seed(1))
    stream = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("lora_b.weight"):
                parameter.normal_(std=0.1, generator=stream)
    return decoder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "base"
    write_weights(folder, MODEL, built(MODEL, torch.float32).state_dict())
    return folder


# --- The form


@pytest.mark.parametrize("width", [64, 192, 4096, 320 * 64])
@pytest.mark.parametrize("double", [False, True])
def test_weights_are_near_and_any_rows_say_what_they_are(width, double):
    weight = torch.randn(37, width, generator=torch.Generator().manual_seed(3)) / 50
    matrix = nf4.packed(weight, double=double)
    assert matrix.shape == (37, narrow_bytes(width, double=double))
    found = nf4.unpacked(matrix, width, torch.float32)
    scales = weight.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True)
    # Half of the widest gap between two levels, and what rounding its scale does to it.
    most = (0.1520 + 0.03 * double) * scales
    assert ((found - weight).unflatten(1, (-1, 64)).abs() <= most).all()
    assert torch.equal(nf4.unpacked(matrix[5:9], width, torch.float32), found[5:9])
    if not double:
        assert torch.equal(nf4.unpacked(matrix[:, :36], 64, torch.float32), found[:, :64])


def test_zeros_stay_zeros():
    zeros = torch.zeros(3, 128)
    for double in (False, True):
        found = nf4.unpacked(nf4.packed(zeros, double=double), 128, torch.float32)
        assert torch.equal(found, zeros)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_bitsandbytes(form, dtype):
    theirs = pytest.importorskip("bitsandbytes.functional")
    weight = (torch.randn(300, 192, generator=torch.Generator().manual_seed(3)) / 50).to(dtype)
    double = form == "nf4_double"
    wanted = theirs.dequantize_4bit(
        *theirs.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type="nf4")
    )
    found = nf4.unpacked(nf4.packed(weight, double=double), 192, dtype)
    if not double:
        assert torch.equal(found, wanted)
    # Of the scales they take a neighbour of the nearest level now and then.
    other = (found != wanted).unflatten(1, (-1, 64)).any(-1)
    assert other.float().mean() < 0.01
    assert (found - wanted).abs().max() < 0.02 * weight.abs().max()


def test_the_gradient_is_that_of_a_product_with_the_numbers():
    stream = torch.Generator().manual_seed(4)
    weight = torch.randn(48, 128, generator=stream, dtype=torch.float64)
    matrix = nf4.packed(weight, double=True)
    numbers = nf4.unpacked(matrix, 128, torch.float64)
    x = torch.randn(2, 5, 128, generator=stream, dtype=torch.float64, requires_grad=True)
    found, wanted = nf4.product(x, matrix), x @ numbers.T
    assert torch.equal(found, wanted)
    out = torch.randn(2, 5, 48, generator=stream, dtype=torch.float64)
    (of_found,) = torch.autograd.grad(found, x, out)
    (of_wanted,) = torch.autograd.grad(wanted, x, out)
    assert (of_found - of_wanted).abs().max() < 1e-12
    with torch.autocast("cpu", torch.bfloat16):
        assert nf4.product(x.float(), matrix).dtype == torch.bfloat16


# --- PEFT


@pytest.mark.filterwarnings("ignore")  # of peft, transformers and bitsandbytes
@pytest.mark.parametrize("form", FORMS)
def test_steps_are_those_of_peft_and_bitsandbytes(base, tmp_path, form):
    """The same batches: losses and adapters after three steps of SGD, in fp32."""
    peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    finetune = QLORA.replace(base=form)
    ours = adapted(base, finetune)
    write_adapters(tmp_path / "peft", MODEL, ours.state_dict(), finetune, None, torch.float32)
    quantised = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.float32,
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=form == "nf4_double",
            bnb_4bit_compute_dtype=torch.float32,
        ),
    )
    theirs = peft.PeftModel.from_pretrained(quantised, tmp_path / "peft", is_trainable=True)
    theirs.train()  # in evaluation bitsandbytes computes in bf16 on a CPU that can
    narrow = [m for m in theirs.modules() if type(m).__name__ == "Linear4bit"]
    assert sum(type(each).__module__.startswith("bitsandbytes") for each in narrow) == 14
    if form == "nf4_double":
        take_scales(theirs, ours)
    batches = [tokens(MODEL, seed=step) for step in range(3)]
    assert_learns_alike(ours, theirs, [(x, x) for x in batches])
    theirs.save_pretrained(tmp_path / "trained")
    assert_comes_back(tmp_path / "trained", MODEL, finetune, adapted(base, finetune), ours)


def take_scales(theirs, ours):
    """Let bitsandbytes' scales be ours: those few that it doesn't round to the nearest."""
    for name, layer in adapted_layers(ours).items():
        there = name.replace("blocks", "layers").replace("attention", "self_attn")
        module = theirs.get_submodule(f"base_model.model.model.{there.replace('ffn', 'mlp')}")
        blocks = layer.in_features // 64
        codes = layer.weight[:, : 33 * blocks].unflatten(1, (blocks, 33))[..., 32].flatten()
        scales = module.base_layer.weight.quant_state.absmax
        assert (scales.flatten() != codes).float().mean() < 0.05
        scales.copy_(codes.view_as(scales))


# --- Jobs


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
base = "nf4"
[optim]
lr = 3e-2
eps = 1e-3
warmup_steps = 1
[train]
weights = true
steps = 4
global_batch = 12
seq_len = 48
eval_batches = 1
[checkpoint]
every = 4
[observe]
tensorboard = false
"""
SHAPE = (
    *("model.vocab_size=260", "model.hidden_size=64", "model.head_dim=32", "model.ffn_size=128"),
    "model.num_kv_heads=4",
    *("train.steps=20", "optim.lr=1e-2", "checkpoint.every=20"),
)
FP64 = ("--set", "layout.param_dtype=fp64", "--set", "layout.precision=fp64")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A base that was trained on text, and a run of adapters beside its matrices in 4 bits."""
    folder = tmp_path_factory.mktemp("tuned")
    write_tiny_job(folder)
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks(120)))
    (folder / "tuned.toml").write_text(TUNED)
    settings = [part for each in SHAPE for part in ("--set", each)]
    for command in (
        ("train", "job.toml", *settings),
        ("export", "runs/tiny", "base"),
        ("train", "tuned.toml", *FP64),
    ):
        done = paceline(*command, folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


def numbers_of(decoder, finetune):
    """What the matrices beside adapters stand for, by name."""
    with torch.device("meta"):
        room = Decoder(decoder.model)
        adapt(room, finetune)
    names = [f"{name}.weight" for name in adapted_layers(room)]
    state = decoder.state_dict()
    return {
        name: nf4.unpacked(
            nf4.packed(state[name], double=False), state[name].shape[1], torch.float64
        )
        for name in names
    }


def test_a_run_learns_and_keeps_its_matrices_in_a_fraction_of_their_bytes(tuned):
    run = Run(tuned / "runs" / "tuned")
    base = read_decoder(tuned / "base", torch.float32)
    trained = KeptWeights(run).read_as_trained()
    plain = numbers_of(base, run.job().finetune)
    assert len(plain) == 14
    dense = sum(each.numel() * 4 for each in plain.values())
    assert sum(trained[name].nbytes for name in plain) == dense * 4.5 / 32
    for name, numbers in plain.items():
        found = nf4.unpacked(trained[name], numbers.shape[1], torch.float64)
        assert torch.equal(found, numbers)
    assert losses(tuned, "tuned")[4] < losses(tuned, "tuned")[1] - 0.1
    _, whole = weights_of(run)
    assert {n: t.shape for n, t in whole.items()} == {
        n: t.shape for n, t in base.state_dict().items()
    }
    # What is merged: the numbers, and what the adapters add.
    state = {**trained, **plain}
    wanted = merged(state, run.job().finetune)
    assert all(torch.equal(whole[name], wanted[name]) for name in plain)


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "tp=2", "pp=2"])
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


def test_scales_in_8_bits_over_shards_are_those_of_one_rank(tuned):
    """With magnitudes, and in mixed precision where this machine has it."""
    bf16 = "bf16" if "bf16" in this_machine().device.precisions else "fp32"
    made = ("finetune.base=nf4_double", "finetune.decomposed=true", f"layout.precision={bf16}")
    changes = settings(*made)
    for name, more in (("one", ()), ("shards", ("--set", "layout.fsdp=2", *ranks(2)))):
        done = paceline(
            "train", "tuned.toml", *changes, "--set", f"name={name}", *more, folder=tuned
        )
        assert done.returncode == 0, done.stderr
    one, shards = (KeptWeights(Run(tuned / "runs" / each)) for each in ("one", "shards"))
    narrow = {n: t for n, t in one.read_as_trained().items() if t.dtype == torch.uint8}
    assert len(narrow) == 14
    assert all(torch.equal(shards.read_as_trained([n])[n], t) for n, t in narrow.items())
    assert losses(tuned, "shards")[1] == pytest.approx(losses(tuned, "one")[1], rel=1e-2)


def test_a_run_leaves_merged_and_says_of_what(tuned):
    done = paceline("export", "runs/tuned", "merged", folder=tuned)
    assert done.returncode == 0, done.stderr
    assert "merged into the matrices that finetune.base = 'nf4' stands for" in done.stdout
    x = tokens(read_decoder(tuned / "merged").model)
    job = Run(tuned / "runs" / "tuned").job()
    decoder = Decoder(job.model)
    adapt(decoder, job.finetune)
    decoder.reset_buffers()
    trained = KeptWeights(Run(tuned / "runs" / "tuned")).read_as_trained()
    decoder.load_state_dict(trained, strict=False)
    assert (decoder(x) - read_decoder(tuned / "merged")(x)).abs().max() < 1e-4
    refused = paceline("export", "runs/tuned", "dcp", "--format", "dcp", folder=tuned)
    assert refused.returncode == 2
    assert "bytes of 4-bit matrices" in refused.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["finetune.rank=16", "finetune.method=full"], "finetune.base = 'nf4' has no effect"),
        (["finetune.base=nf4_double", "layout.tp=2"], "shares scales of scales over whole rows"),
        (["layout.tp=4"], "has 128 of them, which layout.tp = 4 cuts"),
    ],
)
def test_what_matrices_in_4_bits_cannot_have_is_refused(tuned, settings, words):
    changes = [part for each in settings for part in ("--set", each)]
    more = ranks(int(settings[-1][-1])) if "layout" in str(settings) else ()
    done = paceline("train", "tuned.toml", "--set", "name=no", *changes, *more, folder=tuned)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert not (tuned / "runs" / "no").exists()


def test_the_recipe_of_the_page_runs(tuned):
    run_recipe(tuned, 2)
