"""Compatibility layer: the only module with differences between JAX versions and with JAX's private
functions.

Works with JAX 0.11.2 and 0.12.0. Pallas is imported inside functions, because its 0.9 s are needed for
kernels only.
"""

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from jtrain_kernels.device import DeviceSpec


def _known(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """Subset of `options` that are fields of this version's dataclass."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in options.items() if name in names}


def tpu_interpret(dma_mode: Literal["eager", "on_wait"], **options: Any) -> Any:
    """Parameters for `pallas_call(interpret=...)` that emulate TPUs on CPU devices and detect races.

    `tpu_races_found` gives the outcome. Run each kernel with remote copies in both modes: if a wait is
    missing, `eager` finds the race and `on_wait` gives NaN, but neither does both.
    """
    from jax.experimental.pallas import tpu as pltpu

    # From 0.12 a race raises unless told otherwise; a raise leaves the emulated memory behind.
    warn = _known(pltpu.InterpretParams, {"on_race": "warn"})
    return pltpu.InterpretParams(**({"detect_races": True, "dma_execution_mode": dma_mode} | warn | options))


def tpu_races_found() -> bool:
    """True if the last emulated TPU kernel raced; False if none ran."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    # `races` stays None until a kernel has run in the interpreter.
    return interpreter.races is not None and interpreter.races.races_found


def gpu_interpret(**options: Any) -> Any:
    """Parameters for `plgpu.kernel(interpret=...)` that emulate one NVIDIA GPU and detect races.

    `gpu_races_found` gives the outcome. The emulator has no semaphores between devices, no remote references
    and no multimem.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    warn = _known(plgpu.InterpretGPUParams, {"on_race": "warn"})
    parameters: dict[str, Any] = {"detect_races": True} | warn | options
    return plgpu.InterpretGPUParams(**parameters)


def gpu_races_found() -> bool:
    """True if the last emulated GPU kernel raced; False if none ran."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks._races is not None and gpu_callbacks._races.races_found


def reset_interpreters() -> None:
    """Clears emulated memory and races; necessary after an exception within an emulated kernel."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    interpret_pallas_call.reset_tpu_interpret_mode_state()
    gpu_callbacks.reset_gpu_interpret_mode_state()


def lowering_for(mesh: Mesh | AbstractMesh, device: DeviceSpec) -> AbstractContextManager[Any]:
    """Context for lowering to GPUs that are not present: Pallas and jax-triton read the kind and cores from
    it.
    """
    if device.platform != "gpu":
        return contextlib.nullcontext()
    # The devices' own kind word for word, because shard_map compares it with its mesh.
    kind = mesh.devices.flat[0].device_kind if isinstance(mesh, Mesh) else f"NVIDIA {device.kind}"
    abstract = AbstractDevice(device_kind=kind, num_cores=device.num_cores, platform="gpu")
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=abstract)
    )


def mend_jax_triton() -> None:
    """Adapts jax-triton 0.4.1's rule for dead code elimination to JAX 0.12, which passes one argument more.

    Without it, differentiating or rematerialising code with a Triton kernel fails. Remove it once
    jax-triton's own rule takes three arguments.
    """
    from jax._src.interpreters import partial_eval

    triton_lib: Any = importlib.import_module("jax_triton.triton_lib")
    rule: Any = partial_eval.dce_rules.get(triton_lib.triton_kernel_call_p)
    default = partial_eval._default_dce_rule
    if rule is None or len(inspect.signature(rule).parameters) == len(inspect.signature(default).parameters):
        return
    # The rule of 0.4.1 has no parameter for instances in use, so it gets the two that it knows.
    partial_eval.dce_rules[triton_lib.triton_kernel_call_p] = lambda used, live, eqn: rule(used, eqn)


@contextlib.contextmanager
def no_compile_cache() -> Iterator[None]:
    """Context without the compile cache: a program compiled for an absent machine can be written but not read
    back.
    """
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # without a reset JAX reads the setting only once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def splash_backward(kernel: Any, residuals: tuple[Any, ...], dy: Any) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v of splash attention for given residuals; those of a ring are over all its keys.

    Args:
      kernel: result of `make_splash_mha`, with blocks for the backward pass.
      residuals: q, k, v, segment ids, result and log-partition.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    q, k, v, segments, y, lse = residuals
    # The order of `_splash_attention_bwd`'s static parameters in both versions.
    order = (
        "save_residuals",
        "mask_value",
        "is_mqa",
        "block_sizes",
        "residual_checkpoint_name",
        "mask_function",
    )
    statics = [kernel.kwargs[name] for name in (*order, "attn_logits_soft_cap", "interpret")]
    # None stands for the sinks, which jtrain has none of.
    saved = (q, k, v, segments, None, y, lse, kernel.dq_mask_info, kernel.dkv_mask_info)
    gradients: Any = splash._splash_attention_bwd
    return gradients(*statics, saved, dy)[3:6]


def cudnn_attention(*arrays: Any, bias: Any, causal: bool, scale: float, window: int | None) -> Any:
    """cuDNN's fused attention in layout BLNH, without JAX's checks of the live device; `bias` gets no
    gradient.

    Args:
      arrays: q, k, v to compute (y, lse); q, k, v, lse, y, dy to compute (dq, dk, dv).
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    q, k, v, *saved = arrays
    # Unused inputs are arrays without elements: bias, sequence lengths, offsets and page tables.
    none = jax.numpy.zeros(0, q.dtype)
    has_bias = bias is not None
    # JAX 0.12 added a parameter for a function of the scores.
    parameters = inspect.signature(cudnn.dot_product_attention).parameters
    new = {"score_mod": None} if "score_mod" in parameters else {}
    statics = dict(
        scale=scale,
        # Dropout is off, so the seed has no effect; the primitive requires one.
        seed=42,
        dropout_rate=0.0,
        variadic_args=(has_bias, False),
        mask_type=cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=window,
        **new,
    )
    inputs = (q, k, v, bias if has_bias else none, *(none,) * 6)
    if saved:
        return cudnn._dot_product_attention_bwd_p_wrapper.bind(*inputs, *saved, **statics)[:3]
    return cudnn._dot_product_attention_fwd_p_wrapper.bind(*inputs, **statics, is_training=True)
