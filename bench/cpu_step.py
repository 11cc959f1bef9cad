"""Tokens/s of a train step on this CPU beside Hugging Face on torch and MaxText, in one shape and precision.

    python -m jtrain.bench cpu_step --torch-python T/bin/python --maxtext-python M/bin/python

4 layers, D 256, 8 query and 4 key heads of 32, F 1024, V 32000, 8 sequences of 512; parameters float32,
compute bfloat16, AdamW, untied head. The programs take turns on the same cores, and each one's fastest step
counts: what else runs on the machine only ever slows one down. Torch is the better of eager and
`torch.compile`.
"""

import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.data_parts.programs import INSTALL as INSTALL_PEERS
from bench.data_parts.programs import start_program
from bench.peers import protocol
from jtrain import optim
from jtrain.bench import Options, Row, option, row
from jtrain.bench.h200 import random_steps
from jtrain.errors import UserError
from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.runtime.platform import keep_freed_memory

SEQUENCES, SEQ_LEN, VOCAB = 8, 512, 32000
TORCH_STEP = Path(protocol.__file__).with_name("torch_llama_step.py")
INSTALL = {
    "torch": INSTALL_PEERS,
    "maxtext": "python3.12 -m venv M && M/bin/pip install 'maxtext[tpu]==0.2.5'",
}

type Steps = Callable[[int], list[float]]
"""Runs that many steps and returns the milliseconds of each."""


OPTIONS = (
    *(
        option(
            f"--{peer}-python",
            default=os.environ.get(f"PEER_{peer.upper()}_PYTHON"),
            help=f"interpreter that has {peer}; or $PEER_{peer.upper()}_PYTHON",
        )
        for peer in INSTALL
    ),
    option("--rounds", type=int, default=4, help="turns of each program"),
    option("--steps", type=int, default=5, help="steps per turn"),
)


def run(args: Options) -> list[Row]:
    """Interleaved rounds of ours and torch's, then MaxText's steps, which come from its own log.

    Raises:
      UserError: no interpreter was given for a peer, or it lacks the peer.
    """
    # As the training loop does on a CPU: without it each step would fault its pages in anew.
    keep_freed_memory()
    torch_python = _python("torch", args.torch_python, "import torch, transformers")
    maxtext_python = _python(
        "maxtext", args.maxtext_python, "import importlib.util as u; u.find_spec('maxtext').name"
    )
    cores = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        programs = {"jtrain": our_steps()}
        for mode in ("eager", "compile"):
            torch = stack.enter_context(start_program(torch_python, TORCH_STEP, mode=mode, threads=cores))
            torch.answer()  # sent once it is warm
            programs[f"torch {mode}"] = lambda count, torch=torch: torch.ask(count)["step_ms"]
        step_ms: dict[str, list[float]] = {name: [] for name in programs}
        # Turns, so that other work on the machine meets all programs alike.
        for _ in range(args.rounds):
            for name, steps in programs.items():
                step_ms[name] += steps(args.steps)
    step_ms["maxtext"] = maxtext_step_ms(maxtext_python, args.steps)

    # The fastest step: whatever else runs on the machine only makes steps slower.
    tokens_per_s = {name: 1e3 * SEQUENCES * SEQ_LEN / min(ms) for name, ms in step_ms.items()}
    ours = tokens_per_s["jtrain"]
    # The bar is against the better of the two.
    best = max("torch eager", "torch compile", key=lambda name: tokens_per_s[name])
    return [
        row(
            f"jtrain, against the best of torch ({best})",
            ours,
            "tokens/s",
            baseline=tokens_per_s[best],
            bar=">= 1",
        ),
        row("jtrain, against torch eager", ours, "tokens/s", baseline=tokens_per_s["torch eager"]),
        row("jtrain, against torch compile", ours, "tokens/s", baseline=tokens_per_s["torch compile"]),
        row("jtrain, against MaxText 0.2.5", ours, "tokens/s", baseline=tokens_per_s["maxtext"], bar=">= 4"),
        *(row(f"fastest step, {name}", min(ms), "ms") for name, ms in step_ms.items()),
        *(row(f"median step, {name}", statistics.median(ms), "ms") for name, ms in step_ms.items()),
    ]


def our_steps() -> Steps:
    """The real train step on one device, compiled and warm."""
    model = Transformer(
        num_layers=4,
        d_model=256,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
        d_ff=1024,
        vocab_size=VOCAB,
        loss_chunk_tokens=1024,
        attention_chunk=128,
    )
    infos = model.param_infos()
    layout = make_layout(LayoutSpec(remat="none"), MeshSpec(), infos)
    # The horizon below, 10,000 steps, is far beyond the measurement: the schedule does not end in it.
    adamw = optim.AdamW(peak_lr=1e-3, warmup_steps=2)
    optimizer = optim.build(adamw, num_steps=10_000, params=map_params(lambda info: info, infos))
    steps_s = random_steps(model, layout, optimizer, global_batch=SEQUENCES, seq_len=SEQ_LEN)
    # One at a time, since the fastest step is asked for and not the mean.
    return lambda count: [1e3 * steps_s(1) for _ in range(count)]


def maxtext_step_ms(python: str, count: int) -> list[float]:
    """MaxText's own figures for its last `count` steps; the first three it reports hold compilation."""
    config = subprocess.run(
        [python, "-c", "import importlib.util as u; print(u.find_spec('maxtext').submodule_search_locations[0])"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "run_name": "cpu_step", "base_output_directory": folder, "hardware": "cpu",
            "skip_jax_distributed_system": True, "dataset_type": "synthetic", "enable_checkpointing": False,
            "enable_goodput_recording": False, "monitor_goodput": False, "attention": "dot_product",
            "decoder_block": "llama2", "base_num_decoder_layers": 4, "base_emb_dim": 256, "base_num_query_heads": 8,
            "base_num_kv_heads": 4, "head_dim": 32, "base_mlp_dim": 1024, "vocab_size": VOCAB,
            "logits_via_embedding": False, "per_device_batch_size": SEQUENCES, "max_target_length": SEQ_LEN,
            "dtype": "bfloat16", "weight_dtype": "float32", "remat_policy": "minimal", "steps": 3 + count,
        }  # fmt: skip
        command = [python, "-m", "maxtext.trainers.pre_train.train", f"{config}/configs/base.yml"]
        command += [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, cwd=folder
        )
    log = process.stdout + process.stderr
    # MaxText logs this line once per step.
    seconds = [float(s) for s in re.findall(r"completed step: \d+, seconds: ([0-9.]+)", log)]
    # Fewer lines are those of a program that failed; its log says why.
    if len(seconds) != 3 + count:
        raise RuntimeError(
            f"MaxText wrote {len(seconds)} of {3 + count} steps: {shlex.join(command)}\n{log[-3000:]}"
        )
    return [1e3 * s for s in seconds[3:]]


def _python(peer: str, path: str | None, test: str) -> str:
    if path is None or subprocess.run([path, "-c", test], capture_output=True, check=False).returncode:
        reason = f"{path} cannot import it" if path else "no interpreter that has it was given"
        raise UserError(
            f"cpu_step compares with {peer}, but {reason}. Make one with `{INSTALL[peer]}`, then give "
            f"--{peer}-python or PEER_{peer.upper()}_PYTHON."
        )
    return path
