"""Bytes that a compiled program reads and writes."""

import jax
import jax.numpy as jnp
import pytest

from jtrain.hlo.memory_traffic import passes

PROGRAM = """HloModule two

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[8,128], y: bf16[8,128]) -> (bf16[8,128], f32[8]) {
  %x = bf16[8,128]{1,0} parameter(0)
  %y = bf16[8,128]{1,0} parameter(1)
  %fusion = (bf16[8,128]{1,0}, f32[8]{0}) fusion(%x, %y, %x), kind=kInput, calls=%sum
  %first = bf16[8,128]{1,0} get-tuple-element(%fusion), index=0
  %second = f32[8]{0} get-tuple-element(%fusion), index=1
  %turned = bf16[8,128]{1,0} negate(%first)
  ROOT %out = (bf16[8,128]{1,0}, f32[8]{0}) tuple(%turned, %second)
}
"""


def test_each_instruction_reads_its_operands_once_and_writes_its_results() -> None:
    """An operand that is given twice is read once; tuples and their elements count no bytes."""
    fusion, turned = passes(PROGRAM)
    assert (fusion.name, fusion.read_bytes, fusion.written_bytes) == ("fusion", 2 * 2048, 2048 + 32)
    assert (turned.name, turned.read_bytes, turned.written_bytes) == ("turned", 2048, 2048)


ON_A_TPU = """HloModule vmem

ENTRY %main (x: bf16[64,128]) -> bf16[64,128] {
  %x = bf16[64,128]{1,0:T(8,128)} parameter(0)
  %first = ((bf16[64,128]{1,0:T(8,128)}), bf16[32,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%x), slice={}
  %rest = ((bf16[64,128]{1,0:T(8,128)}), bf16[32,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%x), slice={}
  %first_half = bf16[32,128]{1,0:T(8,128)S(1)} slice-done(%first)
  %rest_half = bf16[32,128]{1,0:T(8,128)S(1)} slice-done(%rest)
  %both = bf16[64,128]{1,0:T(8,128)S(1)} custom-call(%first_half, %rest_half), custom_call_target="ConcatBitcast"
  %turned = bf16[64,128]{1,0:T(8,128)S(1)} negate(%both)
  %back = (bf16[64,128]{1,0:T(8,128)}, bf16[64,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%turned)
  ROOT %out = bf16[64,128]{1,0:T(8,128)} copy-done(%back)
}
"""


def test_what_stays_in_vmem_is_no_traffic() -> None:
    """Two slices read an array once together, what is computed on the chip counts nothing, the copy back
    writes it.
    """
    moved = {one.name: (one.read_bytes, one.written_bytes) for one in passes(ON_A_TPU)}
    half = 32 * 128 * 2
    assert {name: bytes_ for name, bytes_ in moved.items() if any(bytes_)} == {
        "first": (half, 0), "rest": (half, 0), "out": (0, 2 * half),
    }  # fmt: skip


def test_a_loop_is_refused() -> None:
    """The bytes of a loop depend on its trip count and on slices."""
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda i, x: jnp.sin(x) + i, x))
    text = loop.lower(jnp.ones(1000)).compile().as_text()
    assert text is not None
    with pytest.raises(
        ValueError, match=r"is a (while|call): bytes are counted only in programs without one"
    ):
        passes(text)
