"""The loop: what happens around the steps of a run.

Every rank executes the same lines in the same order; rank 0 also writes the Run and speaks.
"""

from collections.abc import Iterator

from paceline.train.audit import Auditor
from paceline.train.evaluations import Evaluations
from paceline.train.run_checkpoints import RunCheckpoints
from paceline.train.run_context import RunContext
from paceline.train.step_lines import StepLines
from paceline.train.task import Step
from paceline.train.trainer import Trainer


def train_loop(trainer: Trainer, context: RunContext) -> int:
    """Train from the newest good checkpoint to the Job's last step, or until asked to stop.

    Returns:
        the number of optimizer steps done since the run began.

    Raises:
        RunError: too many bad steps in a row, or no data arrived for too long.
        InputError: evaluations don't have the figure that the Job wants them judged by.
    """
    metrics_buffer, kept = context.metrics_buffer, context.kept
    checkpoints = RunCheckpoints(trainer, context)
    evaluations = Evaluations(trainer, context, checkpoints)
    with kept.keeping(checkpoints.held):
        done = checkpoints.begin(kept.held, kept.generation)
        kept.watch.joined(done, checkpoints.recovered)
        metrics_buffer.write_missing(context.last_line)
        evaluations.go_back_to(done)
        evaluations.make_up(done)
        while True:
            done = _train_on(trainer, context, checkpoints, evaluations, done)
            trainer.agreement.meet(done, at_once=True)
            metrics_buffer.settle()
            if metrics_buffer.rolls_back is None:
                break
            done = checkpoints.roll_back()
            evaluations.go_back_to(done)
        checkpoints.finish(done)
    if trainer.task.stream is not None:
        trainer.task.stream.wait.check()
    return done


def _train_on(
    trainer: Trainer,
    context: RunContext,
    checkpoints: RunCheckpoints,
    evaluations: Evaluations,
    done: int,
) -> int:
    """Train from step `done` on to the end, a wish to stop, or a spike that is to be undone."""
    metrics_buffer, watch = context.metrics_buffer, trainer.stats.watch
    steps = _steps_from(trainer, context, done)
    lines = StepLines(trainer, checkpoints, context.kept.generation)
    auditor = Auditor(trainer, context.run, context.say)
    with context.windows_from(done + 1) as windows, lines, trainer.stats.clock:
        while done < trainer.job.train.steps and not context.ends_early:
            with lines.step():
                checkpoints.save_if_due(done)
                watch.enter("data")
                with lines.data_wait():
                    micro_batches = next(steps, None)
                if micro_batches is None:
                    break
                watch.enter("forward_backward")
                auditor.audit_if_due(done, micro_batches)
                result = trainer.step(done, micro_batches, context.stop.in_exchange)
            done += 1
            watch.at(done)
            context.stop.stepped(done)
            line = lines.line(done)
            evaluations.add(line, result, done)
            if trainer.agreement.meet(done):
                metrics_buffer.catch_up()
                checkpoints.keep_round(done)
            terms = windows.step()
            if not windows.is_open:
                metrics_buffer.release(terms)
            checkpoints.poll()
    return done


def _steps_from(trainer: Trainer, context: RunContext, first: int) -> Iterator[Step]:
    """The batches from step `first` on, after whatever a resumed run has to do before its step."""
    what = trainer.task, first, trainer.job.train.global_batch
    warms_up = first and trainer.needs_warm_up
    if warms_up and (step := next(context.left_out.steps_from(*what), None)) is not None:
        trainer.warm_up(step)
    return context.left_out.steps_from(*what)
