"""Run context: what a run is kept in, watched by and stopped with."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from paceline.config.layout import Layout
from paceline.observe.events import append_event
from paceline.observe.memory import memory_recorder
from paceline.observe.profile import ProfiledWindows
from paceline.observe.run import Run
from paceline.train.best_evaluation import BestEvaluation
from paceline.train.checkpoint.checkpointer import Checkpointer
from paceline.train.checkpoint.store import CheckpointStore
from paceline.train.kept_state import GenerationOverError, KeptState
from paceline.train.left_out import LeftOut
from paceline.train.memory_owners import memory_owners
from paceline.train.metrics_buffer import NUM_RECENT, Line, MetricsBuffer
from paceline.train.noise_scale import NoiseEstimates
from paceline.train.spikes import Spike
from paceline.train.start import identity
from paceline.train.stopping import StopRequest
from paceline.train.trainer import Trainer

# From 65,536 the fp16 loss scale may halve this often before it is below one.
_FP16_SCALE_HALVINGS = 16
_FOLLOWS = {
    "go_on": "the run goes on",
    "skip": "the step is skipped",
    "roll_back": "the newest checkpoint comes back, and the samples since are left out",
}


@dataclass(frozen=True)
class RunContext:
    """Of one rank."""

    run: Run
    checkpointer: Checkpointer
    windows_from: Callable[[int], ProfiledWindows]
    """Maps the number of the first step to the windows that are profiled from there on."""
    stop: StopRequest
    metrics_buffer: MetricsBuffer
    identity: dict[str, Any]
    """Kept in every checkpoint: what may not change when the run goes on."""
    best: BestEvaluation
    say: Callable[[str], None] = lambda _sentence: None
    """Tells a person."""
    left_out: LeftOut = field(default_factory=LeftOut)
    last_line: Callable[[], int] = lambda: 0
    """The last step of which the Run has a line."""
    kept: KeptState = field(default_factory=KeptState)

    @classmethod
    def of(
        cls,
        run: Run,
        trainer: Trainer,
        stop: StopRequest,
        say: Callable[[str], None],
        record: Callable[[Line], None],
        kept: KeptState,
    ) -> "RunContext":
        """Of a rank in a Run directory.

        Args:
            kept: from one generation of an elastic run to the next.
        """
        job, ranks = trainer.job, trainer.ranks
        return cls(
            run=run,
            checkpointer=_checkpointer(trainer, run, say),
            windows_from=lambda first: ProfiledWindows(
                run.trace_folder,
                ranks.rank,
                job.observe.profile_every,
                job.observe.profile_steps,
                first_step=first,
                axis=_only_axis(job.layout),
                memory=memory_recorder(
                    run.memory_folder, ranks.device, partial(memory_owners, trainer)
                ),
            ),
            stop=stop,
            metrics_buffer=_metrics_buffer(trainer, run, say, record),
            identity=identity(job, trainer.task.data_key),
            best=BestEvaluation(job),
            say=say,
            left_out=LeftOut.of(run),
            last_line=lambda: max((line["step"] for line in run.newest_steps()), default=0),
            kept=kept,
        )

    @property
    def ends_early(self) -> bool:
        """Whether the ranks agreed to stop, the best evaluation is too long ago, or an earlier
        state is to come back."""
        buffer = self.metrics_buffer
        return buffer.stop_wanted or self.best.is_over or buffer.rolls_back is not None


def _checkpointer(trainer: Trainer, run: Run, say: Callable[[str], None]) -> Checkpointer:
    kept, store = trainer.job.checkpoint, None
    if kept.copy_to is not None and trainer.ranks.is_first:
        store = CheckpointStore(kept.copy_to, run.path.name)

    def waits(for_others: bool) -> None:
        with suppress(GenerationOverError):  # what a save has begun it ends
            trainer.stats.watch.enter("idle" if for_others else "checkpoint")

    return Checkpointer(
        run.checkpoint_folder,
        keep_last=kept.keep_last,
        keep_every=kept.keep_every,
        store=store,
        waits=waits,
        say=say,
    )


def _only_axis(layout: Layout) -> str | None:
    """The axis of collectives that don't tell theirs; None where it could be one of several."""
    used = [axis for axis in ("dp", "fsdp", "tp", "pp", "cp") if getattr(layout, axis) != 1]
    return (used or ["dp"])[0] if len(used) < 2 else None


def _metrics_buffer(
    trainer: Trainer, run: Run, say: Callable[[str], None], record: Callable[[Line], None]
) -> MetricsBuffer:
    """On CUDA the host launches a step before it reads the last one; on a CPU nothing is ahead, and
    workers that step each for itself read results when they meet. fp16 begins with a loss scale
    that is meant to overflow until it has halved enough."""
    job, ranks = trainer.job, trainer.ranks
    is_local = job.comm.local.method != "none"
    lag = job.train.steps if is_local else int(ranks.device_type == "cuda")
    num_recent = NUM_RECENT + is_local * job.comm.local.round_steps
    allowance = _FP16_SCALE_HALVINGS if job.layout.precision == "fp16" else 0
    most_bad, policy = job.train.max_bad_steps + allowance, job.elastic.on_spike

    def see_spike(spike: Spike) -> None:
        if ranks.is_first:
            append_event(run, "spike", **asdict(spike), policy=policy)
            say(
                f"the loss of step {spike.step} is a spike: {spike.loss:.4g}, with a median of "
                f"{spike.median:.4g} before ({_FOLLOWS[policy]})."
            )

    def see_ranks(figures: dict[str, list[float]]) -> None:
        if job.layout.pp == 1:  # stages differ by design
            trainer.stats.watch.compare(figures["busy_s"], ranks.rank)

    return MetricsBuffer(
        record,
        lag,
        most_bad,
        num_recent,
        see_spike=see_spike,
        see_ranks=see_ranks,
        noise=NoiseEstimates.of(job),
        on_spike=policy,
    )
