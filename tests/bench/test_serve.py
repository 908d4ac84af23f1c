"""`paceline bench serve` and `paceline plan --serve`, on a run of seconds and a real endpoint."""

import json

import pytest

from paceline.bench.serving.measure import earlier, measure, one_round, setup_of
from paceline.bench.serving.online import EndpointLoad, serve_load
from paceline.bench.serving.passes import PassMeter
from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.plan.serving.load import requests_of
from paceline.plan.serving.measured import measured_file, read_measured
from tests.command_line import paceline, write_tiny_job
from tests.generate.networks import MODELS, VOCAB, built
from tests.serve.served import END, serve

GREEDY = Sampling(temperature=0)


def engine_of(name="grouped"):
    return Engine(built(MODELS[name]), Serving(block_size=8, max_tokens=32, max_sequences=6))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    done = paceline("train", "job.toml", "--set", "train.steps=8", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_passes_compute_what_they_say_and_leave_nothing(name):
    engine = engine_of(name)
    meter = PassMeter(engine, engine.most_tokens, GREEDY)
    meter.fill()
    found = one_round(setup_of(engine, meter, 1.0, "a test"), meter)
    works = [one.work for one in found.passes]
    assert {work.single for work in works if not work.parts} == {1, 2, 4, 6}
    assert {work.in_parts for work in works if not work.single} == {16, 32}
    assert any(work.single and work.parts for work in works)
    assert max(work.blocks for work in works) > 6
    assert all(len(one.seconds) == 1 for one in (*found.passes, *found.hosts))
    assert engine.is_idle
    assert engine.numbers()["blocks_free"] == engine.numbers()["blocks"]
    costs = found.costs()
    assert costs.body(1) > 0
    assert costs.host_s + costs.text_s > 0


def test_what_was_measured_is_gone_on_with_and_of_anything_else_begun_anew(tmp_path):
    engine, file, calls = engine_of(), measured_file(tmp_path, "float64"), []
    meter = PassMeter(engine, engine.most_tokens, GREEDY)
    setup = setup_of(engine, meter, 1.0, "a test")
    whole = measure(file, setup, meter, lambda: calls.append(1))
    assert read_measured(file) == whole
    assert len(calls) == 5 * len(whole.passes)
    # As an interruption after three rounds leaves it.
    three = whole.replace(
        passes=tuple(one.replace(seconds=one.seconds[:3]) for one in whole.passes),
        hosts=tuple(one.replace(seconds=one.seconds[:3]) for one in whole.hosts),
    )
    file.write_text(three.model_dump_json())
    calls.clear()
    again = measure(file, setup, meter, lambda: calls.append(1))
    assert len(calls) == 2 * len(whole.passes)
    assert again.passes[0].seconds[:3] == whole.passes[0].seconds[:3]
    assert earlier(file, setup.replace(source="another day", start_s=2.0)) == again
    assert earlier(file, setup.replace(max_sequences=7)) is None
    file.write_text("{")
    assert earlier(file, setup) is None


def test_a_load_gets_its_tokens_when_they_come():
    requests = requests_of(9, 200.0, 0, (1, 30), (1, 9), VOCAB)
    served = serve_load(engine_of(), requests, GREEDY)
    assert served.is_whole
    assert min(served.ttft) > 0
    assert len(served.itl) == sum(each.num_tokens - 1 for each in requests)


def test_an_endpoint_serves_a_load():
    requests = requests_of(8, 100.0, 1, (2, 20), (3, 9), END)
    with serve() as server:
        served = EndpointLoad(server.url, GREEDY).serve(requests)
        server.wait_until_idle()
    assert served.is_whole
    assert served.num_answered == 8
    assert all(first <= last for first, last in zip(served.ttft, served.e2e, strict=True))


def test_an_endpoint_that_refuses_is_told():
    requests = requests_of(3, None, 1, (2000, 2000), (3, 9), END)
    with serve() as server:
        load = EndpointLoad(server.url, GREEDY)
        with pytest.raises(InputError, match=r"All 3 requests failed; the first: 400 .*shorten it"):
            load.serve(requests)
        url = server.url
    with pytest.raises(InputError, match="does not answer as OpenAI's API does"):
        EndpointLoad(url, GREEDY)
    with pytest.raises(InputError, match="is no address"):
        EndpointLoad("file:///etc/passwd", GREEDY)


def test_from_a_run_to_its_plan(trained):
    settings = ("--set", "serve.max_sequences=4", "--set", "serve.max_tokens=32")
    load = ("--rate", "50/s", "--requests", "6", "--in", "4-20", "--out", "4-9")
    done = paceline("bench", "serve", "runs/tiny", *load, *settings, "--json", folder=trained)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["load"]["failed"] == 0
    assert told["load"]["tokens_per_s"] > 0
    assert "median, planned" in done.stdout
    assert told["file"] == "runs/tiny/serving/fp32.json"
    done = paceline(
        "bench", "serve", "runs/tiny", "--set", "serve.weights=int8", *settings, folder=trained
    )
    assert done.returncode == 0, done.stderr
    asked = ("--in", "4-20", "--out", "4-9", "--slo", "ttft 60s")
    plan = ("plan", "runs/tiny", "--serve", "--rate", "1/min", *asked)
    done = paceline(*plan, "--price", "0.1", "--api-price", "10,10", "--json", folder=trained)
    assert done.returncode == 0, done.stderr
    assert "times are" in done.stdout
    assert "bench serve runs/tiny" in done.stdout
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["fleets"][0]["usd_per_hour"] == pytest.approx(0.1)
    assert {fleet["form"] for fleet in told["fleets"]} == {"fp32", "fp32-int8"}
    assert told["rent"]["api_usd_per_hour"] > 0
    done = paceline(*plan, "--set", "model.num_layers=3", folder=trained)
    assert done.returncode == 2
    assert "was measured with another network" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "serve", "nowhere"), "neither a run nor a folder"),
        (("bench", "serve", "runs/tiny", "--slo", "ttft 1s"), "give their --rate"),
        (("bench", "serve", "runs/tiny", "--rate", "fast"), "--rate 'fast' is no rate"),
        (("bench", "serve", "runs/tiny", "--set", "serve.exact=true"), "leave it out here"),
        (("plan", "job.toml", "--serve"), "--serve needs a load"),
        (
            ("plan", "job.toml", "--serve", "--rate", "1/s", "--in", "9", "--out", "9"),
            "measure it with `paceline bench serve",
        ),
        (("plan", "job.toml", "--rate", "5/s"), "--rate has no effect in a plan without --serve"),
        (("plan", "job.toml", "--serve", "--free", "precision"), "--free has no effect"),
        (
            ("plan", "job.toml", "--serve", "--rate", "1/s", "--in", "60", "--out", "60"),
            "requests of 120 tokens, and the network takes 64",
        ),
        (
            ("plan", "job.toml", "--serve", "--rate", "1/s", "--in", "9", "--out", "9",
             "--cluster", "8xL4", "--api-price", "1,1"),
            "give --price",
        ),
        (
            ("plan", "job.toml", "--serve", "--rate", "1/s", "--in", "9", "--out", "9",
             "--cluster", "8xL4", "--slo", "ttft 0.001ms"),
            "No engine keeps ttft 0.001 ms",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_a_sentence(trained, arguments, said):
    done = paceline(*arguments, folder=trained)
    assert done.returncode == 2, done.stdout
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
