"""Documents packed whole: what a sample holds, its loss, and runs on one rank and two."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.config.job_sections import Data
from paceline.kernels.loss import IGNORED
from paceline.observe.run import Run
from paceline.train.data import BatchShape, eval_batches, prepare, prepare_corpus, train_batches
from paceline.train.exact_eval import texts_of
from tests.command_line import losses, paceline, ranks, write_tiny_job
from tests.generate.networks import MODELS, built
from tests.small_job import write_small_job
from tests.train.test_data_prepare import END, all_tokens, make_data

SEQ = 32


def texts_from(seed, count):
    """Texts of 0 to 99 bytes, each of its own letters."""
    random = np.random.default_rng(seed)
    return [
        bytes(random.integers(97, 123, n).tolist()).decode() for n in random.integers(0, 100, count)
    ]


def packed_data(folder, count=120, seed=0, **settings):
    return make_data(folder, texts_from(seed, count), **{"packing": "best_fit", **settings})


def documents_in(tokens):
    return [
        tuple(each) for each in np.split(tokens, np.flatnonzero(tokens == END) + 1) if len(each)
    ]


@pytest.mark.parametrize("seq_len", [16, SEQ, 99, 100, 101])
def test_each_document_is_whole_and_each_token_but_its_first_counts_once(tmp_path, seq_len):
    prepared = prepare(packed_data(tmp_path, eval_fraction=0.2))
    cut = prepared.meta.train_tokens
    for split, own in zip(("train", "eval"), np.split(all_tokens(prepared), [cut]), strict=True):
        data = prepared.dataset(split)
        ids = np.arange(data.num_samples(seq_len))
        tokens, counted = data.gather(ids, seq_len), data.counted(ids, seq_len)
        apart = data.document_ids(ids, seq_len)
        pieces, num_counted = [], 0
        for row, counts, numbers in zip(tokens, counted, apart, strict=True):
            for number in range(numbers[-1] + 1):
                (places,) = np.nonzero(numbers == number)
                size = int(counts[places].sum())
                if size:  # a piece, and no padding
                    assert counts[places][:size].all()
                    pieces.append(tuple(row[places[0] : places[0] + size + 1]))
                    num_counted += size
        documents = [each for each in documents_in(own) if len(each) > 1]
        assert num_counted == sum(len(each) - 1 for each in documents)
        whole = [each for each in documents if len(each) <= seq_len + 1]
        assert Counter(whole) <= Counter(pieces)
        rows = data.rows(seq_len)
        assert rows.num_cut == len(documents) - len(whole)
        num_inputs = np.minimum(rows.counts, seq_len).sum()
        assert rows.num_padding == len(ids) * seq_len - num_inputs
        rests = [(len(each) - 1) % seq_len + 1 for each in documents]
        assert rows.num_padding < seq_len + sum(rests) / 2 + seq_len  # boxes are half full


def test_the_loss_of_packed_samples_is_that_of_each_document_alone(tmp_path):
    prepared = prepare(packed_data(tmp_path, 40, eval_fraction=0.2))
    network = built(MODELS["grouped"].replace(vocab_size=257, max_seq_len=100)).double()
    data = prepared.dataset("train")
    total = count = 0
    for (batch,) in eval_batches(
        data, BatchShape(1, 1, 100, reset_at_documents=True), data.num_samples(100)
    ):
        kept = batch.targets != IGNORED
        logs = network(batch.tokens, batch.document_ids).log_softmax(-1)
        total -= logs[kept].gather(-1, batch.targets[kept, None]).sum().item()
        count += kept.sum().item()
        assert sum(len(text.tokens) for text in texts_of(batch)) == kept.sum()
    alone = 0.0
    documents = documents_in(all_tokens(prepared)[: prepared.meta.train_tokens])
    for document in documents:
        tokens = torch.tensor([document])
        logs = network(tokens[:, :-1]).log_softmax(-1)
        alone -= logs.gather(-1, tokens[:, 1:, None]).sum().item()
    assert count == sum(len(document) - 1 for document in documents)
    assert total == pytest.approx(alone, rel=1e-12)


def test_steps_are_a_function_of_the_seed_and_the_samples_before(tmp_path):
    mixture = {
        "tokenizer": "bytes", "packing": "best_fit", "cache_dir": str(tmp_path / "cache"),
        "sources": [
            {"name": name, "source": packed_data(tmp_path, 90, seed, name=f"{name}.jsonl").source}
            for seed, name in enumerate("ab")
        ],
    }  # fmt: skip
    corpus = prepare_corpus(Data.parse(mixture)).for_samples(SEQ)
    one, split = prepare(packed_data(tmp_path)).dataset("train"), corpus.train_split(4)

    def batches(data, first, num_ranks=1):
        parts = [
            next(
                train_batches(
                    data, BatchShape(4, 1, SEQ, rank, num_ranks, reset_at_documents=True), 7, first
                )
            )
            for rank in range(num_ranks)
        ]
        return [batch for part in parts for batch in part]

    for data in (one, split):
        for whole, part in zip(batches(data, 8), batches(data, 8, num_ranks=2), strict=True):
            for mine, theirs in zip(whole[:3], part[:3], strict=True):
                assert torch.equal(mine, theirs)
        assert any((batch.targets == IGNORED).any() for batch in batches(data, 8))
        assert not torch.equal(batches(data, 8)[0].tokens, batches(data, 12)[0].tokens)
    facts = corpus.packing_facts(SEQ)
    assert 0 < facts["padding_share"] < 0.2
    assert facts["num_cut"] > 10
    other = prepare_corpus(Data.parse({**mixture, "packing": "concatenate"}))
    assert other.fingerprint != corpus.fingerprint
    assert other.packing_facts(SEQ) == {}


@pytest.mark.parametrize(
    "other",
    [
        "data.records=chat",
        "data.stream.folder=in",
        "data.reset_at_documents=true",
        "model.causal=false",
        "train.exact_eval=true",
    ],
)
def test_what_packed_documents_cannot_have_is_refused(tmp_path, other):
    job = write_small_job(tmp_path)
    with pytest.raises(InputError, match=r'data\.packing = "best_fit" can\'t be had with'):
        read_job(job, ["data.packing=best_fit", other])


FP64 = ("--set", "layout.param_dtype=fp64", "--set", "layout.precision=fp64")


def train(folder, name, *settings):
    given = ("--set", "data.packing=best_fit", "--set", f"name={name}", *FP64, *settings)
    done = paceline("train", "job.toml", *given, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_ranks_are_equal_to_one_rank(tmp_path):
    job = write_tiny_job(tmp_path)
    job.write_text(job.read_text().replace('"text.txt"', '"texts.jsonl"'))
    rows = (json.dumps({"text": text}) for text in texts_from(3, 600))
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    said = train(tmp_path, "one", *ranks(1))
    expected = losses(tmp_path, "one")
    assert "of the tokens of samples are padding" in said
    assert 0 < Run(tmp_path / "runs/one").facts()["data"]["padding_share"] < 0.2
    for axis in ("dp", "fsdp"):
        train(
            tmp_path, axis, "--set", f"layout.{axis}=2", "--set", "layout.micro_batch=1", *ranks(2)
        )
        assert losses(tmp_path, axis) == pytest.approx(expected, rel=1e-10)
    done = paceline("evaluate", "runs/one", folder=tmp_path)
    assert done.returncode == 0, done.stderr
