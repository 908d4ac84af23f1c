"""Which implementation of attention runs: the rule, what is remembered, what a CPU can measure."""

import warnings

import pytest
import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels.attention import (
    AttentionShape,
    BackendChoice,
    attend,
    backends,
    block_mask,
    choose,
    measure,
    reference,
    rule,
    table,
)

CPU = torch.device("cpu")
HOPPER, AMPERE = (9, 0), (8, 0)
SHAPE = AttentionShape(2, 4, 2, 32, 16, 16)


@pytest.fixture(autouse=True)
def _no_table(monkeypatch):
    for name in (table.OWN, table.OWN_LAUNCHES):
        monkeypatch.delenv(name, raising=False)


def _all(backend: str) -> bool:
    return True


def _only(*names: str):
    return lambda backend: backend in names


@pytest.mark.parametrize(
    ("capability", "mask", "head_dim", "can", "backend"),
    [
        (HOPPER, "causal", 128, _all, "cudnn"),
        (HOPPER, "none", 64, _all, "cudnn"),
        (HOPPER, "causal", 192, _all, "flash"),
        (HOPPER, "causal", 128, _only("flash", "efficient"), "flash"),
        (HOPPER, "causal", 192, _only("efficient"), "efficient"),
        (HOPPER, "window", 128, _all, "flex"),
        (HOPPER, "documents", 128, _only("efficient"), "efficient"),
        (HOPPER, "pairs", 128, _all, "efficient"),
        (AMPERE, "causal", 128, _all, "flash"),
        ((12, 0), "causal", 128, _all, "flash"),
        (AMPERE, "pairs", 128, _only(), "default"),
        (None, "causal", 128, _all, "default"),
    ],
)
def test_the_rule(capability, mask, head_dim, can, backend):
    shape = SHAPE._replace(head_dim=head_dim, value_dim=head_dim)
    choice = rule(shape, torch.bfloat16, capability, mask, can)
    assert choice.backend == backend
    assert choice.why


def test_32_bits_are_left_to_torch():
    choice = rule(SHAPE, torch.float32, HOPPER, "causal", _all)
    assert choice.backend == "default"
    assert "float32" in choice.why


def test_a_cuda_device_is_asked_what_it_is_and_what_torch_takes(monkeypatch):
    asked = []

    def says(backend: str, *call: object) -> bool:
        asked.append(backend)
        return backend == "flash"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    monkeypatch.setattr(backends, "_torch_says", says)
    choice = choose(SHAPE, torch.bfloat16, torch.device("cuda"))
    assert choice.backend == "flash"
    assert asked == ["cudnn", "flash"]


def test_a_cpu_without_a_measurement_has_torchs_choice():
    choice = choose(SHAPE, torch.float32, CPU)
    assert choice.backend == "default"
    assert "no CUDA device" in choice.why


def test_a_measurement_is_remembered(tmp_path, monkeypatch):
    path = tmp_path / "new" / "attention.json"
    made = measure(SHAPE, torch.float32, CPU, path=path, rounds=2)
    assert made.backend in ("flash", "math")
    assert "flash" in made.why
    assert "math" in made.why
    assert choose(SHAPE, torch.float32, CPU, path=path) == made
    alike = SHAPE._replace(seq_len=31)  # of the same bucket
    assert choose(alike, torch.float32, CPU, path=path) == made
    longer = SHAPE._replace(seq_len=33)
    assert choose(longer, torch.float32, CPU, path=path).backend == "default"
    assert choose(SHAPE, torch.float32, CPU, "none", path).backend == "default"
    assert choose(SHAPE, torch.float64, CPU, path=path).backend == "default"
    monkeypatch.setattr(torch, "__version__", "0.0")  # its kernels may have changed
    assert choose(SHAPE, torch.float32, CPU, path=path).backend == "default"


def test_the_fastest_is_chosen_and_others_stay_in_the_file(tmp_path, monkeypatch):
    path = tmp_path / "attention.json"
    monkeypatch.setenv(table.OWN, str(path))
    monkeypatch.setattr(table, "_times", lambda *call: {"flash": 2.0, "math": 1.0})
    assert measure(SHAPE, torch.float32, CPU).backend == "math"
    monkeypatch.setattr(table, "_times", lambda *call: {"flash": 3.0, "math": 4.0})
    assert measure(SHAPE, torch.float32, CPU, "none").backend == "flash"
    assert choose(SHAPE, torch.float32, CPU) == BackendChoice(
        "math", "measured on this device: flash 2 ms, math 1 ms"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["attention.json"]


def test_the_file_is_beside_ones_own_launches(tmp_path, monkeypatch):
    monkeypatch.setenv(table.OWN_LAUNCHES, str(tmp_path / "launches.json"))
    assert table.default_path() == tmp_path / "attention.json"


def test_what_was_measured_but_is_not_taken_now_is_not_chosen(tmp_path, monkeypatch):
    path = tmp_path / "attention.json"
    monkeypatch.setattr(table, "_times", lambda *call: {"flash": 1.0})
    measure(SHAPE, torch.float32, CPU, path=path)
    wider = SHAPE._replace(value_dim=8)
    measure(wider, torch.float32, CPU, path=path)
    assert choose(wider, torch.float32, CPU, path=path).backend == "default"


def test_a_measurement_needs_a_place_and_something_to_run(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="No file was named"):
        measure(SHAPE, torch.float32, CPU)
    monkeypatch.setattr(table, "candidates", lambda *call: ())
    with pytest.raises(InputError, match="no implementation"):
        measure(SHAPE, torch.float32, CPU, path=tmp_path / "attention.json")


def _problem(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    heads = (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    return [torch.randn(2, n, 32, 16, dtype=dtype, requires_grad=True) for n in heads]


def _assert_alike(out: Tensor, visible: Tensor, inputs: list[Tensor]) -> None:
    wide = [each.detach().double().requires_grad_() for each in inputs]
    expected = reference.attend(*wide, visible)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    for mine, right in zip(
        grads, torch.autograd.grad((expected * weights).sum(), wide), strict=True
    ):
        torch.testing.assert_close(mine.double(), right, atol=1e-5, rtol=1e-5)


DOCUMENTS = torch.tensor([0] * 10 + [1] * 22).expand(2, -1)
MASKS = {"causal": (None, None), "window": (5, None), "documents": (9, DOCUMENTS)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["default", "flash", "math"])
def test_each_implementation_of_the_cpu_is_the_reference(backend, mask):
    window, documents = MASKS[mask]
    inputs = _problem()
    visible = reference.visible_pairs(32, window, documents)
    out = attend(*inputs, None if mask == "causal" else visible, backend)
    _assert_alike(out, visible, inputs)


@pytest.mark.parametrize("mask", MASKS)
def test_flex_attention_sees_what_the_reference_sees(mask):
    window, documents = MASKS[mask]
    inputs = _problem()
    sees = block_mask(32, window, documents, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled, it writes out all scores
        out = attend(*[each.detach() for each in inputs], sees, "flex")
    expected = reference.attend(*inputs, reference.visible_pairs(32, window, documents))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_without_a_mask_all_is_seen():
    inputs = _problem()
    out = attend(*inputs, None, "flash", is_causal=False)
    _assert_alike(out, torch.ones(32, 32, dtype=torch.bool), inputs)


def test_it_compiles_as_one_graph():
    inputs = _problem()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, None, "flash")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares implementations of CUDA")
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_implementations_of_cuda_are_measured(tmp_path, mask):
    device, shape = torch.device("cuda"), AttentionShape(2, 8, 2, 512, 64, 64)
    path = tmp_path / "attention.json"
    made = measure(shape, torch.bfloat16, device, mask, path, rounds=3)
    assert made == choose(shape, torch.bfloat16, device, mask, path)
