"""Layout: how a model sits on a cluster.

Axes follow the vocabulary of the project: `dp` replicates the model, `fsdp` shards it. Their
product is the number of ranks. The other axes (tp, pp, cp, ep) are not built yet and so are not
settings.
"""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.noun import Auto, Count, Noun

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
ParamDtype = Literal["fp64", "fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]


class Layout(Noun):
    """How the work of a step is split over the ranks, and in which precision it is done."""

    dp: Auto | Count = "auto"
    """Number of replicas of the model (DDP; with fsdp > 1, replicas of sharded groups)."""
    fsdp: Auto | Count = "auto"
    """Number of ranks over which parameters, gradients and optimizer state are sharded (FSDP2)."""
    micro_batch: Auto | Count = "auto"
    """Samples that one rank puts through the model at once; the rest is gradient accumulation."""
    precision: Auto | Precision = "auto"
    """Arithmetic of forward and backward: fp16 adds dynamic loss scaling."""
    param_dtype: ParamDtype = "fp32"
    """Type of the stored parameters; with bf16 the optimizer keeps an fp32 master copy."""
    recompute: Auto | Recompute = "auto"
    """Activation checkpointing: keep all, recompute all but matrix products, recompute blocks."""
    compile: Auto | bool = "auto"
    """Whether each block goes through torch.compile."""
    bucket_mib: Auto | Annotated[float, Field(gt=0)] = "auto"
    """Size of DDP's gradient buckets, MiB: each is reduced as soon as its gradients are there."""

    @property
    def num_ranks(self) -> int:
        """Product of the mesh axes of a concrete layout."""
        assert self.dp != "auto"
        assert self.fsdp != "auto"
        return self.dp * self.fsdp
