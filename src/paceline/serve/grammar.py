"""Grammar: which tokens a text may go on with so that it becomes what was asked for.

llguidance (https://github.com/guidance-ai/llguidance, MIT) compiles a JSON schema, a regular
expression or a Lark grammar, and tells for each token of the vocabulary whether it may come next.
Where the text may end, the token that ends a text is among them.
"""

from collections.abc import Callable, Iterable
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.sampling import Grammar

_MOST_KEPT = 32
_MOST_SHOWN = 200
# Else a network that was trained little may go on with spaces for ever.
_JSON: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}"}


class Grammars:
    """Compiles grammars for one tokenizer; may be used by several threads.

    Args:
        vocab_size: rows of the network's logits.
        end_tokens: end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, [*end_tokens]
        self._compiled = lru_cache(_MOST_KEPT)(self._compile)

    def matcher(self, grammar: Grammar) -> "Matcher":
        """A matcher at the beginning of a text.

        Raises:
            InputError: the grammar can't be compiled, or llguidance is not installed.
        """
        return Matcher(self._compiled(grammar))

    @cached_property
    def _words(self) -> Any:
        """llguidance's view of the tokenizer."""
        from llguidance import LLTokenizer

        size = max(self._vocab_size, self._tokenizer.get_vocab_size())
        words = self._tokenizer.to_str()
        return LLTokenizer(words, n_vocab=size, eos_token=self._end_tokens or None)

    def _compile(self, grammar: Grammar) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise InputError(
                "A constrained text needs llguidance: pip install 'paceline[serve]'."
            ) from None
        make: dict[str, Callable[[str], str]] = {
            "json_schema": partial(LLMatcher.grammar_from_json_schema, defaults=_JSON),
            "regex": LLMatcher.grammar_from_regex,
            "lark": LLMatcher.grammar_from_lark,
        }
        try:
            source = make[grammar.kind](grammar.source)
            limits = LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(self._words, source, log_level=0, limits=limits)
            matcher.compute_bitmask()  # finds what only goes on and never ends
            problem = matcher.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            kind = grammar.kind.replace("_", " ")
            raise InputError(f"The {kind} can't be compiled ({_short(problem)}): change it.")
        return matcher


class Matcher:
    """How far one text has got in its grammar, as `paceline.generate` asks it."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self.problem: str | None = None
        """Why the text can't go on, a sentence; None: it can."""

    def copy(self) -> "Matcher":
        """Another one that has got as far."""
        return Matcher(self._matcher.deep_copy())

    def leave_allowed(self, logits: Tensor) -> None:
        """Leave only tokens that may come next.

        Args:
            logits: (vocab,), those of the other tokens become -inf.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(mask, count=len(logits), bitorder="little").astype(bool)
        self._look()
        if self.problem is None and not bits.any():
            self.problem = "The grammar allows no token here, and the text can't end: change it."
        if self.problem is None:
            logits.masked_fill_(torch.from_numpy(~bits).to(logits.device), -torch.inf)

    def take(self, token: int) -> None:
        """The text goes on with this token."""
        if self.problem is None:
            self._matcher.consume_token(token)
            self._look()

    @property
    def is_over(self) -> bool:
        """Whether the text has to end here."""
        return self.problem is not None or bool(self._matcher.is_stopped())

    def _look(self) -> None:
        if self._matcher.is_error():
            problem = _short(self._matcher.get_error())
            self.problem = f"The grammar can't be followed any further ({problem}): change it."


def _short(problem: str) -> str:
    text = " ".join(problem.replace("<non-verbose/>", "").split()).rstrip(".")
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
