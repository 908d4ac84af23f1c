"""From a Run of any layout to a folder that transformers opens (gloo ranks, then processes)."""

import pytest
import torch

from paceline.models.weights import read_decoder
from paceline.observe.run import Run
from paceline.train.data import prepare
from paceline.train.export import export
from tests.command_line import paceline, ranks, write_tiny_job
from tests.train.reshard_cases import FIRST, SECOND, Leg, job_of, run_legs

LAYOUTS = {
    "stages, tied": ("tied", "pp=2 tp=2"),
    "both directions, tied": ("tied", "pp=2 fsdp=2 schedule=dualpipe"),
    "shards of heads": ("tied", "fsdp=2 tp=2"),
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
        (["runs/tiny", "out", "--dtype", "int3"], "--dtype int3"),
    ],
)
def test_what_can_not_be_exported_is_refused(arguments, words, trained):
    done = paceline("export", *arguments, folder=trained)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (trained / "out").exists()
