"""Simulate: the engine's own scheduler and blocks, with a clock instead of a network.

How it works: requests come when they come; before each step those that are there are handed to the
scheduler, which says what the step computes; the clock goes on by what that costs; each text whose
logits were wanted gets a token. So chunks, admission, shared prefixes and preemption are those of
`generate.scheduler`, not a copy of its rules.

What it is not: tokens mean nothing, so texts end where they were asked to, nothing is guessed,
blocks that leave the memory are computed anew, and a text shares with a later prompt only what the
two prompts have alike.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.generate.blocks import Blocks
from paceline.generate.scheduler import Chunk, Scheduler
from paceline.generate.sequence import Sequence as Text
from paceline.generate.work import WorkCounter
from paceline.plan.serving.costs import StepCosts, Terms
from paceline.plan.serving.load import Request, Served

MOST_BLOCKS = 10**6
"""That are simulated: tens of millions of tokens."""


@dataclass(frozen=True)
class Limits:
    """What one engine has."""

    num_blocks: int
    block_size: int
    max_tokens: int
    """Of a forward pass."""
    max_sequences: int
    share_prefixes: bool = True


@dataclass
class Simulated:
    """What became of a load."""

    served: Served
    terms: Terms = field(default_factory=Terms)
    """Of all steps."""
    prefill_s: float = 0.0
    """Of the steps' seconds, the share of prompts among their tokens."""
    num_steps: int = 0
    num_preemptions: int = 0
    most_blocks: int = 0
    """In use at a time."""

    @property
    def busy(self) -> float:
        """Share of the time in which the engine does steps."""
        return self.terms.total / self.served.seconds if self.served.seconds else 0.0


def simulate(
    requests: Sequence[Request],
    limits: Limits,
    count: WorkCounter,
    costs: StepCosts,
    tell: Callable[[Sequence[Chunk]], None] | None = None,
) -> Simulated:
    """Serve a load by one engine.

    Args:
        requests: in the order in which they come.
        tell: told of each step's chunks before it is done.

    Raises:
        InputError: a request that is longer than all blocks hold.
    """
    _check(requests, limits)
    blocks = Blocks(limits.num_blocks, shares=limits.share_prefixes)
    scheduler = Scheduler(blocks, limits.block_size, limits.max_tokens, limits.max_sequences)
    found = Simulated(Served(requests))
    coming = deque(enumerate(requests))
    numbers: dict[Text, int] = {}
    now_s = 0.0
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0][1].after_s <= now_s:
            number, request = coming.popleft()
            text = _text(request)
            numbers[text] = number
            scheduler.add(text)
        chunks = scheduler.next_chunks({})
        if not chunks:
            now_s = max(now_s, coming[0][1].after_s)
            continue
        if tell is not None:
            tell(chunks)
        now_s += _account(found, chunks, count, costs)
        found.most_blocks = max(found.most_blocks, blocks.num_blocks - blocks.num_free)
        for chunk in chunks:
            _go_on(scheduler, chunk, numbers[chunk.sequence])
            found.served.came(numbers[chunk.sequence], chunk.num_choices, now_s)
    found.num_preemptions = scheduler.num_preemptions
    return found


def _account(
    found: Simulated, chunks: Sequence[Chunk], count: WorkCounter, costs: StepCosts
) -> float:
    """Add a step's seconds to what it is about, and return them."""
    work = count(chunks)
    terms = costs.terms(work)
    found.terms += terms
    found.num_steps += 1
    found.prefill_s += terms.total * work.in_parts / work.rows
    return terms.total


def _go_on(scheduler: Scheduler, chunk: Chunk, number: int) -> None:
    """Give a text its next token, as the engine does."""
    text = chunk.sequence
    if chunk.num_choices:
        text.tokens.append(-1 - number)  # which no prompt has
    scheduler.was_computed(chunk, chunk.stop - chunk.start)
    if len(text.tokens) >= text.most_tokens:
        scheduler.end(text, "length")


_ANY = Sampling()


def _text(request: Request) -> Text:
    length = len(request.prompt)
    return Text([*request.prompt], _ANY, 0, length, length + request.num_tokens)


def _check(requests: Sequence[Request], limits: Limits) -> None:
    longest = max((len(each.prompt) + each.num_tokens for each in requests), default=0)
    if longest > limits.num_blocks * limits.block_size:
        raise InputError(
            f"A request has {longest:,} tokens with its text, and the memory for keys and values "
            f"holds {limits.num_blocks * limits.block_size:,}: give it more, or shorten requests."
        )
