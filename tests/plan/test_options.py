"""Few files of the planner know an option of the layout by name: a new option is described in layout/ and
step/.
"""

import ast
import dataclasses
from pathlib import Path

from jtrain.layout.layout import LayoutSpec, OffloadSpec
from jtrain.layout.offload_spec import OFFLOADABLE

PLAN = Path(__file__).parents[2] / "jtrain" / "plan"

KNOW = {
    "estimate/machine.py": "host memory that the driver pages from is memory of the device",
    "estimate/peak_memory.py": "copies that compilers make under a ZeRO stage, in closed form",
    "pipeline_choice.py": "a pipeline is compared with ZeRO-3 alone",
    "report/interconnect_table.py": "published configurations",
    "report/survey_tables.py": "published strategies",
    "smaller_settings.py": "settings in the order of how little they change",
}
"""File -> reason why it names options."""


def options() -> set[str]:
    """Names of options. Without `microbatches`, which is a size of the batch, and names that mean other
    things too.
    """
    names = {field.name for of in (LayoutSpec, OffloadSpec) for field in dataclasses.fields(of)}
    return names - {"microbatches", "auto", "update", *OFFLOADABLE}


def names_of(source: str) -> set[str]:
    """Attributes, arguments and config paths of a source."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Dict(keys=keys):
                texts = [
                    key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
                ]
                found |= {part for text in texts for part in text.split(".")}
            case _:
                pass
    return found


def test_few_files_of_the_planner_know_an_option() -> None:
    """Each has a reason; messages may name options, because they are for people."""
    files = {str(file.relative_to(PLAN)): names_of(file.read_text()) for file in PLAN.rglob("*.py")}
    assert {file for file, names in files.items() if names & options()} == set(KNOW)
    assert {"zero_stage", "remat", "offload", "tensor_overlap"} <= options()
    assert names_of("f(zero_stage=3)") == {"zero_stage"}
