"""transformers' generate, 32 requests at a time: those that are there when a batch starts."""

import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks.serve.workload import Request, Stopwatch, answer, asked

_BATCH = 32


def main() -> None:
    """Do what is asked."""
    task = asked()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[task.precision]
    model = AutoModelForCausalLM.from_pretrained(task.folder, dtype=dtype).eval()

    def run(requests: tuple[Request, ...]) -> Stopwatch:
        watch, left = Stopwatch(requests), list(enumerate(requests))
        while left:
            batch = [each for each in left[:_BATCH] if each[1].after_s <= watch.now()]
            if not batch:
                time.sleep(0.001)
                continue
            left = left[len(batch) :]
            longest = max(len(request.prompt) for _, request in batch)
            pad = [longest - len(request.prompt) for _, request in batch]
            rows = [[0] * n + [*request.prompt] for n, (_, request) in zip(pad, batch, strict=True)]
            seen = [[0] * n + [1] * (longest - n) for n in pad]
            model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(seen),
                max_new_tokens=max(request.num_tokens for _, request in batch),
                do_sample=False,
                eos_token_id=None,
                streamer=_Counter(watch, batch),
            )
        return watch

    answer(task, run)


class _Counter:
    """Counts the tokens of a batch that somebody wants."""

    def __init__(self, watch: Stopwatch, batch: list[tuple[int, Request]]) -> None:
        self._watch, self._batch, self._step = watch, batch, -1

    def put(self, tokens: torch.Tensor) -> None:
        """First the prompts, then a token of each row."""
        if self._step >= 0:
            for number, request in self._batch:
                self._watch.came(number, int(self._step < request.num_tokens))
        self._step += 1

    def end(self) -> None:
        """Nothing is left to do."""


if __name__ == "__main__":
    main()
