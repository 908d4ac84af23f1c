"""Networks that see later tokens: attention by hand, what is masked, a run, and what is refused."""

import json

import numpy as np
import pytest
import torch

from paceline.config.errors import InputError
from paceline.config.job import read_job
from paceline.config.model import Model
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.embed import embed
from paceline.generate.engine import Engine
from paceline.kernels.loss import IGNORED
from paceline.models.attention import Sdpa
from paceline.models.decoder import Decoder
from paceline.models.weights import write_weights
from paceline.observe.run import Run
from paceline.serve.retrieval.encoder import open_encoder
from paceline.train.command import train_job
from paceline.train.data import MicroBatch
from paceline.train.data.batches import BatchShape
from paceline.train.data.masks import Masking, draw, masked
from paceline.train.language import masking
from tests.small_job import work_in, write_small_job

MODEL = Model(
    vocab_size=61, hidden_size=32, ffn_size=48, num_layers=3, num_heads=4, num_kv_heads=2,
    max_seq_len=64, causal=False, sliding_window=6, full_layers=(1,),
)  # fmt: skip
MASKING = Masking(seed=3, share=0.15, token=60, num_tokens=50)


def built(model=MODEL):
    decoder = Decoder(model)
    decoder.init_weights(torch.Generator().manual_seed(0))
    return decoder.double()


@pytest.mark.parametrize("window", [None, 6, 200])
@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 4 + [4] * 8])])
def test_a_token_sees_both_sides(window, documents):
    draw_from = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 12, 8, generator=draw_from, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, 12, 8, generator=draw_from, dtype=torch.float64)
    core = Sdpa(is_causal=False)
    found = core(q, k, v, core.mask(12, window, documents, torch.device("cpu")))
    for query in range(12):
        seen = [
            key
            for key in range(12)
            if (window is None or abs(query - key) <= window // 2)
            and (documents is None or documents[0, query] == documents[0, key])
        ]
        for head in range(4):
            scores = q[0, head, query] @ k[0, head // 2, seen].T / 8**0.5
            expected = scores.softmax(-1) @ v[0, head // 2, seen]
            torch.testing.assert_close(found[0, head, query], expected, rtol=0, atol=1e-12)


def test_a_vector_does_not_depend_on_its_company():
    decoder = built()
    texts = [[5, 9, 3, 8], [7, 1, 2, 30, 31, 4, 4, 9, 12], [1]]
    together = embed(decoder, texts)
    for text, vector in zip(texts, together, strict=True):
        torch.testing.assert_close(embed(decoder, [text])[0], vector, rtol=0, atol=1e-6)
    changed = embed(decoder, [[*texts[0][:-1], 11]], pooling="last")
    first = decoder(torch.tensor([texts[0]]))[0, 0]
    assert not torch.equal(decoder(torch.tensor([[*texts[0][:-1], 11]]))[0, 0], first)
    assert changed.shape == (1, 32)


def test_what_is_masked_is_bert_s_and_a_function_of_seed_and_sample():
    drawn = [draw(MASKING, number, 128) for number in range(400)]
    guessed, replaced, by = (np.stack(part) for part in zip(*drawn, strict=True))
    assert guessed.mean() == pytest.approx(0.15, abs=0.005)
    assert (replaced & ~guessed).sum() == 0
    kept, mask = guessed & ~replaced, replaced & (by == 60)
    assert kept.sum() / guessed.sum() == pytest.approx(0.1, abs=0.01)
    assert mask.sum() / guessed.sum() == pytest.approx(0.8, abs=0.01)
    assert by[replaced & (by != 60)].max() == 49
    again = draw(MASKING, 7, 128)
    assert all(map(np.array_equal, again, (guessed[7], replaced[7], by[7])))
    assert not np.array_equal(draw(MASKING._replace(seed=4), 7, 128)[0], guessed[7])
    assert all(draw(MASKING._replace(share=1e-9), n, 16)[0].sum() == 1 for n in range(20))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_masks_are_the_same_on_any_number_of_ranks_and_after_a_resume(num_ranks):
    tokens = torch.randint(0, 50, (24, 32), generator=torch.Generator().manual_seed(0))

    def of(rank, ranks, first):
        shape = BatchShape(8, 2, 32, rank, ranks)
        steps = []
        for start in range(first, 24, 8):
            mine = tokens[start : start + 8][torch.from_numpy(shape.share(np.arange(8)))]
            steps.append([MicroBatch(part, part, None) for part in mine.split(2)])
        made = [each for step in masked(steps, shape, MASKING, first) for each in step]
        return torch.cat([torch.stack((each.tokens, each.targets), 1) for each in made])

    whole = of(0, 1, 0)
    ranks = [of(rank, num_ranks, 0).unflatten(0, (3, -1)) for rank in range(num_ranks)]
    assert torch.equal(torch.cat(ranks, 1).flatten(0, 1), whole)
    assert torch.equal(of(0, 1, 8), whole[8:])
    inputs, targets = whole.unbind(1)
    counted = targets != IGNORED
    assert torch.equal(targets[counted], tokens[counted])
    assert torch.equal(inputs[~counted], tokens[~counted])


def test_a_run_learns_masked_tokens_and_its_network_makes_vectors(tmp_path, monkeypatch):
    work_in(tmp_path, monkeypatch)
    job = read_job(
        write_small_job(tmp_path),
        ["model.causal=false", "model.vocab_size=300", "data.mask_share=0.3"],
    )
    run = Run(tmp_path / "runs" / job.name)
    train_job(job, run, fresh=False)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]
    encoder = open_encoder(run.path)
    vectors = encoder.vectors(["a fox", "a fox jumps over a lazy dog"])
    assert vectors.shape == (2, 16)
    np.testing.assert_allclose(encoder.vectors(["a fox"])[0], vectors[0], atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.mask_share=0.2"], "data.mask_share = 0.2 has no effect"),
        (["data.mask_token=2"], "data.mask_token = 2 has no effect"),
        (["model.causal=false", "observe.samples=['a']"], "observe.samples needs a model"),
        (["model.causal=false", "train.exact_eval=true"], "train.exact_eval needs a model"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, said):
    with pytest.raises(InputError, match=said):
        read_job(None, settings)


def test_a_mask_needs_an_id():
    job = read_job(None, ["model.causal=false"])
    with pytest.raises(InputError, match="none for a masked one: raise it by one"):
        masking(MODEL, job, 61)
    assert masking(MODEL, job, 60).token == 60
    given = read_job(None, ["model.causal=false", "data.mask_token=61"])
    with pytest.raises(InputError, match=r"data.mask_token = 61 is no id below"):
        masking(MODEL, given, 60)


def test_it_makes_no_texts_and_has_no_family_to_be_written_as(tmp_path):
    with pytest.raises(InputError, match="it makes no texts"):
        Engine(built(), Serving()).submit([1, 2], Sampling())
    with pytest.raises(InputError, match="causal = False"):
        write_weights(tmp_path / "a", MODEL, built().state_dict())
