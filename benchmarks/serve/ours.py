"""Paceline's engine."""

import time
from pathlib import Path

from benchmarks.serve.workload import Request, Stopwatch, answer, asked
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.kernels.dtypes import DTYPES
from paceline.models.decoder import Decoder
from paceline.models.weights import read_decoder


def main() -> None:
    """Do what is asked."""
    task = asked()
    decoder: Decoder = read_decoder(Path(task.folder), DTYPES[task.precision])
    engine = Engine(decoder, Serving())

    def run(requests: tuple[Request, ...]) -> Stopwatch:
        watch, left, numbers = Stopwatch(requests), list(enumerate(requests)), {}
        while left or not engine.is_idle:
            while left and left[0][1].after_s <= watch.now():
                number, request = left.pop(0)
                sampling = Sampling(max_tokens=request.num_tokens, temperature=0, ignore_end=True)
                numbers[engine.submit(request.prompt, sampling)] = number
            for progress in engine.step():
                watch.came(numbers[progress.sequence], progress.tokens)
            if engine.is_idle and left:
                time.sleep(0.001)
        return watch

    answer(task, run, "paceline")


if __name__ == "__main__":
    main()
