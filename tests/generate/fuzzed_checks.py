"""What texts of drawn requests have to be, and what may be left of them: nothing."""

import itertools
from dataclasses import dataclass

import torch

from paceline.generate.choice import Place, choose, logprobs
from paceline.generate.scheduler import Chunk
from paceline.generate.sequence import Sequence
from tests.generate.fuzzed_draws import END, Steps, Stops

_CLOSE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.15}
"""How far the plain network's logits may be from those of passes with other tokens: in bf16 0.03 at
most was measured, of logits with a deviation of 0.7."""
_CLOSE_IN_FEW_BITS = 0.2
"""The same, where a rounding can make an input another whole number; 0.06 was measured."""
_OTHER_EXPERT = 0.5
"""The same of either, where it can send a token to another expert; 0.42 was measured. So of experts
little more is checked than that texts aren't any others."""
_ROWS, _TRIES = 12, 100
"""Of flat, sorted probabilities, one rounding in twelve was seen to choose a given token."""


class ViolationError(Exception):
    """A promise was not kept."""


class _Near(Place):
    """The same place, with a random number that rounding could have been passed by."""

    shift = 0.0

    @property
    def random(self):
        return min(max(super().random + self.shift, 0.0), 1 - 2**-53)


def check_text(setting, keys, request, sequence, counts) -> None:
    """Each token is the one that is chosen from the plain network's logits, as near as rounding
    allows; with `exact` it is the one, and all that is told of it has the bits, of an engine that
    computes this text alone."""
    if not sequence.made and sequence.end != "cancelled" and request.sampling.max_tokens:
        raise ViolationError(f"{request} made nothing")
    plain = _Reference(setting.plain(sequence.tokens, keys), _closeness(setting, keys))
    plain.check(request, sequence, counts)
    if setting.serving.exact:
        logits = _logits_alone(setting.alone(), sequence.tokens)
        _Reference(logits, 0.0).check(request, sequence, counts)
        counts["tokens with equal bits"] += sequence.num_made
    counts["tokens"] += sequence.num_made
    counts["tokens of prompts that are told of"] += len(sequence.prompt_logprobs)
    _check_end(request, sequence)


def _closeness(setting, keys):
    close = _CLOSE[setting.dtype]
    rounds_keys = keys == "int8" and setting.dtype != torch.float64  # in which none is another one
    if setting.serving.weights != "as_trained" or rounds_keys:
        close = max(close, _CLOSE_IN_FEW_BITS)
    return _OTHER_EXPERT if setting.name == "experts" and close > 0.1 else close


def _logits_alone(engine, tokens):
    """(num_tokens, vocab), in passes of as many tokens as the engine's have."""
    size, most = engine.serving.block_size, engine.most_tokens
    sequence = Sequence(tokens, None, 0, len(tokens), len(tokens))
    sequence.blocks = [*range(-(-len(tokens) // size))]
    engine._memory.clear(sequence.blocks)
    stops = [(start, min(start + most, len(tokens))) for start in range(0, len(tokens), most)]
    return torch.cat(
        [engine.compute([Chunk(sequence, start, stop, stop - start)]) for start, stop in stops]
    )


@dataclass
class _Reference:
    """Logits of a whole text."""

    logits: torch.Tensor
    """(num_tokens, vocab)"""
    close: float
    """How far from them an engine's may be."""

    def check(self, request, sequence, counts) -> None:
        """A text, and what is told of it and of its prompt."""
        first, made = sequence.num_prompt - 1, sequence.made
        rows = self.logits[first : first + len(made)]
        self._check_choices(request, sequence, rows, counts)
        if request.sampling.logprobs is not None:
            self._check_told(request, sequence.logprobs, rows, made, request.sampling.logprobs)
        told, tokens = sequence.prompt_logprobs, sequence.tokens[1 : first + 1]
        if sequence.end == "cancelled":
            tokens = tokens[: len(told)]
        if request.num_told is not None:
            self._check_told(request, told, self.logits[: len(tokens)], tokens, request.num_told)

    def _check_choices(self, request, sequence, rows, counts):
        made = sequence.made
        start = Sequence(
            [*request.prompt], request.sampling, sequence.seed, len(request.prompt), 10**6
        )
        places = [Place(start, tuple(made[:count])) for count in range(len(made))]
        wanted = choose(rows.clone(), places) if made and request.num_steps is None else []
        for number, (token, place) in enumerate(zip(made, places, strict=True)):
            if request.num_steps is not None:
                last = made[number - 1] if number else 0
                start.matcher = Steps(request.num_steps - number, last)
                wanted += choose(rows[number][None].clone(), [place])
            if token != wanted[number]:
                if not self._may_choose(token, rows[number], place):
                    raise ViolationError(
                        f"{request} made {made}; {number} should be {wanted[number]}"
                    )
                counts["tokens within rounding"] += 1

    def _may_choose(self, token, logits, place) -> bool:
        """Whether logits so far off were found with which the token is chosen."""
        noise = torch.Generator().manual_seed(0)
        closes = [self.close / 16, self.close / 4, self.close] if self.close else []
        for _, close, sign in itertools.product(range(_TRIES), closes, (-1, 0, 1)):
            near = _Near(place.sequence, place.guessed)
            object.__setattr__(near, "shift", sign * close)
            rows = logits + close * (2 * torch.rand(_ROWS, len(logits), generator=noise) - 1)
            if token in choose(rows, [near] * _ROWS):
                return True
        return False

    def _check_told(self, request, told, rows, tokens, count):
        if len(told) != len(tokens):
            raise ViolationError(f"{request}: {len(told)} tokens of {len(tokens)} are told of")
        if not self.close:
            if told != logprobs(rows, tokens, count):
                raise ViolationError(f"{request}: other bits than alone")
            return
        log = rows.log_softmax(-1).tolist()
        for one, of_row, token in zip(told, log, tokens, strict=True):
            pairs = [(token, one.chosen), *one.likeliest]
            if any(abs(value - of_row[each]) > 2 * self.close for each, value in pairs):
                raise ViolationError(f"{request}: a probability is wrong")


def _check_end(request, sequence) -> None:
    made, sampling = sequence.made, request.sampling
    stops = Stops()
    ends = [
        place
        for place, token in enumerate(made)
        if (token == END and not sampling.ignore_end)
        or (request.has_stops and stops([token]))
        or place + 1 == request.num_steps
    ]
    if sequence.end == "stop":
        is_right = ends == [len(made) - 1]
    elif sequence.end == "length":
        is_right = not ends and len(sequence.tokens) == sequence.most_tokens
    else:
        is_right = not ends and len(made) < max(1, sequence.most_tokens - sequence.num_prompt)
    if not is_right:
        raise ViolationError(f"{request} made {made} and ended by {sequence.end}")


def check_nothing_is_left(engine) -> None:
    """Of an engine that is idle."""
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
