"""Names and forms of Orbax that are not public but needed; a release that breaks one of them fails here, by
its name.

`pyproject.toml` bounds the release. To raise the bound: run these tests with the new one, and mend what they
name.
"""

import json
import tomllib
from pathlib import Path

import jax.numpy as jnp
import orbax.checkpoint as ocp

from jtrain.checkpoint import array_files, array_writer
from tests.processes import program, run_together

PRIVATE = (
    ("orbax.checkpoint._src.path.gcs_utils", "get_kvstore_for_gcs", ["ckpt_path"]),
    ("orbax.checkpoint._src.serialization.tensorstore_utils", "_use_gcs_driver", ["directory"]),
    ("orbax.checkpoint._src.serialization.tensorstore_utils", "_normalize_path", ["path"]),
)
"""Module, function and parameters of what `orbax_io` replaces."""


def test_the_private_functions_of_orbax_are_as_orbax_io_replaces_them() -> None:
    """There, and called with the same arguments."""
    # In a new process: another test of this one may have taught Orbax already.
    names = [f"{module}:{name}" for module, name, _ in PRIVATE]
    [ended] = run_together([program(__file__, "show_parameters", *names)], [{}])
    assert ended.code == 0, ended.errors
    lines = ended.output.splitlines()
    release = ocp.__version__
    for (module, name, parameters), line in zip(PRIVATE, lines, strict=True):
        found = json.loads(line)
        assert found is not None, (
            f"orbax-checkpoint {release} has no {module}.{name}, which orbax_io.py replaces"
        )
        assert found == parameters, (
            f"{module}.{name} of orbax-checkpoint {release} takes {found}, not {parameters}"
        )


def test_orbax_lists_the_leaves_as_array_files_writes_them(tmp_path: Path) -> None:
    """`_METADATA` that Orbax writes for a state of two leaves is the one that array_files.py writes by
    hand.
    """
    state = {"params": {"w": jnp.zeros((4, 4))}, "step": jnp.int32(3)}
    with ocp.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=True) as writer:
        writer.save(tmp_path / "orbax", state)
    theirs = json.loads((tmp_path / "orbax" / array_files.LEAVES).read_text())
    leaves = {leaf.keys: leaf.sharding for leaf in array_writer.describe(state)}
    ours = json.loads(array_files.orbax_lists(leaves)[array_files.LEAVES])
    assert set(ours) <= set(theirs), f"orbax-checkpoint {ocp.__version__} writes {sorted(theirs)}"
    assert set(ours["tree_metadata"]) == set(theirs["tree_metadata"])
    for keys, leaf in ours["tree_metadata"].items():
        assert leaf["key_metadata"] == theirs["tree_metadata"][keys]["key_metadata"]
        assert leaf["value_metadata"].items() <= theirs["tree_metadata"][keys]["value_metadata"].items()
    assert [ours[name] == theirs[name] for name in ("use_ocdbt", "use_zarr3")] == [True, True]


def test_the_release_of_orbax_is_bounded() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [orbax] = [one for one in project["dependencies"] if one.startswith("orbax-checkpoint")]
    assert ",<" in orbax
