"""Runner: the forward pass of packed tokens."""

import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from paceline.config.serving import Serving, WeightForm
from paceline.generate.exact import check_places, tiled_experts
from paceline.generate.layers import StreamedLayers
from paceline.generate.packed import PackedWeights, can_pack
from paceline.generate.paged import Memory, Packed, PagedAttend, Part
from paceline.generate.quantised import QuantisedWeights, quantised_matrices
from paceline.generate.scheduler import Chunk
from paceline.models.decoder import Decoder
from paceline.models.quantised import matrices_of


class Runner:
    """Computes chunks of sequences with a decoder, which is borrowed for each pass.

    Args:
        exact_tokens: each pass has just so many tokens, filled up where there are fewer, and every
            result is computed in one order: logits have the same bits whatever else is in the pass.
            None: as many as there are.
        layers: of the network, where not all stay in the device's memory: then nothing is packed.
        form: of the weights.
        weight_group: weights that share a scale in int4.
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: Memory,
        exact_tokens: int | None = None,
        layers: StreamedLayers | None = None,
        form: WeightForm = "as_trained",
        weight_group: int = Serving().weight_group,
    ) -> None:
        self.decoder, self._memory, self._exact_tokens = decoder, memory, exact_tokens
        self._form: WeightForm = form
        self._weight_group = weight_group
        self._attend = PagedAttend(memory)
        self._layers = layers
        self._packed: PackedWeights | QuantisedWeights | None = None
        self.weights_changed()
        if exact_tokens is not None:
            check_places(self._exact([], []))

    def weights_changed(self) -> None:
        """The network has other weights: quantise them, or pack them where that makes products
        faster."""
        if self._form != "as_trained":
            matrices = quantised_matrices(self.decoder, self._form, self._weight_group)
            if isinstance(self._packed, QuantisedWeights):
                self._packed.renew(matrices)
            else:
                self._packed = QuantisedWeights(self.decoder, matrices)
        elif isinstance(self._packed, PackedWeights):
            self._packed.renew()
        elif self._exact_tokens is None and self._layers is None and can_pack(self.decoder):
            self._packed = PackedWeights(self.decoder)

    @property
    def matrix_bytes(self) -> int:
        """Of the matrices that products read, with their scales."""
        if isinstance(self._packed, QuantisedWeights):
            return self._packed.resident_bytes
        return sum(weight.nbytes for _, weight in matrices_of(self.decoder))

    @torch.inference_mode()
    def logits(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the tokens of chunks, each sequence at most once.

        Returns:
            (num_told and num_choices of all chunks, vocab) in fp32.
        """
        tokens: list[int] = []
        parts: list[Part] = []
        wanted: list[int] = []
        for chunk in chunks:
            blocks = chunk.sequence.blocks
            parts.append(Part(len(tokens), chunk.start, chunk.num_tokens, blocks))
            tokens += chunk.tokens
            num_wanted = chunk.num_told + chunk.num_choices
            wanted += range(len(tokens) - num_wanted, len(tokens))
        if self._exact_tokens is not None:
            return self._exact(tokens, parts)[wanted]
        return self.compute(tokens, parts, wanted)

    @torch.inference_mode()
    def compute(self, tokens: list[int], parts: list[Part], wanted: list[int]) -> Tensor:
        """Compute tokens, of sequences' parts in this order.

        Args:
            wanted: places of the tokens whose logits are.

        Returns:
            (num_wanted, vocab) in fp32; where ranks share the network, on the first one alone.
        """
        return self._pass(tokens, Packed(parts, self._memory), wanted)

    def times(self, most: int) -> dict[int, float]:
        """Seconds of passes of 1, 2, 4, ... tokens, at most so many: measured now."""
        sizes = [1] if self._exact_tokens is not None else [2**power for power in range(8)]
        return {size: min(self._seconds(size) for _ in range(2)) for size in sizes if size <= most}

    @torch.inference_mode()
    def _seconds(self, num_tokens: int) -> float:
        """Of a pass of tokens that nobody wants."""
        parts = [Part(row, 0, 1, (self._memory.spare_block,)) for row in range(num_tokens)]
        begun, tokens = time.perf_counter(), [0] * num_tokens
        if self._exact_tokens is not None:
            logits = self._exact(tokens, parts)
        else:
            logits = self.compute(tokens, parts, [*range(num_tokens)])
        logits.argmax(-1).tolist()
        return time.perf_counter() - begun

    @torch.inference_mode()
    def pass_of_spare(self, rows: int) -> Tensor:
        """A pass of so many tokens that nobody wants, to see what it takes.

        Returns:
            (rows, vocab) in fp32.
        """
        parts = [Part(row, 0, 1, (self._memory.spare_block,)) for row in range(rows)]
        return self.compute([0] * rows, parts, [*range(rows)])

    @torch.inference_mode()
    def _exact(self, tokens: list[int], parts: list[Part]) -> Tensor:
        """Fill a pass up with tokens that nobody wants; all its logits."""
        assert self._exact_tokens is not None
        num_tokens = parts[-1].row + parts[-1].num_tokens if parts else 0
        spare = range(num_tokens, self._exact_tokens)
        parts = parts + [Part(row, 0, 1, (self._memory.spare_block,)) for row in spare]
        tokens = tokens + [0 for _ in spare]
        with tiled_experts(self.decoder):
            return self._pass(tokens, Packed(parts, self._memory, is_exact=True), None)

    def _pass(self, tokens: list[int], packed: Packed, wanted: list[int] | None) -> Tensor:
        device = self._memory.keys.device
        rows = None
        if wanted is not None and len(wanted) < len(tokens):
            rows = torch.tensor(wanted, dtype=torch.long, device=device)
        self._attend.packed = packed
        weights = self._layers or self._packed
        with self._attend.put_in(self.decoder), weights.put_in() if weights else nullcontext():
            ids = torch.tensor([tokens], device=device)
            logits = self.decoder(ids, positions=packed.positions, wanted=rows)
        return self.whole(logits)[0].float()

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of which each rank may have a part; here there is one rank."""
        return logits
