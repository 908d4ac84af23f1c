"""Simulate: the same chunks as the engine computes, and a time that is the sum of its terms."""

import random
from collections import deque

import pytest

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.generate.work import Work, WorkCounter
from paceline.plan.serving.costs import Curve, StepCosts, Terms
from paceline.plan.serving.load import Request, requests_of
from paceline.plan.serving.simulate import Limits, simulate
from tests.generate.networks import MODELS, VOCAB, built

SECOND_A_STEP = StepCosts(Curve((1,), (0,)), Curve((1,), (0,)), host_s=1.0)


def drawn(seed):
    """A load, of which some prompts begin alike, and settings that are tight for it."""
    draw = random.Random(seed)
    begin = tuple(draw.choices(range(VOCAB), k=20))
    requests, after_s = [], 0.0
    for request in requests_of(14, None, seed, (1, 40), (1, 20), VOCAB):
        prompt = begin + request.prompt[:20] if draw.random() < 0.4 else request.prompt
        requests.append(Request(prompt, request.num_tokens, after_s))
        after_s += draw.choice((0, 0, 1, 3, 9))
    size = draw.choice((4, 8))
    serving = Serving(
        block_size=size,
        max_tokens=draw.choice((3, 13, 64)),
        max_sequences=draw.choice((2, 5, 16)),
        share_prefixes=draw.random() < 0.7,
        kv_gb=draw.choice((0.00006, 0.0002)),
        host_gb=0,
    )
    return requests, serving


def chunks_of_engine(decoder, requests, serving):
    """What each step computes, where requests come at given steps; and the engine."""
    engine, steps, clock = Engine(decoder, serving), [], 0
    numbers, coming = {}, deque(enumerate(requests))
    engine.tell_step = lambda step: steps.append(facts(step.chunks, numbers))
    while coming or not engine.is_idle:
        while coming and coming[0][1].after_s <= clock:
            number, request = coming.popleft()
            sampling = Sampling(
                max_tokens=request.num_tokens, temperature=0, ignore_end=True, seed=number
            )
            numbers[engine.submit(request.prompt, sampling)] = number
        clock += 1
        engine.step()
    return engine, steps


def facts(chunks, numbers):
    return [(numbers[c.sequence], c.start, c.stop, c.num_choices) for c in chunks]


@pytest.mark.parametrize("seed", range(12))
def test_a_simulation_computes_the_same_chunks_as_the_engine(seed):
    requests, serving = drawn(seed)
    engine, wanted = chunks_of_engine(built(MODELS["grouped"]), requests, serving)
    limits = Limits(
        engine.numbers()["blocks"],
        serving.block_size,
        serving.max_tokens,
        serving.max_sequences,
        serving.share_prefixes,
    )
    told, numbers = [], {}

    def tell(chunks):
        for chunk in chunks:
            text = chunk.sequence
            if text not in numbers:
                prompt = tuple(text.tokens[: text.num_prompt])
                numbers[text] = next(
                    n
                    for n, r in enumerate(requests)
                    if n not in numbers.values() and r.prompt == prompt
                )
        told.append(facts(chunks, numbers))

    counter = WorkCounter(MODELS["grouped"], serving.block_size)
    found = simulate(requests, limits, counter, SECOND_A_STEP, tell)
    assert told == wanted
    assert found.num_preemptions == engine.numbers()["preemptions"]
    assert found.served.is_whole
    assert found.num_steps == len(wanted)


def test_the_drawn_loads_preempt_share_and_cut_prompts():
    preemptions = shared = cut = 0
    for seed in range(12):
        requests, serving = drawn(seed)
        engine, steps = chunks_of_engine(built(MODELS["grouped"]), requests, serving)
        preemptions += engine.numbers()["preemptions"]
        starts = [fact[1:3] for step in steps for fact in step if fact[3] == 0]
        cut += len(starts)
        prompts = sum(len(request.prompt) for request in requests)
        computed = sum(stop - start for step in steps for _, start, stop, _ in step)
        shared += prompts + sum(r.num_tokens - 1 for r in requests) > computed
    assert preemptions > 10
    assert shared > 2
    assert cut > 10


def test_the_time_is_the_sum_of_its_terms():
    model = MODELS["window"]
    costs = StepCosts(
        Curve((1, 8), (0.01, 0.02)),
        Curve((1, 8), (0.001, 0.003)),
        block_s=1e-4,
        part_s=1e-3,
        pair_s=1e-5,
        host_s=1e-3,
        text_s=1e-4,
        exchange=Curve((1, 8), (1e-3, 2e-3)),
    )
    requests = requests_of(20, None, 3, (1, 40), (2, 9), VOCAB)
    found = simulate(requests, Limits(200, 4, 32, 6), WorkCounter(model, 4), costs)
    assert found.terms.total == pytest.approx(found.served.seconds)
    assert min(found.terms) > 0
    assert 0 < found.prefill_s < found.terms.total
    assert found.busy == pytest.approx(1)
    assert found.served.percentile("ttft", 0.5) < found.served.percentile("e2e", 0.5)
    again = simulate(requests, Limits(200, 4, 32, 6), WorkCounter(model, 4), costs)
    assert again.served.itl == found.served.itl


def test_a_device_that_waits_for_its_host_waits_in_the_host_s_term():
    costs = StepCosts(Curve((1,), (0.01,)), Curve((1,), (0.002,)), host_s=0.001, launch_s=0.02)
    terms = costs.terms(Work(choices=1, single=2))
    assert terms == pytest.approx(Terms(0.001, 0.012, 0.01, 0, 0))
    assert costs.terms(Work(choices=0, single=1)).host == pytest.approx(0.011)


def test_blocks_that_a_token_sees_are_those_of_its_window():
    # 7 tokens in two of three layers, all in the other; blocks of 4.
    model = MODELS["window"]
    engine = Engine(built(model), Serving(block_size=4))
    works = []
    engine.tell_step = lambda step: works.append(WorkCounter(model, 4)(step.chunks))
    engine.submit(list(range(9)), Sampling(max_tokens=20, ignore_end=True, seed=0))
    while not engine.is_idle:
        engine.step()
    assert works[0] == Work(choices=1, parts=1, in_parts=9, pairs=45)
    # The last step computes the token at 27: its window begins at 21, in block 5 of 0 to 6.
    assert works[-1].blocks == pytest.approx((7 + 2 + 2) / 3)


def test_a_request_longer_than_the_memory_is_refused():
    requests = [Request((1,) * 30, 11, 0.0)]
    with pytest.raises(InputError, match=r"41 tokens with its text, and .* holds 40"):
        simulate(requests, Limits(10, 4, 32, 6), WorkCounter(MODELS["grouped"], 4), SECOND_A_STEP)
