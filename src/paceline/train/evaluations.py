"""Evaluations: after which steps held-out batches are read, and what is kept if that fails."""

import statistics
import time
from collections.abc import Callable, Iterable

from paceline.config.errors import InputError
from paceline.train.checkpoint.state import restore_rng_state, rng_state
from paceline.train.metrics_buffer import Line, perplexity
from paceline.train.results import StepResult
from paceline.train.run_checkpoints import RunCheckpoints
from paceline.train.run_context import RunContext
from paceline.train.samples import Samples
from paceline.train.task import Step
from paceline.train.trainer import Trainer


class Evaluations:
    """The evaluations of a run.

    Raises:
        InputError: they decide which checkpoint is the best one, and there are none.
    """

    def __init__(self, trainer: Trainer, context: RunContext, checkpoints: RunCheckpoints) -> None:
        self._trainer, self._context, self._checkpoints = trainer, context, checkpoints
        self._samples = Samples(trainer.job, context.run, context.say)
        best = trainer.job.checkpoint.best
        if best is not None and trainer.task.eval_steps is None:
            raise InputError(
                f"checkpoint.best = {best!r} is judged by evaluations and there are none: give "
                "eval_data, or leave it out."
            )

    def go_back_to(self, done: int) -> None:
        """Forget samples of steps that are done again, as their lines of metrics.jsonl are."""
        if self._trainer.ranks.is_first:
            self._samples.drop_from(done if self._context.best.is_due else done + 1)

    def add(self, line: Line, result: Callable[[], StepResult], done: int) -> None:
        """Take a step's line and the reader of its result; evaluate, where that is due, and add the
        figures to the line.

        A stop cuts it short: then it is made when the run goes on (`make_up`). If it fails, line
        and training state are kept. The ranks of a run can't agree on a checkpoint then, so the
        last one begins before the last evaluation: a thread writes it. It has the step's line, and
        says that the evaluation is due: a run that is killed meanwhile makes it.

        Raises:
            InputError: it doesn't have the figure that it is judged by.
        """
        buffer, eval_steps = self._context.metrics_buffer, self._trainer.task.eval_steps
        buffer.add(line, result)
        if eval_steps is None or not self._is_due(done):
            return
        if done == self._trainer.job.train.steps:
            self._context.best.is_due, buffer.incomplete = True, done
            self._checkpoints.save(done)
            buffer.incomplete = None
        try:
            self._see(line, eval_steps, done)
        except Exception:
            self._checkpoints.keep_after_failure(done)
            raise

    def _is_due(self, done: int) -> bool:
        every = self._trainer.job.train.eval_every
        return done == self._trainer.job.train.steps or (every > 0 and done % every == 0)

    def make_up(self, done: int) -> None:
        """Make the evaluation that a stop or a lost rank cut short after the step before."""
        context, eval_steps = self._context, self._trainer.task.eval_steps
        if not context.best.is_due or eval_steps is None:
            return
        line: Line = {}
        self._see(line, eval_steps, done)
        written = context.run.step(done) if self._trainer.ranks.is_first else None
        if line and written is not None:
            context.metrics_buffer.write(written | line)

    def _see(self, line: Line, eval_steps: Callable[[], Iterable[Step]], done: int) -> None:
        """Add the figures to a line and judge them, or note that a stop was wanted before."""
        self._context.best.is_due = True
        figures = self._figures(eval_steps, done)
        self._context.best.is_due = figures is None
        if figures is None:
            self._context.metrics_buffer.stop_wanted = True
            return
        line |= figures
        self._context.best.see(figures, done)

    def _figures(self, eval_steps: Callable[[], Iterable[Step]], done: int) -> Line | None:
        """Training goes on with random numbers as if there had been no evaluation."""
        task, began, generators = self._trainer.task, time.perf_counter(), rng_state()
        self._trainer.stats.watch.enter("evaluation")
        found = self._evaluated(eval_steps())
        if found is not None and self._trainer.ranks.is_first:
            self._samples.make(self._trainer.module, self._trainer.update.ema, done)
        restore_rng_state(generators)
        if found is None:
            return None
        loss, means = found
        line: Line = {"eval_loss": loss, "eval_s": time.perf_counter() - began}
        if means:
            line["eval_figures"] = means
        objective = self._trainer.job.finetune.objective
        if task.unit == "tokens" and objective in ("likelihood", "distill"):
            line["eval_perplexity"] = perplexity(loss)
        return line | (task.eval_figures() if task.eval_figures else {})

    def _evaluated(self, steps: Iterable[Step]) -> tuple[float, dict[str, float]] | None:
        """The loss and the figures of held-out steps, and the losses of their parts by name; None:
        a rank wants to stop."""
        names = self._trainer.task.eval_names
        if not names:
            return self._trainer.evaluate(steps, self._context.stop.__bool__)
        steps = list(steps)
        size, losses = len(steps) // len(names), {}
        for at, name in enumerate(names):
            part = steps[at * size : (at + 1) * size]
            found = self._trainer.evaluate(part, self._context.stop.__bool__)
            if found is None:
                return None
            losses[f"loss.{name}"] = found[0]
        return statistics.fmean(losses.values()), losses
