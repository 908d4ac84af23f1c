"""Batches of one rank: the same samples for any split over ranks, from any step (one process)."""

import itertools

import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data import BatchShape, eval_batches, prepare, sample_ids, train_batches
from paceline.train.data.dataset import TokenStream, _Advice

SEQ = 16


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    for n in range(60):
        (folder / f"{n}.txt").write_text(f"document {n} " * 12)
    data = Data(source=str(folder), tokenizer="bytes", eval_fraction=0.1)
    return prepare(data.replace(cache_dir=str(folder / ".cache")))


def joined(steps):
    """Tokens, targets (and documents) of steps, (steps, samples, seq_len)."""
    return [
        torch.stack([torch.cat(list(column)) for column in columns])
        for columns in zip(*(list(zip(*step, strict=True)) for step in steps), strict=True)
        if columns[0][0] is not None
    ]


def take(batches, count):
    return list(itertools.islice(batches, count))


def test_a_step_is_the_next_samples_of_the_order(prepared):
    dataset = prepared.dataset("train")
    steps = take(train_batches(dataset, BatchShape(8, 4, SEQ), seed=3, first_sample=40), 2)
    ids = sample_ids(3, 40, 16, dataset.num_samples(SEQ))
    expected = torch.from_numpy(dataset.gather(ids, SEQ).astype(int)).view(2, 8, SEQ + 1)
    tokens, targets = joined(steps)
    assert torch.equal(tokens, expected[:, :, :-1])
    assert torch.equal(targets, expected[:, :, 1:])
    assert [len(step) for step in steps] == [2, 2]
    for micro in (micro for step in steps for micro in step):
        for tensor in (micro.tokens, micro.targets):
            assert (tensor.dtype, tuple(tensor.shape)) == (torch.int64, (4, SEQ))
            assert tensor.is_contiguous()
        assert micro.document_ids is None


@pytest.mark.parametrize("first", [0, 5_000, 10**12])
def test_a_run_resumes_anywhere_by_reading_a_step(prepared, first, monkeypatch):
    """However many samples came before, those of one step are read, and none is looked at twice."""
    read = []
    rows = TokenStream.rows
    monkeypatch.setattr(TokenStream, "rows", lambda *of: read.extend(of[1]) or rows(*of))
    next(train_batches(prepared.dataset("train"), BatchShape(8, 4, SEQ), 3, first))
    assert len(read) == 8


def test_storage_is_told_what_comes_next_while_it_is_waited_for():
    def told(count, num_waits):
        """Whether it was before each of some reads that wait for so many pages."""
        answers = []
        for _ in range(count):
            answers.append(advice.is_due())
            advice.saw(0 if answers[-1] else num_waits)
        return answers

    advice = _Advice()
    assert told(3, num_waits=0) == [False] * 3
    assert told(3, num_waits=5) == [False, True, True]
    assert told(200, num_waits=5).count(False) == 3
    assert told(200, num_waits=0)[-100:] == [False] * 100


@pytest.mark.parametrize(("num_ranks", "micro_batch"), [(1, 1), (2, 3), (4, 3), (6, 2), (12, 1)])
def test_ranks_and_micro_batches_don_t_change_the_batch(prepared, num_ranks, micro_batch):
    dataset = prepared.dataset("train")
    serial = joined(take(train_batches(dataset, BatchShape(12, 12, SEQ), 0, 0), 3))
    shapes = [BatchShape(12, micro_batch, SEQ, rank, num_ranks) for rank in range(num_ranks)]
    parts = [joined(take(train_batches(dataset, shape, 0, 0), 3)) for shape in shapes]
    for column, expected in enumerate(serial):
        assert torch.equal(torch.cat([part[column] for part in parts], dim=1), expected)


def test_a_run_resumes_from_the_samples_it_consumed(prepared):
    dataset, shape = prepared.dataset("train"), BatchShape(8, 4, SEQ)
    num_steps = 2 * dataset.num_samples(SEQ) // 8  # into the third epoch
    whole = joined(take(train_batches(dataset, shape, 1, 0), num_steps + 2))
    resumed = joined(take(train_batches(dataset, shape, 1, 8 * num_steps), 2))
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one[num_steps:], other)


def test_documents_are_told_apart_on_demand(prepared):
    dataset = prepared.dataset("train")
    shape = BatchShape(8, 4, 200, rank=1, num_ranks=2, reset_at_documents=True)
    tokens, _, documents = joined(take(train_batches(dataset, shape, 0, 0), 2))
    assert documents.shape == tokens.shape == (2, 4, 200)
    # The number of the document grows exactly behind each end-of-document token.
    grows = documents[:, :, 1:] - documents[:, :, :-1]
    assert torch.equal(grows, (tokens[:, :, :-1] == prepared.meta.end_of_document).long())
    assert grows.sum() > 0


def test_evaluation_reads_the_split_in_order_and_again_where_it_is_small(prepared):
    dataset = prepared.dataset("eval")
    num_samples = dataset.num_samples(SEQ)
    num_batches = num_samples // 4 + 2
    shapes = [BatchShape(4, 1, SEQ, rank, 2) for rank in range(2)]
    parts = [joined(eval_batches(dataset, shape, num_batches))[0] for shape in shapes]
    tokens = torch.cat(parts, dim=1).flatten(0, 1)
    assert len(tokens) == 4 * num_batches > num_samples
    assert torch.equal(tokens[num_samples:], tokens[: len(tokens) - num_samples])
    expected = dataset.gather(torch.arange(num_samples).numpy(), SEQ)[:, :-1].astype(int)
    assert torch.equal(tokens[:num_samples], torch.from_numpy(expected))


def test_a_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(InputError, match="micro-batches of 3 on 2 ranks"):
        BatchShape(8, 3, SEQ, rank=0, num_ranks=2)


def test_a_split_shorter_than_a_sample_is_refused(prepared):
    shape = BatchShape(1, 1, 10**6)
    for batches in (
        train_batches(prepared.dataset("train"), shape, 0, 0),
        eval_batches(prepared.dataset("eval"), shape, 1),
    ):
        with pytest.raises(InputError, match="too long"):
            next(batches)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_on_a_device_are_those_of_the_host(prepared):
    dataset = prepared.dataset("train")
    shapes = [BatchShape(8, 4, SEQ, reset_at_documents=True, device=d) for d in ("cpu", "cuda")]
    host, device = (joined(take(train_batches(dataset, shape, 0, 0), 20)) for shape in shapes)
    for one, other in zip(host, device, strict=True):
        assert other.is_cuda
        assert torch.equal(one, other.cpu())
