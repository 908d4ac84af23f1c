"""Sampling: how a request wants its tokens chosen."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.frozen import Count, CountOrNone, FrozenConfig

MOST_LOGPROBS = 20
MOST_CHOICES = 128
MOST_STOPS = 16
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class Grammar(FrozenConfig):
    """What a text has to be an instance of."""

    kind: Literal["json_schema", "regex", "lark"]
    """The language of `source`."""
    source: str = Field(max_length=100_000)
    """A JSON schema as text, a regular expression, or a grammar in Lark's notation."""


class Sampling(FrozenConfig):
    """How tokens are chosen, and when a text ends.

    In this order logits are changed by: the grammar, logit_bias, the three penalties, temperature;
    then tokens are left out by top_k, top_p and min_p.
    """

    max_tokens: CountOrNone = 128
    """The text ends after so many tokens at the latest; 0: only its prompt is looked at."""
    temperature: float = Field(1.0, ge=0, le=100)
    """Logits are divided by it; 0 takes the likeliest token."""
    top_k: Count | None = None
    """Only so many of the likeliest tokens can be chosen."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only the fewest likeliest tokens whose probabilities sum to it (nucleus,
    https://arxiv.org/abs/1904.09751)."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Only tokens at least so likely as this times the likeliest (https://arxiv.org/abs/2407.01082)."""
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    """Logits of tokens that stand in prompt or text are divided by it where positive, else
    multiplied (https://arxiv.org/abs/1909.05858)."""
    presence_penalty: _Penalty = 0.0
    """Subtracted from the logits of tokens that stand in the text."""
    frequency_penalty: _Penalty = 0.0
    """Subtracted from the logit of a token for each time that it stands in the text."""
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=1024
    )
    """Added to the logits of these tokens."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = Field(
        (), max_length=MOST_STOPS, strict=False
    )
    """The text ends before the first of these."""
    ignore_end: bool = False
    """Whether the text goes on after the token that ends a document."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    """Of the random numbers; the same request with the same seed gets the same text, whatever else
    is computed beside it. Another one each time by default."""
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    """So many likeliest tokens are told beside each chosen one, with logarithms of probabilities
    before any change to the logits."""
    grammar: Grammar | None = None
    """What the text has to be an instance of; anything by default."""

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the temperature."""
        return bool(self.logit_bias) or self.grammar is not None or self.has_penalties

    @property
    def has_penalties(self) -> bool:
        """Whether the choice depends on the tokens before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )
