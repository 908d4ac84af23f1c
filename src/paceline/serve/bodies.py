"""Bodies: what a request may say, and what of it the engine is asked.

The fields are those of OpenAI's API (https://platform.openai.com/docs/api-reference) that mean
something here, and some of vLLM's. null is a field that was left out. A field that nobody knows is
an error, for a misspelt one would be ignored.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, TypeAdapter
from tokenizers.decoders import DecodeStream

from paceline.config.errors import InputError
from paceline.config.files import parse_json
from paceline.config.frozen import FrozenConfig
from paceline.config.sampling import MOST_CHOICES, MOST_LOGPROBS, Grammar, Sampling
from paceline.config.serving import Retrieval
from paceline.generate.chat import ChatTemplate
from paceline.generate.embed import check_texts
from paceline.generate.sequence import check_tokens
from paceline.serve.errors import ApiError
from paceline.serve.grammar import Grammars, Matcher
from paceline.serve.network import Network
from paceline.serve.retrieval.retriever import Found

MOST_PROMPTS = 128
MOST_MESSAGES = 4096
_OBJECT = TypeAdapter(dict[str, Any])
_SHORT_TEXT = Annotated[str, Field(min_length=1, max_length=256)]
_MAX_TOKENS = 16  # OpenAI's, of /v1/completions


@dataclass(frozen=True)
class Asked:
    """What a request asks the engine for."""

    prompts: list[list[int]]
    echoes: list[str]
    """What stands before the text of each prompt's choices."""
    sampling: Sampling
    """Of every choice, but for its seed."""
    num_choices: int
    """Texts of each prompt that are answered."""
    num_candidates: int
    """Texts of each prompt that are made."""
    salt: bytes
    is_streamed: bool
    tells_usage: bool
    """Whether a stream ends with what was used."""
    tells_logprobs: bool
    prompt_logprobs: int | None = None
    """So many likeliest tokens are told beside each of the prompts'; None: nothing is told."""
    echo_starts: Sequence[Sequence[int]] = ()
    """Of each prompt's tokens in its text, in characters, where something is told of them."""
    matcher: Matcher | None = None
    """Of the grammar, at its beginning; each text gets a copy."""
    sources: Sequence[Found] = ()
    """The chunks of documents that are in the prompt."""

    @property
    def num_texts(self) -> int:
        """That are made."""
        return len(self.prompts) * self.num_candidates

    def sampling_of(self, candidate: int) -> Sampling:
        """How one of a prompt's candidates is made: its seed depends on the request's alone."""
        seed = self.sampling.seed
        return self.sampling if seed is None else self.sampling.replace(seed=_seed(seed, candidate))


def _seed(seed: int, candidate: int) -> int:
    if candidate == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/choice {candidate}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)


class StreamOptions(FrozenConfig):
    """Of a stream."""

    include_usage: bool = False


class JsonSchema(FrozenConfig):
    """As `response_format` has it."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(FrozenConfig):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def grammar(self) -> Grammar | None:
        """None: any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar(kind="json_schema", source='{"type": "object"}')
        if self.json_schema is None:
            raise InputError("response_format.json_schema is missing: give the schema.")
        return _grammar("json_schema", json.dumps(self.json_schema.schema_))


class StructuredOutputs(FrozenConfig):
    """vLLM's way to say the same, and more."""

    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    """In Lark's notation."""

    @property
    def of_text(self) -> Grammar:
        """What the text has to be an instance of."""
        given = [value for value in vars(self).values() if value is not None]
        if len(given) != 1:
            raise InputError(
                "structured_outputs takes exactly one of json, regex, choice, grammar: "
                f"{len(given)} were given."
            )
        if self.regex is not None:
            return _grammar("regex", self.regex)
        if self.choice is not None:
            return _grammar("lark", f"start: {' | '.join(map(json.dumps, self.choice))}")
        if self.grammar is not None:
            return _grammar("lark", self.grammar)
        schema = self.schema_
        return _grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _grammar(kind: str, source: str) -> Grammar:
    return Grammar.parse({"kind": kind, "source": source}, "grammar")


class Fields(FrozenConfig):
    """What every request may say."""

    model: str | None = None
    user: str | None = None
    """Has no effect."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Fields of OpenAI's that are not taken, and why."""

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Read the body of a request.

        Raises:
            InputError: it is no JSON, or says something that can't be asked.
        """
        try:
            raw = parse_json(body, _OBJECT)
        except ValueError as error:
            raise InputError(f"The body {error}: send an object in JSON.") from None
        for name in raw.keys() & cls.refused.keys():
            if raw.pop(name) not in (None, [], "none"):
                raise InputError(f"{name} is not taken: {cls.refused[name]}.")
        return cls.parse(
            {k: v for k, v in raw.items() if v is not None or k not in cls.model_fields}
        )

    @classmethod
    def field_of(cls, sentence: str) -> str | None:
        """The field that a sentence is about: it begins with its name."""
        first = sentence.partition(" ")[0].partition(".")[0]
        known = first in cls.model_fields or first in cls.refused
        return first if known or " is not a setting" in sentence else None


class EmbeddingsBody(Fields):
    """Of /v1/embeddings."""

    input: str | list[Any]
    """A text or its tokens, or a list of either."""
    encoding_format: Literal["float", "base64"] = "float"

    refused: ClassVar = {"dimensions": "vectors are as wide as the network, so leave it out"}

    def texts(self, network: Network) -> list[list[int]]:
        """The tokens of each.

        Raises:
            InputError: there are none, too many, or some that the network can't take.
        """
        given = _prompts(self.input, "input")
        texts = [network.encode(each) if isinstance(each, str) else each for each in given]
        check_texts(network.decoder, texts)
        return texts


class RetrievalAsked(FrozenConfig):
    """What of a server's documents a prompt gets."""

    k: int | None = Field(None, ge=0, le=64)
    """Chunks; 0: none."""
    query: str | None = Field(None, min_length=1)
    """What is searched for, where that isn't the prompt or the user's last message."""


class Body(Fields):
    """What requests for texts may say. What `Sampling` knows is checked there."""

    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: _SHORT_TEXT | None = None
    retrieval: RetrievalAsked | None = None
    """What of the server's documents the prompt gets; None: as the server's settings have it."""

    @classmethod
    def read(cls, body: bytes) -> Self:
        """As above."""
        read = super().read(body)
        if read.stream_options is not None and not read.stream:
            raise InputError("stream_options says how to stream, and stream is not true: set it.")
        return read

    def query(self) -> str | None:
        """What documents are searched for; None: nothing, for the prompt is no text."""
        raise NotImplementedError

    def asked(self, server: "Server", holder: bytes, found: Sequence[Found] = ()) -> Asked:
        """What the engine is asked.

        Args:
            holder: of the key; see `Keys.holder`.
            found: chunks of documents for the prompt, the nearest first.

        Raises:
            InputError: it can't be.
        """
        raise NotImplementedError

    def _sampling(self, defaults: Mapping[str, Any], logprobs: int | None) -> Sampling:
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _logit_bias(self.logit_bias),
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "seed": self.seed,
            "ignore_end": self.ignore_eos,
            "logprobs": logprobs,
            "grammar": self._grammar(),
        }
        said: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.top_k in (0, -1):  # vLLM's words for all
            said["top_k"] = None
        return Sampling.parse({**defaults, **said})

    def _grammar(self) -> Grammar | None:
        if self.structured_outputs is None:
            return None if self.response_format is None else self.response_format.grammar
        if self.response_format is not None:
            raise InputError(
                "response_format and structured_outputs both say what the text has to be: leave "
                "one out."
            )
        return self.structured_outputs.of_text


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for token in given:
        if not token.isdecimal() or len(token) > 12:
            raise InputError(
                f"logit_bias names {token[:40]!r}, which is no token: give its number."
            )
    return {int(token): bias for token, bias in given.items()}


class CompletionBody(Body):
    """Of /v1/completions."""

    prompt: str | list[Any]
    """A text or its tokens, or a list of either."""
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    refused: ClassVar = {"suffix": "texts are gone on with, not filled in, so leave it out"}

    def query(self) -> str | None:
        """As above: the prompt, where it is one text."""
        return self.prompt if isinstance(self.prompt, str) else None

    def asked(self, server: "Server", holder: bytes, found: Sequence[Found] = ()) -> Asked:
        """As above."""
        candidates = self.best_of or self.n
        if candidates < self.n:
            raise InputError(f"best_of = {candidates} is less than n = {self.n}: raise it.")
        if candidates > self.n and self.stream:
            raise InputError("best_of looks at whole texts, and stream is true: leave one out.")
        tells_prompt = self.echo and self.logprobs is not None
        given = _prompts(self.prompt, "prompt")
        logprobs = 0 if self.logprobs is None and candidates > self.n else self.logprobs
        network = server.network
        sampling = self._sampling({"max_tokens": _MAX_TOKENS, **server.defaults}, logprobs)
        prompts = [network.encode(p) if isinstance(p, str) else p for p in given]
        for tokens in prompts:
            check_tokens(tokens, network.decoder.model.vocab_size)
        if found:
            prompt = given[0]
            if len(given) > 1 or not isinstance(prompt, str):
                raise InputError("retrieval needs one prompt that is a text: ask one at a time.")
            if tells_prompt:
                raise InputError(
                    "echo with logprobs tells of the prompt as it was sent, and retrieval puts "
                    "chunks of documents before it: leave one of them out."
                )
            found, own = server.fitting(
                found, sampling, lambda sources: network.encode(f"{sources}\n\n{prompt}")
            )
            prompts = [own] if found else prompts
        return Asked(
            prompts=prompts,
            sources=found,
            echoes=[_text(p, network) if self.echo else "" for p in given],
            sampling=sampling,
            num_choices=self.n,
            num_candidates=candidates,
            salt=_salt(self.cache_salt, holder),
            is_streamed=self.stream,
            tells_usage=self.stream_options is not None and self.stream_options.include_usage,
            tells_logprobs=self.logprobs is not None,
            prompt_logprobs=self.logprobs if tells_prompt else None,
            echo_starts=[_starts(p, network) for p in given] if tells_prompt else (),
        )


def _prompts(given: str | list[Any], name: str) -> Sequence[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if given and all(type(each) is int for each in given):
        return [given]
    if not 1 <= len(given) <= MOST_PROMPTS:
        raise InputError(f"{name} has {len(given)} texts, and 1 to {MOST_PROMPTS} can be asked.")
    for each in given:
        is_tokens = isinstance(each, list) and all(type(token) is int for token in each)
        if not isinstance(each, str) and not is_tokens:
            raise InputError(f"{name} is neither a text nor its tokens, nor a list of either.")
    return given


def _text(prompt: str | list[int], network: Network) -> str:
    if isinstance(prompt, str):
        return prompt
    return network.tokenizer.decode(prompt, skip_special_tokens=False)


def _starts(prompt: str | list[int], network: Network) -> list[int]:
    """Where the tokens of a prompt begin in its text."""
    if isinstance(prompt, str):
        return [start for start, _ in network.encoding(prompt).offsets]
    stream, starts, length = DecodeStream(skip_special_tokens=False), [], 0
    for token in prompt:
        starts.append(length)
        length += len(stream.step(network.tokenizer, token) or "")
    return starts


class TextPart(FrozenConfig):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(FrozenConfig):
    """What somebody said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    # What an answer of OpenAI's says of tools and voices, where there are none.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def is_user(self) -> bool:
        """Whether a user said it."""
        return self.role == "user"

    @property
    def for_template(self) -> dict[str, str]:
        """As a template reads it: content is one text."""
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


_TOOLS = "this server makes text and calls no tools, so leave it out"


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    add_generation_prompt: bool = True

    refused: ClassVar = dict.fromkeys(
        ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"), _TOOLS
    )

    def query(self) -> str | None:
        """As above: what the user said last."""
        said = [message.for_template["content"] for message in self.messages if message.is_user]
        return said[-1] if said and said[-1] else None

    def asked(self, server: "Server", holder: bytes, found: Sequence[Found] = ()) -> Asked:
        """As above."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs is about logprobs, which is not true: set it.")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InputError("max_tokens and max_completion_tokens are the same: leave one out.")
        most = {"max_tokens": server.longest, **server.defaults}
        if self.max_completion_tokens is not None:
            most["max_tokens"] = self.max_completion_tokens
        sampling = self._sampling(most, (self.top_logprobs or 0) if self.logprobs else None)
        found, tokens = server.fitting(found, sampling, lambda text: self._tokens(server, text))
        return Asked(
            prompts=[tokens],
            sources=found,
            echoes=[""],
            sampling=sampling,
            num_choices=self.n,
            num_candidates=self.n,
            salt=_salt(self.cache_salt, holder),
            is_streamed=self.stream,
            tells_usage=self.stream_options is not None and self.stream_options.include_usage,
            tells_logprobs=self.logprobs,
        )

    def _tokens(self, server: "Server", sources: str) -> list[int]:
        """The prompt, with the sources behind what the system says first."""
        messages = [message.for_template for message in self.messages]
        if sources and self.messages[0].role in ("system", "developer"):
            first = messages[0]
            messages[0] = {**first, "content": f"{first['content']}\n\n{sources}"}
        elif sources:
            messages.insert(0, {"role": "system", "content": sources})
        text = server.template.prompt(messages, add_generation_prompt=self.add_generation_prompt)
        return server.network.tokenizer.encode(text, add_special_tokens=False).ids


def _salt(given: str | None, holder: bytes) -> bytes:
    """Who shares keys and values: those who give the same salt, else the holder of a key."""
    whose = b"holder " + holder if given is None else b"salt " + given.encode()
    return hashlib.blake2b(whose, digest_size=16).digest()


@dataclass(frozen=True)
class Server:
    """What requests are read with."""

    network: Network
    template: ChatTemplate
    grammars: Grammars
    defaults: Mapping[str, Any]
    """Settings of sampling for what a request leaves out."""
    longest: int
    """Tokens of the longest text, with its prompt."""
    retrieval: Retrieval
    """What prompts get of its documents."""

    def read(self, kind: type[Body], body: bytes) -> Body:
        """What a request says.

        Raises:
            ApiError: it can't be said; the field that it is about is named.
        """
        with _refusing(kind):
            read = kind.read(body)
            self._check_model(read.model)
            if read.retrieval is not None and self.retrieval.index is None:
                raise InputError(
                    "retrieval asks for documents and this server has none: leave it out, or serve "
                    "with retrieval.index."
                )
            return read

    def wanted(self, body: Body) -> tuple[str, int] | None:
        """What documents are searched for, and how many chunks are wanted; None: nothing.

        Raises:
            ApiError: chunks are asked for, and there is nothing to search for.
        """
        asked = body.retrieval or RetrievalAsked()
        k = self.retrieval.k if asked.k is None else asked.k
        if self.retrieval.index is None or not k:
            return None
        query = asked.query or body.query()
        if query is None and body.retrieval is not None:
            message = "retrieval needs one text to search for: give retrieval.query."
            raise ApiError(400, message, param="retrieval")
        return None if query is None else (query, k)

    def asked(self, body: Body, holder: bytes, found: Sequence[Found] = ()) -> Asked:
        """What a request asks the engine for. Takes a while where prompt or grammar are long.

        Args:
            found: chunks for its prompt, the nearest first.

        Raises:
            ApiError: it can't be asked; the field that it is about is named.
        """
        with _refusing(type(body)):
            asked = body.asked(self, holder, found)
            if asked.sampling.max_tokens == 0 and asked.prompt_logprobs is None:
                raise InputError(
                    "max_tokens = 0 makes no text: raise it, or ask by echo and logprobs what is "
                    "thought of a completion's prompt."
                )
            if (grammar := asked.sampling.grammar) is not None:
                asked = replace(asked, matcher=self.grammars.matcher(grammar))
        return asked

    def fitting(
        self, found: Sequence[Found], sampling: Sampling, tokens_of: Callable[[str], list[int]]
    ) -> tuple[Sequence[Found], list[int]]:
        """As many of the nearest chunks as leave room for the text, and the prompt with them."""
        room = self.longest - min(sampling.max_tokens, self.longest // 4)
        for count in range(len(found), 0, -1):
            tokens = tokens_of(self._sources(found[:count]))
            if len(tokens) <= room:
                return found[:count], tokens
        return (), tokens_of("")

    def _sources(self, found: Sequence[Found]) -> str:
        """Chunks as a prompt has them: in the order of the documents, whichever is the nearest, so
        that prompts with the same ones begin alike and share keys and values."""
        chunks = sorted(found, key=lambda one: one.chunk)
        return "\n\n".join(
            [self.retrieval.instruction, *(f"{c.document}:\n{c.text.strip()}" for c in chunks)]
        )

    def read_embeddings(self, body: bytes) -> tuple[EmbeddingsBody, list[list[int]]]:
        """What a request for vectors says, and the tokens of its texts.

        Raises:
            ApiError: it can't be asked.
        """
        with _refusing(EmbeddingsBody):
            read = EmbeddingsBody.read(body)
            self._check_model(read.model)
            return read, read.texts(self.network)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.network.name):
            raise no_model(name, self.network.name)


@contextmanager
def _refusing(kind: type[Fields]) -> Iterator[None]:
    """What is wrong is the client's, and told with the field that it is about."""
    try:
        yield
    except InputError as error:
        raise ApiError(400, str(error), param=kind.field_of(str(error))) from None


def no_model(name: str, known: str) -> ApiError:
    """There is no network of this name."""
    message = f"model = {name[:100]!r} is not served here: use {known!r}."
    return ApiError(404, message, param="model", code="model_not_found")
