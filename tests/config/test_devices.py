"""`mesh.data=auto`: which of the devices that are here a run takes."""

from pathlib import Path

import jax
import pytest

from jtrain.config import tree
from jtrain.config.devices import resolve_mesh
from jtrain.config.load import for_devices, load_config, mesh_size
from jtrain.config.resume import config_from_text, with_auto_remarks, with_history
from jtrain.config.run import build_run
from jtrain.errors import UserError
from jtrain.plan.compile.compiled_step import topology_devices

OWN = """
import fiddle as fdl
from jtrain.config.load import load_config
from jtrain.layout.mesh import MeshSpec
def own():
    config = load_config("tiny")
    config.mesh = fdl.Config(MeshSpec, {axes})
    return config
"""


@pytest.mark.parametrize(("axes", "data"), [("tensor=2", "auto"), ("data=1, tensor=2", 1)])
def test_a_config_that_does_not_say_data_has_auto(axes: str, data: int | str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN.format(axes=axes))
    config = load_config(str(tmp_path / "own.py"))
    assert config.mesh.data == data
    assert mesh_size(config) == 2, "the fewest devices that it can have"
    assert f"mesh.data: int | Literal['auto'] = {data!r}\n" in tree.flat(config)


@pytest.mark.parametrize(
    ("here", "sets", "data", "taken"),
    [
        (1, (), 1, 1),
        (2, (), 2, 2),
        (3, (), 2, 2),
        (6, (), 4, 4),
        (8, (), 8, 8),
        (6, ("data.global_batch=18",), 6, 6),
        (8, ("layout.microbatches=4",), 4, 4),
        (8, ("mesh.tensor=4",), 2, 8),
        (6, ("mesh.tensor=4",), 1, 4),
        (7, ("mesh.replica=2",), 2, 4),
    ],
)
def test_auto_takes_as_many_as_the_config_divides(
    here: int, sets: tuple[str, ...], data: int, taken: int
) -> None:
    """And says which stay idle, and what would use them; what is left is a run that every check passes."""
    config = load_config("tiny", (), sets)
    devices = jax.devices()[:here]
    got, lines = resolve_mesh(config, devices)
    assert (config.mesh.data, got) == (data, devices[:taken])
    assert build_run(config).mesh.size == taken
    assert lines[0].startswith(f"mesh.data=auto: {data}, on ")
    assert [f"cpu:{device.id}" in lines[0] for device in devices[taken:]] == [True] * (here - taken)
    assert len(lines) == (1 if here == taken else 2)


@pytest.mark.parametrize(
    ("here", "sets", "way"),
    [
        (3, (), "Nearest sizes that do: 15, 18. Set data.global_batch"),
        (8, ("layout.microbatches=4",), "or layout.microbatches to a divisor of 2."),
        (6, ("mesh.tensor=4",), "mesh.tensor=4 takes 4 devices at a time"),
    ],
)
def test_what_would_use_the_idle_devices_is_said(here: int, sets: tuple[str, ...], way: str) -> None:
    _, (_, line) = resolve_mesh(load_config("tiny", (), sets), jax.devices()[:here])
    assert line.startswith("to use more: ")
    assert way in line


@pytest.mark.parametrize(
    ("here", "given", "sets"),
    [(3, (), ("data.global_batch=15",)), (8, ("layout.microbatches=4",), ("layout.microbatches=2",))],
)
def test_a_setting_that_is_offered_uses_all_devices(
    here: int, given: tuple[str, ...], sets: tuple[str, ...]
) -> None:
    assert len(resolve_mesh(load_config("tiny", (), given), jax.devices()[:here])[1]) == 2
    assert len(resolve_mesh(load_config("tiny", (), (*given, *sets)), jax.devices()[:here])[1]) == 1


def test_every_process_keeps_as_many_devices_as_the_others() -> None:
    """Two hosts of four chips: a batch of 6 takes three of each, one of 8 all, and one of 5 none evenly."""
    devices = topology_devices("v5p:2x2x2")
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4
    for batch, each in ((6, 3), (8, 4), (12, 3)):
        config = load_config("tiny", (), (f"data.global_batch={batch}",))
        taken, lines = resolve_mesh(config, devices)
        assert config.mesh.data == 2 * each
        assert taken == [*devices[:each], *devices[4 : 4 + each]]
        assert ("tpu:3, tpu:7 stay idle" in lines[0]) == (each == 3)
    with pytest.raises(
        UserError, match=r"8 devices are here \(tpu\) in 2 processes, .* data\.global_batch=5 does not"
    ):
        resolve_mesh(load_config("tiny", (), ("data.global_batch=5",)), devices)


def test_too_few_devices_for_the_other_axes_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"^3 devices are here \(cpu\), but mesh.tensor=4 takes 4 devices .* 4 to try"
    ):
        resolve_mesh(load_config("tiny", (), ("mesh.tensor=4",)), jax.devices()[:3])


def test_a_mesh_of_fixed_size_is_left_alone() -> None:
    """All devices are handed on; `make_mesh` refuses another number."""
    config = load_config("tiny", (), ("mesh.data=4",))
    assert resolve_mesh(config, jax.devices()) == (jax.devices(), [])
    assert config.mesh.data == 4


def test_nothing_counts_the_devices_of_auto_before_it_is_resolved() -> None:
    mesh = build_run(load_config("tiny")).mesh
    with pytest.raises(UserError, match=r"mesh\.data=auto has to be chosen first"):
        _ = mesh.size
    assert mesh.resolve_data(4).size == 4


def test_the_text_keeps_what_was_asked_and_what_was_resolved(tmp_path: Path) -> None:
    """A later attempt on other devices replaces both, and keeps the remarks of changes."""
    config = load_config("tiny")
    asked = tree.flat(config)
    resolve_mesh(config, jax.devices()[:3])
    text = with_auto_remarks(tree.flat(config), asked)
    assert "mesh.data: int | Literal['auto'] = 2\n" in text
    assert text.endswith("\n# asked: mesh.data = 'auto'\n")
    assert build_run(config_from_text(text)).mesh.size == 2
    (tmp_path / "config.txt").write_text(text + "# changed at step 5: num_steps: 1 there, 2 here\n")
    again = with_history(tmp_path, text, step=7, changes=[])
    assert again.count("# asked: ") == 1
    assert again.endswith("# changed at step 5: num_steps: 1 there, 2 here\n")


def test_a_plan_for_a_count_has_all_of_it_along_data() -> None:
    """`jtrain plan --count`: refused where the batch does not split, because a plan has no idle devices."""
    config = load_config("tiny", (), ("mesh.tensor=2",))
    assert for_devices(config, 8) == ["mesh.data=4 (the config: auto)"]
    assert build_run(config).mesh.size == 8
    config = load_config("tiny")
    for_devices(config, 6)
    with pytest.raises(UserError, match=r"data.global_batch=16 does not split"):
        build_run(config)
    with pytest.raises(UserError, match=r"3 devices are not a multiple of mesh.tensor=2 = 2"):
        for_devices(load_config("tiny", (), ("mesh.tensor=2",)), 3)
