"""Answers: what the engine made, in the form of OpenAI's API, whole or as a stream of chunks."""

import base64
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from paceline.generate.sequence import TokenLogprobs
from paceline.serve.bodies import Asked
from paceline.serve.service import Piece, Token
from paceline.train.data.tokenizer import byte_alphabet

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
Json = dict[str, Any]


class TokenTexts:
    """The text of single tokens, which may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        """What a token is in UTF-8; empty where the tokenizer doesn't know it."""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._added:
            return name.encode()
        if self._is_of_bytes and all(char in byte_alphabet() for char in name):
            return bytes(byte_alphabet()[char] for char in name)
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        return name.replace("▁", " ").encode()

    def text_of(self, token: int) -> str:
        """For a person; a part of a character is written as bytes."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_of_bytes(self) -> bool:
        return "ByteLevel" in str(self._tokenizer.decoder)


class Texts:
    """What was made for a request so far.

    Args:
        pieces: are added.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.texts = [""] * asked.num_texts
        self.tokens: list[list[Token]] = [[] for _ in self.texts]
        self.prompts: list[list[TokenLogprobs] | None] = [None] * asked.num_texts
        self.last: list[Piece | None] = [None] * asked.num_texts

    def add(self, pieces: Iterable[Piece]) -> None:
        """Take pieces, in order."""
        for piece in pieces:
            self.texts[piece.number] += piece.text
            self.tokens[piece.number] += piece.tokens
            if piece.prompt_logprobs is not None:
                self.prompts[piece.number] = piece.prompt_logprobs
            self.last[piece.number] = piece

    @property
    def is_over(self) -> bool:
        """Whether all texts have ended."""
        return all(last is not None and last.end is not None for last in self.last)

    def chosen(self) -> Iterator[int]:
        """Of each prompt the texts that are answered, the likeliest ones first where only some of
        those that were made are."""
        each = self.asked.num_candidates
        for start in range(0, len(self.texts), each):
            numbers = [*range(start, start + each)]
            if each > self.asked.num_choices:
                numbers.sort(key=self._unlikely)
            yield from numbers[: self.asked.num_choices]

    def usage(self) -> Json:
        """Tokens of prompts and texts."""
        asked = self.asked
        made = sum(last.num_made for last in self.last if last is not None)
        firsts = self.last[:: asked.num_candidates]
        prompts = sum(map(len, asked.prompts))
        return {
            "prompt_tokens": prompts,
            "completion_tokens": made,
            "total_tokens": prompts + made,
            "prompt_tokens_details": {
                "cached_tokens": sum(first.num_cached for first in firsts if first is not None)
            },
        }

    def _unlikely(self, number: int) -> float:
        last = self.last[number]
        return 0.0 if last is None else -last.mean_logprob


class CompletionAnswer:
    """Answers of /v1/completions."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: Asked, model: str, token_texts: TokenTexts) -> None:
        self.asked, self._token_texts = asked, token_texts
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._frame = {"id": self._id, "created": int(time.time()), "model": model}

    def answer(self, texts: Texts, fingerprint: str | None) -> Json:
        """The whole answer."""
        choices = [
            self._choice(index, number, texts) for index, number in enumerate(texts.chosen())
        ]
        frame = {**self._frame, "object": self.whole, "choices": choices}
        told = {"usage": texts.usage(), "system_fingerprint": fingerprint}
        return {**frame, **told, **self.sources()}

    def sources(self) -> Json:
        """The chunks of documents that the prompt has, if there are any, the nearest first."""
        found = [
            {"document": s.document, "start": s.start, "stop": s.stop, "score": s.score}
            | {"text": s.text}
            for s in self.asked.sources
        ]
        return {"sources": found} if found else {}

    def first_chunks(self) -> list[Json]:
        """What comes before anything was made: echoes, unless more is told of them."""
        each = self.asked.num_choices
        if self.asked.prompt_logprobs is not None:
            return []
        return [
            self._chunk(self._part(index, self.asked.echoes[index // each], []))
            for index in range(self.asked.num_texts)
            if self.asked.echoes[index // each]
        ]

    def chunk(self, piece: Piece) -> Json:
        """What a piece is in a stream."""
        echo, tokens = "", self._behind_echo(piece.number, piece.tokens)
        if piece.prompt_logprobs is not None:
            echo = self._echo(piece.number)
            tokens = self._echoed(piece.number, piece.prompt_logprobs) + tokens
        part = self._part(piece.number, echo + piece.text, tokens)
        return self._chunk({**part, "finish_reason": piece.end})

    def last_chunk(self, texts: Texts) -> Json:
        """What was used."""
        return {**self._frame, "object": self.part, "choices": [], "usage": texts.usage()}

    def _chunk(self, choice: Json) -> Json:
        return {**self._frame, "object": self.part, "choices": [choice]}

    def _choice(self, index: int, number: int, texts: Texts) -> Json:
        last, told = texts.last[number], texts.prompts[number]
        tokens = self._behind_echo(number, texts.tokens[number])
        if told is not None:
            tokens = self._echoed(number, told) + tokens
        part = self._part(index, self._echo(number) + texts.texts[number], tokens)
        return {**part, "finish_reason": None if last is None else last.end}

    def _echo(self, number: int) -> str:
        return self.asked.echoes[number // self.asked.num_candidates]

    def _behind_echo(self, number: int, tokens: list[Token]) -> list[Token]:
        """Tokens of a text with their places in what is answered."""
        length = len(self._echo(number))
        return [replace(each, start=each.start + length) for each in tokens]

    def _echoed(self, number: int, told: list[TokenLogprobs]) -> list[Token]:
        """The tokens of a text's prompt."""
        prompt = number // self.asked.num_candidates
        parts = (self.asked.prompts[prompt], self.asked.echo_starts[prompt], [None, *told])
        return [Token(*part) for part in zip(*parts, strict=True)]

    def _part(self, index: int, text: str, tokens: list[Token]) -> Json:
        logprobs = self._logprobs(tokens) if self.asked.tells_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, tokens: list[Token]) -> Json:
        text_of = self._token_texts.text_of
        return {
            "tokens": [text_of(each.token) for each in tokens],
            "token_logprobs": [each.logprobs and each.logprobs.chosen for each in tokens],
            "top_logprobs": [
                each.logprobs
                and {text_of(token): value for token, value in each.logprobs.likeliest}
                for each in tokens
            ],
            "text_offset": [each.start for each in tokens],
        }


def embeddings_answer(vectors: Tensor, model: str, num_tokens: int, *, as_base64: bool) -> Json:
    """The answer of /v1/embeddings.

    Args:
        vectors: (num_texts, hidden) fp32.
        as_base64: as bytes of little-endian fp32, which is what OpenAI's client asks for.
    """
    rows = vectors.numpy().astype("<f4")
    data: list[Any] = [base64.b64encode(row.tobytes()).decode() for row in rows]
    if not as_base64:
        data = rows.tolist()
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": each}
            for index, each in enumerate(data)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


class ChatAnswer(CompletionAnswer):
    """Answers of /v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self) -> list[Json]:
        """As above: who speaks."""
        delta = {"role": "assistant", "content": ""}
        nothing = {"logprobs": None, "finish_reason": None}
        return [
            self._chunk({"index": index, "delta": delta, **nothing})
            for index in range(self.asked.num_choices)
        ]

    def chunk(self, piece: Piece) -> Json:
        """As above."""
        return self._chunk(
            {
                "index": piece.number,
                "delta": {"content": piece.text} if piece.text else {},
                "logprobs": self._logprobs(piece.tokens) if self.asked.tells_logprobs else None,
                "finish_reason": piece.end,
            }
        )

    def _choice(self, index: int, number: int, texts: Texts) -> Json:
        last, tokens = texts.last[number], texts.tokens[number]
        return {
            "index": index,
            "message": {"role": "assistant", "content": texts.texts[number], "refusal": None},
            "logprobs": self._logprobs(tokens) if self.asked.tells_logprobs else None,
            "finish_reason": None if last is None else last.end,
        }

    def _logprobs(self, tokens: list[Token]) -> Json:
        content = []
        for each in tokens:
            assert each.logprobs is not None  # only echoes have none
            likeliest = [self._told(token, value) for token, value in each.logprobs.likeliest]
            told = self._told(each.token, each.logprobs.chosen)
            content.append({**told, "top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _told(self, token: int, value: float) -> Json:
        texts = self._token_texts
        data = [*texts.bytes_of(token)]
        return {"token": texts.text_of(token), "logprob": value, "bytes": data}
