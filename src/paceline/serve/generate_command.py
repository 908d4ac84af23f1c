"""The command `paceline generate`: texts that go on from prompts."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import ServingSettings
from paceline.generate.engine import Engine
from paceline.generate.text import TextStream
from paceline.serve.network import Network, open_network

_NOTES = Console(stderr=True, highlight=False, soft_wrap=True)


def generate_command(
    path: Path,
    prompts: Sequence[str],
    settings: ServingSettings,
    step: int | None,
    *,
    as_json: bool,
) -> None:
    """Make a text for each prompt, all at once, and show each as it comes.

    Args:
        path: a run or a folder of weights.
        prompts: "-" reads one from standard input.
        step: of the run's checkpoint; None: the newest good one.
        as_json: a line of JSON for each prompt, instead of the texts.

    Raises:
        InputError: no such network, or a prompt that it can't take.
    """
    texts = [_read(prompt) for prompt in prompts]
    begun = time.perf_counter()
    network = open_network(path, settings.serve, step)
    engine = network.engine(settings.serve)
    _NOTES.print(f"{described(network)}, ready in {time.perf_counter() - begun:.1f} s", style="dim")
    made = _Texts(engine, network, texts, settings.sampling)
    begun = time.perf_counter()
    first_s = None
    while not engine.is_idle:
        engine.step()
        first_s = first_s or time.perf_counter() - begun
        if not as_json:
            made.show()
    seconds = time.perf_counter() - begun
    if as_json:
        made.print_json()
    if made.num_cut:
        _NOTES.print(
            f"{made.num_cut} of {len(texts)} texts end early, at {engine.longest} tokens with "
            "their prompts: the network, or the memory for its keys, takes no more"
        )
    count = made.num_tokens
    _NOTES.print(
        f"{count} tokens in {seconds:.2f} s, {count / seconds:.0f} tokens/s, the first after "
        f"{(first_s or 0) * 1e3:.0f} ms",
        style="dim",
    )


def described(network: Network) -> str:
    """Which network it is, a phrase for a person."""
    parameters = network.decoder.model.num_params
    step = "" if network.step is None else f", step {network.step}"
    dtype = str(next(network.decoder.parameters()).dtype).removeprefix("torch.")
    return f"{network.name}{step}: {parameters / 1e6:.1f} M parameters in {dtype}"


class _Texts:
    """The texts of one command."""

    def __init__(
        self, engine: Engine, network: Network, prompts: Sequence[str], sampling: Sampling
    ) -> None:
        self._prompts = prompts
        self._number, self._is_begun = 0, False
        """The text that is being shown."""
        tokens = [network.encode(prompt) for prompt in prompts]
        self._streams = [TextStream(network.tokenizer, sampling.stop, each) for each in tokens]
        self._sequences = [
            engine.submit(each, sampling, take_text=stream.add, matcher=network.matcher(sampling))
            for each, stream in zip(tokens, self._streams, strict=True)
        ]

    @property
    def num_tokens(self) -> int:
        """Made so far, of all texts."""
        return sum(sequence.num_made for sequence in self._sequences)

    @property
    def num_cut(self) -> int:
        """Texts that ended before they were as long as was asked."""
        return sum(
            each.end == "length" and each.num_made < each.sampling.max_tokens
            for each in self._sequences
        )

    def show(self) -> None:
        """Print what is new of the text that is being shown, and go on to those that follow."""
        while self._number < len(self._streams):
            stream, sequence = self._streams[self._number], self._sequences[self._number]
            if sequence.end is not None:
                stream.finish()
            if not self._is_begun:
                print(self._prompts[self._number], end="")
            self._is_begun = sequence.end is None
            print(stream.new_text(), end="" if self._is_begun else "\n", flush=True)
            if self._is_begun:
                return
            self._number += 1

    def print_json(self) -> None:
        """A line for each prompt."""
        for prompt, stream, sequence in zip(
            self._prompts, self._streams, self._sequences, strict=True
        ):
            stream.finish()
            line = {
                "prompt": prompt,
                "text": stream.text,
                "tokens": sequence.num_made,
                "end": sequence.end,
                "seed": sequence.seed,
            }
            print(json.dumps(line, ensure_ascii=False))


def _read(prompt: str) -> str:
    if prompt != "-":
        return prompt
    if sys.stdin.isatty():
        _NOTES.print("Write the prompt, and end it with Ctrl-D.", style="dim")
    text = sys.stdin.read()
    if not text:
        raise InputError("Standard input is empty: give a prompt, or write one there.")
    return text
