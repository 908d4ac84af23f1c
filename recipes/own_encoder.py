"""Train an encoder for retrieval: two parts of a document get vectors that are alike.

    python recipes/own_encoder.py
    paceline index documents/ --encoder encoder --out idx

A decoder trained to predict tokens never learnt that texts of like meaning have like vectors. Here
it learns from text alone: of a batch of documents each has two parts, and the one has to find the
other among all (https://arxiv.org/abs/2112.09118, with the loss of
https://arxiv.org/abs/1807.03748). The folder `encoder` is what `paceline index` takes.

The text is Python's own library, which is small: it shows the way, and is no encoder of English.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.config.model import Model
from paceline.generate.embed import embed
from paceline.models.decoder import Decoder
from paceline.models.weights import write_weights
from paceline.train.data.files import stdlib_files
from paceline.train.data.tokenizer import Encoder, make_encoder

LENGTH = 32  # tokens of a part
PAIRS, HELD_OUT = 8, 100  # of each document; documents
TEMPERATURE = 0.05
SHAPE = Model(
    vocab_size=2048, hidden_size=64, ffn_size=192, num_layers=1, num_heads=4, max_seq_len=256
)
FOLDER = Path("encoder")


class Pooled(nn.Module):
    """The mean of a decoder's last states, of length 1; as `paceline.generate.embed` pools."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder(SHAPE.replace(tie_embeddings=True))
        self.decoder.init_weights(torch.Generator().manual_seed(0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, seq) to (batch, hidden)."""
        return F.normalize(self.decoder(tokens, returns_states=True).mean(1), dim=-1)


def pairs() -> tuple[Encoder, TensorDataset, TensorDataset]:
    """The tokenizer, and parts that follow each other in a document: to train on, and held out."""
    texts = [path.read_text(errors="replace") for path in stdlib_files()]
    encoder = make_encoder(f"bpe:{SHAPE.vocab_size}", texts[::4])
    draw = torch.Generator().manual_seed(0)
    documents = []
    for tokens in encoder.encode(texts):
        if len(tokens) >= 4 * LENGTH:
            starts = torch.randint(len(tokens) - 2 * LENGTH, (PAIRS,), generator=draw)
            parts = [torch.from_numpy(tokens[start : start + 2 * LENGTH]) for start in starts]
            documents.append(torch.stack(parts))
    order = torch.randperm(len(documents), generator=draw).tolist()
    held_out = torch.stack([documents[number][0] for number in order[:HELD_OUT]])
    train = torch.cat([documents[number] for number in order[HELD_OUT:]])
    split = [TensorDataset(*each.split(LENGTH, dim=1)) for each in (train, held_out)]
    return encoder, split[0], split[1]


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Mean cross-entropy of finding the other part among those of the batch, from either side."""
    # One forward pass: DDP wants one between two backward passes.
    first, second = model(torch.cat(batch)).chunk(2)
    scores, right = first @ second.T / TEMPERATURE, torch.arange(len(first), device=first.device)
    return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2


def found(model: Pooled, first: Tensor, second: Tensor) -> float:
    """Share of the parts whose other part is the nearest of all."""
    vectors = [embed(model.decoder.eval(), part.tolist()) for part in (first, second)]
    nearest = (vectors[0] @ vectors[1].T).argmax(1)
    return (nearest == torch.arange(len(first))).float().mean().item()


def main() -> None:
    """The essential part."""
    encoder, train, held_out = pairs()
    model = Pooled()
    before = found(model, *held_out.tensors)
    job = {
        "name": "encoder",
        "optim": {"lr": 5e-3, "warmup_steps": 15},
        "train": {"steps": 150, "global_batch": 64},
        # A batch in one piece: each part is looked for among the others of it.
        "cluster": {"devices_per_node": 1},
        "layout": {"micro_batch": 64},
    }
    paceline.train(job, model=model, loss=loss, data=train)
    write_weights(FOLDER, model.decoder.model, model.decoder.state_dict())
    encoder.tokenizer.save(str(FOLDER / "tokenizer.json"))
    after = found(model, *held_out.tensors)
    print(f"the other part is the nearest of {HELD_OUT}: {before:.0%} before, {after:.0%} after")


if __name__ == "__main__":
    main()
