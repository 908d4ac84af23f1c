"""Chat: a conversation as the text to train on, and as the prompt of its next answer.

A template says how, in Jinja as transformers reads it
(https://huggingface.co/docs/transformers/chat_templating): in a sandbox that can't change what it
is given, with `raise_exception`, `strftime_now` and a plain `tojson`. Where there is no template
the contents follow one another, each with a line's end behind it: what a network without one can
go on with.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Output, TemplateData
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.config.errors import InputError
from paceline.generate.text import special_name

Message = Mapping[str, Any]
_PLAIN = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
_MOST_SHOWN = 300
# Unicode's noncharacters, which no text may hold: where an answer begins, and where it ends.
_BEGINS, _ENDS = "\ufdd0", "\ufdd1"


class Conversation(NamedTuple):
    """A conversation as a text to train on."""

    text: str
    answers: list[tuple[int, int]]
    """Where the assistant's words stand in it: first character, and the one after the last."""


class ChatTemplate:
    """Makes prompts of conversations.

    Args:
        source: in Jinja; None: the plain form.
        settings: of tokenizer_config.json, for the names of its special tokens.

    Raises:
        InputError: the template can't be read.
    """

    def __init__(self, source: str | None, settings: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(_PLAIN if source is None else source)
        except TemplateError as error:
            raise InputError(
                f"The chat template can't be read ({error}): put a good one there, or remove it."
            ) from None
        self._names = {
            name: value
            for name, value in ((key, special_name(value)) for key, value in settings.items())
            if name.endswith("_token") and value is not None
        }

    def prompt(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text that the network goes on with.

        Raises:
            InputError: the template refuses the messages.
        """
        return re.sub(f"[{_BEGINS}{_ENDS}]", "", self._rendered(messages, add_generation_prompt))

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        """The whole text, and which of it are answers: what `{% generation %}` marks, or else what
        each message of the assistant adds to the prompt before it.

        Raises:
            InputError: the template refuses the messages, or gives an answer another text as soon
                as more follows.
        """
        marked = self._rendered(messages, add_generation_prompt=False)
        if _BEGINS in marked:
            return _without_marks(marked)
        answers = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._rendered(messages[:index], add_generation_prompt=True)
                after = self._rendered(messages[: index + 1], add_generation_prompt=False)
                if not (marked.startswith(after) and after.startswith(before)):
                    raise InputError(
                        "The chat template writes an answer otherwise when more follows it: mark "
                        "answers in it with {% generation %} and {% endgeneration %}."
                    )
                answers.append((len(before), len(after)))
        return Conversation(marked, answers)

    def _rendered(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                **self._names,
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
            )
        except Exception as error:  # a template may do anything with what a person wrote
            problem = " ".join(str(error).split())[:_MOST_SHOWN] or type(error).__name__
            raise InputError(
                f"The chat template refuses the messages ({problem}): change them."
            ) from None


def _without_marks(marked: str) -> Conversation:
    """The text of a template that marks answers."""
    text, answers, begin = "", [], 0
    for part in re.split(f"([{_BEGINS}{_ENDS}])", marked):
        if part == _BEGINS:
            begin = len(text)
        elif part == _ENDS:
            answers.append((begin, len(text)))
        else:
            text += part
    return Conversation(text, answers)


class _Generation(Extension):
    """`{% generation %}`, which marks what an assistant said."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [Output([TemplateData(_BEGINS)]), *body, Output([TemplateData(_ENDS)])]


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' own: Jinja's escapes what HTML gives a meaning."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
