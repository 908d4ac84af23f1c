"""Load: requests as they come, and how long each of their tokens took.

The words are those of `vllm bench serve`: TTFT is the time to a request's first token, TPOT the
mean time of its later ones, ITL that between any two that came one after the other, E2E that to the
last. Nothing here needs more than Python: other engines' processes import it, too.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Range = tuple[int, int]
"""The fewest and the most, evenly drawn."""
KINDS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens are made after it, whatever they are."""

    prompt: tuple[int, ...]
    num_tokens: int
    after_s: float
    """It comes so long after the first one; 0: all at once."""


def requests_of(
    number: int, rate: float | None, seed: int, num_in: Range, num_out: Range, vocab_size: int
) -> list[Request]:
    """Prompts and texts of drawn lengths.

    Args:
        rate: requests a second, at random moments (Poisson); None: all at once.
    """
    draw = random.Random(seed)
    made, after_s = [], 0.0
    for _ in range(number):
        length, count = draw.randint(*num_in), draw.randint(*num_out)
        made.append(Request(tuple(draw.choices(range(vocab_size), k=length)), count, after_s))
        after_s += draw.expovariate(rate) if rate else 0.0
    return made


@dataclass
class Served:
    """When the tokens of a load came."""

    requests: Sequence[Request]
    seconds: float = 0.0
    """Until the last one."""
    num_tokens: int = 0
    """That were made."""
    itl: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._made = [0] * len(self.requests)

    def came(self, number: int, count: int, now_s: float) -> None:
        """So many tokens of a request came, so long after the load began."""
        if not count:
            return
        if number in self._first:
            # Tokens of one step came together; the time is shared out.
            self.itl += [(now_s - self._last[number]) / count] * count
        self._first.setdefault(number, now_s)
        self._last[number] = self.seconds = now_s
        self._made[number] += count
        self.num_tokens += count

    def was_made(self, number: int, count: int) -> None:
        """A request got so many tokens in all, of which some came together."""
        self.num_tokens += count - self._made[number]
        self._made[number] = count

    @property
    def is_whole(self) -> bool:
        """Whether each request got all its tokens."""
        return self._made == [request.num_tokens for request in self.requests]

    @property
    def num_answered(self) -> int:
        """Requests that got a token."""
        return len(self._first)

    @property
    def ttft(self) -> list[float]:
        """Seconds to the first token, of each request that got one."""
        return [first - self.requests[n].after_s for n, first in self._first.items()]

    @property
    def e2e(self) -> list[float]:
        """Seconds to the last token."""
        return [last - self.requests[n].after_s for n, last in self._last.items()]

    @property
    def tpot(self) -> list[float]:
        """Mean seconds of a request's tokens after its first; 0 where there are none."""
        return [
            (self._last[n] - first) / max(1, self._made[n] - 1) for n, first in self._first.items()
        ]

    @property
    def tokens_per_s(self) -> float:
        """Tokens that were made, a second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def percentile(self, kind: str, part: float) -> float:
        """Seconds that this part of a kind's values doesn't exceed; 0 where there are none."""
        values = sorted(getattr(self, kind))
        return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0

    def count_within(self, limits: Mapping[str, float]) -> int:
        """Requests whose times, by kind, exceed none of these limits."""
        kinds = [(getattr(self, kind), limit) for kind, limit in limits.items()]
        return sum(all(v[n] <= limit for v, limit in kinds) for n in range(len(self._first)))
