"""Corpus: all that a run reads, a mixture of sources and sets of text that it is evaluated on.

How it works: each source is prepared by itself (cache.py), so that mixtures share what they have in
common. All have one tokenizer: a given one, or one that is trained on all sources, each in
proportion to its size on disk. What a source holds out is the evaluation set of its name.

A Job with one source is read in that one's own order, as a mixture of nothing else would be.
"""

import hashlib
import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import FileLock

from paceline.config.errors import InputError
from paceline.config.job_sections import Data, Train
from paceline.config.mixture import EvalSet
from paceline.train.data.batches import BatchShape, MicroBatch, Samples, eval_batches
from paceline.train.data.build import Progress, training_texts
from paceline.train.data.cache import (
    PreparedData,
    cache_folder,
    contents_hash,
    listing_of,
    prepare,
)
from paceline.train.data.files import find_files
from paceline.train.data.mixed import MixedDataset
from paceline.train.data.mixture import MixtureOrder, mixture_of
from paceline.train.data.tokenizer import TRAINING_CHARS, bpe_size, make_encoder

HELD_OUT = "held_out"
"""The name of what an only source holds out."""
_LEFT_OUT = {
    "num_filtered_out": "left out by the filter",
    "num_duplicates": "left out as duplicates",
}
"""Counts of documents in a `Meta`, and what became of these."""


@dataclass(frozen=True)
class Corpus:
    """Everything prepared, by name."""

    data: Data
    sources: Mapping[str, PreparedData]
    eval_sets: Mapping[str, PreparedData]

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer.json that decodes the tokens."""
        return self.first.tokenizer_path

    @property
    def vocab_size(self) -> int:
        """What an embedding must have rows for."""
        return self.first.meta.vocab_size

    @property
    def fingerprint(self) -> str:
        """Names exactly the tokens that are trained on, whoever made them."""
        packing = "-best_fit" if self.is_best_fit else ""
        if not self.data.sources:
            return self.first.meta.fingerprint + packing
        named = [(name, part.meta.fingerprint) for name, part in self.sources.items()]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest() + packing

    @property
    def is_best_fit(self) -> bool:
        """Whether samples are made of whole documents."""
        return self.data.packing == "best_fit"

    @property
    def eval_names(self) -> tuple[str, ...]:
        """Of the sets of `eval_steps` in their order; of an only one there is no need."""
        names = (*self.sources, *self.eval_sets)
        return names if len(names) > 1 else ()

    def for_samples(self, seq_len: int) -> "Corpus":
        """The same, cut so that each source has samples to train on and to hold out.

        Raises:
            InputError: one has too few tokens.
        """
        sources = {}
        for name, part in self.sources.items():
            with _naming(name):
                sources[name] = part.for_samples(seq_len)
        for name, part in self.eval_sets.items():
            with _naming(name):
                part.dataset("all").num_samples(seq_len)
        return Corpus(self.data, sources, self.eval_sets)

    def num_samples(self, seq_len: int) -> int:
        """Samples of an epoch: of each source those that it says, or all of them once."""
        sizes = self._sizes(seq_len)
        if not self.data.sources:
            return sizes[0]
        epochs = [each.epochs or 1.0 for each in self.data.sources]
        return math.ceil(sum(map(operator.mul, epochs, sizes)))

    def train_split(self, global_batch: int) -> Samples:
        """What is trained on, in steps of so many samples."""
        parts = [part.dataset("train") for part in self.sources.values()]
        if not self.data.sources:
            return parts[0]
        return MixedDataset(parts, partial(self._mixture, global_batch))

    def check_length(self, train: Train) -> None:
        """Check that sources may be read as often as a run is long.

        Raises:
            InputError: all of them come to their `max_epochs` before.
        """
        order = self._mixture(train.global_batch, train.seed, self._sizes(train.seq_len))
        length = order.length
        if length is not None and length < train.steps * train.global_batch:
            raise InputError(
                f"train.steps = {train.steps} are more than the {length // train.global_batch} "
                "that data.sources have by their max_epochs: raise one of these, or train less."
            )

    def eval_steps(self, shape: BatchShape, num_batches: int) -> Iterator[list[MicroBatch]]:
        """So many global batches of each set that is evaluated, one set after another."""
        return chain.from_iterable(
            eval_batches(each, shape, num_batches) for each in self.held_out()
        )

    def held_out(self) -> list[Samples]:
        """The sets that are evaluated: what each source holds out, and the others."""
        own: list[Samples] = [part.dataset("eval") for part in self.sources.values()]
        return [*own, *(part.dataset("all") for part in self.eval_sets.values())]

    def packed(self) -> list[PreparedData]:
        """Sources of conversations."""
        return [part for part in self.sources.values() if part.is_packed]

    def packing_facts(self, seq_len: int) -> dict[str, float]:
        """How much of all train samples is padding, and how many documents are longer than one;
        nothing where they are not packed whole."""
        if not self.is_best_fit:
            return {}
        rows = [part.documents("train").rows(seq_len) for part in self.sources.values()]
        num_samples = sum(len(each.ends) for each in rows)
        return {
            "padding_share": sum(each.num_padding for each in rows) / (num_samples * seq_len),
            "num_cut": sum(each.num_cut for each in rows),
        }

    def facts(self) -> dict[str, Any]:
        """What a Run keeps about its data."""
        facts = [_facts(part) for part in self.sources.values()]
        told = {"tokenizer": self.data.tokenizer, "vocab_size": self.vocab_size}
        if not self.data.sources:
            return {**told, **facts[0]}
        sums = {
            name: sum(each.get(name, 0) for each in facts)
            for name in ("train_tokens", "eval_tokens", "num_documents", *_LEFT_OUT)
            if any(name in each for each in facts)
        }
        return {**told, **sums, "sources": dict(zip(self.sources, facts, strict=True))}

    def more_held_out_by(self, cut: "Corpus") -> Iterator[tuple[str, int, int]]:
        """Sources of which `for_samples` holds out more: name, tokens before and then."""
        for name, part in self.sources.items():
            before, after = part.meta.eval_tokens, cut.sources[name].meta.eval_tokens
            if after > before:
                yield ("this data" if name == HELD_OUT else name), before, after

    def left_out(self) -> Iterator[str]:
        """A sentence for each source and set of which documents were left out."""
        for name, part in {**self.sources, **self.eval_sets}.items():
            gone = {why: n for key, why in _LEFT_OUT.items() if (n := getattr(part.meta, key))}
            if gone:
                of = "this data" if name == HELD_OUT else name
                told = ", ".join(f"{count:,} {why}" for why, count in gone.items())
                yield f"{part.meta.num_documents:,} documents of {of} are kept, {told}"

    def _sizes(self, seq_len: int) -> list[int]:
        return [part.num_samples(seq_len) for part in self.sources.values()]

    def _mixture(self, global_batch: int, seed: int, sizes: Sequence[int]) -> MixtureOrder:
        return mixture_of(self.data, sizes, seed, global_batch)

    @property
    def first(self) -> PreparedData:
        """The first source, or the only one."""
        return next(iter(self.sources.values()))


def prepare_corpus(data: Data, progress: Progress | None = None) -> Corpus:
    """Return the tokenised form of all that a Job reads; tokenise it first where that is needed.

    Args:
        data: its sources and its sets of text.
        progress: called with the bytes read so far and those of a whole source, on disk.

    Raises:
        InputError: one sentence, where a source or the tokenizer can't be used.
    """
    try:
        return _prepared_corpus(data, progress)
    except OSError as error:
        if error.filename is not None:
            raise
        # What can't be read is a sentence already: a write of many bytes has failed.
        raise InputError(
            f"{cache_folder(data)} can't be written ({error.strerror or error}): make room there, "
            "or set data.cache_dir to another folder."
        ) from None


def _prepared_corpus(data: Data, progress: Progress | None) -> Corpus:
    spec = data.tokenizer
    if not data.sources:
        sources = {HELD_OUT: prepare(data, progress, _num_published(data))}
    else:
        if bpe_size(spec):
            spec = str(_given_tokenizer(data, progress) or _shared_tokenizer(data))
        sources = {each.name: _prepared(data, each, spec, progress) for each in data.sources}
    if bpe_size(spec):
        spec = str(sources[HELD_OUT].tokenizer_path)
    sets = {each.name: _prepared(data, each, spec, progress) for each in data.eval_sets}
    return Corpus(data, sources, sets)


def _prepared(data: Data, part: EvalSet, tokenizer: str, progress: Progress | None) -> PreparedData:
    alone = _alone(data, part).replace(tokenizer=tokenizer)
    with _naming(part.name):
        return prepare(alone, progress, _num_published(data))


def _num_published(data: Data) -> int:
    parts = (*data.sources, *data.eval_sets)
    return sum(format == "tokens" for format in (data.format, *(each.format for each in parts)))


def _given_tokenizer(data: Data, progress: Progress | None) -> Path | None:
    """The tokenizer.json of the first source that is published tokens."""
    for each in data.sources:
        if each.format == "tokens":
            return _prepared(data, each, data.tokenizer, progress).tokenizer_path
    return None


def _alone(data: Data, part: EvalSet) -> Data:
    """The settings of a part of the corpus as if there were no other."""
    names = ("source", "format", "text_field", "filter", "dedup")
    own = {name: getattr(part, name) for name in names}
    return data.replace(**own, sources=(), stages=(), eval_sets=(), temperature=1.0)


def _shared_tokenizer(data: Data) -> Path:
    """The tokenizer.json that is trained on all sources, trained first where it is not there."""
    cache = cache_folder(data)
    parts, contents = [_alone(data, each) for each in data.sources], []
    files = []
    for part, source in zip(parts, data.sources, strict=True):
        with _naming(source.name):
            files.append(find_files(part))
            formats = [file.format for file in files[-1]]
            told = [contents_hash(listing_of(files[-1]), cache), formats, part.text_field]
            contents.append(told if part.filter is None else [*told, part.filter])
    key = hashlib.sha256(json.dumps([data.tokenizer, contents]).encode()).hexdigest()[:32]
    path = cache / f"{key}-tokenizer.json"
    with FileLock(path.with_suffix(".lock")):
        if path.is_file():
            return path
        sizes = [sum(file.size_bytes for file in each) for each in files]
        texts = chain.from_iterable(
            training_texts(each, part, TRAINING_CHARS * size // max(1, sum(sizes)))
            for each, part, size in zip(files, parts, sizes, strict=True)
        )
        aside = path.with_suffix(".partial")
        make_encoder(data.tokenizer, texts).save(aside)
        aside.replace(path)
    return path


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Let a sentence about what can't be used begin with the name of what it is about."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error) if name == HELD_OUT else f"{name}: {error}") from None


def _facts(part: PreparedData) -> dict[str, Any]:
    names = ["train_tokens", "eval_tokens", "num_documents", "tokens_sha256"]
    if part.meta.texts_per_row == 1 and part.meta.column_bytes is None:  # else losses are others
        names.append("unigram_loss")
    names += [name for name in _LEFT_OUT if getattr(part.meta, name)]
    return {name: getattr(part.meta, name) for name in names}
