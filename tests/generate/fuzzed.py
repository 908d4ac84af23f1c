"""Rounds of drawn requests on drawn engines, where every text is compared with the plain network.

How it works: a round draws an engine (family, precision, sizes of blocks and passes, too few of
them, tiers, guesses, exactness) and requests (lengths, beginnings that others have too, salts,
sampling, grammars, stops). Between steps it cancels some, damages what is kept, or says that the
weights have changed, which they have not. In the end each text, of cancelled ones what was made, is
held against the plain network: one pass over it without blocks, and what is chosen from its logits.
With `exact` each logarithm of a probability has to have the bits of an engine of the same sizes
that makes this text alone. Then all blocks, files and reads have to be gone.

A round is a function of its seed. What threads do when, and so what is fetched, is not; texts are.
"""

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.choice import Place, choose
from paceline.generate.engine import Engine
from paceline.generate.paged import KeyShape
from paceline.generate.quantised import QuantisedWeights, quantised_matrices
from paceline.generate.sequence import Sequence
from tests.generate.networks import MODELS, built, prompt

_CLOSE = {torch.float64: 1e-6, torch.float32: 2e-3}
"""How far the plain network's logits may be from those of passes with other tokens."""
_CLOSE_IN_FEW_BITS = 0.5
"""The same, where a rounding can make an input another whole number."""
_MOST_WAITS = 2000


class ViolationError(Exception):
    """A promise was not kept."""


@dataclass
class Steps:
    """Alternating tokens, as a grammar: after an even token an odd one, so many in all."""

    num_left: int
    last: int = 0

    def leave_allowed(self, logits):
        logits[self.last % 2 :: 2] = -torch.inf

    def take(self, token):
        self.last, self.num_left = token, self.num_left - 1

    @property
    def is_over(self):
        return self.num_left <= 0


@dataclass
class Stops:
    """A text ends with two tokens of which the second is the first one's successor."""

    tokens: list[int] = field(default_factory=list)

    def __call__(self, tokens):
        self.tokens += tokens
        last = self.tokens[-2:]
        return "a stop" if len(last) == 2 and last[1] == last[0] + 1 else None


@dataclass
class Drawn:
    """A request."""

    prompt: list[int]
    sampling: Sampling
    salt: bytes
    num_steps: int | None
    """Of its grammar; None: it has none."""
    has_stops: bool

    def submit(self, engine):
        matcher = None if self.num_steps is None else Steps(self.num_steps)
        take_text = Stops() if self.has_stops else None
        return engine.submit(
            self.prompt, self.sampling, salt=self.salt, take_text=take_text, matcher=matcher
        )


class _Near(Place):
    """The same place, with a random number that rounding could have been passed by."""

    shift = 0.0

    @property
    def random(self):
        return min(max(super().random + self.shift, 0.0), 1 - 2**-53)


@lru_cache
def network(name, dtype):
    return built(MODELS[name], dtype)


@lru_cache(8)
def engine_alone(name, dtype, weights, block_size, max_tokens):
    sizes = {"block_size": block_size, "max_tokens": max_tokens}
    exact = Serving(exact=True, weights=weights, share_prefixes=False, **sizes)
    return Engine(network(name, dtype), exact, end_tokens=[1])


@lru_cache(4)
def matrices_in(name, dtype, weights):
    """What puts a network's matrices into a form, while the plain network computes."""
    if weights == "as_trained":
        return nullcontext
    decoder = network(name, dtype)
    return QuantisedWeights(decoder, quantised_matrices(decoder, weights, 64)).put_in


def run_round(seed, num_requests, folder: Path) -> Counter:
    """Do one round.

    Returns:
        how often what happened.

    Raises:
        ViolationError: says the round, the request and what is wrong.
    """
    draw = random.Random(seed)
    name, dtype = draw.choice([*MODELS]), draw.choice([*_CLOSE])
    decoder = network(name, dtype)
    serving = _serving(draw, decoder, folder)
    engine = Engine(decoder, serving, end_tokens=[1])
    _choose_rule(draw, engine)
    counts = Counter(rounds=1)
    try:
        requests = _serve(draw, engine, num_requests, counts)
        for sequence, request in requests.items():
            counts[f"ended by {sequence.end}"] += 1
            close = _CLOSE[dtype] if serving.weights == "as_trained" else _CLOSE_IN_FEW_BITS
            with matrices_in(name, dtype, serving.weights)():
                _check_text(decoder, request, sequence, counts, close)
            if serving.exact:
                sizes = serving.block_size, serving.max_tokens
                alone = engine_alone(name, dtype, serving.weights, *sizes)
                _check_bits(alone, request, sequence, counts)
        _check_nothing_is_left(engine, folder)
    except ViolationError as violation:
        raise ViolationError(f"round {seed}, {name} in {dtype}, {serving!r}: {violation}") from None
    for key in ("preemptions", "blocks_fetched", "blocks_recomputed", "blocks_damaged"):
        counts[key] = engine.numbers()[key]
    for kind in ("all", name, f"{serving.weights} weights", f"exact: {serving.exact}"):
        counts[f"requests, {kind}"] = len(requests)
    return counts


def _serving(draw, decoder, folder) -> Serving:
    size, dtype = draw.choice([2, 4, 8]), next(decoder.parameters()).dtype
    block_gb = KeyShape.of(decoder).block_bytes(size, dtype) / 1e9
    exact = draw.random() < 0.3
    shares = draw.random() < 0.85
    host = draw.choice([0, 5, 30, 100, 300]) if shares else 0
    disk = draw.choice([0, 9, 200]) if host else 0
    return Serving(
        block_size=size,
        kv_gb=(draw.choice([40, 48, 64, 96, 96]) // size + 0.5) * block_gb,
        host_gb=host * block_gb,
        disk_gb=disk * block_gb,
        disk_folder=str(folder) if disk else "",
        max_tokens=draw.choice([16, 32]) if exact else draw.choice([1, 3, 8, 40, 512]),
        max_sequences=draw.choice([1, 3, 6, 30]),
        share_prefixes=shares,
        exact=exact,
        weights=draw.choice(["as_trained", "as_trained", "int8", "int4"])
        if dtype == torch.float32
        else "as_trained",
        speculate=draw.choice(["off", "ngram"]),
    )


def _choose_rule(draw, engine) -> None:
    """Fetch always or never, or as measured: with networks that small, chance has a say in it."""
    rule = draw.choice(["always", "always", "always", "never", "measured"])
    if engine._offload is not None and rule != "measured":
        token_s = 1e9 if rule == "always" else 0.0
        engine._offload.passes.seconds = lambda start, stop: token_s * (stop - start)


def _request(draw, longest, number, exact, earlier) -> Drawn:
    tokens = prompt(draw.choice([0, 4, 9, 24, 33]), draw.randint(0, 2))
    if earlier and draw.random() < 0.5:  # as the next turn of a conversation
        tokens = [*draw.choice(earlier).tokens]
    tokens += prompt(draw.randint(1, 9), number)
    tokens = tokens[: longest - 1]
    drawn = draw.random() < 0.5
    sampling = Sampling(
        max_tokens=draw.choice([1, 2, 5, 9, 14, 30]),
        temperature=draw.choice([0.7, 1.0, 2.0]) if drawn else 0.0,
        top_k=draw.choice([None, 1, 7]),
        top_p=draw.choice([1.0, 0.9, 0.3]),
        min_p=draw.choice([0.0, 0.1]),
        repetition_penalty=draw.choice([1.0, 1.0, 1.3]),
        frequency_penalty=draw.choice([0.0, 0.0, 0.5]),
        presence_penalty=draw.choice([0.0, 0.0, -0.5]),
        logit_bias=draw.choice([{}, {}, {3: 4.0}]),
        ignore_end=draw.random() < 0.5,
        seed=draw.randrange(2**32),
        logprobs=20 if exact or draw.random() < 0.2 else None,
    )
    return Drawn(
        tokens,
        sampling,
        salt=draw.choice([b"", b"", b"a"]),
        num_steps=draw.randint(1, 8) if draw.random() < 0.1 else None,
        has_stops=draw.random() < 0.2,
    )


def _serve(draw, engine, num_requests, counts) -> dict[Sequence, Drawn]:
    """Submit requests among steps, and do steps until all have ended."""
    requests: dict[Sequence, Drawn] = {}
    most_steps = 1000
    for number in range(num_requests):
        request = _request(draw, engine.longest, number, engine.serving.exact, [*requests])
        requests[request.submit(engine)] = request
        # A text that gives its blocks back time and again is still computed further each time.
        most_steps += 40 * (len(request.prompt) + request.sampling.max_tokens)
        for _ in range(draw.choice([0, 1, 2, 8, 20])):
            _step(engine, counts)
        if draw.random() < 0.2:
            victim = draw.choice([*requests])
            counts["cancelled while blocks are fetched"] += victim.read is not None
            engine.cancel(victim)
        if draw.random() < 0.03:
            engine.weights_changed()
            counts["other weights"] += 1
        if draw.random() < 0.1:
            _damage(draw, engine)
    while not engine.is_idle:
        _step(engine, counts)
        if counts["steps"] > most_steps:
            raise ViolationError(
                f"{counts['steps']} steps, and {len(requests)} texts haven't ended"
            )
        if counts["waits"] > _MOST_WAITS:
            raise ViolationError("nothing is fetched any more")
    return requests


def _step(engine, counts) -> None:
    did = engine.step()
    counts["steps" if did else "waits"] += 1
    if not did and not engine.is_idle and not any(s.read for s in engine._scheduler.running):
        raise ViolationError("a step did nothing, and nothing is fetched")


def _damage(draw, engine) -> None:
    """Change a byte of half of what is kept."""
    if engine._offload is None:
        return
    tiers = engine._offload.tiers
    tiers.settle()
    for kept in (*tiers._host.values(), *tiers._disk.values()):
        if draw.random() < 0.5:
            if isinstance(file := getattr(kept, "path", None), Path):
                file.write_bytes(b"not what was written")
            elif not kept.num_readers:  # else it was checked already
                kept.data[draw.randrange(kept.num_bytes)] ^= 64


def _check_text(decoder, request, sequence, counts, close) -> None:
    """Each token is the one that is chosen from the plain network's logits."""
    made = sequence.made
    if not made:
        if sequence.end != "cancelled":
            raise ViolationError(f"{request} made nothing")
        return
    with torch.inference_mode():
        logits = decoder(torch.tensor([sequence.tokens[:-1]]))[0, len(request.prompt) - 1 :].float()
    start = Sequence([*request.prompt], request.sampling, sequence.seed, len(request.prompt), 10**6)
    if request.num_steps is None:
        places = [Place(start, tuple(made[:count])) for count in range(len(made))]
        wanted = choose(logits.clone(), places)
    for place, token in enumerate(made):
        now = Place(start, tuple(made[:place]))
        if request.num_steps is not None:
            start.matcher = Steps(request.num_steps - place, made[place - 1] if place else 0)
            (expected,) = choose(logits[place][None].clone(), [now])
        else:
            expected = wanted[place]
        if token != expected:
            if token not in _near(logits[place], now, close):
                raise ViolationError(f"{request} made {made}; {place} should be {expected}")
            counts["within rounding"] += 1
    counts["tokens"] += len(made)
    _check_end(request, sequence)
    for told, row, token in zip(sequence.logprobs, logits, made, strict=False):
        if abs(told.chosen - float(row.log_softmax(-1)[token])) > 10 * close:
            raise ViolationError(f"{request}: a probability is wrong")


def _near(logits, place, close) -> set[int]:
    """Tokens that may be chosen where logits are so far off."""
    found = set()
    noise = torch.Generator().manual_seed(0)
    for shift in (-close, 0.0, close):
        for _ in range(10):
            near = _Near(place.sequence, place.guessed)
            object.__setattr__(near, "shift", shift)
            rows = logits + close * (2 * torch.rand(logits.shape, generator=noise) - 1)
            found |= {*choose(rows[None], [near])}
    return found


def _check_end(request, sequence) -> None:
    made, sampling = sequence.made, request.sampling
    stops = Stops()
    ends = [
        place
        for place, token in enumerate(made)
        if (token == 1 and not sampling.ignore_end)
        or (request.has_stops and stops([token]))
        or place + 1 == request.num_steps
    ]
    if sequence.end == "stop":
        is_right = ends == [len(made) - 1]
    elif sequence.end == "length":
        is_right = not ends and len(sequence.tokens) == sequence.most_tokens
    else:
        is_right = not ends and len(sequence.tokens) < sequence.most_tokens
    if not is_right:
        raise ViolationError(f"{request} made {made} and ended by {sequence.end}")


def _check_bits(engine, request, sequence, counts) -> None:
    """Alone the text is the same, and all logarithms of probabilities are."""
    alone = request.submit(engine)
    while alone.end is None and alone.num_made < sequence.num_made:
        engine.step()
    engine.cancel(alone)
    if alone.made[: sequence.num_made] != sequence.made:
        raise ViolationError(f"{request} made {sequence.made} and alone {alone.made}")
    if alone.logprobs[: sequence.num_made] != sequence.logprobs:
        raise ViolationError(f"{request}: other bits than alone")
    counts["tokens with equal bits"] += sequence.num_made


def _check_nothing_is_left(engine, folder) -> None:
    numbers = engine.numbers()
    if numbers["blocks_free"] != numbers["blocks"]:
        raise ViolationError(f"{numbers['blocks'] - numbers['blocks_free']} blocks are lost")
    if engine._scheduler._coming:
        raise ViolationError("names of blocks are still coming")
    if engine._offload is None:
        return
    tiers, serving = engine._offload.tiers, engine.serving
    tiers.settle()
    if any(held.num_readers for held in tiers._host.values()):
        raise ViolationError("somebody still reads")
    numbers = tiers.numbers()
    own = [] if tiers._folder is None else [f.name for f in tiers._folder.path.iterdir()]
    if len(own) - bool(own) != numbers["disk"]:
        raise ViolationError(f"{len(own) - 1} files for {numbers['disk']} blocks on disk")
    sizes = {"host": sum(held.num_bytes for held in tiers._host.values())}
    sizes["disk"] = sum(file.num_bytes for file in tiers._disk.values())
    for tier, budget_gb in (("host", serving.host_gb), ("disk", serving.disk_gb)):
        if numbers[f"{tier}_bytes"] != sizes[tier] or sizes[tier] > budget_gb * 1e9:
            raise ViolationError(f"{numbers} don't tell {sizes}, or go beyond {serving}")
