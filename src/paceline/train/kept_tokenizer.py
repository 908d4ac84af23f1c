"""The tokenizer that a Run keeps, so that an export doesn't need the training data any more.

What a given tokenizer or starting weights came with (chat template, special tokens, how to
generate) is carried along; what is known and nobody gave is set.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from tokenizers import Tokenizer

from paceline.config.errors import InputError
from paceline.config.files import parse_json, read_bytes
from paceline.config.job import Job
from paceline.observe.run import Run
from paceline.train.data import prepare_corpus
from paceline.train.data.conversations import SETTINGS_FILE, TEMPLATE_FILE, ChatForm
from paceline.train.data.stream.prepare import prepare_stream
from paceline.train.data.tokenizer import end_name, given_folder

GENERATION = "generation_config.json"
_TOKENIZER = "tokenizer.json"
_CARRIED = (
    SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json", TEMPLATE_FILE,
    "chat_template.json", GENERATION,
)  # fmt: skip
"""What may stand beside a tokenizer.json or weights, and says how to use them."""
_OBJECT = TypeAdapter(dict[str, Any])


def keep_tokenizer(run: Run, job: Job) -> None:
    """Keep in the Run what an export says of the tokens, for the data may be gone by then.

    Args:
        job: its data has been tokenised, or its stream has a log.
    """
    data, weights = job.data, job.train.weights
    folders = [given_folder(data.tokenizer), None if weights is None else Path(weights)]
    found = prepare_stream(job) if data.stream.is_on else prepare_corpus(data)
    kept = {_TOKENIZER: found.tokenizer_path.read_bytes()}
    for folder in filter(None, folders):
        for name in _CARRIED:
            if name not in kept and (folder / name).is_file():
                kept[name] = read_bytes(folder / name, "put a good copy there, or remove it")
    if data.has_answers:
        kept[TEMPLATE_FILE] = ChatForm.of(data).source.encode()
    run.tokenizer_folder.mkdir(exist_ok=True)
    for name, contents in kept.items():
        (run.tokenizer_folder / name).write_bytes(contents)


def about_tokens(run: Run, job: Job, max_seq_len: int) -> dict[str, bytes]:
    """The files about tokens, with what is known and nobody gave.

    Args:
        run: where they are kept; if an earlier version made it, they come from the data.
        job: of the Run.
        max_seq_len: the longest sequence that the network takes.
    """
    if not (run.tokenizer_folder / _TOKENIZER).is_file():
        keep_tokenizer(run, job)
    kept = {file.name: file.read_bytes() for file in run.tokenizer_folder.iterdir()}
    end = end_name(tokenizer := Tokenizer.from_buffer(kept[_TOKENIZER]))
    settings, generation = (_object(kept.get(name), name) for name in (SETTINGS_FILE, GENERATION))
    known: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if end is not None:
        # Padding is masked out; without a token for it, batches can't be generated.
        known |= {"eos_token": end, "pad_token": end, "model_max_length": max_seq_len}
        number = tokenizer.token_to_id(end)
        generation = {"eos_token_id": number, "pad_token_id": number, **generation}
    texts = {SETTINGS_FILE: {**known, **settings}, GENERATION: generation}
    return {**kept, **{name: _as_json(value) for name, value in texts.items()}}


def _as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _object(contents: bytes | None, name: str) -> dict[str, Any]:
    try:
        return {} if contents is None else parse_json(contents, _OBJECT)
    except ValueError as error:
        raise InputError(f"{name} in the run's tokenizer folder {error}: remove it.") from None
