"""Sequence: the tokens of one text that is being made, and how far they are computed."""

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling

EndReason = Literal["stop", "length", "cancelled"]
"""Why a text ended: at its natural end or a stop string; after max_tokens, or where the network
takes no more; or nobody wants it any more."""


def check_tokens(tokens: List[int], vocab_size: int) -> None:
    """Check that a network can begin with these tokens.

    Raises:
        InputError: there are none, or one that it doesn't know.
    """
    if not tokens:
        raise InputError("The prompt has no tokens: give at least one.")
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise InputError(
            f"The prompt has token {wrong[0]}, but the network knows 0 to {vocab_size - 1}: use "
            "its own tokenizer."
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """What the network thought of a token, before any change to its logits."""

    chosen: float
    """Natural logarithm of the chosen token's probability."""
    likeliest: tuple[tuple[int, float], ...]
    """The likeliest tokens, the likeliest first."""


class Fetch(Protocol):
    """Keys and values of a sequence's next blocks, on their way from elsewhere."""

    @property
    def is_done(self) -> bool:
        """Whether all is there that will be."""
        ...

    def wait(self, seconds: float) -> object:
        """Wait until it is done, at most so long."""
        ...

    def place(self, blocks: List[int]) -> int:
        """Put what came into blocks, the first ones of these; how many there are."""
        ...

    def close(self) -> None:
        """Nobody wants it any more."""
        ...


@dataclass(eq=False)
class Sequence:
    """One text that is being made.

    Its keys and values, of the first `num_computed` tokens, are in `blocks`.
    """

    tokens: list[int]
    """The prompt, then what was made."""
    sampling: Sampling
    seed: int
    num_prompt: int
    most_tokens: int
    """There are never more: prompt, max_tokens and the network's longest sequence."""
    root: bytes = b""
    """What the name of its first block begins with."""
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    """Of its full blocks, as far as they are known."""
    num_shared: int = 0
    """Tokens whose keys and values were there already, when it was last admitted."""
    read: Fetch | None = None
    """Brings more of them; until it is done nothing is computed."""
    num_prompt_logprobs: int | None = None
    """So many likeliest tokens are told beside each of the prompt's; None: nothing is told."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens after the first, as far as they are known."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens that were made, where they were asked for."""
    matcher: Any = None
    """Knows which tokens its grammar allows next; None: it has none."""
    take_text: Callable[[list[int]], str | None] | None = None
    """Told the tokens that were made; returns the stop string that ended the text, if one did."""
    end: EndReason | None = None

    @property
    def made(self) -> list[int]:
        """The tokens that were made."""
        return self.tokens[self.num_prompt :]

    @property
    def num_made(self) -> int:
        """How many tokens were made."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_untold(self) -> int:
        """Tokens of the prompt that nothing is told of yet, and something has to be."""
        if self.num_prompt_logprobs is None:
            return 0
        return self.num_prompt - 1 - len(self.prompt_logprobs)

    @property
    def num_left(self) -> int:
        """Tokens that have to be computed before the next one can be chosen."""
        return len(self.tokens) - self.num_computed
