"""A network as lm-evaluation-harness asks it, by the engine that serves requests.

How it works: the harness turns the questions of its tasks into requests of three kinds, and gives
all of a kind at once. Texts are cut into contexts and continuations by the harness's own code
(`TemplateLM`); the engine packs them into its passes, and works on texts that are to be made as it
does on those of clients. https://github.com/EleutherAI/lm-evaluation-harness
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.generate.chat import ChatTemplate
from paceline.generate.engine import Engine
from paceline.generate.score import Given
from paceline.generate.text import TextStream
from paceline.serve.network import Network

_Pair = tuple[Sequence[int], Sequence[int]]
"""The tokens of a context, and those of what follows it."""


class ServedNetwork(TemplateLM):
    """A network, for the harness.

    Args:
        template: makes prompts of conversations; None: texts are asked as they are.
        evaluating: is told how many requests come, and gives what is called after each.
    """

    def __init__(
        self,
        engine: Engine,
        network: Network,
        template: ChatTemplate | None,
        evaluating: Callable[[int], AbstractContextManager[Callable[[], None]]],
    ) -> None:
        super().__init__()
        self._engine, self._network, self._template = engine, network, template
        self._evaluating = evaluating

    @property
    def eot_token_id(self) -> int:
        """Stands before a text that has nothing before it."""
        return self._network.first_token

    @property
    def tokenizer_name(self) -> str:
        """The network's."""
        return self._network.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """As the network has it."""
        return self._network.chat_template

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as a prompt: for an answer, or else for the rest of its last message."""
        assert self._template is not None
        text = self._template.prompt(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The tokens of a text; a chat template has the special ones itself."""
        if add_special_tokens is None and self._template is None:
            return self._network.encode(string)
        adds = bool(add_special_tokens)
        return self._network.tokenizer.encode(string, add_special_tokens=adds).ids

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Of each pair of texts, log p of the second after the first, in nats, and whether all its
        tokens are the likeliest."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._scored([(context, own) for _, context, own in requests])

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Of each text, log p in nats. A long one is read in windows, each as long as the network
        takes."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]),
                    self.prefix_token_id,
                    max_seq_len=self._engine.longest,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        logs = iter(self._scored([pair for own in windows for pair in own]))
        return [sum(next(logs)[0] for _ in own) for own in windows]

    def _scored(self, pairs: Sequence[_Pair]) -> list[tuple[float, bool]]:
        given = [self._given(context, own) for context, own in pairs]
        found = []
        with self._evaluating(len(pairs)) as advance:
            for score, (_, own) in zip(self._engine.scores(given), pairs, strict=True):
                log = -float(score.losses[-len(own) :].double().sum())
                found.append((log, bool(score.are_likeliest[-len(own) :].all())))
                advance()
        return found

    def _given(self, context: Sequence[int], own: Sequence[int]) -> Given:
        """As much of the context's end as the network takes."""
        longest = self._engine.longest
        if not 1 <= len(own) <= longest:
            raise InputError(
                f"A choice of a task has {len(own)} tokens, and the network takes 1 to {longest} "
                "at a time: choose another task, or another network."
            )
        tokens = [*context, *own][-longest - 1 :]
        return Given(tokens[:-1], tokens[1:])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """The text that follows each, up to its stop strings, greedy unless its task says else."""
        streams = []
        for request in requests:
            text, settings = request.args
            sampling = _sampling(settings)
            tokens = self._fitting(self.tok_encode(text), sampling.max_tokens)
            stream = TextStream(self._network.tokenizer, sampling.stop, tokens)
            streams.append(stream)
            self._engine.submit(tokens, sampling, take_text=stream.add)
        with self._evaluating(len(requests)) as advance:
            while not self._engine.is_idle:
                for progress in self._engine.step():
                    if progress.sequence.end is not None:
                        advance()
        for stream in streams:
            stream.finish()
        return [stream.text for stream in streams]

    def _fitting(self, tokens: list[int], num_made: int) -> list[int]:
        """The end of a prompt that leaves room for the text."""
        room = self._engine.longest - num_made
        if room < 1:
            raise InputError(
                f"A task makes texts of {num_made} tokens, and this network takes "
                f"{self._engine.longest} with the prompt: lower max_gen_toks in the task's file."
            )
        return tokens[-room:] or [self.prefix_token_id]


def _sampling(settings: dict[str, Any]) -> Sampling:
    """As a task's generation_kwargs say it."""
    given = normalize_gen_kwargs(settings)
    stops, most, samples = (given.pop(name) for name in ("until", "max_gen_toks", "do_sample"))
    if not samples:
        given = {"temperature": 0.0}
    stops = tuple(each for each in stops if each)
    return Sampling.parse({**given, "stop": stops, "max_tokens": most}, "generation_kwargs")
