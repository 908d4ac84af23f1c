"""`paceline tokens`: tokenise what a Job reads, and write it as other trainers read it."""

import json
from pathlib import Path

from paceline.config.errors import InputError
from paceline.config.job_sections import Data
from paceline.train.data.corpus import HELD_OUT, prepare_corpus
from paceline.train.data.dataset import SplitName, TokenDataset
from paceline.train.data.megatron import write_documents


def tokens_command(data: Data, megatron: Path, *, as_json: bool) -> None:
    """Write each source's train and held-out splits as Megatron's .bin and .idx.

    Args:
        data: of a Job.
        megatron: prefix of the files.

    Raises:
        InputError: a source or the tokenizer can't be used, or the files can't be written.
    """
    if data.stream.is_on:
        raise InputError("data.stream has no end, which a file needs: leave it out.")
    if data.records != "text":
        raise InputError(
            f'data.records = "{data.records}" says more than tokens, which Megatron\'s files '
            "can't hold: leave it out."
        )
    corpus, written = prepare_corpus(data), []
    for name, part in (*corpus.sources.items(), *corpus.eval_sets.items()):
        splits: tuple[SplitName, ...] = ("all",) if name in corpus.eval_sets else ("train", "eval")
        for split in splits:
            stem = "-".join([megatron.name, *([] if name == HELD_OUT else [name]), split])
            prefix = megatron.with_name(stem)
            documents = TokenDataset(part.folder, split, part.meta).documents()
            counts = write_documents(prefix, documents, part.meta.vocab_size)
            written.append({"prefix": str(prefix), "documents": counts[0], "tokens": counts[1]})
    if as_json:
        print(json.dumps({"tokenizer": str(corpus.tokenizer_path), "written": written}))
        return
    for each in written:
        print(f"{each['prefix']}.bin: {each['tokens']:,} tokens of {each['documents']:,} documents")
    print(f"tokenizer: {corpus.tokenizer_path}")
