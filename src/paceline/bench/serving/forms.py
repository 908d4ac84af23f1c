"""Forms: what weights, keys and values in fewer bits take on this device, and what they cost.

How it works: forms take turns at the same passes (`generate.prices`, `generate.key_prices`). Of a
pass's time two parts are measured by themselves: reading as many bytes as the form's matrices have,
and their products, at the rate that they have with many rows, where reading and unpacking hardly
count (4 bits are multiplied in bf16). The rest is attention and what isn't quantised; what a form's
rest is more than that of weights as trained is unpacking and rounding. Where a device multiplies
while it reads, the parts are more than their sum, and the rest is none.
"""

import ctypes
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.errors import InputError
from paceline.config.serving import KeyForm, Serving, WeightForm
from paceline.generate.key_prices import KeyPrice, expected_loads, key_prices
from paceline.generate.paged import KeyShape, Memory
from paceline.generate.prices import weight_prices
from paceline.generate.quantised import product_of, quantised_matrices
from paceline.generate.runner import Runner
from paceline.models.decoder import Decoder
from paceline.models.quantised import matrices_of

WEIGHT_FORMS: tuple[WeightForm, ...] = ("as_trained", "int8", "int4")
KEY_FORMS: tuple[KeyForm, ...] = ("as_weights", "int8")
_MANY_ROWS = 256
_TIMES = 5


@dataclass(frozen=True)
class FormPass:
    """A pass over the next tokens of so many texts."""

    rows: int
    pass_s: float
    bytes_s: float
    """Of it, reading the matrices."""
    product_s: float
    """And multiplying."""

    @property
    def rest_s(self) -> float:
        """What remains."""
        return max(0.0, self.pass_s - self.bytes_s - self.product_s)


@dataclass(frozen=True)
class FormPrice:
    """A form of the weights."""

    form: WeightForm
    resident_bytes: int
    """Of the matrices that products read, with their scales."""
    peak_bytes: int | None
    """What the process needs at most for them beyond the network's own weights, while they are made
    and in a pass of many tokens; None: this system doesn't tell."""
    passes: tuple[FormPass, ...]


def form_prices(decoder: Decoder, serving: Serving, most_tokens: int) -> list[FormPrice]:
    """Measure each form of the weights.

    Raises:
        InputError: the weights were read in fewer bits.
    """
    if any(weight.is_meta for _, weight in matrices_of(decoder)):
        raise InputError(
            "These weights are stored in fewer bits already: give the run that they were made of."
        )
    most = min(serving.max_sequences, most_tokens)
    rows = [*(4**n for n in range(most.bit_length()) if 4**n < most), most, most_tokens]
    rows = list(dict.fromkeys(rows))
    prices = weight_prices(decoder, WEIGHT_FORMS, rows, serving.weight_group)
    found = []
    for number, form in enumerate(WEIGHT_FORMS):
        own = prices[number :: len(WEIGHT_FORMS)]
        bytes_s = _read_s(own[0].resident_bytes, next(decoder.parameters()).device)
        row_s = _product_s(decoder, form, serving.weight_group) / _MANY_ROWS
        passes = tuple(FormPass(p.rows, p.pass_s, bytes_s, row_s * p.rows) for p in own)
        peak = _peak_bytes(partial(_use, decoder, form, serving.weight_group, most_tokens))
        found.append(FormPrice(form, own[0].resident_bytes, peak, passes))
    return found


def forms_of_keys(decoder: Decoder, serving: Serving, most_tokens: int) -> list[KeyPrice]:
    """Measure each form of keys and values, with weights as trained."""
    loads = expected_loads(decoder.model.max_seq_len, serving.max_sequences, most_tokens)
    return key_prices(decoder, KEY_FORMS, loads, serving.block_size)


def crossover(before: FormPrice, form: FormPrice) -> int | None:
    """The fewest tokens of a pass with which a form isn't quicker; None: it always is."""
    pairs = zip(before.passes, form.passes, strict=True)
    return next((new.rows for old, new in pairs if new.pass_s >= old.pass_s), None)


def _read_s(num_bytes: int, device: torch.device) -> float:
    """Seconds of reading so many bytes."""
    kept = torch.ones(max(1, num_bytes // 4), device=device)
    return _seconds(kept.sum)


@torch.inference_mode()
def _product_s(decoder: Decoder, form: WeightForm, group: int) -> float:
    """Seconds of all products with many rows, without unpacking."""
    products = list(_products(decoder, form, group))
    return _seconds(lambda: [product() for product in products])


def _products(decoder: Decoder, form: WeightForm, group: int) -> Iterator[Callable[[], Tensor]]:
    if form == "as_trained":
        for _, weight in matrices_of(decoder):
            yield partial(F.linear, _many_rows(weight), weight)
        return
    dtype = next(decoder.parameters()).dtype
    for _, matrix in quantised_matrices(decoder, form, group):
        if matrix.bits == 8:
            yield partial(product_of(matrix, None), _many_rows(matrix.values).to(dtype))
        else:
            wide = matrix.dequantised(torch.bfloat16)
            yield partial(F.linear, _many_rows(wide), wide)


def _many_rows(weight: Tensor) -> Tensor:
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    return torch.ones(_MANY_ROWS, weight.shape[1], dtype=dtype, device=weight.device)


def _use(decoder: Decoder, form: WeightForm, group: int, rows: int) -> None:
    """Make a form's matrices, and a pass with them."""
    first = next(decoder.parameters())
    memory = Memory(KeyShape.of(decoder), 1, 1, first.dtype, first.device)
    Runner(decoder, memory, form=form, weight_group=group).pass_of_spare(rows)


def _seconds(do: Callable[[], object]) -> float:
    """The median of a few times; one before them warms up."""
    do()
    taken = []
    for _ in range(_TIMES):
        begun_s = time.perf_counter()
        do()
        taken.append(time.perf_counter() - begun_s)
    return median(taken)


def _peak_bytes(do: Callable[[], object]) -> int | None:
    """What the process has at most while it does this, beyond what it had before."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    with suppress(OSError, AttributeError):
        if trim is not None:
            trim(0)  # what was freed and kept would count as there before
        Path("/proc/self/clear_refs").write_text("5")  # begins the maximum anew
        before = psutil.Process().memory_info().rss
        do()
        status = Path("/proc/self/status").read_text()
        if most := re.search(r"VmHWM:\s+(\d+) kB", status):
            return max(0, int(most[1]) * 1024 - before)
    return None


def same_load(prices: Sequence[KeyPrice]) -> list[tuple[KeyPrice, KeyPrice]]:
    """Prices of both forms, load by load."""
    return list(zip(prices[:: len(KEY_FORMS)], prices[1 :: len(KEY_FORMS)], strict=True))
