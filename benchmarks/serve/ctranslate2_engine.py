"""CTranslate2: batches of up to 32 requests that are there, the shortest prompts first.

A row leaves its batch when its text is long enough. It has no bf16 on a CPU: there it computes in
fp32.
"""

import os
import sys
import time
from pathlib import Path

import ctranslate2
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from benchmarks.serve.workload import VOCAB, Request, Stopwatch, answer, asked

_BATCH = 32


def main() -> None:
    """Do what is asked; or convert a folder into another."""
    if sys.argv[1] == "convert":
        _Converter(sys.argv[2]).convert(sys.argv[3])
        return
    task = asked()
    generator = ctranslate2.Generator(
        str(Path(task.folder).with_name("ctranslate2")),
        inter_threads=1,
        intra_threads=len(os.sched_getaffinity(0)),
    )

    def run(requests: tuple[Request, ...]) -> Stopwatch:
        watch, left = Stopwatch(requests), list(enumerate(requests))
        while left:
            batch = sorted(watch.waiting(left), key=lambda each: len(each[1].prompt))[:_BATCH]
            if not batch:
                time.sleep(0.001)
                continue
            left = [each for each in left if each not in batch]
            _make(generator, batch, watch)
        return watch

    answer(task, run, "ctranslate2")


def _make(
    generator: ctranslate2.Generator, batch: list[tuple[int, Request]], watch: Stopwatch
) -> None:
    def take(step: ctranslate2.GenerationStepResult) -> bool:
        number = batch[step.batch_id][0]
        watch.came(number, [step.token_id])
        return not watch.lacks(number)

    generator.generate_batch(
        [[*map(str, request.prompt)] for _, request in batch],
        max_length=max(request.num_tokens for _, request in batch),
        include_prompt_in_result=False,
        end_token=[],
        callback=take,
    )


class _Converter(TransformersConverter):
    """Of a folder without a tokenizer: a token's text is its number."""

    def load_tokenizer(self, *_: object, **__: object) -> PreTrainedTokenizerFast:
        """In place of the folder's."""
        words = WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0")
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(words), unk_token="0", bos_token="0", eos_token="0"
        )


if __name__ == "__main__":
    main()
