"""Actions after a step: an evaluation, a copy in local memory, a save, weights sent to readers.

They follow from numbers alone that are equal in all processes. With `num_steps=10`, a save every 4 steps, an
evaluation every 5, weights every 6 and a copy every 2, all numbers good:

    step      1  2     3  4     5         6           7  8     9  10
    actions      copy     save  evaluate  copy, send     save     evaluate, save, send
"""

import dataclasses

from jtrain.config.run import Run


@dataclasses.dataclass(frozen=True)
class Actions:
    """Actions after one step, in the order in which the loop takes them.

    is_last: no step follows: the run is complete, the data ends, or a stop was requested.
    """

    is_last: bool
    evaluate: bool
    copy: bool
    save: bool
    send: bool

    @property
    def read_results(self) -> bool:
        """True if the step's loss and gradient norm must be known to be good first."""
        return self.evaluate or self.copy or self.save or self.send


@dataclasses.dataclass(frozen=True)
class Cadence:
    """Steps between actions; None for never.

    num_steps: length of the run.
    evaluate_first: True to evaluate before the first step of a run as well.
    send_every_steps: steps between weights that readers get; they get those of the last step too.
    """

    num_steps: int
    evaluate_every_steps: int | None
    copy_every_steps: int | None
    evaluate_first: bool = False
    send_every_steps: int | None = None

    @classmethod
    def of(cls, run: Run) -> "Cadence":
        """Returns the cadence of a run."""
        stream = run.weight_stream
        return cls(
            run.num_steps,
            run.eval.every_steps,
            run.checkpoint.local_every_steps,
            run.eval.first,
            None if stream is None else stream.every_steps,
        )

    def decide(
        self,
        step: int,
        *,
        is_save_due: bool,
        stop_requested: bool,
        data_ended: bool,
        is_send_due: bool = False,
    ) -> Actions:
        """Returns the actions after `step`.

        Args:
          is_save_due: `checkpoint.every_steps` asks for a save here, or one of an earlier step is still to be
            made.
          stop_requested: a process of the run is to stop; nothing is evaluated for that.
          data_ended: the data has no batch for another step.
          is_send_due: weights of an earlier step are still to be sent.
        """
        # The end of the data is the end of the run, as its last step is.
        is_complete = step == self.num_steps or data_ended
        is_last = is_complete or stop_requested
        # The last step always saves, so that nothing is lost at a stop.
        save = is_save_due or is_last
        return Actions(
            is_last=is_last,
            evaluate=self.evaluate_every_steps is not None
            and (is_complete or step % self.evaluate_every_steps == 0),
            # Not where a save is due: the checkpoint then holds the same state.
            copy=self.copy_every_steps is not None and not save and step % self.copy_every_steps == 0,
            save=save,
            # The last weights of a run are those that its readers go on with; a stop has no time for others.
            send=self.send_every_steps is not None
            and (is_complete or (not stop_requested and (is_send_due or step % self.send_every_steps == 0))),
        )
