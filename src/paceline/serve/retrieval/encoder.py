"""Encoder: texts as vectors of length 1, by a network of ours or one of transformers.

Ours is a decoder, of a run or a folder (`generate.embed`). Any other folder with config.json,
safetensors and tokenizer.json is opened by transformers' AutoModel: no code of the folder is run,
nothing is downloaded, nothing is unpickled. A vector is the mean of a text's last states.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import TypeAdapter
from tokenizers import Tokenizer
from torch import Tensor, nn

from paceline.config.errors import InputError
from paceline.config.files import read_json
from paceline.generate.embed import embed, parts_of
from paceline.serve.network import Network, open_network
from paceline.train.data.tokenizer import read_tokenizer

Vectors = NDArray[np.float32]
_PASS_TOKENS = 4096
_CURE = "give a run, or a folder with config.json, safetensors and tokenizer.json"
_OBJECT = TypeAdapter(dict[str, Any])


class Encoder(Protocol):
    """Makes vectors of texts; for one thread at a time."""

    tokenizer: Tokenizer
    width: int
    """Of a vector."""
    longest: int
    """Tokens that it reads of a text; what follows is left out."""

    step: int | None
    """Of a run's checkpoint; None: a folder's."""

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """(num_texts, width), each of length 1."""

    def fingerprint(self) -> str:
        """Names exactly these weights and this tokenizer."""


def open_encoder(path: Path, step: int | None = None) -> Encoder:
    """Open an encoder.

    Args:
        path: a run or a folder of weights.
        step: of the run's checkpoint; None: the newest good one.

    Raises:
        InputError: neither, or transformers is needed and missing or refuses the folder.
    """
    config = path / "config.json"
    if config.is_file():
        said = read_json(config, _OBJECT, _CURE).get("architectures") or [""]
        if not str(said[0]).endswith("ForCausalLM"):
            return _OfTransformers(path)
    return _OfDecoder(open_network(path, step=step))


class _OfDecoder:
    def __init__(self, network: Network) -> None:
        self._network, self.tokenizer = network, network.tokenizer
        model = network.decoder.model
        self.width, self.longest = model.hidden_size, model.max_seq_len
        self.step = network.step

    def vectors(self, texts: Sequence[str]) -> Vectors:
        tokens = [self._network.encode(text)[: self.longest] for text in texts]
        return _in_parts(tokens, self.width, lambda part: embed(self._network.decoder, part))

    def fingerprint(self) -> str:
        return _fingerprint(self._network.decoder, self.tokenizer)


class _OfTransformers:
    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoModel
        except ImportError:
            raise InputError(
                f"{folder} is no decoder, and another encoder needs transformers: pip install "
                "transformers."
            ) from None
        self.tokenizer = read_tokenizer(folder / "tokenizer.json")
        try:
            model = AutoModel.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
            )
        except Exception as error:  # whatever a folder of others may hold
            problem = " ".join(str(error).split())[:200]
            raise InputError(f"transformers can't open {folder} ({problem}): {_CURE}.") from None
        self._model: nn.Module = model.eval()
        self.step: int | None = None
        self.width = int(model.config.hidden_size)
        self.longest = int(model.config.max_position_embeddings)

    def vectors(self, texts: Sequence[str]) -> Vectors:
        tokens = [
            encoding.ids[: self.longest] for encoding in self.tokenizer.encode_batch([*texts])
        ]
        return _in_parts(tokens, self.width, self._pass)

    def fingerprint(self) -> str:
        return _fingerprint(self._model, self.tokenizer)

    @torch.inference_mode()
    def _pass(self, texts: list[list[int]]) -> Tensor:
        lengths = torch.tensor([len(tokens) for tokens in texts])[:, None]
        longest = int(lengths.max())
        ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in texts])
        mask = (torch.arange(longest) < lengths).long()
        states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        return F.normalize((states * mask[..., None]).sum(1), dim=-1)


def _in_parts(tokens: list[list[int]], width: int, of_part: Any) -> Vectors:
    vectors = np.zeros((len(tokens), width), np.float32)
    known = [number for number, each in enumerate(tokens) if each]
    for part in parts_of([len(tokens[number]) for number in known], _PASS_TOKENS):
        numbers = [known[place] for place in part]
        vectors[numbers] = of_part([tokens[number] for number in numbers]).numpy()
    return vectors


def _fingerprint(network: nn.Module, tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(tokenizer.to_str().encode())
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
