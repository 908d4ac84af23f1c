"""Networks for small devices: each file is run by its own runtime, and judged by what it finds."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from paceline.config.errors import InputError, RunError
from paceline.observe.run import Run
from paceline.serve.edge import command
from paceline.serve.edge.command import STATED, VERDICT, Budget, Stated, export_for_edge
from paceline.serve.network import open_network
from paceline.train.kept_weights import weights_of
from tests.command_line import paceline, write_tiny_job

NEEDED = {
    "gguf": ("gguf",),
    "onnx": ("onnxscript", "onnxruntime"),
    "executorch": ("executorch",),
    "safetensors": (),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a run is."""
    folder = tmp_path_factory.mktemp("edge")
    write_tiny_job(folder)
    done = paceline("train", "job.toml", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return Run(folder / "runs/tiny")


def needs(form):
    for name in NEEDED[form]:
        pytest.importorskip(name, reason=f"needs {name}, of an extra of its own")


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("form", NEEDED)
def test_a_file_is_run_and_what_was_found_stands_beside_it(tmp_path, run, form, weights):
    needs(form)
    found = export_for_edge(run, tmp_path / "out", form, weights)
    told = json.loads((tmp_path / "out" / VERDICT).read_text())
    assert told["weights"] == weights
    assert told["step"] == 12
    assert told["num_bytes"] == found.num_bytes > 10_000
    assert 0 < found.logit_error < STATED[weights].logit_error
    assert abs(found.loss_difference) < STATED[weights].loss_difference
    assert 2 < found.loss_of_run < 6
    if "reader" not in found.runtime:
        assert found.tokens_per_s > 0
        assert found.resident_bytes > 0
        assert found.runtime in told["runtime"]


def test_executorch_that_is_not_there_is_said(tmp_path, run, monkeypatch):
    needed = "executorch.backends.xnnpack.partition.xnnpack_partitioner"
    monkeypatch.setitem(sys.modules, needed, None)
    with pytest.raises(InputError, match=r"pip install 'paceline\[executorch\]'"):
        export_for_edge(run, tmp_path / "out", "executorch")
    assert not [*tmp_path.iterdir()]


def test_safetensors_are_read_by_their_library_and_by_serve(tmp_path, run):
    export_for_edge(run, tmp_path / "out", "safetensors", "int4")
    names = load_file(tmp_path / "out/model.safetensors")
    packed = names["model.layers.0.self_attn.q_proj.weight_packed"]
    assert packed.shape == (32, 32 // 8)
    network = open_network(tmp_path / "out")
    _, weights = weights_of(run)
    tokens = torch.arange(8)[None] + 97
    exact = open_network(run.path).decoder
    assert exact.state_dict().keys() == weights.keys()
    with torch.no_grad():
        wanted, found = exact(tokens), network.decoder(tokens).float()
    assert (found - wanted).norm() < STATED["int4"].logit_error * wanted.norm()


def test_a_budget_takes_the_most_bits_that_fit(tmp_path, run):
    sizes = {}
    for weights in ("fp32", "int8"):
        found = export_for_edge(run, tmp_path / weights, "safetensors", weights)
        sizes[weights] = found.num_bytes
    for most, wanted in ((sizes["fp32"], "fp32"), (sizes["int8"], "int8")):
        found = export_for_edge(run, tmp_path / f"most-{most}", "safetensors", None, Budget(most))
        assert found.weights == wanted


@pytest.mark.parametrize(
    ("budget", "said"),
    [("1 KB", "of 1 kB"), ("50 MB, 0.000001 ms", "ms a token of 1e-06")],
)
def test_what_is_over_the_budget_is_not_kept(folder, run, budget, said):
    done = paceline(
        "export", "runs/tiny", "over", "--for", "edge", "--weights", "int4", "--budget", budget,
        folder=folder,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert not [*folder.glob("*over*")]


def test_a_time_that_nothing_here_measures_is_refused_before_anything_is_tried(
    tmp_path, run, monkeypatch
):
    monkeypatch.setattr(command, "has_llama", lambda: False)
    monkeypatch.setattr(command, "write_gguf_of", None)
    with pytest.raises(InputError, match="pip install llama-cpp-python, or leave the time out"):
        export_for_edge(run, tmp_path / "out", "gguf", None, Budget(1e9, 1e9))
    assert not [*tmp_path.iterdir()]


def test_what_differs_by_more_than_is_stated_is_not_kept(tmp_path, run, monkeypatch):
    monkeypatch.setitem(STATED, "int4", Stated(1e-6, 1e-6))
    with pytest.raises(RunError, match=r"int4 has logits .* off"):
        export_for_edge(run, tmp_path / "out", "safetensors", "int4")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("50 MB", Budget(50e6)),
        ("1.5MiB", Budget(1.5 * 2**20)),
        ("2 gb, 5 ms", Budget(2e9, 5.0)),
    ],
)
def test_budgets_are_read(text, most):
    assert Budget.parse(text) == most


@pytest.mark.parametrize("text", ["", "50", "50 parsecs", "5 MB, soon", "1.2.3 MB"])
def test_other_budgets_are_refused(text):
    with pytest.raises(InputError, match=r"--budget .* is no size"):
        Budget.parse(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--for", "mars"), "--for mars is not known"),
        (("--for", "edge", "--format", "dcp"), "--format dcp is not one of edge's"),
        (("--for", "edge", "--dtype", "bf16"), "--dtype has no effect in --for edge"),
        (("--budget", "5 MB"), "--budget has no effect in an export without --for edge"),
        (("--group", "32"), "--group has no effect in an export without --weights int4"),
        (
            ("--weights", "int8", "--group", "64"),
            "--group has no effect in an export without --weights int4",
        ),
        (
            ("--format", "gguf", "--weights", "int4", "--group", "32"),
            "--group has no effect in --format gguf with --weights int4",
        ),
        (
            ("--format", "gguf", "--weights", "int8", "--dtype", "bf16"),
            "--dtype has no effect in --format gguf with --weights int8",
        ),
    ],
)
def test_options_that_can_not_be_are_refused(folder, options, said):
    done = paceline("export", "runs/tiny", "no", *options, folder=folder)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_run_that_is_run_needs_no_torch():
    """So that the memory that is measured is the runtime's."""
    code = "import sys, paceline.serve.edge.runtime as r; print(r.__file__)"
    file = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    code = f"import runpy, sys; runpy.run_path({file!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
