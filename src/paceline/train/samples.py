"""Samples: how a network goes on from a few prompts while it is trained (`observe.samples`).

After each evaluation rank 0 makes greedy texts with the weights as they are, by the engine that
serves them; the other ranks wait. Training goes on as if there had been none.
"""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import cast

from tokenizers import Tokenizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.config.errors import InputError
from paceline.config.job import Job
from paceline.config.layout import Layout
from paceline.config.sampling import Sampling
from paceline.config.serving import Serving
from paceline.generate.engine import Engine
from paceline.models.decoder import Decoder
from paceline.observe.events import append_line
from paceline.observe.metrics import drop_from
from paceline.observe.run import Run
from paceline.train.data.tokenizer import end_name
from paceline.train.ema import WeightMean

_SHOWN = 100
"""Characters of a text on the terminal."""


def check_samples(layout: Layout) -> None:
    """Refuse a layout of which rank 0 doesn't hold the whole network as it is served.

    Raises:
        InputError: such a one.
    """
    if odd := parted_by(layout):
        raise InputError(
            f"observe.samples needs ranks that hold the network whole, as it is served, and this "
            f"layout has {odd}: leave the samples out, and make texts by paceline generate."
        )


def parted_by(layout: Layout) -> str | None:
    """Why ranks don't hold the network whole, as it is served; None: they do."""
    odd = next(
        (
            f"{name} = {getattr(layout, name)!r}"
            for name, value in (("compile", False), ("recompute", "none"), ("offload", ()))
            if getattr(layout, name) != value
        ),
        None,
    )
    if not layout.is_plain or layout.fsdp > 1:
        odd = layout.summary
    if layout.precision == "fp8":
        odd = 'precision = "fp8"'
    return odd


class Samples:
    """Those of a run.

    Args:
        say: tells a person.
    """

    def __init__(self, job: Job, run: Run, say: Callable[[str], None]) -> None:
        self._observe, self._run, self._say = job.observe, run, say

    def drop_from(self, step: int) -> None:
        """Forget those after this step and later ones: the run makes them anew."""
        drop_from(self._run.samples_file, "step", step)

    def make(self, module: nn.Module, ema: WeightMean | None, done: int) -> None:
        """Make them after a step; a line of samples.jsonl.

        Args:
            module: the network, or DDP's wrapper around it.
            ema: a mean of its weights, which is then taken.
        """
        prompts = self._observe.samples
        if not prompts:
            return
        begun = time.perf_counter()
        module.eval()
        with nullcontext() if ema is None else ema.taken():
            texts = self._texts(module)
        module.train()
        seconds = time.perf_counter() - begun
        line = {"step": done, "seconds": seconds, "prompts": [*prompts], "texts": texts}
        append_line(self._run.samples_file, json.dumps(line).encode() + b"\n")
        for prompt, text in zip(prompts, texts, strict=True):
            self._say(f"step {done}: {(prompt + text)[:_SHOWN]!r}")

    def _texts(self, module: nn.Module) -> list[str]:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        tokenizer = Tokenizer.from_file(str(self._run.tokenizer_folder / "tokenizer.json"))
        name = end_name(tokenizer)
        end = None if name is None else tokenizer.token_to_id(name)
        engine = Engine(
            cast(Decoder, module),
            Serving(max_sequences=len(self._observe.samples), host_gb=0),
            tokenizer,
            [] if end is None else [end],
        )
        sampling = Sampling(max_tokens=self._observe.sample_tokens, temperature=0)
        return engine.texts([*self._observe.samples], sampling)
