"""Turn text into token ids: by a byte-level BPE trained on the source, bytes, or a tokenizer.json.

How it works: all three are a `tokenizers.Tokenizer`, so each is saved as a tokenizer.json that
decodes elsewhere. "bpe:N" (Sennrich et al., 2016, https://arxiv.org/abs/1508.07909; on bytes, with
GPT-2's splitting rule) is trained on at most 2**25 characters of the source: the beginning of each
file, in proportion to its size on disk. "bytes" is 256 ids equal to the bytes. Both end a document
with `<|endoftext|>`. A given tokenizer.json ends it with the first of the usual names that it
knows, `END_NAMES`.

Texts never reach a special token: "<|endoftext|>" inside a document is encoded as ordinary
characters. No beginning-of-document token is added.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.config.errors import InputError

TRAINING_CHARS = 2**25
END_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)
_SMALLEST_BPE = 257


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and the id that ends a document."""

    tokenizer: Tokenizer
    end_of_document: int
    is_bytes: bool = False

    @property
    def vocab_size(self) -> int:
        """One more than the largest id: what an embedding must have rows for."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def encode(self, texts: list[str]) -> list[NDArray[np.int64]]:
        """Encode texts on all threads of the `tokenizers` library, without special tokens."""
        if self.is_bytes:  # what the tokenizer would give, a hundred times faster
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def save(self, path: Path) -> None:
        """Write its tokenizer.json."""
        # The library's own `save` has no error of its own for a full disk.
        path.write_text(self.tokenizer.to_str(pretty=True), "utf-8")


def bpe_size(spec: str) -> int | None:
    """The N of "bpe:N", None for the other kinds of tokenizer.

    Raises:
        InputError: N is missing or too small.
    """
    if not spec.startswith("bpe:"):
        return None
    size = int(spec[4:]) if re.fullmatch(r"bpe:\d{1,9}", spec) else 0
    if size < _SMALLEST_BPE:
        raise InputError(
            f'data.tokenizer = "{spec}" needs a vocabulary of at least {_SMALLEST_BPE} (256 bytes '
            'and the end of a document): write "bpe:4096", for example.'
        )
    return size


def tokenizer_identity(spec: str) -> str:
    """What tells two tokenizers apart: the spec, or the hash of a tokenizer.json.

    Raises:
        InputError: the spec is none of the three kinds, or its file is missing.
    """
    if spec == "bytes" or bpe_size(spec):
        return spec
    return hashlib.sha256(_tokenizer_file(spec).read_bytes()).hexdigest()


def make_encoder(spec: str, texts: Iterable[str]) -> Encoder:
    """Build the tokenizer that `Data.tokenizer` asks for.

    Args:
        spec: "bpe:N", "bytes" or the path of a tokenizer.json (or of its folder).
        texts: what a BPE is trained on; read for that kind only.

    Raises:
        InputError: the spec or its file can't be used.
    """
    if size := bpe_size(spec):
        tokenizer = _train_bpe(size, texts)
    elif spec == "bytes":
        tokenizer = _byte_tokenizer()
    else:
        tokenizer = read_tokenizer(_tokenizer_file(spec))
    end = end_name(tokenizer)
    if end is None:
        raise InputError(
            f'data.tokenizer "{spec}" has no token to end a document with: it needs one of '
            f"{', '.join(END_NAMES)}."
        )
    tokenizer.encode_special_tokens = True
    return Encoder(tokenizer, tokenizer.get_vocab()[end], is_bytes=spec == "bytes")


def end_name(tokenizer: Tokenizer) -> str | None:
    """The token that ends a document, None where it has none of the usual names."""
    return next((name for name in END_NAMES if tokenizer.token_to_id(name) is not None), None)


def end_name_of(spec: str) -> str | None:
    """`end_name` of a tokenizer.json, or of one in a folder."""
    return end_name(read_tokenizer(_tokenizer_file(spec)))


def given_folder(spec: str) -> Path | None:
    """Where a tokenizer.json was given, its folder, which may hold more about it."""
    return None if spec == "bytes" or bpe_size(spec) else _tokenizer_file(spec).parent


def check_vocab(vocab_size: int, model_vocab_size: int) -> None:
    """Check that the model has an embedding for every token id; it may have more (padding).

    Raises:
        InputError: the model's vocabulary is smaller than the tokenizer's.
    """
    if vocab_size > model_vocab_size:
        raise InputError(
            f"model.vocab_size = {model_vocab_size} is smaller than the tokenizer's {vocab_size}: "
            "raise it to that or use a smaller data.tokenizer."
        )


def _train_bpe(size: int, texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_NAMES[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_NAMES[0], special=True)])
    return tokenizer


def byte_alphabet() -> dict[str, int]:
    """The character by which `tokenizers` (after GPT-2) writes each byte -> the byte."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = sorted(set(range(256)) - visible)
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(others)}


def _tokenizer_file(spec: str) -> Path:
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise InputError(
            f'data.tokenizer = "{spec}" is no file: use "bpe:N", "bytes" or the path of a '
            "tokenizer.json."
        )
    return path


def read_tokenizer(path: Path) -> Tokenizer:
    """Open a tokenizer.json; it neither cuts texts nor fills them up.

    Raises:
        InputError: it is none.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"{path} can't be read as a tokenizer.json: {error}.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
