"""Finetune: what of a decoder is trained, all of it or adapters beside its matrices, and what it
learns from: answers, which of two answers is the better one, or what a larger network says."""

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.frozen import FrozenConfig, Width
from paceline.config.model import Model

BLOCK, GROUP = 64, 256
"""Of a matrix in 4 bits: neighbouring weights that share a scale, and scales that share an outer
one."""
TENSORS_FILE = "adapter_model.safetensors"
"""Of a folder of adapters in PEFT's format."""
Patterns = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Dpo(FrozenConfig):
    """Direct preference optimisation (https://arxiv.org/abs/2305.18290)."""

    beta: float = Field(0.1, gt=0, le=1e6)
    """How strongly what is learnt is held to the weights that the run began with."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Part of the pairs that are taken to be the wrong way round
    (https://ericmitchell.ai/cdpo.pdf)."""


class Grpo(FrozenConfig):
    """Group relative policy optimisation (https://arxiv.org/abs/2402.03300)."""

    reward: str | None = None
    """"file.py:function": your Python function, which is called with prompt and completion, two
    texts, and the columns of `data.columns` by name, and returns a number."""
    group: int = Field(8, ge=2, le=4096)
    """Completions of a prompt, whose rewards are compared; train.global_batch counts
    completions."""
    max_tokens: Width = 128
    """Of a completion; train.seq_len may leave it fewer."""
    temperature: float = Field(1.0, gt=0, le=100)
    """Logits are divided by it, while completions are made and learnt from."""
    updates: int = Field(1, gt=0, le=64)
    """Steps on the same completions."""
    clip: float = Field(0.2, gt=0, lt=1)
    """A token counts no more once it has become more or less likely than when it was made, by this
    part."""
    beta: float = Field(0.0, ge=0, le=1e6)
    """Weight of the divergence from the weights that the run began with."""


class Distill(FrozenConfig):
    """Distillation: learning what another network, the teacher, thinks of each next token
    (https://arxiv.org/abs/1503.02531)."""

    teacher: str | None = None
    """Directory of a run, whose newest good checkpoint is taken, or folder in Hugging Face's layout
    with weights. Its tokens are the run's own: `data.tokenizer` may be left out."""
    model: Model | None = None
    """The teacher's shapes; filled in."""
    weight: float = Field(0.5, gt=0, le=1)
    """Of the divergence in the loss; the rest is that of the likelihood of the text."""
    temperature: float = Field(1.0, gt=0, le=100)
    """Logits of both are divided by it, and the divergence is multiplied by its square: above 1
    unlikely tokens count for more."""


class Finetune(FrozenConfig):
    """What is trained of the network that `train.weights` gives."""

    method: Literal["full", "lora"] = "full"
    """"full": all parameters. "lora": adapters of low rank beside matrices, which stay as they
    are (https://arxiv.org/abs/2106.09685)."""
    objective: Literal["likelihood", "dpo", "grpo", "distill"] = "likelihood"
    """"likelihood": of the text or the answers. "dpo": of two answers to a prompt the better one is
    to become likelier than the other, beside the weights that the run began with; rows are
    `data.records = "preferences"`. "grpo": the network completes prompts (`data.records =
    "prompts"`), and completions with more reward than others of their prompt become likelier.
    "distill": of the text or the answers, and of what a teacher says of each next token; with
    `train.weights` or without."""
    dpo: Dpo = Dpo()
    grpo: Grpo = Grpo()
    distill: Distill = Distill()
    rank: int = Field(16, gt=0, le=4096)
    """Of an adapter: what it adds to a matrix is a product of two that are so narrow."""
    alpha: float = Field(32.0, gt=0, le=1e6)
    """What an adapter gives is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that each pass of training sets to 0."""
    targets: Patterns = ("*_proj",)
    """Matrices of the blocks that get adapters: their names or the ends of these, with * for
    anything ("q_proj", "attention.*", "blocks.3.*"). By default all of attention and feed-forward,
    but routed experts and routers. Patterns with "experts" in them name the stacked matrices of
    routed experts, "experts.gate_up_proj" (gate and up share an adapter) and "experts.down_proj":
    each expert gets an adapter."""
    decomposed: bool = False
    """Train the length of each row of the adapted matrix as well (DoRA,
    https://arxiv.org/abs/2402.09353)."""
    factors: Literal["both", "a", "b"] = "both"
    """Which of an adapter's two matrices are trained: "a", the one beside the inputs, "b", the one
    beside the outputs, or both. Lengths of rows are trained with either."""
    base: Literal["dense", "nf4", "nf4_double"] = "dense"
    """Form of the matrices beside adapters: "dense", as layout.param_dtype; "nf4", 4 bits and a
    scale for each 64 (QLoRA, https://arxiv.org/abs/2305.14314); "nf4_double", whose scales have 8
    bits."""
    adapters: str | None = None
    """Folder of adapters in PEFT's format to start from; else they begin without effect."""

    @property
    def is_adapted(self) -> bool:
        """Whether adapters are trained, and nothing else."""
        return self.method == "lora"

    @property
    def is_narrow(self) -> bool:
        """Whether the matrices beside adapters are kept in 4 bits."""
        return self.base != "dense"

    @property
    def teacher(self) -> Model | None:
        """Shapes of the network that is learnt from; None: there is none."""
        return self.distill.model if self.objective == "distill" else None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss asks for what the first weights give."""
        return self.objective == "dpo" or (self.objective == "grpo" and self.grpo.beta > 0)

    @property
    def scaling(self) -> float:
        """What adapters give is multiplied by."""
        return self.alpha / self.rank

    def trains(self, factor: Literal["a", "b"]) -> bool:
        """Whether a matrix of each adapter is trained."""
        return self.factors in ("both", factor)

    def names(self, matrix: str) -> bool:
        """Whether the targets name a matrix.

        Args:
            matrix: its whole name, as "blocks.3.attention.q_proj".
        """
        return any(fits(matrix, pattern) for pattern in self.targets)


def narrow_bytes(in_features: int, *, double: bool) -> int:
    """Bytes of a row of a matrix in 4 bits, as `models.nf4` lays it out.

    Args:
        in_features: a multiple of BLOCK.
        double: whether scales are quantised as well.
    """
    blocks = in_features // BLOCK
    if not double:
        return blocks * (BLOCK // 2 + 4)
    return blocks * (BLOCK // 2 + 1) + 4 * (2 + num_outer(blocks))


def num_outer(blocks: int) -> int:
    """Outer scales that a row of so many blocks needs, wherever its first one lies in a group."""
    return (blocks + GROUP - 2) // GROUP + 1


def fits(matrix: str, pattern: str) -> bool:
    """Whether a pattern is that of a matrix's name, or of an end of it; of experts, if it says
    "experts"."""
    if ".experts." in matrix and "experts" not in pattern:
        return False
    return fnmatchcase(matrix, pattern) or fnmatchcase(matrix, f"*.{pattern}")
