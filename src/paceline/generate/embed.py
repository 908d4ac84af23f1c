"""Embed: texts as vectors of length 1, from the states that a decoder's head would read.

Texts that are alike in what the network makes of them have vectors with a large inner product. A
decoder that was trained to predict tokens was not trained for that: what it gives is a start.

How it works: texts of like length go through the network together, padded at their ends, which no
token of a text sees. "mean" is the mean of a text's states, "last" its last one.
"""

from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.errors import InputError
from paceline.generate.sequence import check_tokens
from paceline.models.decoder import Decoder

Pooling = Literal["mean", "last"]


def check_texts(decoder: Decoder, texts: List[List[int]]) -> None:
    """Check that texts can be embedded.

    Raises:
        InputError: one is empty, too long, or has tokens that the network doesn't know.
    """
    longest = decoder.model.max_seq_len
    for tokens in texts:
        check_tokens(tokens, decoder.model.vocab_size)
        if len(tokens) > longest:
            raise InputError(
                f"A text has {len(tokens)} tokens, and the network takes {longest}: shorten it."
            )


@torch.inference_mode()
def embed(decoder: Decoder, texts: List[List[int]], pooling: Pooling = "mean") -> Tensor:
    """The vectors of texts, in one pass.

    Args:
        texts: tokens of each; see `check_texts`.

    Returns:
        (num_texts, hidden) fp32, on the CPU.
    """
    device = next(decoder.parameters()).device
    lengths = torch.tensor([len(tokens) for tokens in texts])
    padded = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
    for row, tokens in zip(padded, texts, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    lengths = lengths.to(device)[:, None]
    place = torch.arange(padded.shape[1], device=device)
    # What fills up is a document of its own, where tokens see later ones.
    documents = None if decoder.model.causal else (place >= lengths).long()
    states = decoder(padded.to(device), documents, returns_states=True).float()
    taken = place < lengths if pooling == "mean" else place == lengths - 1
    return F.normalize((states * taken[..., None]).sum(1), dim=-1).cpu()


def parts_of(lengths: List[int], most_tokens: int) -> Iterator[list[int]]:
    """Numbers of the texts that go through the network together: alike in length, with padding at
    most so many tokens, or one text."""
    part: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda each: lengths[each]):
        if part and (len(part) + 1) * lengths[number] > most_tokens:
            yield part
            part = []
        part.append(number)
    if part:
        yield part
