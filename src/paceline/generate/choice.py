"""Choice: the next token from its logits, as each request wants it.

How it works: random numbers are a function of a request's seed and of the token's place in its
text. A token is where the sum of the probabilities, in order, passes the random number. So neither
the other requests nor how many tokens a pass computes can change a choice.
"""

import hashlib
from collections.abc import Sequence as List
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config.sampling import Sampling
from paceline.generate.sequence import Sequence, TokenLogprobs

# So many of the likeliest tokens are looked at first where a request leaves out unlikely ones; only
# where they don't suffice all are sorted. Never a function of the other requests.
_FIRST_LOOK = 1024
_ROWS = 32


@dataclass(frozen=True)
class Place:
    """Where a token is chosen: after a sequence's tokens, and some of a guess."""

    sequence: Sequence
    guessed: tuple[int, ...] = ()

    @property
    def random(self) -> float:
        """A number from 0 up to 1, of this place in this text."""
        place = self.sequence.num_made + len(self.guessed)
        text = f"{self.sequence.seed}/{place}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) / 2**56


@torch.inference_mode()
def choose(logits: Tensor, places: List[Place]) -> list[int]:
    """The token of each place.

    Args:
        logits: (num_places, vocab) fp32; are changed.
        places: of each row.
    """
    samplings = [place.sequence.sampling for place in places]
    for row, (place, sampling) in enumerate(zip(places, samplings, strict=True)):
        if sampling.changes_logits:
            _change(logits[row], place, sampling)
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    whole = [row for row in drawn if not _leaves_out(samplings[row])]
    if whole:
        random = [places[row].random for row in whole]
        rows = logits[whole] / _column([samplings[row].temperature for row in whole], logits)
        for row, token in zip(whole, _draw(rows.softmax(-1), random), strict=True):
            tokens[row] = token
    for row in drawn:
        if _leaves_out(samplings[row]):
            tokens[row] = _draw_likely(logits[row], samplings[row], places[row].random)
    return tokens


def logprobs(logits: Tensor, tokens: List[int], count: int) -> list[TokenLogprobs]:
    """What the network thinks of tokens.

    Args:
        logits: (num_tokens, vocab), before any change.
        count: of the likeliest ones that are told beside each.
    """
    told = []
    for start in range(0, len(tokens), _ROWS):  # the memory of a few rows, not of a long prompt
        log = logits[start : start + _ROWS].log_softmax(-1)
        chosen = log.gather(
            -1, torch.tensor(tokens[start : start + _ROWS], device=log.device)[:, None]
        )
        best = log.topk(min(count, log.shape[1]))
        rows = (chosen[:, 0].tolist(), best.indices.tolist(), best.values.tolist())
        told += [
            TokenLogprobs(of_chosen, tuple(zip(likeliest, values, strict=True)))
            for of_chosen, likeliest, values in zip(*rows, strict=True)
        ]
    return told


def _change(logits: Tensor, place: Place, sampling: Sampling) -> None:
    """Change a row of logits by everything but the temperature."""
    sequence = place.sequence
    if sequence.matcher is not None:
        sequence.matcher.leave_allowed(logits)
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if sampling.has_penalties:
        made = torch.tensor([*sequence.made, *place.guessed], device=logits.device).long()
        prompt = torch.tensor(sequence.tokens[: sequence.num_prompt], device=logits.device)
        seen = torch.cat((prompt, made)).unique()
        known = logits[seen]
        factor = sampling.repetition_penalty
        logits[seen] = torch.where(known > 0, known / factor, known * factor)
        times = torch.zeros_like(logits).index_add_(
            0, made, torch.ones_like(made, dtype=logits.dtype)
        )
        logits -= sampling.frequency_penalty * times + sampling.presence_penalty * (times > 0)


def _leaves_out(sampling: Sampling) -> bool:
    return sampling.top_k is not None or sampling.top_p < 1 or sampling.min_p > 0


def _draw(probabilities: Tensor, random: List[float]) -> list[int]:
    """The place in each row (n, number of tokens) where its sum passes a random number."""
    sums = probabilities.double().cumsum(-1)
    wanted = _column(random, sums) * sums[:, -1:]
    found = torch.searchsorted(sums, wanted, right=True)
    # Rounding may bring a number up to the last sum: then the last possible token is meant.
    possible = (probabilities > 0).long()
    last = possible.shape[1] - 1 - possible.flip(1).argmax(1, keepdim=True)
    return torch.minimum(found, last)[:, 0].tolist()


def _draw_likely(logits: Tensor, sampling: Sampling, random: float) -> int:
    """Draw among the likely tokens of a row."""
    probabilities = (logits / sampling.temperature).softmax(-1)
    for count in (max(_FIRST_LOOK, sampling.top_k or 0), len(logits)):
        best = probabilities.topk(min(count, len(logits)))
        kept, reaches = _kept(best.values.double(), sampling)
        if reaches or count >= len(logits):
            break
    (place,) = _draw(kept[None], [random])
    return int(best.indices[place])


def _kept(sorted_: Tensor, sampling: Sampling) -> tuple[Tensor, bool]:
    """Probabilities of the likeliest tokens, zero where they are left out.

    Returns:
        them, and whether no token that isn't there could be kept.
    """
    kept = sorted_[: sampling.top_k]
    whole = 1.0 if sampling.top_k is None else kept.sum()
    before = kept.cumsum(0) - kept
    is_kept = (before < sampling.top_p * whole) & (kept >= sampling.min_p * kept[0])
    return kept * is_kept, sampling.top_k is not None or not bool(is_kept[-1])


def _column(numbers: List[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)[:, None]
