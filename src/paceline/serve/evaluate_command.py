"""The command `paceline evaluate`: how well a network knows held-out text, and which choice it
finds likeliest.

How it works: texts go through the passes that serve requests (`generate.score`), so what is
measured is what is served: its precision, its forms of weights and keys, with `serve.exact` its
bits. Of a run the samples are those of its own evaluations. Choices are scored as
lm-evaluation-harness does it: by the log probability of each after its context, whole ("accuracy")
and per byte of the choice ("accuracy per byte": its acc_norm).
https://github.com/EleutherAI/lm-evaluation-harness
"""

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter
from rich.console import Console
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.files import parse_json, read_text
from paceline.config.frozen import FrozenConfig
from paceline.config.job_sections import Data
from paceline.config.serving import Serving, ServingSettings
from paceline.generate.engine import Engine
from paceline.generate.score import Given
from paceline.observe.run import Run
from paceline.serve.answers import TokenTexts
from paceline.serve.generate_command import described
from paceline.serve.network import Network, open_network
from paceline.serve.progress import evaluating
from paceline.train.data import BatchShape, eval_batches, prepare_corpus
from paceline.train.data.documents import read_pieces
from paceline.train.data.files import find_files
from paceline.train.data.tokenizer import end_name
from paceline.train.exact_eval import texts_of

_NOTES = Console(stderr=True, highlight=False, soft_wrap=True)
_CURE = 'give a file of lines such as {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}'
_OBJECT = TypeAdapter(dict[str, Any])
_MOST_LOSS = 700.0
"""A loss above it has no perplexity in floating point."""


@dataclass(frozen=True)
class Texts:
    """What is evaluated."""

    source: str
    number: int
    given: Iterable[Given]
    trained_loss: float | None = None
    """What training found on the same with the same weights, if it looked."""


class Example(FrozenConfig):
    """A question with choices, one of which is right."""

    context: str
    choices: Annotated[list[str], Field(min_length=2, max_length=1024)]
    answer: Annotated[int, Field(ge=0)]


def evaluate_command(
    path: Path,
    settings: ServingSettings,
    step: int | None,
    *,
    data: Path | None = None,
    choices: Path | None = None,
    whole: bool = False,
    as_json: bool = False,
) -> None:
    """Evaluate a network, and print what was found.

    Args:
        path: a run or a folder of weights.
        step: of the run's checkpoint; None: the newest good one.
        data: text files, in place of the run's held-out text.
        choices: lines of JSON, an `Example` each, in place of text.
        whole: all of the run's held-out text.

    Raises:
        InputError: no such network or text, or choices that can't be scored.
    """
    if choices is not None and (data is not None or whole):
        raise InputError("--choices is evaluated in place of text: leave --data and --whole out.")
    if whole and data is not None:
        raise InputError("--data is always read whole, and --whole is of a run: leave it out.")
    examples = None if choices is None else _read_examples(choices)
    network = open_network(path, settings.serve, step)
    texts = None if examples else _texts(path, network, data, whole=whole)
    engine = network.engine(settings.serve.replace(host_gb=0.0))  # no keys are used again
    begun_s = time.perf_counter()
    if examples:
        found = _of_choices(engine, network, examples)
    else:
        assert texts is not None
        found = _of_texts(engine, network, texts)
    seconds = time.perf_counter() - begun_s
    _NOTES.print(described(network), style="dim")
    told = {"model": network.name, "step": network.step, **found, "seconds": seconds}
    print(json.dumps(told) if as_json else _lines(told))


def held_out_loss(path: Path, network: Network, serving: Serving) -> float | None:
    """The loss of a run's held-out text, in nats a token; None: a folder of weights has none."""
    if network.step is None:
        return None
    texts = _texts(path, network, None, whole=False)
    engine = network.engine(serving.replace(host_gb=0.0))
    loss: float = _of_texts(engine, network, texts)["loss"]
    return loss


# ---- text ---------------------------------------------------------------------------------------


def _texts(path: Path, network: Network, data: Path | None, *, whole: bool) -> Texts:
    if data is not None:
        return _of_files(data, network)
    if network.step is None:
        raise InputError(f"{path} is a folder of weights and has no held-out text: give --data.")
    run = Run(path)
    job = run.job()
    if job.data.has_answers:
        raise InputError(
            f"{path} was trained on answers of conversations, and all tokens of a text are "
            "evaluated here: give --data (the loss of held-out answers stands in its metrics)."
        )
    sets = prepare_corpus(job.data).for_samples(job.train.seq_len).held_out()
    size, counts = job.train.global_batch, [job.train.eval_batches] * len(sets)
    if whole:
        size, counts = 1, [each.num_samples(job.train.seq_len) for each in sets]
    shape = BatchShape(size, 1, job.train.seq_len, reset_at_documents=job.data.starts_anew)
    samples = (
        sample
        for each, count in zip(sets, counts, strict=True)
        for step in eval_batches(each, shape, count)
        for sample in step
    )
    line = run.step(network.step)
    trained = None if whole or line is None else line.get("eval_loss")
    given = (text for sample in samples for text in texts_of(sample))
    return Texts(f"held-out text of {network.name}", size * sum(counts), given, trained)


def _of_files(data: Path, network: Network) -> Texts:
    """Files of text in one row, cut into pieces as long as the network takes; each token but the
    first is predicted once."""
    if not data.exists():
        raise InputError(f"--data {data} does not exist: give a file or folder of text.")
    ends = _end_of_document(network)
    tokens: list[int] = []
    for file in find_files(Data(source=str(data))):
        for piece in read_pieces(file, "text"):
            if piece.text:
                tokens += network.tokenizer.encode(piece.text, add_special_tokens=False).ids
                tokens += ends if piece.ends_document else []
    if len(tokens) < 2:
        raise InputError(f"--data {data} has {len(tokens)} tokens: give two or more.")
    longest = network.decoder.model.max_seq_len
    starts = range(0, len(tokens) - 1, longest)
    last = len(tokens) - 1
    given = (
        Given(tokens[start : min(start + longest, last)], tokens[start + 1 : start + longest + 1])
        for start in starts
    )
    return Texts(str(data), len(starts), given)


def _end_of_document(network: Network) -> list[int]:
    name = end_name(network.tokenizer)
    number = None if name is None else network.tokenizer.token_to_id(name)
    return [] if number is None else [number]


def _of_texts(engine: Engine, network: Network, texts: Texts) -> dict[str, Any]:
    """Loss in nats a token, and the same per byte of the text."""
    bytes_of = TokenTexts(network.tokenizer).bytes_of
    ends = {*network.end_tokens, *_end_of_document(network)}
    total, num_tokens, num_bytes = 0.0, 0, 0

    def counted() -> Iterator[Given]:
        nonlocal num_bytes
        for given in texts.given:
            num_bytes += sum(len(bytes_of(each)) for each in given.targets if each not in ends)
            yield given

    with evaluating(texts.number) as advance:
        for losses in engine.losses(counted()):
            total += float(losses.double().sum())
            num_tokens += len(losses)
            advance()
    loss = total / num_tokens
    return {
        "data": texts.source,
        "tokens": num_tokens,
        "bytes": num_bytes,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < _MOST_LOSS else None,
        "bits_per_byte": total / math.log(2) / num_bytes if num_bytes else None,
        "trained_loss": texts.trained_loss,
    }


# ---- choices ------------------------------------------------------------------------------------


def _read_examples(file: Path) -> list[Example]:
    examples = []
    for number, line in enumerate(read_text(file, _CURE).splitlines(), 1):
        if line.strip():
            try:
                raw = parse_json(line, _OBJECT)
            except ValueError as error:
                raise InputError(f"{file} line {number} {error}: {_CURE}.") from None
            example = Example.parse(raw, f"{file} line {number}")
            if example.answer >= len(example.choices) or not all(example.choices):
                raise InputError(
                    f"{file} line {number} has answer {example.answer} of {len(example.choices)} "
                    "choices: count from 0, and leave no choice empty."
                )
            examples.append(example)
    if not examples:
        raise InputError(f"{file} has no line: {_CURE}.")
    return examples


class _Scored(NamedTuple):
    """A choice after its context, and how many of the targets are its own."""

    given: Given
    num_own: int


def _scored(network: Network, context: str, choice: str) -> _Scored:
    """As lm-evaluation-harness cuts it: white space at a context's end is the choice's."""
    stripped = context.rstrip()
    choice = context[len(stripped) :] + choice
    start = network.encode(stripped) or [network.first_token]
    whole = network.encode(stripped + choice) if stripped else [*start, *network.encode(choice)]
    num_own = len(whole) - len(start)
    if num_own < 1 or len(whole) - 1 > network.decoder.model.max_seq_len:
        raise InputError(
            f"A choice has {num_own} tokens after {len(start)} of its context, and the network "
            f"takes 1 or more, {network.decoder.model.max_seq_len} in all: shorten it."
        )
    return _Scored(Given(whole[:-1], whole[1:]), num_own)


def _of_choices(engine: Engine, network: Network, examples: Sequence[Example]) -> dict[str, Any]:
    scored = [
        _scored(network, example.context, choice)
        for example in examples
        for choice in example.choices
    ]
    with evaluating(len(scored)) as advance:
        logs = []
        for losses, one in zip(engine.losses(s.given for s in scored), scored, strict=True):
            logs.append(-_sum_of_last(losses, one.num_own))
            advance()
    num_right, num_right_per_byte, place = 0, 0, 0
    for example in examples:
        own = logs[place : place + len(example.choices)]
        place += len(own)
        per_byte = [log / len(c.encode()) for log, c in zip(own, example.choices, strict=True)]
        num_right += own.index(max(own)) == example.answer
        num_right_per_byte += per_byte.index(max(per_byte)) == example.answer
    number = len(examples)
    return {
        "examples": number,
        "accuracy": num_right / number,
        "accuracy_per_byte": num_right_per_byte / number,
    }


def _sum_of_last(losses: Tensor, count: int) -> float:
    return float(losses[-count:].double().sum())


# ---- what is shown ------------------------------------------------------------------------------


def _lines(found: dict[str, Any]) -> str:
    if "accuracy" in found:
        return (
            f"accuracy {found['accuracy']:.4f}, per byte {found['accuracy_per_byte']:.4f}, of "
            f"{found['examples']} examples in {found['seconds']:.1f} s"
        )
    trained = found["trained_loss"]
    beside = "" if trained is None else f"; training found {trained:.6f}"
    bits = found["bits_per_byte"]
    perplexity = found["perplexity"]
    return (
        f"loss {found['loss']:.6f} nats a token{beside}\n"
        f"perplexity {'infinite' if perplexity is None else f'{perplexity:.4g}'}, "
        f"{'no' if bits is None else f'{bits:.4f}'} bits a byte\n"
        f"{found['tokens']:,} tokens of {found['data']} in {found['seconds']:.1f} s"
    )
