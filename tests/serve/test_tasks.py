"""`paceline evaluate --tasks`: lm-evaluation-harness on data of this machine, held against the
plain network and against the harness's own way to ask an exported one."""

import json
import math
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from paceline.config.errors import InputError
from paceline.config.serving import Serving
from paceline.generate.chat import ChatTemplate
from paceline.observe.run import Run
from tests.command_line import paceline, write_tiny_job
from tests.serve.served import small_network

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance

from paceline.serve.harness import ServedNetwork

SETTINGS = Serving(block_size=8, max_tokens=64, max_sequences=8)
PAIRS = [
    ("the quick brown ", "fox"),
    ("over the", " lazy dog"),
    ("", "lazy"),
    ("fox", "jumps over the " * 4),
    ("a" * 300, "dog"),
]
DATA = (
    "dataset_path: json\ndataset_kwargs: {data_files: {test: questions.jsonl}}\ntest_split: test\n"
)
TASKS = {
    "choices": DATA
    + """\
task: choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["fox", "dog", "%%"]
doc_to_target: answer
target_delimiter: " "
fewshot_split: test
metric_list:
  - {metric: acc}
  - {metric: acc_norm}
""",
    "words": DATA
    + """\
task: words
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list:
  - {metric: word_perplexity}
  - {metric: bits_per_byte}
""",
    "texts": DATA
    + """\
task: texts
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{['fox', 'dog', '%%'][answer]}}"
generation_kwargs: {until: [" ", "\\n"], max_gen_toks: 12, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run, its export, and tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    write_tiny_job(folder)
    done = paceline("train", "job.toml", folder=folder)
    assert done.returncode == 0, done.stderr
    assert paceline("export", "runs/tiny", "weights", folder=folder).returncode == 0
    starts = ["the quick brown", "over the lazy", "jumps over the", "quick the lazy", "brown"]
    questions = [{"question": text, "answer": at % 2} for at, text in enumerate(starts)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def evaluate(folder, *arguments):
    done = paceline("evaluate", *arguments, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def asked(network, template=None):
    """The network as the harness asks it, and how many requests were counted."""
    counted = []

    def evaluating(number):
        return nullcontext(lambda: counted.append(number))

    engine = network.engine(SETTINGS)
    return ServedNetwork(engine, network, template, evaluating), counted


def requests(kind, *arguments):
    return [Instance(kind, {}, given, at) for at, given in enumerate(arguments)]


def rows_of(network, tokens):
    with torch.no_grad():
        return network.decoder(torch.tensor([tokens]))[0].log_softmax(-1)


def test_log_probabilities_are_those_of_the_plain_network():
    network = small_network()
    harness, counted = asked(network)
    found = harness.loglikelihood(requests("loglikelihood", *PAIRS))
    for (context, choice), (log, is_greedy) in zip(PAIRS, found, strict=True):
        # White space at a context's end is the choice's, and 256 tokens are seen at most.
        start, own = [*context.rstrip().encode()], [*choice.encode()]
        own = [*context.encode()][len(start) :] + own
        tokens = [*(start or [256]), *own][-257:]
        rows = rows_of(network, tokens[:-1])[-len(own) :]
        wanted = rows.gather(-1, torch.tensor(own)[:, None]).sum()
        assert log == pytest.approx(float(wanted), abs=1e-5)
        assert is_greedy == bool((rows.argmax(-1) == torch.tensor(own)).all())
    assert counted == [len(PAIRS)] * len(PAIRS)


def test_the_likeliest_tokens_are_known_as_such():
    network = small_network()
    harness, _ = asked(network)
    (text,) = harness.generate_until(requests("generate_until", ("dog", {"max_gen_toks": 1})))
    token = int(rows_of(network, [*b"dog"])[-1].argmax())
    (_, is_greedy), (_, is_other) = harness._loglikelihood_tokens(
        [(("", ""), [*b"dog"], [token]), (("", ""), [*b"dog"], [token ^ 1])]
    )
    assert (is_greedy, is_other) == (True, False)
    assert text == network.tokenizer.decode([token])


@pytest.mark.parametrize("length", [3, 256, 300, 700])
def test_long_texts_are_read_in_windows(length):
    network = small_network()
    harness, _ = asked(network)
    text = ("the quick brown fox " * 40)[:length]
    (found,) = harness.loglikelihood_rolling(requests("loglikelihood_rolling", (text,)))
    tokens, wanted = [256, *text.encode()], 0.0
    for start in range(0, length, 256):
        stop = min(start + 256, length)
        # The last window begins earlier, so that it is as long as the others.
        begin = max(0, stop - 256)
        rows = rows_of(network, tokens[begin:stop])[start - begin :]
        wanted += float(
            -F.nll_loss(rows, torch.tensor(tokens[start + 1 : stop + 1]), reduction="sum")
        )
    assert found == pytest.approx(wanted, abs=1e-5, rel=1e-8)


def test_texts_are_greedy_and_end_before_stop_strings():
    network = small_network()
    harness, counted = asked(network)
    asks = [(text, {"max_gen_toks": 20, "until": ["\x00"]}) for text in ("a", "fox", "z" * 300)]
    whole = harness.generate_until(requests("generate_until", *asks))
    assert len(counted) == 3
    for (prompt, _), text in zip(asks, whole, strict=True):
        tokens = [*prompt.encode()][-236:]
        for _ in range(20):
            tokens.append(int(rows_of(network, tokens)[-1].argmax()))
        own = tokens[-20:]
        own = own[: own.index(256)] if 256 in own else own
        assert text == network.tokenizer.decode(own)
    stop = whole[1][1:3]
    assert stop
    (cut,) = harness.generate_until(
        requests("generate_until", ("fox", {"max_gen_toks": 20, "until": stop}))
    )
    assert cut == whole[1][: whole[1].index(stop)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_gen_toks": 256}, "lower max_gen_toks"),
        ({"do_sample": True, "temperature": 1.0, "num_beams": 4}, "num_beams is not a setting"),
    ],
)
def test_texts_that_can_not_be_made_are_refused(settings, said):
    harness, _ = asked(small_network())
    with pytest.raises(InputError, match=said):
        harness.generate_until(requests("generate_until", ("fox", settings)))


def test_conversations_are_asked_by_the_networks_template():
    source = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    network = small_network(template=source)
    harness, _ = asked(network, ChatTemplate(source, network.settings))
    said = [{"role": "user", "content": "hi"}]
    assert harness.apply_chat_template(said) == "<user>hi</s><assistant>"
    said.append({"role": "assistant", "content": "It is "})
    text = harness.apply_chat_template(said, add_generation_prompt=False)
    assert text == "<user>hi</s><assistant>It is"
    assert harness.chat_template() == source


def test_a_run_is_evaluated_as_the_harness_evaluates_its_export(trained):
    """The harness's own class for networks of transformers, on the same tasks."""
    found = evaluate(trained, "runs/tiny", "--tasks", "choices.yaml,words.yaml,texts.yaml")
    ours = {line["task"]: line for line in found["tasks"]}
    assert [*ours] == [*TASKS]
    assert all(line["questions"] == 5 and line["shots"] == 0 for line in ours.values())
    own = _by_transformers(trained)
    for name, metrics in own.items():
        assert ours[name]["metrics"] == pytest.approx(metrics, rel=1e-5)
    assert set(ours["choices"]["errors"]) == {"acc", "acc_norm"}


def _by_transformers(folder):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    patch.setenv("DISABLE_MULTIPROC", "1")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file="weights/tokenizer.json",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    model = AutoModelForCausalLM.from_pretrained("weights")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the harness's own
        found = lm_eval.simple_evaluate(
            HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu"),
            tasks=[f"{name}.yaml" for name in TASKS],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
            log_samples=False,
        )
    patch.undo()
    return {
        name: {
            key.removesuffix(",none"): value
            for key, value in values.items()
            if key.endswith(",none") and "stderr" not in key
        }
        for name, values in found["results"].items()
    }


def test_what_was_found_stands_in_the_run_and_its_report(trained):
    arguments = ("evaluate", "runs/tiny", "--tasks", "choices.yaml", "--step", "8")
    done = paceline(*arguments, "--fewshot", "2", "--limit", "3", folder=trained)
    assert done.returncode == 0, done.stderr
    head, acc, acc_norm = (line.split() for line in done.stdout.splitlines())
    assert head == ["task", "metric", "value", "±", "examples", "questions"]
    run = Run(trained / "runs/tiny")
    line = run.tasks()[-1]
    assert (line["task"], line["step"], line["shots"], line["questions"]) == ("choices", 8, 2, 3)
    assert line["checkpoint"] == run.checkpoint_sum(8)
    for row, metric in ((acc, "acc"), (acc_norm, "acc_norm")):
        assert row == ["choices", metric, f"{line['metrics'][metric]:.4f}", *row[3:4], "2", "3"]
    page = run.report_file.read_text()
    assert "<h2>Tasks</h2>" in page or ">Tasks<" in page
    assert "acc_norm" in page


def test_a_folder_of_weights_is_evaluated_alike(trained):
    of_run, of_folder = (
        evaluate(trained, served, "--tasks", "words.yaml")["tasks"][0]
        for served in ("runs/tiny", "weights")
    )
    assert of_folder["step"] is None
    assert of_folder["metrics"] == pytest.approx(of_run["metrics"], rel=1e-5)
    assert all(math.isfinite(value) for value in of_run["metrics"].values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "nowhere.yaml"], "--tasks nowhere.yaml is no file"),
        (["--tasks", ","], "names none"),
        (["--tasks", "lambada_opnai"], "did you mean lambada_openai"),
        (["--tasks", "damaged.yaml"], "Task damaged.yaml can't be read"),
        (["--tasks", "empty.yaml"], "Task empty.yaml can't be read"),
        (["--tasks", "lost.yaml"], "Task lost.yaml can't be read"),
        (["--tasks", "hub.yaml"], "HF_HUB_OFFLINE=0"),
        (["--tasks", "metric.yaml"], "needs the metric 'accuracy', which is not on this machine"),
        (["--tasks", "wrong.yaml"], "A task fails in lm-evaluation-harness"),
        (["--tasks", "choices.yaml", "--chat"], "--chat needs a chat template"),
        (["--tasks", "choices.yaml", "--whole"], "leave --data, --choices, --whole out"),
        (["--limit", "3"], "give --tasks"),
    ],
)
def test_what_can_not_be_asked_is_refused_in_a_sentence(trained, arguments, said):
    choices = TASKS["choices"]
    for name, text in {
        "damaged": "task: [",
        "empty": "",
        "lost": choices.replace("questions.jsonl", "lost.jsonl"),
        "hub": choices.replace("path: json", "path: nobody/nothing"),
        "metric": choices.replace(
            "{metric: acc}",
            "{metric: accuracy, hf_evaluate: true, aggregation: mean, higher_is_better: true}",
        ),
        "wrong": choices.replace("{{question}}", "{{question if answer == 0 else answer.no.such}}"),
    }.items():
        (trained / f"{name}.yaml").write_text(text)
    done = paceline("evaluate", "runs/tiny", *arguments, folder=trained)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
