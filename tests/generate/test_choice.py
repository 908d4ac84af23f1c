"""Choice: tokens are drawn as often as they should be, and none that was left out."""

from collections import Counter

import pytest
import torch

from paceline.config.sampling import Sampling
from paceline.generate.choice import Place, choose, logprobs
from paceline.generate.sequence import Sequence

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
NUM_DRAWS = 4000


def place(sampling, prompt=(0,), made=(), seed=0):
    tokens = [*prompt, *made]
    return Place(Sequence(tokens, sampling, seed, len(prompt), 1000))


def drawn(sampling, logits=LOGITS, **tokens):
    """How often each token is chosen, over so many seeds."""
    places = [place(sampling, seed=seed, **tokens) for seed in range(NUM_DRAWS)]
    return Counter(choose(logits.repeat(NUM_DRAWS, 1), places))


def assert_as_often_as(counts, probabilities):
    for token, probability in enumerate(probabilities.tolist()):
        spread = (NUM_DRAWS * probability * (1 - probability)) ** 0.5
        assert counts[token] == pytest.approx(NUM_DRAWS * probability, abs=4 * spread + 1e-9)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_tokens_are_drawn_as_often_as_the_softmax_says(temperature):
    counts = drawn(Sampling(temperature=temperature))
    assert_as_often_as(counts, (LOGITS / temperature).softmax(-1))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.7}, [0, 1]),  # 0.55 and 0.20
        ({"top_p": 0.54}, [0]),
        ({"min_p": 0.2}, [0, 1, 2]),  # 0.37, 0.22, 0.13 of the likeliest
        ({"top_k": 3, "top_p": 0.85}, [0, 1]),  # of the three: 0.63 and 0.23
        ({"logit_bias": {0: -100.0}, "top_k": 2}, [1, 2]),
    ],
)
def test_unlikely_tokens_are_left_out_and_the_others_keep_their_proportions(settings, kept):
    probabilities = torch.zeros(6)
    probabilities[kept] = LOGITS[kept].softmax(-1)
    assert_as_often_as(drawn(Sampling(**settings)), probabilities)


def test_where_few_tokens_do_not_make_up_the_nucleus_all_are_looked_at():
    logits = torch.arange(5000) * -1e-4
    counts = drawn(Sampling(top_p=0.9), logits)
    assert 4000 < max(counts) < 4700
    assert len(counts) > 2000


def test_a_grown_seed_or_place_is_another_number():
    numbers = {
        place(Sampling(), made=range(n), seed=s).random for n in range(20) for s in range(20)
    }
    assert len(numbers) == 400
    assert all(0 <= number < 1 for number in numbers)


def test_penalties_are_those_of_their_papers():
    sampling = Sampling(
        temperature=0,
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias={5: 1.0},
    )
    logits = LOGITS[None].clone()
    choose(logits, [place(sampling, prompt=(1, 4), made=(0, 0, 3))])
    # Token 1 stands in the prompt alone; 4 too, where it is below zero; 0 was made twice.
    wanted = [2.0 / 2 - 2 * 0.5 - 0.25, 1.0 / 2, 0.5, 0.0 - 0.5 - 0.25, -1.0 * 2, -3.0 + 1]
    assert logits[0].tolist() == pytest.approx(wanted)


def test_what_is_guessed_counts_as_made():
    sampling = Sampling(temperature=0, frequency_penalty=1.5)
    guessed = Place(place(sampling).sequence, guessed=(0,))
    assert choose(LOGITS[None].clone(), [guessed]) == [1]
    assert guessed.random != place(sampling).random


def test_log_probabilities_are_of_the_likeliest_in_order():
    (told,) = logprobs(LOGITS[None], [3], 2)
    wanted = LOGITS.log_softmax(-1)
    assert told.chosen == pytest.approx(float(wanted[3]))
    assert [token for token, _ in told.likeliest] == [0, 1]
    assert logprobs(LOGITS[None], [3], 0)[0].likeliest == ()
