"""Mixtures: which sample of which source comes when (pure), and what is prepared (one process)."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.errors import InputError
from paceline.config.job_sections import Data, Train
from paceline.train.data import BatchShape, prepare_corpus, train_batches
from paceline.train.data.dataset import TokenStream
from paceline.train.data.mixture import PERIOD, MixedSource, MixtureOrder, WeightsFrom, places_of
from paceline.train.data.order import sample_ids

SEQ = 16
SIZES = {"code": 700, "prose": 7000, "sums": 90}


def order_of(*stages, seed=0, most=None):
    """The order of three sources under (first, weights) each."""
    sources = tuple(MixedSource(name, size, (most or {}).get(name)) for name, size in SIZES.items())
    return MixtureOrder(seed, sources, tuple(WeightsFrom(*each) for each in stages))


CURRICULUM = ((0, (1, 2, 1)), (5_000, (0, 1, 3)), (20_000, (1, 1, 0)))


def sources_of(order, ids):
    return np.searchsorted(order.offsets, ids, "right") - 1


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 60_000), st.integers(0, 300), st.integers(0, 300))
def test_any_part_of_the_order_is_computed_alone(first, left, right):
    order = order_of(*CURRICULUM, seed=5, most={"code": 1500})
    whole = order.ids(first, left + right)
    anew = order_of(*CURRICULUM, seed=5, most={"code": 1500})
    parts = [anew.ids(first + left, right), anew.ids(first, left)][::-1]
    assert len(whole) == left + right
    assert np.array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("number", [0, 1, 4_999, 5_000, 5_001, PERIOD, 20_000, 59_999])
def test_how_many_of_a_source_came_before_needs_no_replay(number):
    order = order_of(*CURRICULUM, most={"code": 1500})
    sources = sources_of(order, order.ids(0, 60_000))
    assert np.array_equal(np.bincount(sources[:number], minlength=3), order.counts(number))


def test_any_stretch_is_mixed_as_the_weights_say():
    weights = np.array([1, 2.5, 0.25])
    order = order_of((0, tuple(weights)))
    sources = sources_of(order, order.ids(0, 3 * PERIOD))
    for size in (16, 256, 4096):
        counts = [np.bincount(part, minlength=3) for part in np.split(sources, 3 * PERIOD // size)]
        assert np.abs(counts - weights / weights.sum() * size).max() < 2


def test_a_source_is_read_epoch_by_epoch_in_an_order_of_its_own():
    order = order_of(*CURRICULUM, seed=3)
    ids = order.ids(0, 40_000)
    sources = sources_of(order, ids)
    for number, size in enumerate(SIZES.values()):
        own = ids[sources == number] - order.offsets[number]
        for epoch in np.split(own, range(size, len(own), size))[:-1]:
            assert np.array_equal(np.sort(epoch), np.arange(size))
    # Whatever else is mixed in, and how.
    other = order_of((0, (5, 1, 1)), seed=3)
    mine = other.ids(0, 5_000)
    first = ids[sources == 0][:500]
    assert np.array_equal(mine[sources_of(other, mine) == 0][:500], first)
    assert not np.array_equal(first, sample_ids(3, 0, 500, SIZES["code"]))


def test_a_stage_begins_at_its_step_exactly():
    order = order_of((0, (1, 0, 0)), (777, (0, 1, 0)))
    assert set(sources_of(order, order.ids(0, 777))) == {0}
    assert set(sources_of(order, order.ids(777, 999))) == {1}


def test_a_source_that_was_read_as_often_as_it_may_leaves_its_part_to_the_others():
    order = order_of((0, (1, 1, 2)), most={"sums": 180})
    sources = sources_of(order, order.ids(0, 10_000))
    last = int(np.flatnonzero(sources == 2)[-1])
    assert (sources == 2).sum() == 180
    after = np.bincount(sources[last + 1 :], minlength=3)
    assert abs(after[0] - after[1]) <= 1
    assert order.length is None


def test_a_mixture_ends_when_all_sources_may_not_be_read_again():
    most = {"code": 350, "prose": 100, "sums": 7}
    order = order_of((0, (1, 1, 1)), most=most)
    assert order.length == 457
    assert len(order.ids(0, 1000)) == 457
    assert len(order.ids(450, 1000)) == 7
    assert len(order.ids(457, 10)) == 0
    assert np.array_equal(order.counts(457), [350, 100, 7])


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=300).filter(any))
def test_places_follow_the_weights(weights):
    counts, shares = places_of(weights), np.array(weights) / sum(weights) * PERIOD
    assert counts.sum() == PERIOD
    assert ((counts > 0) == (np.array(weights) > 0)).all()
    assert (counts - shares).max() <= 1
    few = 300  # those with less than a place take one from others
    assert (shares - counts).max() <= few


def test_the_order_never_changes():
    ids = order_of(*CURRICULUM, seed=1, most={"code": 1500}).ids(4_995, 12)
    assert ids.tolist() == [305, 5484, 7700, 7422, 648, 7778, 4861, 7779, 7739, 7730, 2682, 7701]


# ---- prepared from text -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three sources of text and a set to evaluate on, one of them JSON lines."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, count in (("code", 60), ("prose", 200), ("check", 8)):
        lines = (f"{name} has document {n}, which is not long\n" for n in range(count))
        (folder / f"{name}.txt").write_text("".join(lines))
    rows = "".join(f'{{"sum": "{n} + {n} = {n + n}"}}\n' for n in range(300))
    (folder / "sums.jsonl").write_text(rows)
    sources = [
        {"name": "code", "source": str(folder / "code.txt"), "weight": 1.0},
        {"name": "prose", "source": str(folder / "prose.txt"), "weight": 2.0},
        {
            "name": "sums",
            "source": str(folder / "sums.jsonl"),
            "text_field": "sum",
            "weight": 0.0,
        },
    ]
    return Data.parse(
        {
            "sources": sources,
            "stages": [{"from_step": 5, "weights": {"sums": 3.0, "code": 1.0}}],
            "eval_sets": [{"name": "check", "source": str(folder / "check.txt")}],
            "tokenizer": "bytes",
            "eval_fraction": 0.1,
            "cache_dir": str(folder / ".cache"),
        }
    )


def consumed(corpus, num_ranks, num_steps, first=0):
    """Tokens of each step in the order of the global batch, from all ranks."""
    split = corpus.train_split(12)
    steps = []
    for rank in range(num_ranks):
        shape = BatchShape(12, 12 // num_ranks, SEQ, rank, num_ranks)
        batches = train_batches(split, shape, 4, first)
        steps.append([step[0].tokens.numpy() for step in itertools.islice(batches, num_steps)])
    return [np.concatenate(parts) for parts in zip(*steps, strict=True)]


def test_ranks_and_resuming_don_t_change_what_is_consumed(data):
    corpus = prepare_corpus(data).for_samples(SEQ)
    whole = consumed(corpus, 1, 40)
    done, parts = 0, []
    for num_ranks, count in ((2, 3), (4, 4), (1, 6), (3, 9), (2, 18)):
        parts += consumed(corpus, num_ranks, count, first=done * 12)
        done += count
    assert np.array_equal(whole, parts)


def test_a_mixture_resumes_anywhere_by_reading_a_step(data, monkeypatch):
    read, split = [], prepare_corpus(data).for_samples(SEQ).train_split(12)
    rows = TokenStream.rows
    monkeypatch.setattr(TokenStream, "rows", lambda *of: read.extend(of[1]) or rows(*of))
    next(train_batches(split, BatchShape(12, 4, SEQ), 0, 12 * 10**9))
    assert len(read) == 12


def test_samples_are_of_the_source_that_the_weights_say(data):
    corpus = prepare_corpus(data).for_samples(SEQ)
    steps = consumed(corpus, 1, 20)
    digits = np.frombuffer(b"0123456789+=", np.uint8)
    share = [np.isin(step, digits).mean() for step in steps]
    assert max(share[:5]) < 0.2 < 0.3 < min(share[5:])


def test_what_is_held_out_has_names(data):
    corpus = prepare_corpus(data).for_samples(SEQ)
    assert corpus.eval_names == ("code", "prose", "sums", "check")
    steps = list(corpus.eval_steps(BatchShape(4, 4, SEQ), 2))
    assert len(steps) == 8
    read = [bytes(step[0].tokens.numpy().astype(np.uint8).flatten()) for step in steps]
    assert b"code" in read[0]
    assert b"check" in read[6]


def test_sources_share_a_tokenizer_that_is_trained_on_all(data):
    shared = prepare_corpus(data.replace(tokenizer="bpe:400"))
    contents = {part.tokenizer_path.read_bytes() for part in shared.sources.values()}
    contents.add(shared.eval_sets["check"].tokenizer_path.read_bytes())
    assert len(contents) == 1
    alone = data.replace(sources=(), stages=(), source=data.sources[0].source, tokenizer="bpe:400")
    assert prepare_corpus(alone).tokenizer_path.read_bytes() not in contents


def test_weights_follow_from_sizes_and_temperature(data):
    bare = tuple(each.replace(weight=None) for each in data.sources)
    plain = data.replace(sources=bare, stages=())

    def share(data):
        corpus = prepare_corpus(data).for_samples(SEQ)
        order = corpus.train_split(12).order(0, SEQ).__self__
        counts = order.counts(PERIOD)
        return counts / counts.sum(), np.array([each.num_samples for each in order.sources])

    by_size, sizes = share(plain)
    assert by_size == pytest.approx(sizes / sizes.sum(), abs=1e-4)
    root = np.sqrt(sizes)
    assert share(plain.replace(temperature=2.0))[0] == pytest.approx(root / root.sum(), abs=1e-4)
    coldest = share(plain.replace(temperature=1e-4))[0]  # all is the largest's
    assert coldest.tolist() == (sizes == sizes.max()).tolist()
    twice = plain.replace(sources=(bare[0].replace(epochs=2.0), *bare[1:]))
    seen = sizes * [2, 1, 1]
    assert share(twice)[0] == pytest.approx(seen / seen.sum(), abs=1e-4)
    assert prepare_corpus(twice).for_samples(SEQ).num_samples(SEQ) == seen.sum()


def test_a_run_longer_than_its_sources_is_refused(data):
    bound = tuple(each.replace(max_epochs=1.0) for each in data.sources)
    corpus = prepare_corpus(data.replace(sources=bound, stages=())).for_samples(SEQ)
    train = Train(global_batch=12, seq_len=SEQ, steps=10_000)
    with pytest.raises(InputError, match=r"train.steps = 10000 are more than the \d+ that"):
        corpus.check_length(train)
    corpus.check_length(train.replace(steps=10))


def test_a_source_that_cannot_be_used_is_named(data, tmp_path):
    missing = data.sources[1].replace(source=str(tmp_path / "none"))
    with pytest.raises(InputError, match=r"^prose: data.source .* names no file"):
        prepare_corpus(data.replace(sources=(data.sources[0], missing), stages=()))
    (tmp_path / "short.txt").write_text("no")
    short = data.sources[1].replace(source=str(tmp_path / "short.txt"))
    corpus = prepare_corpus(data.replace(sources=(data.sources[0], short), stages=()))
    with pytest.raises(InputError, match=r"^prose: train.seq_len = 16 is too long for 3 tokens"):
        corpus.for_samples(SEQ)
