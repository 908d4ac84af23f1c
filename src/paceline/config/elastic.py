"""Elastic: what a run does when machines are lost and come back (docs/elastic.md)."""

from typing import Literal

from pydantic import Field

from paceline.config.frozen import Auto, Count, CountOrNone, FrozenConfig


class Elastic(FrozenConfig):
    """What is survived, and within which bounds. Everything else of a run stays as it is."""

    min_nodes: CountOrNone = 0
    """Nodes without which the run does not go on: it waits for their return, then stops with a
    checkpoint. 0: the run is not elastic, and the loss of a rank ends it."""
    max_nodes: CountOrNone = 0
    """Nodes that train at most; 0: `cluster.num_nodes`."""
    spares: CountOrNone = 0
    """Nodes that wait, ready to take the place of a lost one."""
    exact: bool = False
    """Sum gradients, their norm and the loss in an order that doesn't depend on who computed them:
    losses and parameters are then bit-equal to those of a run that lost nobody."""
    heartbeat_s: float = Field(2.0, ge=0.2, le=600)
    """Seconds without a sign of life after which a node is lost."""
    wait_s: float = Field(60.0, ge=0, le=10**7)
    """How long the run waits for nodes: at its start, and while fewer than `min_nodes` are left."""
    first_limit_s: float = Field(300.0, gt=0, le=10**6)
    """Seconds after which a rank is stuck where its usual time is not known yet: in a start, while
    it reads a checkpoint, compiles or evaluates for the first time; and, however short they usually
    are, in saving a checkpoint of which nothing more gets to the disk. Elsewhere 10 times the
    longest of the last 32 times, and 5 s at least."""
    copy_every: Auto | Count = "auto"
    """Steps between copies of a rank's state in the memory of another node; "auto": as often as
    costs at most 1 % of a step's time, measured."""
    restarts: Count = 3
    """Losses without a finished step between them that end the run."""
    replace_slow: bool = False
    """Whether a rank that is merely slow, for many steps, is replaced where a spare is there."""
    audit_every: CountOrNone = 0
    """Steps between audits: a micro-batch is computed again on another rank, and the bits of its
    gradient compared; 0: none."""
    on_spike: Literal["go_on", "skip", "roll_back"] = "go_on"
    """What follows from a loss above `spike` times the median of the last 100: nothing but a line;
    the step is skipped; or the newest checkpoint comes back and the samples since are left out."""
    spike: float = Field(3.0, gt=1, le=10**6)
    """From which multiple of the median of recent losses a loss is a spike."""
    save_within_s: float | None = Field(None, gt=0, le=10**6)
    """Seconds between the notice that this machine goes away (SIGTERM, a cloud's) and its end; a
    checkpoint is made that fits, and the exit code is 75: start me again."""

    @property
    def is_on(self) -> bool:
        """Whether the run goes on without a lost machine."""
        return self.min_nodes > 0

    @property
    def asks_again(self) -> bool:
        """Whether a run that is stopped before its last step exits with 75, and not with 0."""
        return self.is_on or self.save_within_s is not None
