"""`paceline evaluate`: the trainer's own figure, the bits of its logits, text files and choices."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.score import Given
from paceline.observe.run import Run
from paceline.serve.network import open_network
from paceline.train.data import MicroBatch
from paceline.train.exact_eval import ExactLoss
from tests.command_line import paceline, ranks, write_tiny_job
from tests.generate.networks import MODELS, VOCAB, built, prompt


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs: plain, with exact evaluations, with documents apart on two ranks; and an export."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    (folder / "more.txt").write_text("the fox\njumps over")
    kinds = {
        "tiny": ["--set", "train.eval_every=4"],
        "exact": ["--set", "train.exact_eval=true"],
        "apart": [
            *("--set", "data.reset_at_documents=true", "--set", 'data.source="*.txt"'),
            *("--set", "layout.fsdp=2", *ranks(2)),
        ],
    }
    for name, settings in kinds.items():
        done = paceline("train", "job.toml", "--set", f"name={name}", *settings, folder=folder)
        assert done.returncode == 0, done.stderr
    assert paceline("export", "runs/tiny", "weights", folder=folder).returncode == 0
    return folder


def evaluate(folder, *arguments):
    done = paceline("evaluate", *arguments, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def eval_loss(folder, name, step=12):
    return Run(folder / "runs" / name).step(step)["eval_loss"]


@pytest.mark.parametrize(("name", "step"), [("tiny", 12), ("tiny", 8), ("apart", 12)])
def test_the_loss_is_that_of_the_runs_own_evaluation(trained, name, step):
    found = evaluate(trained, f"runs/{name}", "--step", str(step))
    assert found["loss"] == pytest.approx(eval_loss(trained, name, step), abs=1e-5)
    assert found["trained_loss"] == eval_loss(trained, name, step)
    assert found["perplexity"] == math.exp(found["loss"])
    assert found["tokens"] == 12 * 32
    # Tokens are bytes here, and the few ends of documents have none.
    bits = found["loss"] / math.log(2) * found["tokens"] / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(bits)
    assert found["tokens"] - 3 <= found["bytes"] <= found["tokens"]


def test_exact_evaluations_have_the_same_loss_in_training_and_after_it(trained):
    found = evaluate(trained, "runs/exact", "--set", "serve.exact=true")
    assert found["loss"] == pytest.approx(eval_loss(trained, "exact"), rel=1e-14)
    assert found["loss"] == pytest.approx(eval_loss(trained, "tiny"), abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_exact_logits_are_those_of_the_trainers_exact_evaluation(name, monkeypatch):
    """Bit by bit, in the likeliest tokens of a text that is made beside others."""
    decoder = built(MODELS[name], torch.float32)
    logits = []
    cross = Engine.losses

    def keep(engine, texts):
        forward = engine._runner.logits
        engine._runner.logits = lambda chunks: logits.append(forward(chunks)) or logits[-1]
        return cross(engine, texts)

    monkeypatch.setattr(Engine, "losses", keep)
    tokens = torch.tensor([prompt(31, 0), prompt(31, 1)])
    ExactLoss()(decoder, MicroBatch(tokens[:, :-1], tokens[:, 1:], None))
    trained = torch.cat(logits).unflatten(0, (2, 30))
    engine = Engine(decoder, Serving(exact=True))
    for row, length in ((0, 9), (1, 30), (0, 30), (1, 2)):
        engine.submit(tokens[row, :length].tolist(), Sampling(max_tokens=1, logprobs=20))
    served = {s.num_prompt: s for s in engine._scheduler.waiting if s.tokens[0] == tokens[0, 0]}
    while not engine.is_idle:
        engine.step()
    for length, sequence in served.items():
        wanted = trained[0, length - 1].log_softmax(-1).topk(20)
        pairs = zip(wanted.indices.tolist(), wanted.values.tolist(), strict=True)
        assert sequence.logprobs[0].likeliest == tuple(pairs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv_gb", [1e-2, 1.2e-4])
def test_losses_are_those_of_the_network_however_texts_are_packed(name, kv_gb):
    decoder = built(MODELS[name])
    texts = [prompt(length + 1, length) for length in (1, 3, 30, 1, 17, 90)]
    engine = Engine(decoder, Serving(block_size=4, max_tokens=13, kv_gb=kv_gb))
    if engine.longest < 90:
        texts.pop()
    given = [Given(text[:-1], text[1:]) for text in texts]
    found = list(engine.losses(given))
    with torch.no_grad():
        for text, losses in zip(texts, found, strict=True):
            own = decoder(torch.tensor([text[:-1]]))[0].float()
            wanted = F.cross_entropy(own, torch.tensor(text[1:]), reduction="none")
            torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    numbers = engine.numbers()
    assert numbers["blocks_free"] == numbers["blocks"]


def test_a_text_that_no_memory_holds_is_refused():
    engine = Engine(built(MODELS["grouped"]), Serving(block_size=4, kv_gb=1e-5))
    with pytest.raises(InputError, match=r"A text has 60 tokens.*raise serve.kv_gb"):
        list(engine.losses([Given([1] * 60, [VOCAB - 1] * 60)]))


def test_a_file_is_evaluated_whole(trained):
    (trained / "some.txt").write_text("the quick brown fox\n" * 9)
    found = [
        evaluate(trained, served, "--data", "some.txt", *rest)
        for served, *rest in (["runs/tiny"], ["weights"], ["weights", "--set", "serve.exact=true"])
    ]
    assert [each["tokens"] for each in found] == [180] * 3  # with the end, without the first
    assert [each["bytes"] for each in found] == [179] * 3
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], abs=1e-5)
    assert found[2]["loss"] == pytest.approx(found[0]["loss"], abs=1e-5)
    network = open_network(trained / "weights")
    tokens = [*network.encode("the quick brown fox\n" * 9), 256]
    total = 0.0
    with torch.no_grad():
        for start in range(0, 180, 64):
            part = torch.tensor(tokens[start : start + 65])
            losses = F.cross_entropy(network.decoder(part[None, :-1])[0], part[1:], reduction="sum")
            total += float(losses)
    assert found[0]["loss"] == pytest.approx(total / 180, abs=1e-5)


def test_all_held_out_text_can_be_read(trained):
    whole, part = (evaluate(trained, "runs/tiny", *more) for more in (["--whole"], []))
    assert whole["tokens"] > 3 * part["tokens"]
    assert whole["trained_loss"] is None


def test_the_likeliest_choice_is_found(trained):
    questions = [
        ("the quick brown ", ["fox", "%%%", "jumps over"]),
        ("over the", [" lazy", " dog", " dog dog"]),
        ("", ["lazy", "z"]),
        ("fox", [" @", "    ", "o"]),
    ]
    network = open_network(trained / "runs" / "tiny")

    def log(context, choice):
        start = list(context.encode()) or [256]
        tokens = torch.tensor([*start, *choice.encode()])
        with torch.no_grad():
            rows = network.decoder(tokens[None, :-1])[0].log_softmax(-1)
        return float(rows.gather(-1, tokens[1:, None])[len(start) - 1 :].sum())

    logs = [[log(context, choice) for choice in choices] for context, choices in questions]
    best = [own.index(max(own)) for own in logs]
    per_byte = [
        max(range(len(own)), key=lambda at: own[at] / len(choices[at]))
        for own, (_, choices) in zip(logs, questions, strict=True)
    ]
    assert best != per_byte
    answers = [best[0], best[1], best[2], per_byte[3]]
    lines = [
        json.dumps({"context": context, "choices": choices, "answer": answer})
        for (context, choices), answer in zip(questions, answers, strict=True)
    ]
    (trained / "questions.jsonl").write_text("\n".join(lines))
    found = evaluate(trained, "runs/tiny", "--choices", "questions.jsonl")
    both = [
        sum(a == b for a, b in zip(wanted, answers, strict=True)) / 4 for wanted in (best, per_byte)
    ]
    assert found["examples"] == 4
    assert [found["accuracy"], found["accuracy_per_byte"]] == both
    printed = paceline("evaluate", "weights", "--choices", "questions.jsonl", folder=trained).stdout
    assert printed.startswith(f"accuracy {both[0]:.4f}, per byte {both[1]:.4f}, of 4 examples in")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["weights"], "has no held-out text: give --data"),
        (["weights", "--data", "nowhere"], "--data nowhere does not exist"),
        (["weights", "--data", "empty.txt"], "has 0 tokens"),
        (["runs/tiny", "--whole", "--data", "text.txt"], "leave it out"),
        (["runs/tiny", "--choices", "text.txt"], "text.txt line 1 is not valid JSON"),
        (["runs/tiny", "--choices", "few.jsonl"], "few.jsonl line 1.choices"),
        (["runs/tiny", "--choices", "wrong.jsonl"], "has answer 2 of 2 choices"),
        (["runs/tiny", "--choices", "long.jsonl"], "shorten it"),
        (["nowhere", "--data", "text.txt"], "nowhere is neither a run nor a folder"),
    ],
)
def test_what_can_not_be_evaluated_is_refused_in_a_sentence(trained, arguments, said):
    (trained / "empty.txt").write_text("")
    example = {"context": "a", "choices": ["b"], "answer": 0}
    (trained / "few.jsonl").write_text(json.dumps(example))
    wrong = {**example, "choices": ["b", "c"], "answer": 2}
    (trained / "wrong.jsonl").write_text(json.dumps(wrong))
    (trained / "long.jsonl").write_text(json.dumps({**wrong, "context": "a" * 70, "answer": 0}))
    done = paceline("evaluate", *arguments, folder=trained)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_exact_evaluations_of_a_cut_network_are_refused(trained):
    settings = ("--set", "train.exact_eval=true", "--set", "layout.fsdp=2", *ranks(2))
    done = paceline("train", "job.toml", "--set", "name=cut", *settings, folder=trained)
    assert done.returncode == 2
    assert "train.exact_eval = true needs ranks that hold the network" in done.stderr
