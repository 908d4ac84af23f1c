"""What papers say that a pipeline's ranks wait, to compare ours with."""

from paceline.config.schedule import DEMANDS


def bubble_fraction_published(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    stages_per_rank: int,
    forward_s: float = 1.0,
    input_grad_s: float = 1.0,
    weight_grad_s: float = 1.0,
) -> float:
    """Bubble over ideal time by the published formula, from one stage's seconds per micro-batch.

    A step is taken to be synchronous: it ends when the last rank ends, as it does where gradients
    are clipped by their global norm. What the formulas hold for, and where our lists meet them:

    - gpipe, 1f1b: (p-1)(F+I+W); any costs, any number m of micro-batches.
    - interleaved: the same seconds per stage, a stage being 1/v of a rank's layers; any costs.
    - zb_h1, interleaved_zb: (p-1)(F+I-W); F and I at least W, m at least p.
    - zbv: its paper counts none for F = I = W, since there each rank starts its next step when it
      is done itself (the optimizer's check comes later). A synchronous step waits for the last
      rank to get its first input: (p-1)F. F = I = W, m at least 2p-1.
    - dualpipev: (p-1)(F&B + B - 3W), where F&B, the time of a forward beside a backward pass, is
      taken to be F+I+W: no overlap. The formula is for pairs that overlap; run one after the
      other, our list waits (p-1)F, half of it, where F = I = W and m is at least 2p.
    - dualpipe: the same with p/2 for p; m at least 2p.
    """
    whole_s = forward_s + input_grad_s + weight_grad_s
    ranks_waited_for = num_ranks // DEMANDS[name].num_directions - 1
    if name in ("gpipe", "1f1b", "interleaved"):
        wait_s = whole_s
    elif name in ("zb_h1", "interleaved_zb"):
        wait_s = forward_s + input_grad_s - weight_grad_s
    elif name == "zbv":
        wait_s = forward_s
    else:
        wait_s = whole_s + input_grad_s - 2 * weight_grad_s
    stages_passed = stages_per_rank / DEMANDS[name].num_directions
    return ranks_waited_for * wait_s / (num_micro_batches * stages_passed * whole_s)
