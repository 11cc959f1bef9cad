"""Plans a config for machines in a process that has none of the optional packages of accelerators.

python plan_without_extras.py CONFIG DEVICE...
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

PACKAGES = "jax_plugins", "jax_triton", "libtpu", "nvidia", "tokamax", "triton"


class WithoutExtras(PathFinder):
    """Finder of all modules but those of `PACKAGES`."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] in PACKAGES else super().find_spec(fullname, path, target)


class Gpu:
    platform, device_kind = "gpu", "NVIDIA H200"


def plan(config: str, devices: list[str]) -> None:
    # Imported under that finder, because jax imports what it finds of these packages.
    from jtrain.cli.plan import main
    from jtrain.config.load import for_devices, load_config
    from jtrain.config.run import build_run
    from jtrain.plan.estimate.attention_kernel import explain_attention
    from jtrain.plan.estimate.machine import machine_of
    from jtrain.plan.from_run import plan_job
    from jtrain_kernels import registry
    from jtrain_kernels.installed import is_installed

    modules = {name for op in registry.ops().values() for one in op.implementations for name in one.modules}
    assert modules, "some kernels need optional packages"
    assert not any(is_installed(module) for module in modules)
    for device in devices:
        assert main([f"--config={config}", "--device", device, "--count", "8"]) == 0
    # Devices of this process run what is installed here.
    run_config = load_config(config)
    for_devices(run_config, 1)
    job = plan_job(build_run(run_config), machine_of([Gpu()]))
    assert explain_attention(job) == "attention by xla: no other runs"
    assert not any(name.partition(".")[0] in PACKAGES for name in sys.modules)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
plan(sys.argv[1], sys.argv[2:])
