"""A server's record: terms that sum to its time, what a finding needs, files that are checked."""

import json
import time
from functools import partial

import pytest

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.explain.serving import explain_record
from paceline.generate.engine import Engine
from paceline.plan.serving.record import (
    RECORD_FILE,
    PlannedTerms,
    Record,
    RecordHead,
    RecordSecond,
    read_record,
)
from paceline.serve.record import Recorder
from tests.command_line import paceline
from tests.generate.networks import MODELS, built
from tests.serve.served import serve

HEAD = RecordHead(name="small", max_sequences=8, max_tokens=64, blocks=100, planned="a test")


def test_a_server_writes_what_explain_reads(tmp_path):
    folder = tmp_path / "record"
    begun_s = time.perf_counter()
    with serve(record=partial(Recorder, folder, "small", tmp_path)) as server:
        for prompt in ("one text", "another text", "and a third one"):
            answer = server.post(prompt=prompt, max_tokens=12, ignore_eos=True)
            assert answer.status_code == 200
            time.sleep(0.4)
    whole_s = time.perf_counter() - begun_s
    record = read_record(folder / RECORD_FILE)
    total = record.total
    assert record.head.planned is None
    assert total.first_tokens == 3
    assert total.prompt_tokens == len("one text") + len("another text") + len("and a third one")
    assert total.text_tokens == 3 * 12
    assert total.steps == 3 * 12
    assert 0 < total.queue_s < total.ttft_s
    assert total.idle_s > 0.7
    found = explain_record(record)
    assert 0.8 < found.whole_s < whole_s
    done = paceline("explain", str(folder), "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["total"] == total.model_dump()
    assert "what to change" in done.stdout
    done = paceline("explain", str(folder), "--all", folder=tmp_path)
    assert done.returncode == 2
    assert "--all has no effect" in done.stderr
    with pytest.raises(InputError, match="is there already"):
        Recorder(folder, "small", tmp_path, Engine(built(MODELS["grouped"]), Serving()))


def test_texts_that_are_cancelled_leave_nothing_behind(tmp_path):
    engine = Engine(built(MODELS["grouped"]), Serving(block_size=4, max_tokens=8))
    recorder = Recorder(tmp_path, "small", tmp_path, engine)
    text = engine.submit(list(range(30)), Sampling(max_tokens=3))
    engine.step()
    engine.cancel(text)
    assert len(recorder._seen) == 1
    recorder.close()
    assert not recorder._seen
    assert read_record(tmp_path / RECORD_FILE).total.first_tokens == 0


QUIET = RecordSecond(
    second=0,
    steps=100,
    idle_s=0.1,
    gap_s=0.05,
    host_s=0.05,
    pass_s=1.0,
    planned=PlannedTerms(host=0.05, weights=0.3, products=0.5, attention=0.2),
    prompt_tokens=100,
    text_tokens=700,
    rows=800,
    running=700,
    first_tokens=10,
    ttft_s=1.0,
    queue_s=0.1,
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"queue_s": 0.8, "most_waiting": 9}, "80.0% of the time to the first token is waiting"),
        ({"preemptions": 3}, "raise serve.kv_gb"),
        ({"gap_s": 0.9}, "of the busy time is the host's, most of it between steps"),
        ({"host_s": 0.9}, "most of it choosing tokens"),
        ({"pass_s": 1.4}, "Passes take 1.40 x what was measured"),
        (
            {"planned": PlannedTerms(weights=0.8, products=0.2), "running": 150},
            "80.0% of a pass is reading them, for 1.5 texts",
        ),
        ({"idle_s": 9.0}, "fewer replicas"),
        ({"steps": 0}, "Nothing was asked for"),
    ],
)
def test_each_finding_comes_with_its_cause_alone(changes, said):
    quiet = explain_record(Record(head=HEAD, total=QUIET))
    assert quiet.findings == ()
    assert quiet.whole_s == pytest.approx(1.2)
    found = explain_record(Record(head=HEAD, total=QUIET.replace(**changes)))
    assert len(found.findings) == 1
    assert said in found.findings[0]


def test_seconds_add_up():
    summed = QUIET.replace(least_free=4, most_waiting=2) + QUIET.replace(second=1, most_waiting=1)
    assert (summed.steps, summed.least_free, summed.most_waiting) == (200, 4, 2)
    assert summed.planned.products == 1.0
    assert summed.second == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{}\n", "line 1, lacks name"),
        (HEAD.model_dump_json() + "\n[]\n", "line 2, "),
        (HEAD.model_dump_json() + '\n{"second": 1, "steps": -1}\n', "line 2, holds steps = -1"),
        (HEAD.model_dump_json() + '\n{"second": 1, "steps": 1e999}\n', "line 2, "),
    ],
)
def test_a_damaged_record_is_refused_in_a_sentence(tmp_path, text, said):
    file = tmp_path / RECORD_FILE
    file.write_text(text)
    with pytest.raises(InputError, match=said) as error:
        read_record(file)
    assert "\n" not in str(error.value)


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    file = tmp_path / RECORD_FILE
    line = QUIET.model_dump_json()
    file.write_text(f"{HEAD.model_dump_json()}\n{line}\n{line[:40]}")
    assert read_record(file).total == QUIET
