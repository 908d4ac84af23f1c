"""Which implementation runs, which launch is chosen, and where that is written down."""

import json

import pytest
import torch

from paceline.config.errors import InputError
from paceline.kernels import launch, switch
from paceline.kernels.launch import Kernel, Launch

CPU = torch.device("cpu")
ROWS = [
    {"device": "cpu", "kernel": "norm.forward", "dtype": "fp32", "size": size, "blocks": {"B": b},
     "num_warps": 4, "num_stages": 2, "ms": ms, "peer_ms": 1.0}
    for size, b, ms in ((1024, 256, 0.5), (4096, 512, 0.9))
]  # fmt: skip
KERNEL = Kernel("norm.forward", None, "x: *T", lambda size: Launch({"B": size}), (1024,))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A function that makes rows one's own table."""

    def write(rows):
        path = tmp_path / "launches.json"
        path.write_text(json.dumps({"rows": rows}))
        monkeypatch.setenv(launch.OWN, str(path))
        launch.table.cache_clear()

    yield write
    launch.table.cache_clear()


def test_reference_and_auto_leave_a_cpu_to_torch():
    for choice in ("reference", "auto"):
        with switch.using(choice, CPU):
            assert not switch.takes("activations", torch.ones(1))


def test_kernels_that_cannot_run_are_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(InputError, match=r'layout.kernels = "triton" was given, but .*"reference"'):
        switch.use("triton", CPU)
    with pytest.raises(InputError), switch.using("triton", CPU):
        pass


def test_the_interpreter_takes_what_kernels_are_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(switch, "why_not", lambda device: None)
    with switch.using("triton", CPU):
        assert switch.takes("activations", torch.ones(1))
        assert not switch.takes("activations", torch.ones(1, dtype=torch.float64))
    assert not switch.takes("activations", torch.ones(1))


def test_the_rule_decides_where_the_table_says_nothing(table):
    table([])
    assert KERNEL.at(2048, torch.ones(1)).blocks == {"B": 2048}


def test_the_next_larger_row_decides_elsewhere(table):
    table(ROWS)
    assert KERNEL.at(1000, torch.ones(1)).blocks == {"B": 256}
    assert KERNEL.at(1024, torch.ones(1)).blocks == {"B": 256}
    assert KERNEL.at(1025, torch.ones(1)).blocks == {"B": 512}
    assert KERNEL.at(5000, torch.ones(1)).blocks == {"B": 5000}, "larger than all: the rule"
    assert KERNEL.at(1024, torch.ones(1, dtype=torch.bfloat16)).blocks == {"B": 1024}


@pytest.mark.parametrize("text", [None, "{", '{"rows": [{"device": "cpu"}]}', '{"rows": 1}'])
def test_what_is_no_table_is_refused(text, tmp_path, monkeypatch):
    path = tmp_path / "launches.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(launch.OWN, str(path))
    launch.table.cache_clear()
    with pytest.raises(InputError, match=r"launches.json .* a table that paceline bench kernels"):
        launch.table()
    launch.table.cache_clear()


def test_an_operator_pays_where_all_its_rows_beat_torch(table):
    table(ROWS)
    assert launch.faster_than_torch(CPU) == {("norm", torch.float32)}
    table([*ROWS, {**ROWS[0], "kernel": "norm.backward", "ms": 1.1}])
    assert launch.faster_than_torch(CPU) == set()


def test_what_a_kernel_takes_is_read_by_type():
    kernel = Kernel("a.b", None, "x out: *T; sums: *fp32; width: i32", lambda _: Launch({}), ())
    assert kernel.argument_types == {"x": "*T", "out": "*T", "sums": "*fp32", "width": "i32"}


def test_blocks_are_powers_of_two():
    assert [launch.next_power_of_2(size) for size in (0, 1, 2, 3, 4096, 4097)] == [
        *(1, 1, 2, 4, 4096, 8192)
    ]


def test_rows_are_seen_in_place_where_they_lie_in_one_piece():
    x = torch.arange(24.0).reshape(4, 6)
    assert launch.as_rows(x[:, :3]).stride() == (6, 1)
    assert launch.as_rows(x[:, ::2]).stride() == (3, 1)
    assert launch.as_rows(torch.tensor(3.0)).shape == (1, 1)
    assert launch.as_rows(x.reshape(2, 2, 6)).data_ptr() == x.data_ptr()
