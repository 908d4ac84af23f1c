"""The base of every config: frozen, strict, documented data.

A config holds data and pure functions of it. Unknown keys are errors that name the nearest known
one, because a misspelt setting that is silently ignored costs a person a training run.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from paceline.config.errors import InputError

Auto = Literal["auto"]
MOST = 10**15
"""Of any count of anything: where there is more, it is a slip of the hand."""
Count = Annotated[int, Field(gt=0, le=MOST)]
CountOrNone = Annotated[int, Field(ge=0, le=MOST)]
"""0 where there is none."""
Ways = Annotated[int, Field(gt=0, le=10**6)]
"""Devices, ranks or nodes that share something: ten times those of the largest machines."""
Layers = Annotated[int, Field(gt=0, le=1000)]
"""Those of the deepest transformer that was trained (https://arxiv.org/abs/2203.00555); each is
planned, built and written down by itself."""
Width = Annotated[int, Field(gt=0, le=2**30)]
"""Of a vector, or of one side of a matrix."""
_WORDS = {
    "a integer": "an integer",
    "a boolean": "true or false",
    "a tuple": "a list",
    "a dictionary": "a table",
    "String should have": "a text of",
    "Tuple should have": "a list of",
}
"""What pydantic calls things, as a person does who writes TOML."""
_LEFT_OUT = (" or instance of ", " after validation")
"""Where what it says of Python begins."""
# Characters of a wrong value that an error repeats.
_MOST_SHOWN = 200


class FrozenConfig(BaseModel):
    """A frozen record that accepts exactly its own fields, in their own types."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    @classmethod
    def parse(cls, raw: Mapping[str, Any], where: str = "") -> Self:
        """Validate raw data (as read from TOML or JSON).

        Args:
            raw: the data, a mapping of field names to values.
            where: the name of this section, put before the field in error messages.

        Raises:
            InputError: one sentence naming the field, what was given and what is required.
        """
        try:
            return cls.model_validate(dict(raw))
        except ValidationError as error:
            raise InputError(_describe(error, cls, where)) from None

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated again."""
        return self.parse({**self.__dict__, **changes})


def whole(text: str) -> int | None:
    """The whole number above 0 that a text is, up to MOST; None where it is none."""
    fits = text.isdecimal() and len(text) <= len(str(MOST))
    return int(text) if fits and 0 < int(text) <= MOST else None


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "; did you mean X?" for the closest known word, or else the list of the known ones."""
    longer = [name for name in known if name.lower().startswith(word.lower())]
    close = longer or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; known are {', '.join(sorted(known))}."


def _describe(error: ValidationError, config: type[BaseModel], where: str) -> str:
    """Put the first problem that pydantic found into one sentence."""
    problems = error.errors()
    # Where a section or a word may stand, a section's own problem says more than that it's no word;
    # and so does that of what a list holds, where a number may stand.
    problems = [each for each in problems if not _refuses_as_a_whole(each)] or problems
    first = problems[0]
    section, path = _walk(config, first["loc"])
    name = ".".join(filter(None, [where, *path]))
    if first["type"] == "extra_forbidden":
        unknown = str(first["loc"][-1])
        name = ".".join(filter(None, [where, *path[:-1], unknown]))
        return f"{name} is not a setting{nearest(unknown, list(section.model_fields))}"
    if first["type"] == "union_tag_invalid":
        context = first["ctx"]
        key = context["discriminator"].strip("'")
        return f"{name}.{key} = {context['tag']!r} is not known: use {context['expected_tags']}."
    if first["type"] == "union_tag_not_found":
        key = first["ctx"]["discriminator"].strip("'")
        return f"{name}.{key} is missing: say which kind of {name} it is."
    if first["type"] == "missing":
        return f"{name} is missing: give it a value."
    if first["type"] == "value_error":
        sentence = first["msg"].removeprefix("Value error, ")
        return sentence if not path else f"{name}: {sentence}"
    # A field that takes several types reports one problem for each: they belong to one sentence.
    same = [p for p in problems if _walk(config, p["loc"])[1] == path]
    required = " or ".join(dict.fromkeys(_required(p) for p in same))
    given = repr(first["input"])
    shown = given if len(given) <= _MOST_SHOWN else f"{given[:_MOST_SHOWN]}..."
    return f"{name} = {shown} can't be used: it must be {required}."


def _refuses_as_a_whole(problem: ErrorDetails) -> bool:
    is_plain = problem["type"] in ("literal_error", "string_type", "int_type")
    return is_plain and isinstance(problem["input"], Mapping | list)


def _required(problem: ErrorDetails) -> str:
    if problem["type"] == "string_pattern_mismatch":
        return f"a text that matches {problem['ctx']['pattern']}"
    message = problem["msg"].removeprefix("Input should be ").replace("a valid ", "a ")
    for end in _LEFT_OUT:
        message = message.partition(end)[0]
    for python, words in _WORDS.items():
        message = message.replace(python, words)
    return message


def _walk(config: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[type[BaseModel], list[str]]:
    """Follow an error's location through the sections; drop the parts that name types of a union.

    Returns:
        the innermost section, and the dotted path as a person would write it.
    """
    section, path, is_key = config, [], False
    union: list[type[BaseModel]] = []
    for part in loc:
        if is_key:  # of a mapping: a person chose it
            path.append(str(part))
            is_key = False
            continue
        field = section.model_fields.get(str(part))
        is_key = field is not None and get_origin(field.annotation) is dict
        tagged = [one for one in union if _has_default(one, part)]
        inner = _sections_of(section, str(part))
        union = inner
        if tagged:
            section = tagged[0]
        elif inner:
            section = inner[0]
            path.append(str(part))
        elif part in section.model_fields or (part == loc[-1] and not _names_a_type(str(part))):
            path.append(str(part))
    return section, path


def _names_a_type(part: str) -> bool:
    return "[" in part or "-" in part or part in {"int", "float", "str", "bool", "tuple", "list"}


def _sections_of(config: type[BaseModel], name: str) -> list[type[BaseModel]]:
    field = config.model_fields.get(name)
    kinds = (field.annotation, *getattr(field.annotation, "__args__", ())) if field else ()
    return [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]


def _has_default(section: type[BaseModel], tag: int | str) -> bool:
    """Whether a word names this section among those of a union: it is the default of a field."""
    return any(field.default == tag for field in section.model_fields.values())
