"""Run a file in a process of its own: what its runtime finds, how fast, and in how much memory.

    python runtime.py onnx model.onnx samples.npy logits.npy

It is a script, not a module: only what the runtime needs is imported, so that memory is the
runtime's. What it prints is one line of JSON. Each sample goes through in two parts, so that keys
and values of earlier tokens are tried, too.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

Logits = np.ndarray
Feed = Callable[[np.ndarray, bool], Logits]
"""Takes a text's next tokens, (seq,), or its first ones; gives (seq, vocab) logits."""
_MADE = 64
"""Tokens that are timed, at most: after a prompt of as many."""


def _onnx(file: Path) -> tuple[str, Callable[[], Feed]]:
    import onnxruntime

    def opened() -> Feed:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = _num_cores()
        session = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
        keys = next(each for each in session.get_inputs() if each.name == "keys")
        return _with_keys(keys.shape, lambda *given: session.run(None, dict(zip(
            ("tokens", "keys", "values"), given, strict=True
        ))))  # fmt: skip

    return f"onnxruntime {version('onnxruntime')}", opened


def _executorch(file: Path) -> tuple[str, Callable[[], Feed]]:
    import torch
    from executorch.runtime import Runtime

    runtime = Runtime.get()

    def opened() -> Feed:
        method = runtime.load_program(file).load_method("forward")
        shape = method.metadata.input_tensor_meta(1).sizes()

        def run(*given: np.ndarray) -> list[np.ndarray]:
            # Of what is empty it wants torch's own strides, not numpy's.
            found = method.execute(
                [torch.from_numpy(each) if each.size else torch.zeros(each.shape) for each in given]
            )
            # What it gives lies in its own memory, which the next call writes over.
            return [each.numpy().copy() for each in found]

        return _with_keys(list(shape), run)

    return f"executorch {version('executorch')}", opened


def _gguf(file: Path) -> tuple[str, Callable[[], Feed]]:
    import llama_cpp

    def opened() -> Feed:
        cores = _num_cores()
        model = llama_cpp.Llama(
            str(file), n_ctx=0, logits_all=True, verbose=False, n_threads=cores,
            n_threads_batch=cores,
        )  # fmt: skip

        def feed(tokens: np.ndarray, is_first: bool) -> Logits:
            if is_first:
                model.reset()
            model.eval(tokens.tolist())
            return model.scores[model.n_tokens - len(tokens) : model.n_tokens]

        return feed

    return f"llama-cpp-python {version('llama-cpp-python')}", opened


def _safetensors(folder: Path) -> tuple[str, Callable[[], Feed]]:
    import torch

    from paceline.models.cached_step import CachedStep
    from paceline.serve.network import open_network

    def opened() -> Feed:
        network = open_network(folder)
        model, dtype = network.decoder.model, next(network.decoder.parameters()).dtype
        step = CachedStep(network.decoder)
        shape = [model.num_layers, 1, model.num_kv_heads, 0, model.head_dim]

        @torch.inference_mode()
        def run(tokens: np.ndarray, *kept: np.ndarray) -> list[np.ndarray]:
            given = (torch.from_numpy(each).to(dtype) for each in kept)
            return [each.float().numpy() for each in step(torch.from_numpy(tokens), *given)]

        return _with_keys(shape, run)

    return f"paceline {version('paceline')}", opened


def _with_keys(shape: list[Any], run: Callable[..., list[np.ndarray]]) -> Feed:
    """A text's next tokens by a graph that takes keys and values and gives them back.

    Args:
        shape: (layers, batch, kv_heads, earlier, head_dim); batch and earlier are free.
    """
    kept: list[np.ndarray] = []
    nothing = np.zeros((shape[0], 1, shape[2], 0, shape[4]), np.float32)

    def feed(tokens: np.ndarray, is_first: bool) -> Logits:
        given = [nothing, nothing] if is_first else kept
        logits, *kept[:] = run(tokens[None], *given)
        return logits[0]

    return feed


_RUNTIMES = {
    "onnx": _onnx,
    "executorch": _executorch,
    "gguf": _gguf,
    "safetensors": _safetensors,
}


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _peak_bytes() -> int:
    """The most that this process had resident; that of getrusage may be its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _speed(feed: Feed, prompt: np.ndarray, made: int) -> tuple[float, float]:
    """Tokens a second of a prompt, and of a text that is made token by token."""
    feed(prompt, True)
    begun = time.perf_counter()
    logits = feed(prompt, True)
    read = time.perf_counter()
    for _ in range(made):
        logits = feed(logits[-1:].argmax(-1), False)
    return len(prompt) / (read - begun), made / (time.perf_counter() - read)


def main() -> None:
    """Do what the module says."""
    form, *paths = sys.argv[1:]
    file, samples, results = map(Path, paths)
    tokens = np.load(samples)
    half = tokens.shape[1] // 2
    runtime, opened = _RUNTIMES[form](file)
    before = psutil.Process().memory_info().rss
    begun = time.perf_counter()
    feed = opened()
    open_s = time.perf_counter() - begun
    prompt, made = tokens[0, : min(half, _MADE)], min(half, _MADE)
    read_per_s, made_per_s = _speed(feed, prompt, made)
    resident = _peak_bytes() - before
    logits: Any = None
    for row, sample in enumerate(tokens):
        for start, stop in ((0, half), (half, len(sample))):
            found = feed(sample[start:stop], start == 0)
            if logits is None:
                shape = (*tokens.shape, found.shape[-1])
                logits = np.lib.format.open_memmap(results, "w+", np.float32, shape)
            logits[row, start:stop] = found
    logits.flush()
    told = {
        "runtime": runtime,
        "threads": _num_cores(),
        "open_s": open_s,
        "prompt_tokens_per_s": read_per_s,
        "tokens_per_s": made_per_s,
        "resident_bytes": resident,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
