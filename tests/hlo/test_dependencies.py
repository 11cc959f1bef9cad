"""What each op of a program reads, through tuples, loops, branches and calls, and the lines that ops come from."""

import jax
import jax.numpy as jnp

from jtrain.hlo.dependencies import producers
from jtrain.hlo.parser import read
from jtrain.hlo.source_lines import source_lines
from tests.compilations import with_source_lines

LOOP = """HloModule step

FileNames
1 "/usr/lib/python3/site-packages/jax/_src/lax.py"
2 "/home/me/jtrain/jtrain/model/mlp.py"
3 "/home/me/train/own_mixer.py"
4 "/venv/site-packages/jtrain_kernels/registry.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=88 end_line=89 column=1 end_column=2}
3 {file_name_id=3 function_name_id=1 line=5 end_line=5 column=1 end_column=2}
4 {file_name_id=4 function_name_id=1 line=314 end_line=314 column=1 end_column=2}

StackFrames
1 {file_location_id=3 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=1 parent_frame_id=2}
4 {file_location_id=1 parent_frame_id=4}
5 {file_location_id=4 parent_frame_id=3}
6 {file_location_id=4 parent_frame_id=6}

%cond (p: (s32[], f32[8], f32[8])) -> pred[] {
  %p = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %i), direction=LT
}

%body (q: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %q = (s32[], f32[8], f32[8]) parameter(0)
  %n = s32[] get-tuple-element(%q), index=0
  %x = f32[8] get-tuple-element(%q), index=1
  %w = f32[8] get-tuple-element(%q), index=2
  %next = s32[] add(%n, %n)
  %start = (f32[2], f32[8]) all-gather-start(%x), replica_groups={{0,1}}
  %y = f32[8] multiply(%x, %w)
  %done = f32[8] all-gather-done(%start)
  ROOT %state = (s32[], f32[8], f32[8]) tuple(%next, %y, %done)
}

%yes (t: f32[8]) -> f32[8] {
  %t = f32[8] parameter(0)
  ROOT %double = f32[8] add(%t, %t)
}

%no (f: f32[8]) -> f32[8] {
  ROOT %f = f32[8] parameter(0)
}

ENTRY %main (a: f32[8], z: s32[], which: pred[]) -> f32[8] {
  %a = f32[8] parameter(0)
  %z = s32[] parameter(1)
  %which = pred[] parameter(2)
  %first = f32[8] negate(%a)
  %view = f32[8] bitcast(%first)
  %init = (s32[], f32[8], f32[8]) tuple(%z, %a, %view)
  %loop = (s32[], f32[8], f32[8]) while(%init), condition=%cond, body=%body
  %out = f32[8] get-tuple-element(%loop), index=1
  %gathered = f32[8] get-tuple-element(%loop), index=2
  %branch = f32[8] conditional(%which, %out, %gathered), true_computation=%yes, false_computation=%no
  ROOT %last = f32[8] add(%branch, %first), metadata={op_name="x" stack_frame_id=3}
}
"""


def test_an_op_reads_what_the_trip_before_made() -> None:
    """Element by element: y multiplies the weight that the last trip, or the line before the loop, brought."""
    made_by = producers(read(LOOP))
    # The state's element 1 is `a`, an argument, and then y; element 2 is first, and then the gathered weight.
    assert made_by["y"] == {"y", "first", "done", "start"}
    assert made_by["start"] == {"y"}
    assert made_by["done"] == {"start"}
    assert made_by["less"] == made_by["next"] == {"next"}
    # Each branch has its own operand; what is passed on unchanged was made before.
    assert made_by["double"] == {"y"}
    assert made_by["last"] == {"double", "done", "start", "first"}
    assert made_by["first"] == frozenset()


def test_a_frame_s_line_is_the_innermost_of_ours() -> None:
    """Libraries' frames stand for their callers'; who asked for a kernel says more than the registry."""
    assert source_lines(LOOP) == {
        1: "/home/me/train/own_mixer.py:5",
        2: "jtrain/model/mlp.py:88",
        3: "jtrain/model/mlp.py:88",
        5: "jtrain/model/mlp.py:88",
        6: "jtrain_kernels/registry.py:314",
    }
    assert source_lines("HloModule step\n\nENTRY %main () -> f32[] {\n") == {}


def test_the_compiler_s_own_text_is_read() -> None:
    """A compiled scan: its product reads the carry that it made, and names this file."""

    def scanned(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, weight: (jnp.tanh(carry @ weight), None), x, weights)[0]

    with with_source_lines():
        text = jax.jit(scanned).lower(jnp.ones((8, 8)), jnp.ones((3, 8, 8))).compile().as_text()
    assert text is not None
    assert any(
        line.partition(":")[0].endswith("test_dependencies.py") for line in source_lines(text).values()
    )
    program = read(text)
    made_by = producers(program)
    # What tanh makes of one trip is what the product of the next one reads.
    assert any(
        makers & {name} or any(name in made_by[maker] for maker in makers) for name, makers in made_by.items()
    )
