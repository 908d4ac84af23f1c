"""Timeline: columns, Chrome trace JSON and back, damaged files (pure)."""

import gzip
import json

import numpy as np
import pytest

from paceline.config.errors import InputError
from paceline.observe.terms import TERM_ID, op_term
from paceline.observe.timeline import COMM, COPY, HOST, IDLE, PROCESSOR, Span, Timeline

# An epoch in microseconds leaves a double 0.25 us: short times here, absolute ones below.
SPANS = [
    Span("gemm", "matmul", 0, "device 7", 10.125, 5.001),
    Span("all_reduce", "exposed_comm.dp", 0, "device 20", 12.0, 30.5),
    Span("gemm", "matmul", 1, "device 7", 11.0, 4.0),
    Span("Memcpy HtoD", "other_kernels", 1, "device 3", 20.0, 1.0, COPY),
    Span("loader", "data_wait", 1, "host", 0.0, 9.0),
    Span("idle", "host_gap", 1, "idle", 15.0, 5.0),
]
STEPS = [(0, 7, 0.0, 50.0), (1, 7, 0.5, 49.5)]


def timeline():
    return Timeline.of(SPANS, STEPS)


def test_spans_come_back_as_given_with_the_layer_of_their_term():
    layers = [PROCESSOR, COMM, PROCESSOR, COPY, HOST, IDLE]
    expected = [span._replace(layer=layer) for span, layer in zip(SPANS, layers, strict=True)]
    assert list(timeline()) == expected
    assert timeline().ranks == (0, 1)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_written_timeline_is_read_back_to_the_nanosecond(tmp_path, name):
    original = timeline()
    shifted = original.spans.copy()
    shifted["start_ns"] += 1_790_857_026_123_456_789
    steps = original.steps.copy()
    for edge in ("start_ns", "end_ns"):
        steps[edge] += 1_790_857_026_123_456_789
    original = Timeline(shifted, steps, original.names, original.streams)
    original.write(tmp_path / name)
    back = Timeline.read(tmp_path / name)
    assert np.array_equal(back.spans, original.spans)
    assert np.array_equal(back.steps, original.steps)
    assert (back.names, back.streams) == (original.names, original.streams)


def test_the_file_has_what_perfetto_shows(tmp_path):
    timeline().write(tmp_path / "t.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    labels = {(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    assert {(0, 0, "rank 0"), (1, 0, "rank 1"), (0, 0, "steps")} <= labels
    assert (1, 1, "device 7") in labels
    assert (0, 3, "device 3") not in labels  # rank 0 has nothing on that stream
    gemm = next(e for e in events if e["name"] == "gemm")
    assert (gemm["cat"], gemm["ts"], gemm["dur"]) == ("matmul", 10.125, 5.001)


def test_an_empty_timeline_survives(tmp_path):
    Timeline.of([], []).write(tmp_path / "t.json")
    assert len(Timeline.read(tmp_path / "t.json")) == 0
    assert len(Timeline.merge([])) == 0


def test_merge_shares_one_table_of_names():
    one = Timeline.of(SPANS[2:], STEPS[1:])
    other = Timeline.of(SPANS[:2], STEPS[:1])
    merged = Timeline.merge([one, other])
    assert sorted(map(str, merged)) == sorted(map(str, timeline()))
    assert len(merged.names) == len(set(merged.names)) == 5
    assert len(merged.steps) == 2


def test_a_term_outside_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="'matmull'; did you mean matmul"):
        Timeline.of([SPANS[0]._replace(term="matmull")], [])
    with pytest.raises(InputError, match="ends before it starts"):
        Timeline.of([SPANS[0]._replace(duration_us=-1.0)], [])


def test_damaged_files_are_refused_in_a_sentence(tmp_path):
    good = tmp_path / "good.json.gz"
    timeline().write(good)
    whole = good.read_bytes()
    spoilt = whole[:60] + b"\xff\xff\xff" + whole[63:]
    contents = {
        "cut.gz": (whole[: len(whole) // 2], "cut or damaged"),
        "spoilt.gz": (spoilt, "cut or damaged"),
        "half.json": (gzip.decompress(whole)[:-20], "cut or damaged"),
        "binary.json": (b"\x00\xff\xfe", "cut or damaged"),
        "other.json": (b'{"a": 1}', "no list traceEvents"),
        "number.json": (b"3", "no list traceEvents"),
    }
    for name, (data, message) in contents.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=message):
            Timeline.read(tmp_path / name)
    with pytest.raises(InputError, match="does not exist"):
        Timeline.read(tmp_path / "absent.json")
    with pytest.raises(InputError, match="can't be read"):
        Timeline.read(tmp_path)


def test_a_foreign_trace_is_no_timeline_of_ours(tmp_path):
    (tmp_path / "t.json").write_text('{"traceEvents": [{"ph": "X", "pid": 1, "tid": 1}]}')
    with pytest.raises(InputError, match="read_kineto"):
        Timeline.read(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("aten::mm", "matmul"),
        ("aten::addmm_", "matmul"),
        ("aten::baddbmm", "matmul"),
        ("aten::convolution_backward", "matmul"),
        ("aten::mkldnn_convolution", "matmul"),
        ("prims::convert_element_type", "other_kernels"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::copy_", "other_kernels"),
        ("mylib::fused_op", "other_kernels"),
        ("cpp_fused_add_0", "other_kernels"),
        ("AddmmBackward0", "host_gap"),
        ("autograd::engine::evaluate_function: MmBackward0", "host_gap"),
    ],
)
def test_operators_by_name(name, term):
    assert op_term(name) == term
    assert term in TERM_ID
