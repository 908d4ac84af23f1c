"""Conversations: rows of chat data as texts, and which of their characters are answers.

A row has `messages`, a list of {role, content}, or `prompt` and `completion`: two such lists, or
two texts. A row of preferences has `prompt`, `chosen` and `rejected`: a prompt and two
completions. Messages become one text by a chat template: that of `data.chat_template`, else the one
beside the tokenizer, else `DEFAULT_TEMPLATE`. Two texts follow one another as they are, and the end
of a text behind them; the answer is the completion.

The forms are those of Hugging Face's datasets, https://huggingface.co/docs/trl/dataset_formats.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from paceline.config.errors import InputError
from paceline.config.files import parse_json, read_bytes
from paceline.config.job_sections import Data
from paceline.generate.chat import ChatTemplate, Conversation
from paceline.train.data.documents import Row, read_rows
from paceline.train.data.files import SourceFile
from paceline.train.data.tokenizer import END_NAMES, TRAINING_CHARS, end_name_of, given_folder

SETTINGS_FILE, TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Where nobody gave one: each message behind its role, an answer with the end of a text."""
_COLUMNS = ("messages", "prompt", "completion")
_PAIR = ("prompt", "chosen", "rejected")
_OBJECT = TypeAdapter(dict[str, Any])
_CURE = "put a good copy there"


@dataclass(frozen=True)
class ChatForm:
    """What makes texts of rows."""

    source: str
    """The chat template."""
    settings: Mapping[str, Any]
    """With the names of special tokens."""
    has_pairs: bool = False
    """Whether rows are preferences."""

    @classmethod
    def of(cls, data: Data) -> "ChatForm":
        """That of a Job's data.

        Raises:
            InputError: a file of it can't be read.
        """
        folder = given_folder(data.tokenizer)
        settings: dict[str, Any] = {}
        if folder is not None and (folder / SETTINGS_FILE).is_file():
            path = folder / SETTINGS_FILE
            try:
                settings = parse_json(read_bytes(path, _CURE), _OBJECT)
            except ValueError as error:
                raise InputError(f"{path} {error}: remove it, or {_CURE}.") from None
        end = END_NAMES[0] if folder is None else end_name_of(data.tokenizer)
        known = {} if end is None else {"eos_token": end}
        source = _source(data, folder, settings)
        return cls(source, {**known, **settings}, data.records == "preferences")

    @property
    def end(self) -> str:
        """What ends a text."""
        named = self.settings.get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        return named if isinstance(named, str) else ""

    def read(self, files: Sequence[SourceFile]) -> Iterator[tuple[list["ChatRow"], int]]:
        """The conversations of each row of files (of preferences the better one, and then the worse
        one), with the bytes of its file that were read so far.

        Raises:
            InputError: a file can't be read, or a row is none; the sentence names it.
        """
        template = ChatTemplate(self.source, self.settings)
        for file in files:
            for row in read_rows(file, _PAIR if self.has_pairs else _COLUMNS):
                each = _completed(row) if self.has_pairs else [row]
                yield [self._chat_row(one, template) for one in each], row.read_bytes

    def read_prompts(
        self, file: SourceFile, columns: Sequence[str]
    ) -> Iterator[tuple[Row, str, bool]]:
        """Rows of a file, each with the text that an answer follows, and whether no template made
        it.

        Raises:
            InputError: as `read`.
        """
        template = ChatTemplate(self.source, self.settings)
        for row in read_rows(file, ("prompt", *columns)):
            prompt = row.values.get("prompt")
            if isinstance(prompt, str) and prompt:
                yield row, _checked(prompt, row.where), True
            elif isinstance(prompt, list) and prompt:
                messages = [_message(each, row.where) for each in prompt]
                yield row, template.prompt(messages, add_generation_prompt=True), False
            else:
                raise InputError(
                    f"{row.where} has no prompt, a text or a list of messages: correct or remove "
                    "it."
                )

    def _chat_row(self, row: Row, template: ChatTemplate) -> "ChatRow":
        values = {name: value for name, value in row.values.items() if value is not None}
        prompt, completion = values.get("prompt"), values.get("completion")
        if "messages" not in values and isinstance(prompt, str) and isinstance(completion, str):
            answer = completion if completion.endswith(self.end) else completion + self.end
            text = _checked(prompt, row.where) + _checked(answer, row.where)
            return ChatRow(Conversation(text, [(len(prompt), len(text))]), is_plain=True)
        if isinstance(prompt, list) and isinstance(completion, list):
            values.setdefault("messages", prompt + completion)
        messages = values.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InputError(
                f"{row.where} is no conversation: it needs messages, a list of objects with role "
                "and content, or a prompt and a completion, both texts or both such lists."
            )
        messages = [_message(each, row.where) for each in messages]
        try:
            conversation = template.conversation(messages)
        except InputError as error:
            raise InputError(f"{row.where}: {error}") from None
        if "messages" not in row.values or row.values["messages"] is None:  # the completion only
            begin = len(template.prompt(messages[: len(prompt or ())], add_generation_prompt=False))
            kept = [span for span in conversation.answers if span[0] >= begin]
            conversation = conversation._replace(answers=kept)
        return ChatRow(conversation, is_plain=False)


@dataclass(frozen=True)
class ChatRow:
    """A row as a text."""

    conversation: Conversation
    is_plain: bool
    """Not made by a template: the tokenizer adds what it puts around a text."""


def texts_for_training(form: ChatForm, files: Sequence[SourceFile]) -> Iterator[str]:
    """The beginning of all conversations, that a BPE is trained on."""
    left = TRAINING_CHARS
    for rows, _ in form.read(files):
        for row in rows:
            yield row.conversation.text[:left]
            left -= len(row.conversation.text)
        if left <= 0:
            return


def _completed(row: Row) -> list[Row]:
    """The two completions of a row of preferences."""
    prompt, *answers = (row.values.get(name) for name in _PAIR)
    kinds = {type(value) for value in (prompt, *answers)}
    if kinds not in ({str}, {list}):
        raise InputError(
            f"{row.where} is no preference: it needs a prompt, chosen and rejected, all three "
            "texts or all three lists of messages."
        )
    return [row._replace(values={"prompt": prompt, "completion": answer}) for answer in answers]


def _source(data: Data, folder: Path | None, settings: Mapping[str, Any]) -> str:
    given = None if data.chat_template is None else Path(data.chat_template).expanduser()
    if given is None and folder is not None and (folder / TEMPLATE_FILE).is_file():
        given = folder / TEMPLATE_FILE
    if given is not None:
        try:
            return read_bytes(given, "give data.chat_template the path of a Jinja file").decode()
        except UnicodeDecodeError:
            raise InputError(f"{given} is not UTF-8 text: {_CURE}.") from None
    known = settings.get("chat_template")
    if isinstance(known, list):  # several by name
        named = {each.get("name"): each.get("template") for each in known if isinstance(each, dict)}
        known = named.get("default")
    return known if isinstance(known, str) else DEFAULT_TEMPLATE


def _message(value: Any, where: str) -> dict[str, Any]:
    """A message without the keys that are empty (columnar files have all keys in every row)."""
    stated = value if isinstance(value, dict) else {}
    message = {key: each for key, each in stated.items() if each is not None}
    content = message.setdefault("content", "")
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise InputError(
            f"{where} has a message {value!r:.60} without a role and a text as its content: "
            "correct or remove the row."
        )
    _checked(content, where)
    return message


def _checked(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may spell half of a surrogate pair, which no encoding can.
        raise InputError(f"{where} holds half a surrogate pair: correct or remove it.") from None
    if "\ufdd0" in text or "\ufdd1" in text:  # by which a template's marks are found
        raise InputError(f"{where} holds a noncharacter of Unicode: correct or remove it.")
    return text
