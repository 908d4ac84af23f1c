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
            batch = watch.waiting(left)[:_BATCH]
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
                streamer=_Taker(watch, [number for number, _ in batch]),
            )
        return watch

    answer(task, run, "transformers")


class _Taker:
    """Takes the tokens of a batch that somebody wants."""

    def __init__(self, watch: Stopwatch, numbers: list[int]) -> None:
        self._watch, self._numbers, self._is_begun = watch, numbers, False

    def put(self, tokens: torch.Tensor) -> None:
        """First the prompts, then a token of each row."""
        if self._is_begun:
            for number, token in zip(self._numbers, tokens.tolist(), strict=True):
                if self._watch.lacks(number):
                    self._watch.came(number, [token])
        self._is_begun = True

    def end(self) -> None:
        """Nothing is left to do."""


if __name__ == "__main__":
    main()
