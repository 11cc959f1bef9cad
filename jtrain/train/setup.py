"""Preparation of an attempt that touches no file of its workdir: devices, memory, data and held-out text."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jtrain.config.run import Run, build_run_optimizer, check_vocabulary
from jtrain.data import Prefetch, TextDataset, open_dataset, place_tree, put_batch
from jtrain.data.inspect.resource_estimate import budget
from jtrain.data.native.library import core_line
from jtrain.data.references import StoredReferences
from jtrain.data.teacher import StoredTeacher
from jtrain.errors import UserError
from jtrain.layout.dims import Batch
from jtrain.layout.mesh import make_mesh
from jtrain.model.ops import SoftTargets
from jtrain.optim.optimizer import Optimizer
from jtrain.plan.estimate.flops import flops_per_token
from jtrain.plan.estimate.machine import machine_of
from jtrain.plan.fit_check import available_bytes, check_fits_devices, with_host_memory
from jtrain.plan.from_run import plan_job
from jtrain.plan.job import Job
from jtrain.plan.report.summary import brief_lines
from jtrain.runtime.multihost import same_everywhere
from jtrain.runtime.secrets import without_secrets
from jtrain.step.objective import DPO, Distillation
from jtrain.train.evaluation import Evaluation


@dataclasses.dataclass(frozen=True)
class Setup:
    """Parts of a run on these devices, which are known to fit them.

    job: the model in its layout on this machine.
    memory_bytes: memory that each device has available; None where a device does not tell.
    references: the stored reference of preference pairs, or the stored teacher; None without one.
    """

    run: Run
    job: Job
    memory_bytes: int | None
    mesh: Mesh
    optimizer: Optimizer
    dataset: TextDataset
    evaluation: Evaluation
    references: StoredReferences | StoredTeacher | None = None

    def lines(self, home: Path) -> list[str]:
        """Returns the plan in brief, what the run reads and by which core, for the first lines of a run in
        folder `home`.
        """
        *plan, last = brief_lines(self.job, available=self.memory_bytes)
        # One line for both: all that comes before the first step fits a small screen.
        plan.append(f"{last}; the whole plan: {home / 'plan.txt'}")
        reads = without_secrets("\n".join([self.dataset.describe(), *self.evaluation.describe()]))
        if self.run.adapter is not None and self.run.adapter.base is None:
            reads += "\nwarning: adapter.base is not set, so the frozen base is drawn from the seed"
        # Rows that this process reads: other processes read the rest.
        rows = place_tree(self.mesh, self.run.data.global_batch).rows(jax.process_index())
        return [*plan, reads, f"{budget(self.dataset, rows=len(rows)).line()}; {core_line()}"]

    def open_batches(self, data_state: dict[str, Any] | None, first_step: int) -> Prefetch:
        """Opens this process's batches from `first_step` on; `data_state` is None at the start of the
        data.
        """
        placement = place_tree(self.mesh, self.run.data.global_batch)
        batches = self.dataset.train_batches(
            data_state,
            first_step=first_step,
            rows=placement.rows(jax.process_index()),
            context=self.run.mesh.context,
            cost=self._token_cost(),
        )
        order_L = self.run.context_order()
        return Prefetch(
            batches, lambda batch: put_batch(self._with_stored(batch, order_L), self.mesh, placement)
        )

    def _with_stored(self, batch: Batch, order_L: np.ndarray) -> Batch:
        """A batch of the host with what is stored of it."""
        match self.references, self.run.objective:
            case StoredReferences() as references, _:
                return references.beside(batch, order_L)
            case StoredTeacher() as teacher, Distillation(share=share):
                ids = batch.token_BL, batch.target_BL, batch.segment_BL
                said = teacher.at_targets(*ids, order_L, vocab_size=self.run.model.vocab_size)
                return dataclasses.replace(batch, soft=SoftTargets(*said, share))
        return batch

    def _token_cost(self) -> tuple[float, float]:
        """Relative FLOPs of a token: 1.0 for itself, and those that each earlier token of its document
        adds.
        """
        flops = flops_per_token(self.run.model, seq_len=self.run.data.seq_len)
        return 1.0, flops.attention_flops / self.run.data.seq_len / flops.matmul_flops


def set_up(run: Run, devices: Sequence[jax.Device]) -> Setup:
    """Checks that a run fits these devices, and opens its data.

    Raises:
      UserError: it does not fit; there is no data, or the processes see different files; the tokenizer has
        more ids than the model.
    """
    job = with_host_memory(plan_job(run, machine_of(devices)))
    # None where a device does not tell: then nothing can be checked.
    memory_bytes = available_bytes(devices)
    if memory_bytes is not None:
        # Before the data is opened, which may take long.
        check_fits_devices(job, devices, available=memory_bytes)
    mesh = make_mesh(run.mesh, devices)
    optimizer = build_run_optimizer(run)
    # One process says it, all open the same files.
    dataset = open_dataset(run.data, seed=run.seed, say=print_line if jax.process_index() == 0 else None)
    # Before the first batch: processes that read different files would train on different data.
    if not same_everywhere(dataset.fingerprint()):
        raise UserError(
            f"the processes of this run find different files at {run.data.path_fields}. Give every host the "
            "same files; where files are still being added, start again when all hosts have them."
        )
    check_vocabulary(run.model, dataset.vocab_size)
    references, teacher = None, None
    match run.objective:
        case DPO(stored=str(path)):
            references = StoredReferences.read(path)
        case Distillation(stored=None, top_k=k):
            raise UserError(
                f"objective=Distillation(top_k={k}) without objective.stored, the folder of what a teacher "
                "says. Set objective.stored to what `jtrain data reference --workdir TEACHER --out FOLDER` "
                "wrote."
            )
        case Distillation(stored=str(path), top_k=k):
            teacher = StoredTeacher(path, top_k=k)
    evaluation = Evaluation(run, job.layout, mesh, dataset, references)
    return Setup(run, job, memory_bytes, mesh, optimizer, dataset, evaluation, references or teacher)


def print_line(line: str) -> None:
    """Prints a line at once, for readers that follow a log file."""
    print(line, flush=True)
