"""`paceline bench kernels`: what can be known of it without a GPU."""

import json

import pytest
import torch

from benchmarks.kernels.run import as_markdown
from paceline.bench.kernels import command, every, tune
from paceline.bench.kernels.cases import KernelCase, KernelCost
from paceline.bench.kernels.checks import faults
from paceline.bench.kernels.every import cases
from paceline.bench.kernels.rows import CaseTimings
from paceline.bench.kernels.timing import Ceilings, Timing, tensors, variant
from paceline.config.errors import InputError
from paceline.kernels import launch, switch
from paceline.kernels.launch import Kernel, Launch

CPU = torch.device("cpu")


def test_names_tell_cases_apart_and_every_one_costs_something():
    found = list(cases())
    assert len({(case.name, case.shape) for case in found}) == len(found)
    assert all(case.forward.bytes > 0 for case in found)
    assert all(case.cost("both").bytes == sum(_bytes(case)) for case in found if case.backward)


def _bytes(case):
    return case.cost("forward").bytes, case.cost("backward").bytes


SMALL = {
    "norm": ((4, 16),),
    "activations": ((4, 16),),
    "rope": ((4, 2, 1, 8),),
    "batch_norm": ((4, 8, 2),),
    "cross_entropy": ((4, 16),),
    "linear_cross_entropy": ((4, 8, 16),),
    "experts": ((4, 16, 8, 3, 2),),
    "adamw": ((2, 4, 8),),
    "quantize": ((600,),),
}


def test_every_case_runs_and_agrees_with_itself(monkeypatch):
    """In plain torch, at small shapes: inputs fit their functions, forward and backward."""
    monkeypatch.setattr(every, "SHAPES", SMALL)
    monkeypatch.setattr(switch, "use", lambda kernels, device: None)
    names = []
    for case in cases(torch.float32):
        inputs = case.make(torch.Generator().manual_seed(0))
        assert faults(case, inputs, CPU, repetitions=2) == []
        variant(case.function, [inputs], case.directions[-1], "reference", CPU).calls[0]()
        names.append(case.name)
    assert len(set(names)) == len(names) == 15


def test_a_row_says_rate_share_and_ratios():
    timings = {"ours": Timing(2.0, 1.9, 2.1), "eager": Timing(4.0, 4, 4)}
    row = CaseTimings("swiglu", "8 x 8", "forward", timings, 3000, 0, 0.75, ("off by 1",), ())
    assert row.ratios == {"eager": 2.0}
    assert "2.000 ms" in str(row)
    assert "WRONG" in str(row)
    text = as_markdown([row, row._replace(timings={**timings, "liger": Timing(1.0, 1, 1)})])
    assert "| eager / ours | liger / ours |" in text
    assert "| 2.00 |  |" in text, "a peer that is missing has no ratio"
    assert "eager 2.00 x ours, liger 0.50 x ours" in text


ERRORS = {
    "nothing": (lambda call: 0.0, []),
    "off": (lambda call: 1e-3, ["value 0 is 1.0e-03 off"]),
    "not a number": (lambda call: float("nan"), ["value 0 is nan off"]),
    "a race": (lambda call: call * 1e-8, ["value 0 differs between repetitions"]),
}


@pytest.mark.parametrize("what", ERRORS)
def test_what_is_wrong_is_found(what, monkeypatch):
    monkeypatch.setattr(switch, "why_not", lambda device: None)
    error, sentences = ERRORS[what]
    calls = []

    def function(x):
        calls.append(1)
        return x + error(len(calls)) if switch._chosen == "triton" else x * 1

    def make(generator):
        return (torch.ones(64, 8),)

    case = KernelCase("norm", "mine", "64 x 8", make, function, KernelCost(1))
    found = faults(case, case.make(torch.Generator()), CPU)
    assert [any(sentence in each for each in found) for sentence in sentences] == [True] * len(
        sentences
    )
    assert bool(found) == bool(sentences)


def test_a_table_keeps_what_others_wrote(tmp_path):
    launch = {"blocks": {"B": 16}, "num_warps": 4, "num_stages": 2, "peer_ms": 2.0}
    row = {"device": "A", "kernel": "norm.f", "dtype": "bf16", "size": 1, "ms": 1.0, **launch}
    path = tmp_path / "launches.json"
    command.write_table(path, [row, {**row, "device": "B"}])
    command.write_table(path, [{**row, "ms": 0.5}])
    rows = json.loads(path.read_text())["rows"]
    assert [(each["device"], each["ms"]) for each in rows] == [("A", 0.5), ("B", 1.0)]
    assert [each.name for each in tmp_path.iterdir()] == ["launches.json"]


def test_a_trial_is_over_when_its_block_is():
    kernel = Kernel("norm.f", None, "x: *T", lambda size: Launch({"B": size}), (8,))
    x = torch.ones(1)
    with tune.trial(CPU, launch.Launched(kernel, 8, "fp32"), Launch({"B": 1})):
        assert kernel.at(8, x).blocks == {"B": 1}
    assert kernel.at(8, x).blocks == {"B": 8}
    assert launch.faster_than_torch(CPU) == set()


def test_launched_kernels_are_seen_with_their_sizes():
    started = []

    class Function:
        def __getitem__(self, grid):
            return lambda *arguments, **options: started.append((grid, arguments, options))

    kernel = Kernel("norm.f", Function(), "x: *T", lambda size: Launch({"B": size}, 8), (8,))
    with launch.record_launches() as seen:
        kernel((3,), 16, torch.ones(1), "x", CONSTANT=True)
    kernel((3,), 32, torch.ones(1), "x")
    assert seen == [(kernel, 16, "fp32")]
    options = {"CONSTANT": True, "B": 16, "num_warps": 8, "num_stages": 2}
    assert started[0] == ((3,), ("x",), options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(InputError, match="measures a CUDA device and none can be used here"):
        command.kernels_command([], tmp_path / "x.json", tune=True, quick=True)
    assert not list(tmp_path.iterdir())


def test_an_unknown_operator_is_named():
    with pytest.raises(InputError, match='--only "swigul" is no operator; did you mean swiglu'):
        command._chosen(["swigul"])


def test_results_are_a_list_of_tensors():
    x = torch.ones(2)
    assert [each.shape for each in tensors((x, x))] == [(2,), (2,)]
    assert len(tensors(x)) == 1
    assert Ceilings(1.0, 2.0)._asdict() == {"copy_gb_s": 1.0, "matmul_tflop_s": 2.0}


ROW = ("norm.forward", 90, "bf16", 4096, "", "BLOCK=4096 warps=8 stages=2", 40, 0, 0, 6, "")


def test_the_report_lets_no_spill_ship_without_a_reason():
    pytest.importorskip("triton")
    from benchmarks.kernels import report

    def faults(**changes):
        row = dict(zip(report.COLUMNS, ROW, strict=True), **changes)
        return report.faults([tuple(row.values())])

    assert faults() == []
    assert faults(spilled_bytes=8) == [
        "norm.forward (bf16, 4096) on sm_90 spills 8 bytes a thread."
    ]
    assert faults(spilled_bytes=8, why="measured to be faster") == []
    assert faults(shared_bytes=2**18)[0].endswith("wants 262144 bytes of shared memory.")
