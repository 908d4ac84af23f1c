"""Traces that no profiler can have written: read without the damage, or refused in a sentence."""

import copy
import gzip
import json
import random
import zipfile

import numpy as np
import pytest

from paceline.config.errors import InputError
from paceline.observe import caveats
from paceline.observe.kineto import blocks
from paceline.observe.recorded import read_account
from tests.observe.test_kineto import NODE, event, kernel, launch, span

DEEP, OPENS = 100_000, '{"a":'


def sound(num_steps=2):
    """Steps of a device in a job of two ranks, with all that a reader looks at."""
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]
    about = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "A100", "computeMajor": 8, "computeMinor": 0}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2, "pg_config": groups},
    }
    said = {"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64}
    said |= {"dtype": "Float", "Group size": 2, "Process Group Name": "0"}
    said |= {"Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]"}
    shapes = {"Input_Dims": [[8, 8], [8, 8]], "Input_type": ["float", "float"]}
    events = []
    for n in range(num_steps):
        at = 1000 * n
        events += [
            span(f"ProfilerStep#{n}", at, at + 1000),
            event("aten::mm", at + 10, at + 40, External_id=n, Sequence_number=n, **shapes),
            launch(at + 20, 10 * n + 1),
            event(NODE + "MmBackward0", at + 50, at + 90, tid=3, Fwd_thread_id=1),
            event("record_param_comms", at + 60, at + 80, tid=3, **said),
            launch(at + 70, 10 * n + 2, tid=3),
            kernel("ampere_sgemm_128x64_nn", at + 30, at + 330, 10 * n + 1, stream=7),
            kernel("ncclDevKernel_AllReduce_Sum_f32", at + 300, at + 900, 10 * n + 2, 20, **said),
        ]
    return {**about, "traceEvents": events, "traceName": "x.json"}


def read(path, data):
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    return read_account(path)


def more(count=40):
    """The sound trace among as many operators that one bad event is a small part of them."""
    trace = sound()
    extra = [event("aten::add", 400 + n, 401 + n) for n in range(count)]
    return trace | {"traceEvents": [*trace["traceEvents"], *extra]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ts": 1e300},
        {"ts": -1e300},
        {"ts": None},
        {"ts": float("nan")},
        {"ts": float("inf")},
        {"ts": "soon"},
        {"ts": [1]},
        {"dur": -5},
        {"dur": 1e18},
        {"dur": None},
        {"dur": "long"},
        {"dur": float("nan")},
        {"name": 7},
        {"name": None},
        {"pid": {"a": 1}},
        {"ph": 3},
    ],
    ids=str,
)
def test_an_event_that_no_profiler_writes_is_left_out_and_counted(tmp_path, wrong):
    trace = more()
    trace["traceEvents"].append(event("aten::bad", 500, 510) | wrong)
    account, whole = read(tmp_path / "a.json", trace), read(tmp_path / "b.json", more())
    told = account.caveat(caveats.EVENTS_LEFT_OUT)
    assert told.numbers["events"] == 1
    assert "1 events beside" in told.sentence
    np.testing.assert_array_equal(account.terms_ns, whole.terms_ns)
    assert whole.caveats == ()


@pytest.mark.parametrize("wrong", ["ts", "dur"])
def test_an_event_without_its_time_is_left_out(tmp_path, wrong):
    trace, bad = more(), event("aten::bad", 500, 510)
    del bad[wrong]
    trace["traceEvents"].insert(0, bad)  # the first tells where time begins, if it does
    assert read(tmp_path / "a.json", trace).caveat(caveats.EVENTS_LEFT_OUT).numbers["events"] == 1


@pytest.mark.parametrize("wrong", [3, "text", None, [], True])
def test_what_is_no_event_is_left_out(tmp_path, wrong):
    trace = more()
    trace["traceEvents"].insert(5, wrong)
    assert read(tmp_path / "a.json", trace).caveat(caveats.EVENTS_LEFT_OUT).numbers["events"] == 1


@pytest.mark.parametrize(
    "args",
    [
        3,
        [],
        {"correlation": "x"},
        {"correlation": 1 << 70},
        {"Process Group Ranks": {"a": 1}},
        {"In msg nelems": 1 << 80, "dtype": "Float"},
        {"Group size": 1 << 40},
        {"Input Dims": [[1 << 90], "x", [None]], "Input type": ["float", 3, {}]},
        {"stream": {}},
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [2, 4, 6, 7])
def test_arguments_that_can_not_be_read_cost_no_event(tmp_path, args, at):
    trace = more()
    trace["traceEvents"][at]["args"] = args
    account = read(tmp_path / "a.json", trace)
    assert len(account.steps) == 2
    assert (account.terms_ns.sum(axis=1) == 1_000_000).all()


def test_numbers_may_be_text_and_ids_may_come_twice(tmp_path):
    trace, other = sound(), sound()
    for one in trace["traceEvents"]:
        one["ts"], one["dur"] = str(one["ts"]), str(one["dur"])
    other["traceEvents"].insert(3, other["traceEvents"][2])
    for account in (read(tmp_path / "a.json", trace), read(tmp_path / "b.json", other)):
        assert account.caveats == ()
        assert account.term_s("matmul") == pytest.approx(300e-6)


@pytest.mark.parametrize(
    "streams", [("0x0", "0x7f3a10"), (7, "20"), ("null stream", "default"), (0, 1 << 70)], ids=str
)
def test_streams_may_be_any_number_or_text(tmp_path, streams):
    # ROCm 6.2 writes "0x0".
    trace = sound()
    for one in trace["traceEvents"]:
        if one["cat"] == "kernel":
            one["args"]["stream"] = streams[one["name"].startswith("nccl")]
    account, whole = read(tmp_path / "a.json", trace), read(tmp_path / "b.json", sound())
    assert account.caveats == ()
    np.testing.assert_array_equal(account.terms_ns, whole.terms_ns)


def test_text_that_json_forbids_is_repaired(tmp_path):
    text = json.dumps(more()).replace('"aten::mm"', '"aten::mm", "why": NaN', 1).encode()
    text = text.replace(b"aten::mm", b"aten::\xff\x01mm", 1)
    account = read(tmp_path / "a.json", b"\xef\xbb\xbf" + text)
    assert account.caveats == ()
    assert len(account.steps) == 2


def nested(opens, closes):
    return opens * DEEP + "1" + closes * DEEP


def test_damage_that_leaves_nothing_to_read_is_refused_in_a_sentence(tmp_path):
    text = json.dumps(sound())
    header = sound() | {"distributedInfo": {"rank": 1 << 40}}
    damaged = {
        "args": text.replace('"args": {}', f'"args": {nested(OPENS, "}")}', 1),
        "dims": text.replace("[[8, 8], [8, 8]]", nested("[", "]"), 1),
        "header": text.replace('"schemaVersion": 1', f'"x": {nested("[", "]")}', 1),
        "rank": json.dumps(header),
        "info": json.dumps(sound() | {"distributedInfo": [1]}),
        "base": json.dumps(sound() | {"baseTimeNanoseconds": 1 << 63}),
        "object": json.dumps(sound() | {"traceEvents": {"a": sound()["traceEvents"]}}),
        "null": json.dumps(sound() | {"traceEvents": None}),
        "text": '"traceEvents"',
        "numbers": json.dumps(sound() | {"traceEvents": list(range(50))}),
        "encoding": text.encode("utf-16"),
        "zeros": bytes(10_000),
        "spaces": " " * 10_000,
    }
    every = sound()
    for one in every["traceEvents"]:
        one["dur"] = -1
    damaged["negative"] = json.dumps(every)
    for name, data in damaged.items():
        data = data.encode() if isinstance(data, str) else data
        with pytest.raises(InputError) as refused:
            read(tmp_path / f"{name}.json", data)
        assert "\n" not in str(refused.value), name
        assert len(str(refused.value)) < 500, name


def test_other_files_are_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "trace.json.gz", "w") as archive:
        archive.writestr("trace.json", json.dumps(sound()))
    with pytest.raises(InputError, match="is a zip archive; give the trace itself"):
        read_account(tmp_path / "trace.json.gz")
    with pytest.raises(InputError, match="is packed with zstd"):
        read(tmp_path / "t.json", b"\x28\xb5\x2f\xfd" + bytes(100))


def test_a_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_RATIO_COUNTS_FROM", 1 << 20)
    monkeypatch.setattr(blocks, "_MOST_BYTES_OF_ONE", 4 << 20)
    text = json.dumps(sound())
    cases = {
        "unpacks to more than 400 times": text[:-1] + "," + " " * (4 << 20) + '"a": 1}',
        "MiB for one event": text.replace('"args": {}', '"args": {"a": "%s"}' % ("x" * (40 << 20))),
        "MiB for what stands before": '{"a": "%s", ' % ("x" * (40 << 20)) + text[1:],
    }
    for sentence, data in cases.items():
        packed = gzip.compress(data.encode())
        if "MiB" in sentence:
            monkeypatch.setattr(blocks, "_MOST_RATIO", 1 << 20)
        with pytest.raises(InputError, match=sentence):
            read(tmp_path / "t.json.gz", packed)


# --- at random ----------------------------------------------------------------------------------

_VALUES = (
    None,
    True,
    -1,
    1e300,
    1 << 65,
    float("nan"),
    "",
    "x",
    "\ud800",
    [],
    {},
    [[1]],
    {"a": {}},
)


def places(data, path=()):
    """Paths to all values within plain data."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def changed(rng, trace, everywhere):
    """A trace with some of its values replaced, removed or doubled."""
    trace = copy.deepcopy(trace)
    for path in rng.sample(everywhere, rng.choice((1, 2, 5))):
        inner = trace
        try:
            for key in path[:-1]:
                inner = inner[key]
            if rng.random() < 0.2:
                del inner[path[-1]]
            else:
                inner[path[-1]] = rng.choice(_VALUES)
        except (KeyError, IndexError, TypeError):
            continue  # a change before took it away
    return json.dumps(trace).encode()


def torn(rng, data):
    """Bytes with a piece cut out, doubled, overwritten or flipped."""
    one, other = sorted(rng.sample(range(len(data)), 2))
    other = min(other, one + rng.choice((1, 8, 200)))
    kind = rng.randrange(4)
    if kind == 0:
        return data[:one] + data[other:]
    if kind == 1:
        return data[:other] + data[one:]
    if kind == 2:
        return data[:one] + rng.randbytes(other - one) + data[other:]
    return data[:one] + bytes([data[one] ^ (1 << rng.randrange(8))]) + data[one + 1 :]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_damaged_there_is_an_account_or_a_sentence(tmp_path, seed):
    rng, trace = random.Random(seed), more(20)
    everywhere, data = list(places(trace)), json.dumps(more(20)).encode()
    num_read, sentences = 0, []
    for number in range(60):
        kind = number % 4
        if kind < 2:
            damaged = changed(rng, trace, everywhere)
        elif kind == 2:
            damaged = torn(rng, data)
        else:
            damaged = torn(rng, gzip.compress(data))
        try:
            account = read(tmp_path / "t.json", damaged)
        except InputError as refused:
            sentences.append(str(refused))
        else:
            lengths = account.steps["end_ns"] - account.steps["start_ns"]
            assert (account.terms_ns.sum(axis=1) == lengths).all()
            assert (account.terms_ns >= 0).all()
            assert len(lengths) > 0
            num_read += 1
    print(num_read, len(sentences))
    assert num_read > 5
    assert len(sentences) > 5
    assert all("\n" not in sentence for sentence in sentences)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_wherever_a_file_is_cut_its_steps_are_whole_or_it_is_refused(tmp_path, pack):
    trace = sound(num_steps=12)
    kinds = ("user_annotation", "cpu_op", "cuda_runtime", "kernel")  # as Kineto writes them
    trace["traceEvents"].sort(key=lambda one: (kinds.index(one["cat"]) // 2, one["ts"]))
    data = pack(json.dumps(trace).encode())
    whole = read(tmp_path / "t.json", data)
    by_step = dict(zip(whole.steps["step"].tolist(), whole.terms_ns.tolist(), strict=True))
    counts = set()
    for end in range(1, len(data) - 30, max(1, len(data) // 60)):
        try:
            account = read(tmp_path / "t.json", data[:end])
        except InputError:
            counts.add(0)
            continue
        assert account.caveat(caveats.CUT), end
        counts.add(len(account.steps))
        for row, terms in zip(account.steps, account.terms_ns.tolist(), strict=True):
            assert terms == by_step[int(row["step"])], end
    assert 0 in counts
    assert max(counts) >= 9
