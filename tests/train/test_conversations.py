"""Conversations: which tokens are answers, how samples are packed, and runs that train on them."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.config.job_sections import Data
from paceline.generate.chat import ChatTemplate
from paceline.kernels.loss import IGNORED
from paceline.observe.run import Run
from paceline.train.data import BatchShape, eval_batches, prepare, train_batches
from paceline.train.data.packed import best_fit
from paceline.train.data.tokenizer import make_encoder
from tests.command_line import losses, paceline, ranks, write_tiny_job
from tests.generate.networks import MODELS, built

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hëllo 🙂, who?"},
    {"role": "assistant", "content": "Me, naïve."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Still me."},
]


def talks(count, words=3):
    """Conversations of several lengths."""
    made = []
    for n in range(count):
        answer = " ".join([("yes", f"{2 * n}.")[n % 2]] * (n % words + 1))
        messages = [
            {"role": "user", "content": f"{n}+{n}?"},
            {"role": "assistant", "content": answer},
        ]
        made.append({"messages": messages})
    return made


def chat_data(folder, rows, name="talks.jsonl", **changes):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"records": "chat", "tokenizer": "bytes", "cache_dir": str(folder / "cache")}
    return Data(**{"source": str(path), **common} | changes)


def tokenizer_folder(folder, template):
    """A byte-level BPE with the special tokens of ChatML, and its template."""
    texts = ["Hello who are you And now Still me naïve What is plus It brief"] * 3
    encoder = make_encoder("bpe:300", texts)
    encoder.tokenizer.add_special_tokens(
        [AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>")]
    )
    folder.mkdir()
    encoder.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "chat_template.jinja").write_text(template)
    return folder


def answers_of(prepared, split="train", seq_len=200):
    """The answers of each sample as texts."""
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    dataset = prepared.conversations(split)
    ids = np.arange(dataset.num_samples(seq_len))
    targets = dataset.gather(ids, seq_len)[:, 1:]
    rows = zip(targets, dataset.counted(ids, seq_len), strict=True)
    return [tokenizer.decode(row[kept], skip_special_tokens=False) for row, kept in rows]


# --- which tokens are answers


def test_answers_are_those_of_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    folder = tokenizer_folder(tmp_path / "tokens", MARKED)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    found = theirs.apply_chat_template(
        TALK, chat_template=MARKED, return_assistant_tokens_mask=True, return_dict=True
    )
    rows = [{"messages": TALK}, {"messages": TALK[1:]}]
    prepared = prepare(chat_data(tmp_path, rows, tokenizer=str(folder)))
    seen = []
    for split in ("train", "eval"):
        dataset, ids = prepared.conversations(split), np.array([0])
        tokens, counted = dataset.gather(ids, 99)[0], dataset.counted(ids, 99)[0]
        seen.append((tokens[: len(found["input_ids"])].tolist(), [0, *counted.astype(int)]))
    wanted = found["input_ids"], found["assistant_masks"]
    assert any(ids == wanted[0] and mask[: len(ids)] == wanted[1] for ids, mask in seen)
    assert sum(wanted[1]) > 5


def test_without_marks_an_answer_is_what_a_message_adds_to_its_prompt():
    marked = ChatTemplate(MARKED, {}).conversation(TALK)
    plain = ChatTemplate(PLAIN, {}).conversation(TALK)
    assert (
        plain.text
        == marked.text
        == ChatTemplate(MARKED, {}).prompt(TALK, add_generation_prompt=False)
    )
    cut = [plain.text[begin:end] for begin, end in plain.answers]
    assert cut == [marked.text[begin:end] + "\n" for begin, end in marked.answers]
    assert cut == ["Me, naïve.<|im_end|>\n", "Still me.<|im_end|>\n"]


def test_a_template_that_rewrites_answers_must_mark_them():
    shortens = PLAIN.replace(
        "{{ message['content'] }}", "{{ message['content'] if loop.last else '...' }}"
    )
    with pytest.raises(InputError, match="writes an answer otherwise when more follows"):
        ChatTemplate(shortens, {}).conversation(TALK)


def test_rows_of_every_form(tmp_path):
    rows = [
        {"messages": TALK, "id": 3},
        {"prompt": "2 + 2 = ", "completion": "4"},
        {"prompt": TALK[:4], "completion": TALK[4:], "messages": None},
        {"messages": TALK[:2]},
    ]
    prepared = prepare(chat_data(tmp_path, rows, eval_fraction=0.4))
    assert (prepared.meta.num_documents, prepared.meta.num_empty_documents) == (3, 1)
    found = "".join(sorted(answers_of(prepared) + answers_of(prepared, "eval")))
    end = "<|endoftext|>"
    for text, count in (("Me, naïve." + end, 1), ("Still me." + end, 2), ("4" + end, 1)):
        assert found.count(text) == count
    assert len(found) == len("Me, naïve.Still me.Still me.4") + 4 * len(end)


def test_columns_are_rows_too(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = talks(20)
    rows[3]["messages"][1]["name"] = "x"  # columnar files have the key, empty, in every other row
    table = pyarrow.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "talks.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "talks.arrow"), table.schema) as sink:
        sink.write_table(table)
    found = [
        prepare(chat_data(tmp_path, rows, tokenizer="bytes", source=str(tmp_path / name))).meta
        for name in ("talks.jsonl", "talks.parquet", "talks.arrow")
    ]
    assert len({meta.tokens_sha256 for meta in found}) == 1


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x"}, "line 3 is no conversation"),
        ({"messages": []}, "line 3 is no conversation"),
        ({"messages": [{"role": 3, "content": "x"}]}, "line 3 has a message"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "line 3 has a message"),
        ({"messages": ["x"]}, "line 3 has a message 'x'"),
        ({"prompt": "x", "completion": ["y"]}, "line 3 is no conversation"),
        ({"prompt": "\ud800", "completion": "y"}, "line 3 holds half a surrogate"),
        ({"messages": [{"role": "assistant", "content": "\ufdd0"}]}, "line 3 holds a noncharacter"),
    ],
)
def test_a_row_that_is_none_is_refused_by_its_name(tmp_path, row, words):
    with pytest.raises(InputError, match=words):
        prepare(chat_data(tmp_path, [*talks(2), row]))
    assert not list((tmp_path / "cache" / "data").glob("*/meta.json"))


def test_text_has_no_rows_and_one_conversation_is_too_few(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(InputError, match="read as text, which has no rows"):
        prepare(chat_data(tmp_path, [], source=str(tmp_path / "a.txt")))
    with pytest.raises(InputError, match="holds 1 conversations with an answer"):
        prepare(chat_data(tmp_path, talks(1)))


def test_another_template_makes_other_tokens(tmp_path):
    first = prepare(chat_data(tmp_path, talks(9)))
    (tmp_path / "own.jinja").write_text(MARKED)
    second = prepare(chat_data(tmp_path, talks(9), chat_template=str(tmp_path / "own.jinja")))
    assert first.folder != second.folder
    assert any("<|im_end|>" in text for text in answers_of(second))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.chat_template=x.jinja"], "data.chat_template = 'x.jinja' has no effect"),
        (["data.records=chat", "data.text_field=body"], "data.text_field = 'body' has no effect"),
        (["data.records=chat", "train.exact_eval=true"], "counts every token"),
        (
            [
                "data.records=chat",
                "model.experts={num_experts=4,experts_per_token=1,ffn_size=8,balance_loss=0.1}",
            ],
            "balance_loss = 0.1 is a part of a mean",
        ),
    ],
)
def test_what_conversations_cannot_have_is_refused(overrides, words):
    with pytest.raises(InputError, match=words):
        read_job(None, overrides)


# --- packing


def one_by_one(lengths, room):
    """Best fit as it is defined: each thing into the box with the least room that is enough, of
    several the one that was filled last."""
    boxes, by_room = [], [[] for _ in range(room + 1)]
    for thing in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[thing]
        left = next((left for left in range(length, room + 1) if by_room[left]), None)
        if left is None:
            left, box = room, len(boxes)
            boxes.append([])
        else:
            box = by_room[left].pop()
        boxes[box].append(thing)
        by_room[left - length].append(box)
    return boxes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60))
def test_best_fit_puts_each_thing_into_one_box_with_room(lengths):
    things, ends = best_fit(np.array(lengths, np.int64), 40)
    boxes = [box.tolist() for box in np.split(things, ends[:-1])] if lengths else []
    assert sorted(each for box in boxes for each in box) == list(range(len(lengths)))
    filled = [sum(lengths[each] for each in box) for box in boxes]
    assert all(total <= 40 for total in filled)
    # No box could be emptied into another one: of any two, one is more than half full.
    assert sum(total <= 20 for total in filled) <= 1
    assert boxes == one_by_one(lengths, 40)


def test_no_conversation_crosses_a_sample_and_long_ones_are_cut(tmp_path):
    long = {"prompt": "x" * 30, "completion": "y" * 90}
    late = {"prompt": "x" * 90, "completion": "y"}
    prepared = prepare(chat_data(tmp_path, [*talks(80), long, late], eval_fraction=0.1))
    dataset = prepared.conversations("train")
    packing = dataset.packing(80)
    assert packing.num_cut + prepared.conversations("eval").packing(80).num_cut == 2
    assert packing.num_left_out + prepared.conversations("eval").packing(80).num_left_out == 1
    assert len(set(packing.conversations.tolist())) == len(packing.conversations)
    ids = np.arange(dataset.num_samples(80))
    documents, counted = dataset.document_ids(ids, 80), dataset.counted(ids, 80)
    tokenizer = Tokenizer.from_file(str(prepared.tokenizer_path))
    for row, apart, kept in zip(dataset.gather(ids, 80), documents, counted, strict=True):
        for number in range(apart[-1] + 1):
            text = tokenizer.decode(row[:-1][apart == number], skip_special_tokens=False)
            assert text.startswith(("<|user|>", "xxx", "<|endoftext|>"))
            assert text.startswith("<|endoftext|>") != kept[apart == number].any()
    assert (documents == documents[:, -1:]).sum() >= packing.num_padding


def test_the_loss_of_packed_samples_is_that_of_each_conversation_alone(tmp_path):
    prepared = prepare(chat_data(tmp_path, talks(40), eval_fraction=0.2))
    model = MODELS["grouped"].replace(vocab_size=257, max_seq_len=96)
    network = built(model).double()
    dataset = prepared.conversations("train")
    shape = BatchShape(1, 1, 96, reset_at_documents=True)
    total = alone = count = 0.0
    for (batch,) in eval_batches(dataset, shape, dataset.num_samples(96)):
        logs = network(batch.tokens, batch.document_ids).log_softmax(-1)
        kept = batch.targets != IGNORED
        total -= logs[kept].gather(-1, batch.targets[kept, None]).sum().item()
        count += kept.sum().item()
        for number in range(int(batch.document_ids[0, -1])):
            own = batch.document_ids[0] == number
            logs = network(batch.tokens[:, own]).log_softmax(-1)
            targets = batch.targets[:, own]
            kept = targets != IGNORED
            alone -= logs[kept].gather(-1, targets[kept, None]).sum().item()
    assert total == pytest.approx(alone, rel=1e-12)
    held_out = prepared.conversations("eval")
    evaluated = eval_batches(held_out, shape, held_out.num_samples(96))
    count += sum((batch.targets != IGNORED).sum().item() for (batch,) in evaluated)
    assert count == prepared.meta.answer_tokens


def test_steps_are_a_function_of_the_seed_and_the_samples_before(tmp_path):
    dataset = prepare(chat_data(tmp_path, talks(90))).conversations("train")

    def batches(first, num_ranks=1):
        parts = [
            next(train_batches(dataset, BatchShape(4, 1, 96, rank, num_ranks), 7, first))
            for rank in range(num_ranks)
        ]
        return [batch for part in parts for batch in part]

    for one, two in zip(batches(8), batches(8, num_ranks=2), strict=True):
        assert torch.equal(one.tokens, two.tokens)
        assert torch.equal(one.targets, two.targets)
    assert not torch.equal(batches(8)[0].tokens, batches(12)[0].tokens)


# --- runs


CHAT = """
[data]
source = "talks.jsonl"
records = "chat"
tokenizer = "bytes"
eval_fraction = 0.1
"""
FP64 = ("--set", "layout.param_dtype=fp64", "--set", "layout.precision=fp64")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on conversations."""
    folder = tmp_path_factory.mktemp("chat")
    job = write_tiny_job(folder)
    before, rest = job.read_text().split("[data]")
    job.write_text(before + CHAT + "[optim]" + rest.split("[optim]")[1])
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talks(400)))
    settings = (*FP64, "--set", "train.seq_len=64", *ranks(1))
    done = paceline("train", "job.toml", *settings, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder, done.stderr + done.stdout


def test_a_run_learns_answers_and_keeps_its_template(trained):
    folder, said = trained
    assert losses(folder)[12] < losses(folder)[1] - 0.5
    assert "conversations fill" in said
    run = Run(folder / "runs" / "tiny")
    assert run.facts()["data"]["padding_share"] < 0.5
    template = (run.tokenizer_folder / "chat_template.jinja").read_text()
    assert ChatTemplate(template, {"eos_token": "E"}).conversation(TALK).answers
    done = paceline("export", "runs/tiny", "out", folder=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "out" / "chat_template.jinja").read_text() == template


def test_ranks_are_equal_to_one_rank_though_answers_differ(trained):
    folder, _ = trained
    for axis in ("dp", "fsdp", "pp"):
        done = paceline(
            "train", "job.toml", "--set", f"name={axis}", *FP64, "--set", "train.seq_len=64",
            "--set", f"layout.{axis}=2", "--set", "layout.micro_batch=3", *ranks(2), folder=folder,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert losses(folder, axis) == pytest.approx(losses(folder), rel=1e-10)


def test_held_out_answers_are_not_evaluated_as_text(trained):
    folder, _ = trained
    done = paceline("evaluate", "runs/tiny", folder=folder)
    assert done.returncode == 2
    assert "trained on answers of conversations" in done.stderr
