"""Layouts of tests, from one set of fields."""

import dataclasses
from typing import Any

from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import Layout, LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.precision import PrecisionSpec

PRECISION = {field.name for field in dataclasses.fields(PrecisionSpec)}
OTHER = {"kernels", "pipeline"}
"""Arguments of `make_layout` besides the specs."""


def layout_from(fields: dict[str, Any], mesh: MeshSpec, infos: tuple[ParamInfo, ...], **more: Any) -> Layout:
    """Layout whose `fields` are those of LayoutSpec, PrecisionSpec, or OTHER; `more` goes to
    `make_layout`.
    """
    spec = LayoutSpec(**{name: value for name, value in fields.items() if name not in PRECISION | OTHER})
    precision = PrecisionSpec(**{name: value for name, value in fields.items() if name in PRECISION})
    more |= {name: value for name, value in fields.items() if name in OTHER}
    return make_layout(spec, mesh, infos, precision=precision, **more)
