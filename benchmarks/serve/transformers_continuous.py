"""transformers' continuous batching: requests join a batch that runs, over a paged cache."""

import time

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.serve.workload import Request, Stopwatch, answer, asked

_PAGES = ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=512)
"""Room for 64 texts of 256 tokens; what it finds out by itself is for a GPU's memory."""


def main() -> None:
    """Do what is asked."""
    task = asked()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[task.precision]
    model = AutoModelForCausalLM.from_pretrained(task.folder, dtype=dtype).eval()
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1), _PAGES
    )
    manager.start()

    def run(requests: tuple[Request, ...]) -> Stopwatch:
        watch, left = Stopwatch(requests), list(enumerate(requests))
        numbers: dict[str, int] = {}
        made = [0 for _ in requests]
        while left or numbers:
            while left and left[0][1].after_s <= watch.now():
                number, request = left.pop(0)
                name = manager.add_request(
                    [*request.prompt], max_new_tokens=request.num_tokens, streaming=True
                )
                numbers[name] = number
            if not numbers:
                time.sleep(0.001)
            elif (told := manager.get_result(timeout=0.001)) is not None:
                number = numbers[told.request_id]
                watch.came(number, told.generated_tokens[made[number] :])
                made[number] = len(told.generated_tokens)
                if told.is_finished():
                    assert told.error is None, told.error
                    del numbers[told.request_id]
        return watch

    answer(task, run, "transformers")
    manager.stop(block=True)


if __name__ == "__main__":
    main()
