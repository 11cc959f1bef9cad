"""Every kit's own arguments, with the dimensions that they have: they suit any number of devices a cluster has.

The tests of each kit start it word for word, at small dimensions.
"""

import re

import pytest

from jtrain.config.devices import resolve_mesh
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.plan.compile.kernel_calls import devices_like
from jtrain_kernels.device import from_name
from tests.launch.hosts import ROOT
from tests.launch.kits import PLACES, commands

COMMANDS = commands()


def values_of(words: list[str], option: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == option]


def test_every_command_of_a_kit_is_found() -> None:
    """Those that stand for any command say `--config=...`."""
    text = "".join(path.read_text() for path in PLACES)
    assert len(re.findall(r"--config=\w", text)) == len(re.findall(r"--config=(?!\.\.\.)", text)) >= 24
    assert {words[0] for words in COMMANDS.values()} == {"--config=tiny", "--config=llama8b"}
    assert sum("--set" in words for words in COMMANDS.values()) >= 3


@pytest.mark.parametrize("words", sorted({tuple(words) for words in COMMANDS.values()}), ids=" ".join)
def test_a_kits_arguments_take_all_devices(words: tuple[str, ...]) -> None:
    """On 8, 16 and 64 H200, or as many CPUs as a laptop has; a batch is cut so that as much fits as on 8."""
    large = words[0] != "--config=tiny"
    for count in (8, 16, 64) if large else (1, 2, 8):
        name = words[0].partition("=")[2]
        config = load_config(name, values_of([*words], "--with"), values_of([*words], "--set"))
        devices = devices_like(from_name("h200" if large else "cpu"), count)
        assert resolve_mesh(config, devices)[0] == devices
        run = build_run(config)
        assert run.mesh.size == count
        if large:
            at_a_time = run.data.global_batch // run.mesh.batch_shards // run.layout.microbatches
            assert at_a_time * run.data.seq_len == run.layout.microbatch_tokens == 16_384


def test_images_are_built_as_their_files_take_it() -> None:
    """Where a manifest says how to build its image, the Dockerfile has that argument."""
    named = [
        (path.name, dockerfile, argument)
        for path in PLACES
        for dockerfile, argument in re.findall(
            r"(launch/docker/\w+\.Dockerfile) with (\w+)=", path.read_text()
        )
    ]
    assert len(named) == 2
    for _, dockerfile, argument in named:
        assert f"\nARG {argument}=" in (ROOT / dockerfile).read_text()
