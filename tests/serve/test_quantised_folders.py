"""Weights written in fewer bits: by compressed-tensors' own reader, and as they are served."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.models.compressed import read_narrow
from paceline.models.weights import read_decoder
from paceline.serve.network import open_network
from tests.command_line import paceline, write_tiny_job

FORMS = {"int8": [], "int4": ["--group", "16", "--dtype", "bf16"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a Run, its weights, and these in each form."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    done = paceline("train", "job.toml", folder=folder)
    assert done.returncode == 0, done.stderr
    assert paceline("export", "runs/tiny", "whole", folder=folder).returncode == 0
    for form, options in FORMS.items():
        done = paceline("export", "runs/tiny", form, "--weights", form, *options, folder=folder)
        assert done.returncode == 0, done.stderr
    return folder


def _read(folder):
    dtype = torch.bfloat16 if folder.name == "int4" else torch.float32
    return read_narrow(folder, dtype, torch.device("cpu"))


@pytest.mark.parametrize("form", FORMS)
def test_their_own_reader_has_the_same_weights(trained, form):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    said = json.loads((trained / form / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(said).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(said["format"])
    stored = load_file(trained / form / "model.safetensors")
    _, matrices = _read(trained / form)
    assert len(matrices) == 14
    for name, matrix in matrices.items():
        theirs = re.sub(r"^blocks\.", "model.layers.", name)
        theirs = theirs.replace(".attention.", ".self_attn.").replace(".ffn.", ".mlp.")
        parts = {
            key.removeprefix(f"{theirs}."): tensor
            for key, tensor in stored.items()
            if key.startswith(f"{theirs}.")
        }
        weight = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(weight, matrix.dequantised(weight.dtype))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_transformers_opens_the_folder(trained, form):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(trained / form)
    _, matrices = _read(trained / form)
    whole = read_decoder(trained / "whole")
    with torch.no_grad():
        for name, matrix in matrices.items():
            whole.get_submodule(name).weight.copy_(matrix.dequantised())
    tokens = torch.arange(40)[None]
    close = 0.02 if form == "int8" else 0.05  # inputs in 8 bits; in bf16
    with torch.no_grad():
        found, wanted = theirs(tokens).logits.float(), whole(tokens)
    assert (found - wanted).norm() < close * wanted.norm()


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_made_by_the_stored_matrices(trained, form):
    decoder, matrices = _read(trained / form)
    whole = read_decoder(trained / "whole")
    for name, matrix in matrices.items():
        weight = whole.get_submodule(name).weight
        group = matrix.scales.repeat_interleave(matrix.group_size, 1)
        assert torch.all((matrix.dequantised() - weight).abs() <= group * 0.51)
        assert decoder.get_submodule(name).weight.is_meta
        with torch.no_grad():
            weight.copy_(matrix.dequantised())
    network = open_network(trained / form)
    tokens = torch.tensor([network.encode("the quick brown fox")])
    with torch.no_grad():
        found, wanted = network.decoder(tokens).float(), whole(tokens)
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    engine = network.engine(Serving())
    assert engine.weight_form == "as_trained"
    sampling = Sampling(max_tokens=12, temperature=0)
    assert engine.texts(["the quick"], sampling) == network.engine(Serving(exact=True)).texts(
        ["the quick"], sampling
    )
    for other in (Serving(weights="int8"), Serving(weights_gb=1.0)):
        with pytest.raises(InputError, match="stored in fewer bits already"):
            network.engine(other)


def test_its_size_is_that_of_its_bits(trained):
    sizes = {form: (trained / form / "model.safetensors").stat().st_size for form in FORMS}
    whole = (trained / "whole" / "model.safetensors").stat().st_size
    assert sizes["int4"] < sizes["int8"] < whole


def _set(folder, changes):
    file = folder / "config.json"
    said = json.loads(file.read_text())
    before = said["quantization_config"]
    said["quantization_config"] = {**before, **changes} if changes else 3
    file.write_text(json.dumps(said))


def _damage(kind, folder):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("q_proj.weight_scale"))
    if kind == "scale":
        tensors[name][0] = float("nan")
    elif kind == "missing":
        del tensors[name]
    elif kind == "type":
        packed = name.replace("_scale", "_packed")
        tensors[packed] = tensors[packed].float()
    elif kind == "shape":
        tensors[name.replace("_scale", "_shape")][0] = 1
    elif kind == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "format":
        _set(folder, {"format": "marlin-24"})
    elif kind == "groups":
        _set(folder, {"config_groups": {}})
    elif kind == "nothing":
        _set(folder, None)
    if kind in ("scale", "missing", "type", "shape"):
        save_file(tensors, file)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("scale", "has a scale that is no positive number"),
        ("missing", "weight_scale is missing in"),
        ("type", "not in whole numbers"),
        ("shape", "is said to have another shape"),
        ("cut", "model.safetensors"),
        ("format", "quantization_config.format is not as paceline export writes it"),
        ("groups", "quantization_config.config_groups.group_0 is not as"),
        ("nothing", "quantization_config is not as"),
    ],
)
def test_a_damaged_folder_is_refused_in_a_sentence(trained, tmp_path, kind, said):
    folder = tmp_path / "int4"
    shutil.copytree(trained / "int4", folder)
    _damage(kind, folder)
    with pytest.raises(InputError, match=said) as caught:
        open_network(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--weights", "int3"], "not one of int8, int4"),
        (["--weights", "int4", "--group", "12"], "no multiple of 8"),
        (["--weights", "int4", "--group", "48"], "which groups of 48 don't divide"),
        (["--weights", "int8", "--format", "dcp"], "leave dcp out"),
    ],
)
def test_what_can_not_be_written_is_refused_in_a_sentence(trained, options, said):
    done = paceline("export", "runs/tiny", "none", *options, folder=trained)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (trained / "none").exists()


def test_a_run_does_not_begin_with_them(trained):
    done = paceline(
        "train", "job.toml", "--set", "name=again", "--set", "train.weights=int4", folder=trained
    )
    assert done.returncode == 2
    assert "quantization_config" in done.stderr
