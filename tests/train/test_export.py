"""From a Run of any layout to a folder that transformers opens (gloo ranks, then processes)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from paceline.config.errors import InputError
from paceline.config.vision import ResNet
from paceline.models.resnet import ResNetwork
from paceline.models.weights import read_decoder
from paceline.observe.run import Run
from paceline.train.data import prepare
from paceline.train.export import export, load
from tests.command_line import paceline, python, ranks, write_tiny_job
from tests.models import torchvision_like
from tests.train.reshard_cases import FIRST, SECOND, Leg, job_of, run_legs

LAYOUTS = {
    "stages, tied": ("tied", "pp=2 tp=2"),
    "both directions, tied": ("tied", "pp=2 fsdp=2 schedule=dualpipe"),
    "moved experts": ("experts", "fsdp=2 cp=2 ep=4 rebalance_every=1"),
}
MODELS = {
    "tied": ("model.tie_embeddings=true",),
    "experts": ("model.experts={num_experts=8,experts_per_token=2,ffn_size=16}",),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Name of a layout, or kind of a network in one process -> the exported network."""
    root = tmp_path_factory.mktemp("exported")
    write_tiny_job(root)
    prepare(job_of(root / "any", 1, ()).data)
    alone = {kind: Leg(root / kind, 1, (*MODELS[kind], "layout.micro_batch=2")) for kind in MODELS}
    split = {
        name: Leg(root / name, 4, (*MODELS[kind], *(f"layout.{each}" for each in layout.split())))
        for name, (kind, layout) in LAYOUTS.items()
    }
    legs = {**alone, **split}
    run_legs(list(legs.values()))
    for name, leg in legs.items():
        assert export(Run(leg.folder), root / "weights" / name) == FIRST + SECOND
    return {name: read_decoder(root / "weights" / name) for name in legs}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_exported(layout, exported):
    kind, _ = LAYOUTS[layout]
    tokens = torch.arange(48).view(2, 24) * 5
    with torch.no_grad():
        logits, expected = (exported[name](tokens) for name in (layout, kind))
    assert torch.allclose(logits, expected, rtol=0, atol=1e-5)
    for mine, theirs in zip(*(exported[n].parameters() for n in (layout, kind)), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-5)  # experts are in order again


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a Run that was sharded over two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    settings = ("--set", "layout.fsdp=2", "--set", "train.steps=2", *ranks(2))
    assert paceline("train", "job.toml", *settings, folder=folder).returncode == 0
    return folder


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_a_sharded_run_is_exported_and_opens_in_transformers(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = paceline("export", "runs/tiny", "weights", folder=trained)
    assert done.returncode == 0, done.stderr
    assert "after step 2" in done.stdout
    weights = trained / "weights"
    theirs = AutoModelForCausalLM.from_pretrained(weights).eval()
    text = "the lazy dog"
    tokens = AutoTokenizer.from_pretrained(weights)(text, return_tensors="pt").input_ids
    assert tokens[0].tolist() == list(text.encode())
    with torch.no_grad():
        logits = read_decoder(weights)(tokens)
        assert torch.allclose(theirs(tokens).logits, logits, atol=1e-5)
        # Two steps of training moved the weights away from their initial values.
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert loss < 5.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "out"], "nowhere is not a run"),
        (["runs/tiny", "runs"], "exists already"),
        # Before the run is looked at: what follows would take long.
        (["runs/other", "runs", "--prune", "ffn_size=8"], "runs exists already"),
        (["runs/other", "runs", "--for", "edge"], "runs exists already"),
        (["runs/tiny", "out", "--dtype", "int3"], "--dtype int3"),
    ],
)
def test_what_can_not_be_exported_is_refused(arguments, words, trained):
    done = paceline("export", *arguments, folder=trained)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (trained / "out").exists()


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_generation_in_transformers_stops_where_documents_end(tmp_path):
    """Documents of two words: a model that has learnt them ends after the second."""
    from transformers import pipeline

    write_tiny_job(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "tick tock"}\n' * 400)
    settings = [
        "data.source=text.jsonl", "train.steps=60", "optim.lr=1e-2", "data.reset_at_documents=true",
        "train.eval_every=0",
    ]  # fmt: skip
    flags = [part for each in settings for part in ("--set", each)]
    assert paceline("train", "job.toml", *flags, *ranks(1), folder=tmp_path).returncode == 0
    assert paceline("export", "runs/tiny", "weights", folder=tmp_path).returncode == 0
    generate = pipeline("text-generation", str(tmp_path / "weights"))
    (said,) = generate("tick", max_new_tokens=40, do_sample=False)
    assert said["generated_text"] == "tick tock"


def test_a_module_of_one_s_own_is_exported_and_loaded(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    done = python("mine.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    done = paceline("export", "runs/mine", "weights", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    stored = load_file(tmp_path / "weights" / "model.safetensors")
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    assert load(tmp_path / "runs" / "mine", module) == 3
    assert stored.keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    assert module[1].num_batches_tracked > 0
    with pytest.raises(InputError, match=r"weight"):
        load(tmp_path / "runs" / "mine", torch.nn.Linear(4, 3))
    with pytest.raises(InputError, match="is not a run"):
        load(tmp_path / "nowhere", module)


OWN = """
import paceline, torch
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 3))
module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()
job = {"name": "mine", "train": {"steps": 3, "global_batch": 8},
       "cluster": {"devices_per_node": 1}, "optim": {"warmup_steps": 0}}
paceline.train(job, model=module, loss=loss, data=data)
"""


def test_a_resnet_is_exported_and_loaded(tmp_path):
    """Into our module, and into torchvision's by the folder alone: the same logits."""
    settings = [
        "data.source=images", "train.steps=2", "train.global_batch=4", "train.eval_every=0",
        "train.eval_batches=1", "optim.warmup_steps=0",
    ]  # fmt: skip
    (tmp_path / "job.toml").write_text(IMAGES)
    flags = [part for each in settings for part in ("--set", each)]
    done = paceline("train", "job.toml", *flags, *ranks(1), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, dtype in (("weights", "fp32"), ("narrow", "bf16")):
        done = paceline("export", "runs/images", name, "--dtype", dtype, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    network = ResNetwork(ResNet(depth=18, num_classes=4, image_size=32))
    assert load(tmp_path / "runs" / "images", network) == 2
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    assert config["architecture"] == "resnet18"
    theirs = torchvision_like.of_config(config)
    theirs.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"))
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        logits = network.eval()(images)
        torch.testing.assert_close(theirs.eval()(images), logits, rtol=1e-4, atol=1e-4)
        assert logits.std() > 0.01
    narrow = load_file(tmp_path / "narrow" / "model.safetensors")
    assert {tensor.dtype for tensor in narrow.values()} == {torch.bfloat16}


IMAGES = """
name = "images"
[model]
family = "resnet"
depth = 18
num_classes = 4
image_size = 32
"""


def test_a_place_that_can_t_be_written_is_refused_in_one_sentence(trained):
    (trained / "file").write_text("")
    done = paceline("export", "runs/tiny", "file/weights", folder=trained)
    assert done.returncode == 2
    assert "file/weights can't be written" in done.stderr
    assert "Traceback" not in done.stderr
