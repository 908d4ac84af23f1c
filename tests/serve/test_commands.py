"""From a Run of any layout to texts and talks, by the command line and beside transformers."""

import json
import re

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving, read_endpoint_settings, read_settings
from paceline.observe.run import Run
from paceline.serve.chat_command import chat_command
from paceline.serve.network import open_network
from tests.command_line import paceline, ranks, write_tiny_job


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a Run that was sharded over two ranks, and its exported weights."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny_job(folder)
    settings = ("--set", "layout.fsdp=2", "--set", "train.steps=24", *ranks(2))
    assert paceline("train", "job.toml", *settings, folder=folder).returncode == 0
    assert paceline("export", "runs/tiny", "weights", folder=folder).returncode == 0
    return folder


PROMPTS = ["the quick", "dog", "over the lazy brown"]


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_texts_are_those_of_transformers_from_the_run_and_from_its_export(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = trained / "weights"
    theirs, tokenizer = (
        AutoModelForCausalLM.from_pretrained(weights),
        AutoTokenizer.from_pretrained(weights),
    )
    wanted = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt").input_ids
        made = theirs.generate(tokens, max_new_tokens=20, do_sample=False)
        wanted.append(tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True))
    for served in ("runs/tiny", "weights"):
        network = open_network(trained / served)
        assert network.step == (24 if served == "runs/tiny" else None)
        texts = network.engine(Serving()).texts(PROMPTS, Sampling(max_tokens=20, temperature=0))
        assert texts == wanted
        done = paceline(
            "generate", served, *PROMPTS, "--tokens", "20", "--temperature", "0", "--json",
            folder=trained,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert [line["text"] for line in lines] == wanted
        assert [line["prompt"] for line in lines] == PROMPTS


def test_texts_are_shown_after_their_prompts_and_a_seed_repeats_them(trained):
    arguments = ("generate", "runs/tiny", *PROMPTS, "--tokens", "12", "--seed", "7")
    few = ("--set", "serve.weights_gb=1e-4", "--set", "serve.disk_folder=kept")
    first, second = (paceline(*arguments, *more, folder=trained) for more in ((), few))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert all(prompt in first.stdout for prompt in PROMPTS)
    assert "tiny, step 24" in first.stderr
    assert f"{12 * len(PROMPTS)} tokens in" in first.stderr
    assert "end early" not in first.stderr


def test_a_text_that_the_network_can_not_go_on_with_says_so(trained):
    done = paceline("generate", "runs/tiny", PROMPTS[0], "--tokens", "9999", folder=trained)
    assert done.returncode == 0, done.stderr
    longest = Run(trained / "runs" / "tiny").job().model.max_seq_len
    assert f"1 of 1 texts end early, at {longest} tokens with their prompts" in done.stderr


def test_a_text_keeps_to_its_grammar(trained):
    pytest.importorskip("llguidance")
    grammar = 'sampling.grammar={kind="regex", source="[0-9]{3}(a|b)"}'
    done = paceline("generate", "runs/tiny", *PROMPTS, "--set", grammar, "--json", folder=trained)
    assert done.returncode == 0, done.stderr
    texts = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    assert all(re.fullmatch("[0-9]{3}(a|b)", text) for text in texts), texts


def test_a_folder_is_served_as_it_was_written(trained):
    paceline("export", "runs/tiny", "narrow", "--dtype", "bf16", folder=trained)
    for name, dtype in (("narrow", torch.bfloat16), ("weights", torch.float32)):
        assert next(open_network(trained / name).decoder.parameters()).dtype == dtype


def test_weights_can_be_narrower_and_of_an_earlier_step(trained):
    network = open_network(trained / "runs" / "tiny", Serving(precision="bf16"), step=20)
    assert network.step == 20
    assert {p.dtype for p in network.decoder.parameters()} == {torch.bfloat16}
    assert network.decoder.rope_cos.dtype == torch.float32
    assert network.end_tokens == {256}
    (text,) = network.engine(Serving()).texts(["the"], Sampling(max_tokens=5))
    assert isinstance(text, str)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "a"], "nowhere is neither a run nor a folder of weights"),
        (["runs/tiny", ""], "The prompt has no tokens"),
        (["runs/tiny", "a" * 64], "prompt and text together may have 64"),
        (["runs/tiny", "a", "--step", "3"], "has no checkpoint of step 3"),
        (["weights", "a", "--step", "3"], "--step 3 is of a run's checkpoint"),
        (["runs/tiny", "a", "--set", "sampling.top_p=0"], "sampling.top_p = 0"),
        (["runs/tiny", "a", "--set", "serve.blocks=3"], "serve.blocks is not a setting"),
        (["runs/tiny", "a", "--set", "model.x=3"], "model is not a setting"),
    ],
)
def test_what_can_not_be_made_is_refused_in_a_sentence(arguments, words, trained):
    done = paceline("generate", *arguments, folder=trained)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("setting", "needed"),
    [
        ("serve.guess_tokens=3", "serve.speculate"),
        ("serve.weight_group=32", 'serve.weights = "int4"'),
        ("serve.disk_folder=kept", "serve.disk_gb or serve.weights_gb"),
        ("retrieval.k=2", "retrieval.index"),
    ],
)
def test_a_setting_that_does_nothing_alone_is_refused(setting, needed):
    with pytest.raises(InputError, match=f"no effect without {needed}"):
        read_endpoint_settings([setting])


def test_settings_are_read_in_their_own_types():
    settings = read_settings(["serve.precision=bf16", 'sampling.stop=["a"]'], temperature=0.5)
    assert settings.serve.precision == "bf16"
    assert settings.sampling.stop == ("a",)
    assert settings.sampling.temperature == 0.5
    with pytest.raises(InputError, match=r"sampling.temperature = -1"):
        read_settings([], temperature=-1.0)


def test_a_damaged_folder_is_refused(trained, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((trained / "weights" / name).read_bytes())
    with pytest.raises(InputError, match=r"has no tokenizer.json"):
        open_network(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json of .* can't be read"):
        open_network(tmp_path)


def _talk(folder, monkeypatch, capsys, *lines, **sampling):
    """What a chat prints for these lines: to its answers, and beside them."""
    left = iter(lines)

    def write(prompt):
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", write)
    chat_command(folder, read_settings([], temperature=0.0, **sampling), None)
    printed = capsys.readouterr()
    return printed.out.splitlines(), printed.err


def test_a_talk_goes_on_from_all_that_was_said(trained, monkeypatch, capsys):
    weights = trained / "runs" / "tiny"
    out, err = _talk(weights, monkeypatch, capsys, "the quick", "dog", max_tokens=9)
    engine = open_network(weights).engine(Serving())
    sampling = Sampling(max_tokens=9, temperature=0)
    (first,) = engine.texts(["the quick"], sampling)
    (second,) = engine.texts([f"the quick\n{first}\ndog"], sampling)
    assert "\n".join(out).rstrip() == f"{first}\n{second}".rstrip()
    assert "It has no chat template" in err
    assert "0 of 9 tokens before them were known" in err


def test_a_talk_that_gets_too_long_forgets_its_beginning(trained, monkeypatch, capsys):
    lines = [f"line {number} over the lazy dog" for number in range(5)]
    _, err = _talk(trained / "weights", monkeypatch, capsys, *lines, max_tokens=10)
    assert err.count("tokens/s") == 5
    _, err = _talk(trained / "weights", monkeypatch, capsys, "a" * 70, max_tokens=10)
    assert "The prompt has 70 tokens, but prompt and text together may have 64" in err


def test_settings_of_a_talk_are_changed_in_it(trained, monkeypatch, capsys):
    lines = (
        "/set max_tokens=3",
        "the",
        "/set top_p=7",
        "the",
        "/new",
        "the",
        "/what",
        "/quit",
        "x",
    )
    _, err = _talk(trained / "weights", monkeypatch, capsys, *lines, max_tokens=9)
    assert err.count("3 tokens, ") == 3
    assert "sampling.top_p = 7" in err
    assert err.count("/new begins anew") == 2
