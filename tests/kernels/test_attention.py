"""Which implementation of attention runs: the rule, what is remembered, what a CPU can measure."""

import warnings

import pytest
import torch
from torch import Tensor

from paceline.config.errors import InputError
from paceline.kernels.attention import backends, choose, table
from paceline.kernels.attention.backends import attend
from paceline.kernels.attention.rule import AttentionShape, BackendChoice, rule
from paceline.kernels.attention.table import measure

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
    ("capability", "head_dim", "can", "backend"),
    [
        (HOPPER, 128, _all, "cudnn"),
        (HOPPER, 64, _all, "cudnn"),
        (HOPPER, 192, _all, "flash"),
        (HOPPER, 128, _only("flash", "efficient"), "flash"),
        (HOPPER, 192, _only("efficient"), "efficient"),
        (AMPERE, 128, _all, "flash"),
        ((12, 0), 128, _all, "flash"),
        (AMPERE, 128, _only(), "default"),
        (None, 128, _all, "default"),
    ],
)
def test_the_rule(capability, head_dim, can, backend):
    shape = SHAPE._replace(head_dim=head_dim, value_dim=head_dim)
    choice = rule(shape, torch.bfloat16, capability, can)
    assert choice.backend == backend
    assert choice.why


def test_32_bits_are_left_to_torch():
    choice = rule(SHAPE, torch.float32, HOPPER, _all)
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
    assert choose(SHAPE, torch.float64, CPU, path=path).backend == "default"
    monkeypatch.setattr(torch, "__version__", "0.0")  # its kernels may have changed
    assert choose(SHAPE, torch.float32, CPU, path=path).backend == "default"


def test_the_fastest_is_chosen_and_others_stay_in_the_file(tmp_path, monkeypatch):
    path = tmp_path / "attention.json"
    monkeypatch.setenv(table.OWN, str(path))
    monkeypatch.setattr(table, "_times", lambda *call: {"flash": 2.0, "math": 1.0})
    assert measure(SHAPE, torch.float32, CPU).backend == "math"
    monkeypatch.setattr(table, "_times", lambda *call: {"flash": 3.0, "math": 4.0})
    assert measure(SHAPE._replace(seq_len=64), torch.float32, CPU).backend == "flash"
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


@pytest.mark.parametrize("text", ["{", "{}", '{"rows": 1}', '{"rows": [{"device": "cpu"}]}'])
def test_a_file_that_is_no_table_is_refused_in_a_sentence(tmp_path, text):
    path = tmp_path / "attention.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"attention\.json .*bench kernels --tune"):
        choose(SHAPE, torch.float32, CPU, path)


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


def _written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    ahead = torch.ones(32, 32, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(ahead, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("backend", ["default", "flash", "math"])
def test_each_implementation_of_the_cpu_is_softmax_of_scores(backend):
    inputs = _problem()
    wide = [each.detach().double().requires_grad_() for each in inputs]
    out, expected = attend(*inputs, backend), _written_out(*wide)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    for mine, right in zip(
        grads, torch.autograd.grad((expected * weights).sum(), wide), strict=True
    ):
        torch.testing.assert_close(mine.double(), right, atol=1e-5, rtol=1e-5)


def test_flex_attention_is_softmax_of_scores():
    inputs = [each.detach() for each in _problem()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled, it writes out all scores
        out = attend(*inputs, "flex")
    torch.testing.assert_close(out, _written_out(*inputs), atol=1e-5, rtol=1e-5)


def test_it_compiles_as_one_graph():
    inputs = _problem()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, "flash")

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares implementations of CUDA")
def test_implementations_of_cuda_are_measured(tmp_path):
    device, shape = torch.device("cuda"), AttentionShape(2, 8, 2, 512, 64, 64)
    path = tmp_path / "attention.json"
    made = measure(shape, torch.bfloat16, device, path, rounds=3)
    assert made == choose(shape, torch.bfloat16, device, path)
