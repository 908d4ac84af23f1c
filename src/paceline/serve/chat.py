"""Chat: a conversation as the prompt that the network was trained on.

A template says how, in Jinja as transformers reads it
(https://huggingface.co/docs/transformers/chat_templating): in a sandbox that can't change what it
is given, with `raise_exception`, `strftime_now` and a plain `tojson`. Where there is no template
the contents follow one another, each with a line's end behind it: what a network without one can
go on with.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.config.errors import InputError

Message = Mapping[str, Any]
_PLAIN = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
_MOST_SHOWN = 300


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
            for name, value in ((key, _name(value)) for key, value in settings.items())
            if name.endswith("_token") and value is not None
        }

    def prompt(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text that the network goes on with.

        Raises:
            InputError: the template refuses the messages.
        """
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


class _Generation(Extension):
    """`{% generation %}`, which marks what an assistant said: the text stays as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _name(value: object) -> str | None:
    """A special token as the settings have it: its text, or an object with it."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


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
