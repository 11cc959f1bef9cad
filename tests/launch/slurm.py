"""A Slurm cluster for tests: `sbatch` in Python, with stubs of `srun` and `scontrol` that start real
processes.
"""

import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.launch.hosts import ROOT, Host, Running, environment

STUBS = Path(__file__).parent / "stubs"
OF_A_JOB = {
    "job-name": None,
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "gpus-per-node": "SLURM_GPUS_PER_NODE",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
    "time": None,
    "signal": None,
    "requeue": None,
    "open-mode": None,
}
"""Option of sbatch -> the job's variable that Slurm makes of it."""


class Slurm:
    """A cluster of test hosts.

    Args:
      hosts: its nodes.
      folder: where the jobs are submitted, shared by all nodes.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts, self.folder = list(hosts), folder
        self._log = folder / "asked.jsonl"
        self.excluded: set[str] = set()
        self._restarts = 0
        self.job = free_job_number()

    def sbatch(
        self,
        script: Path,
        *arguments: str,
        nodes: int,
        options: Mapping[str, str] | None = None,
        **variables: str,
    ) -> Running:
        """Starts a batch script as Slurm does on the first node of a job.

        Args:
          script: its `#SBATCH` lines are read; an unknown option fails.
          arguments: of the script.
          options: of sbatch, in place of the script's lines.
          variables: of the user's environment.
        """
        given = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script.read_text(), re.MULTILINE)) | dict(
            options or {}
        )
        assert set(given) <= set(OF_A_JOB), given
        job = {
            name: given[option] for option, name in OF_A_JOB.items() if name is not None and option in given
        }
        here = [host for host in self.hosts if host.name not in self.excluded][:nodes]
        assert len(here) == nodes, f"{self.excluded} are excluded"
        listing = [{"name": host.name, "enter": host.enter} for host in here]
        (self.folder / "cluster.json").write_text(json.dumps({"hosts": listing, "log": str(self._log)}))
        job |= {"SLURM_JOB_ID": str(self.job), "SLURM_JOB_NUM_NODES": str(nodes)}
        job |= {"SLURM_JOB_NODELIST": ",".join(host.name for host in here)}
        if self._restarts:
            job["SLURM_RESTART_COUNT"] = str(self._restarts)
        job |= {
            "STUB_CLUSTER": str(self.folder / "cluster.json"),
            "PATH": f"{STUBS}{os.pathsep}{os.environ['PATH']}",
        }
        return Running(["bash", str(script), *arguments], environment(**job, **variables), cwd=self.folder)

    def asked(self, program: str) -> list[list[str]]:
        """Argument vectors with which the job has called a program of Slurm; `codes` are those of each
        step.
        """
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [words[1:] for words in map(json.loads, lines) if words[0] == program]

    def requeued(self) -> bool:
        """True if the job has asked to be queued again since the last call; applies what it excludes."""
        asked = self.asked("scontrol")
        self._log.write_text("")
        for words in asked:
            for nodes in (word.partition("=")[2] for word in words if word.startswith("ExcNodeList=")):
                self.excluded = set(nodes.split(","))
        again = ["release", str(self.job)] in asked
        assert again == (["requeuehold", str(self.job)] in asked), "a job that is held waits for ever"
        self._restarts += again
        return again

    def logs(self, attempt: int = 0) -> dict[str, str]:
        """Text of each process's log of an attempt."""
        folder = self.folder / f"jtrain-{self.job}" / f"attempt-{attempt}"
        return {file.name: file.read_text(errors="replace") for file in sorted(folder.glob("*.log"))}


def free_job_number() -> int:
    """Returns a job number whose port, as jax makes it, nobody uses; other processes that ask begin with
    others.
    """
    begin = os.getpid() * 7 % 4000
    for number in (1000 + (begin + offset) % 4000 for offset in range(4000)):
        with socket.socket() as probe:
            try:
                probe.bind(("", number % 2**12 + (65535 - 2**12 + 1)))
            except OSError:
                continue
            return number
    raise AssertionError("all ports are taken")


SLURM_SCRIPT = ROOT / "launch" / "slurm.sbatch"
