"""Weights that a training starts from: do they belong to the Job's network and to its tokens?

A row of an embedding is a token's, and a matrix was trained for one arithmetic: other tokens or
another arithmetic train without an error and give something poor. Here they are refused before
anything is written. Reading the weights is `models.weights`.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.config.job import to_raw
from paceline.config.job_sections import Data
from paceline.config.model import Model
from paceline.models.dcp import check_dcp, is_dcp
from paceline.models.weights import check_weights, read_model
from paceline.observe.records import ORIGIN, OriginRecord
from paceline.train.data.tokenizer import bpe_size, read_tokenizer

ORIGIN_FILE = "paceline.json"
"""Beside weights that `paceline export` wrote: `records.OriginRecord`."""
# How long sequences are, how far positions reach and how experts are kept in balance: people change
# these of a trained network.
_MAY_CHANGE = {
    *("max_seq_len", "init_std", "rope_theta", "rope_scaling"),
    *("parametrization", "base_width", "base_head_dim", "base_layers"),
}
_MAY_CHANGE_OF_EXPERTS = {"bias_update_speed", "balance_loss"}


def check_network(model: Model, weights: str) -> None:
    """Check that weights were trained for a network.

    Raises:
        InputError: they compute something else, or a tensor is missing or of another shape. A
            folder of DCP's says nothing of what is computed: names and shapes alone are compared.
    """
    if is_dcp(weights):
        check_dcp(model, weights)
        return
    theirs, ours = (_arithmetic(each) for each in (read_model(weights), model))
    for name in sorted(theirs.keys() | ours.keys()):
        was, now = theirs.get(name), ours.get(name)
        if was != now:
            raise InputError(
                f"train.weights = {weights!r} was trained with model.{name} = {was}, and the Job "
                f'has {now}: take the network from there with [model] hf = "{weights}".'
            )
    check_weights(model, weights)


def _arithmetic(model: Model) -> dict[str, Any]:
    raw = _without(to_raw(model), _MAY_CHANGE)
    if "experts" in raw:
        raw["experts"] = _without(raw["experts"], _MAY_CHANGE_OF_EXPERTS)
    return raw


def _without(section: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name not in names}


def check_tokens(tokenizer: Path, data: Data, weights: str, setting: str = "train.weights") -> None:
    """Check that weights were trained with the tokens of the data.

    Args:
        tokenizer: file of that of the data.
        data: says where it is from.
        weights: folder whose tokenizer.json is that of the weights.
        setting: that names them.

    Raises:
        InputError: they were trained with others, or a fresh tokenizer can't be theirs.
    """
    theirs = Path(weights) / "tokenizer.json"
    if theirs.is_file():
        if read_tokenizer(theirs).get_vocab() == read_tokenizer(tokenizer).get_vocab():
            return
        raise InputError(
            f"{setting} = {weights!r} was trained with other tokens than data.tokenizer = "
            f'{data.tokenizer!r} gives: set data.tokenizer = "{weights}".'
        )
    if bpe_size(data.tokenizer):
        raise InputError(
            f"data.tokenizer = {data.tokenizer!r} is trained afresh, and {setting} = "
            f"{weights!r} knows other tokens: give the tokenizer.json that they were trained with."
        )


def parent_of(weights: str | None) -> OriginRecord | None:
    """The run and the checkpoint that starting weights are from, None where nothing says so."""
    if weights is None:
        return None
    with suppress(InputError):
        return read_json(Path(weights) / ORIGIN_FILE, ORIGIN, "export them again")
    return None
