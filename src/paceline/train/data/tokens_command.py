"""`paceline tokens`: tokenise what a Job reads; publish it, or write it as Megatron reads it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.config.urls import check_tells_no_secret, is_url
from paceline.train.data import build
from paceline.train.data.corpus import HELD_OUT, Corpus, prepare_corpus
from paceline.train.data.dataset import SplitName
from paceline.train.data.megatron import write_documents
from paceline.train.data.publish import publish, published_lines


def tokens_command(data: Data, megatron: Path | None, to: str | None, *, as_json: bool) -> None:
    """Write each source's train and held-out splits.

    Args:
        data: of a Job.
        megatron: prefix of Megatron's .bin and .idx.
        to: a folder or URL, to train from; one of both is given.

    Raises:
        InputError: a source or the tokenizer can't be used, or the files can't be written.
    """
    if (megatron is None) == (to is None):
        raise InputError(
            "paceline tokens needs one place to write to: give --to URL, to train from it, or "
            "--megatron PREFIX."
        )
    if to is not None:
        _check_place(data, to)
    if data.stream.is_on:
        raise InputError("data.stream has no end, which a file needs: leave it out.")
    if data.records != "text":
        raise InputError(
            f'data.records = "{data.records}" says more than tokens, which alone are written: '
            "leave it out."
        )
    with _shown("tokenising") as progress:
        corpus = prepare_corpus(data, progress)
    if to is None:
        assert megatron is not None
        _write_for_megatron(corpus, megatron, as_json=as_json)
        return
    with _shown("publishing") as progress:
        found = publish(corpus, to, progress)
    if as_json:
        told = {place: each.meta.model_dump(mode="json") for place, each in found.items()}
        print(json.dumps({"published": told}))
        return
    for line in published_lines(found):
        print(line)


def _check_place(data: Data, to: str) -> None:
    if is_url(to):
        try:
            check_tells_no_secret(to)
        except ValueError as error:
            raise InputError(f"--to: {error}") from None
    for part in (*data.sources, *data.eval_sets):
        if part.format == "tokens":
            raise InputError(f"{part.name} is published already: copy it as it is.")
    if data.format == "tokens":
        raise InputError(f"{data.source} is published already: copy it as it is.")


def _write_for_megatron(corpus: Corpus, megatron: Path, *, as_json: bool) -> None:
    written = []
    for name, part in (*corpus.sources.items(), *corpus.eval_sets.items()):
        splits: tuple[SplitName, ...] = ("all",) if name in corpus.eval_sets else ("train", "eval")
        for split in splits:
            stem = "-".join([megatron.name, *([] if name == HELD_OUT else [name]), split])
            prefix = megatron.with_name(stem)
            counts = write_documents(prefix, part.tokens(split).documents(), part.meta.vocab_size)
            written.append({"prefix": str(prefix), "documents": counts[0], "tokens": counts[1]})
    if as_json:
        print(json.dumps({"tokenizer": str(corpus.tokenizer_path), "written": written}))
        return
    for each in written:
        print(f"{each['prefix']}.bin: {each['tokens']:,} tokens of {each['documents']:,} documents")
    print(f"tokenizer: {corpus.tokenizer_path}")


@contextmanager
def _shown(what: str) -> Iterator[build.Progress]:
    """A progress bar that shows itself only where there is something to do."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
