"""The command `paceline chat`: a conversation in the terminal."""

import time
from pathlib import Path

from rich.console import Console

from paceline.config.errors import InputError
from paceline.config.sampling import Sampling
from paceline.config.serving import ServingSettings, read_settings
from paceline.generate.chat import ChatTemplate
from paceline.generate.engine import Engine
from paceline.generate.text import TextStream
from paceline.serve.generate_command import described
from paceline.serve.network import Network, open_network

_NOTES = Console(stderr=True, highlight=False, soft_wrap=True)
_HELP = (
    "/new begins anew, /set temperature=0.7 changes a setting of sampling, /quit or Ctrl-D leaves; "
    "Ctrl-C ends an answer."
)


def chat_command(path: Path, settings: ServingSettings, step: int | None) -> None:
    """Answer what is written, line by line, until it ends.

    Args:
        path: a run or a folder of weights.
        step: of the run's checkpoint; None: the newest good one.

    Raises:
        InputError: no such network.
    """
    network = open_network(path, settings.serve, step)
    talk = _Conversation(network, network.engine(settings.serve))
    _NOTES.print(f"{described(network)}. {_HELP}", style="dim")
    if network.chat_template is None:
        _NOTES.print(
            "It has no chat template: it goes on with what you write, as a text.", style="dim"
        )
    sampling = settings.sampling
    while (line := _line()) is not None:
        word, _, rest = line.partition(" ")
        if word == "/quit":
            return
        if word == "/new":
            talk = _Conversation(network, talk.engine)
        elif word == "/set":
            sampling = _changed(sampling, rest)
        elif word.startswith("/") and word[1:].isalpha():
            _NOTES.print(_HELP, style="dim")
        elif line:
            try:
                talk.answer(line, sampling)
            except InputError as error:
                _NOTES.print(str(error))


class _Conversation:
    """What was said so far."""

    def __init__(self, network: Network, engine: Engine) -> None:
        self.engine, self._network = engine, network
        self._template = ChatTemplate(network.chat_template, network.settings)
        self._messages: list[dict[str, str]] = []

    def answer(self, line: str, sampling: Sampling) -> None:
        """Say a line, and print what the network says to it.

        Raises:
            InputError: the line alone is too long for the network.
        """
        self._messages.append({"role": "user", "content": line})
        tokens = self._prompt()
        stream = TextStream(self._network.tokenizer, sampling.stop, tokens)
        begun = time.perf_counter()
        sequence = self.engine.submit(
            tokens, sampling, take_text=stream.add, matcher=self._network.matcher(sampling)
        )
        try:
            while sequence.end is None:
                self.engine.step()
                print(stream.new_text(), end="", flush=True)
        except KeyboardInterrupt:
            self.engine.cancel(sequence)
        stream.finish()
        print(stream.new_text(), flush=True)
        self._messages.append({"role": "assistant", "content": stream.text})
        seconds = time.perf_counter() - begun
        _NOTES.print(
            f"{sequence.num_made} tokens, {sequence.num_made / seconds:.0f} tokens/s; "
            f"{sequence.num_shared} of {len(tokens)} tokens before them were known",
            style="dim",
        )

    def _prompt(self) -> list[int]:
        """The tokens of the conversation; its oldest parts go where it gets too long."""
        while True:
            text = self._template.prompt(self._messages, add_generation_prompt=True)
            if self._network.chat_template is None:
                tokens = self._network.encode(text.removesuffix("\n"))
            else:  # a template has the special tokens itself
                tokens = self._network.tokenizer.encode(text, add_special_tokens=False).ids
            if len(tokens) < self.engine.longest or len(self._messages) == 1:
                return tokens
            del self._messages[:2]


def _line() -> str | None:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _changed(sampling: Sampling, text: str) -> Sampling:
    """With one setting changed; as it was, and a sentence, where it can't be."""
    try:
        named = sampling.model_dump(exclude_unset=True)
        return read_settings([f"sampling.{text}"], **named).sampling
    except InputError as error:
        _NOTES.print(str(error))
        return sampling
