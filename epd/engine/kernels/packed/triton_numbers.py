"""Numbers of four and eight bits become wide, in Triton.

Theory of operation
-------------------
To convert integers to floats would take longer than to read them.  So bits are put where a half of
16 bits has them, two halves at a time, and one multiplication makes the exponent right: for
bfloat16, in PTX.  Other dtypes go through float32.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl

from epd.engine.kernels.packed import MIDDLE

FP8, INT4, FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = {"fp8": 0, "int4": 1, "fp4": 2}
NO_ZERO = tl.constexpr(MIDDLE)
EIGHT = """{.reg .b32 t, s, more, none; mov.b32 more, 0x7b807b80; mov.b32 none, 0x80008000;
prmt.b32 t, $1, 0, 0x1404; and.b32 s, t, none; shr.b32 t, t, 4;
lop3.b32 t, t, 0x07f007f0, s, 0xea; fma.rn.bf16x2 $0, t, more, none;}"""  # of two of e4m3 a pair


@cache
def widening(kind: str, *, own: bool) -> str:
    """PTX that makes a word of eight numbers four pairs of bfloat16.  $5 and $6 are what integers
    of the upper and lower rows are above zero, then come scales (e2m1's are 2 ** 126 too large)."""
    lines = [
        ".reg .b32 t, d, one, none, above; mov.b32 one, 0x3f803f80; mov.b32 none, 0x80008000;",
        "mov.b32 above, 0x43004300;",
    ]
    for pair in range(4):
        row = pair % 2
        if kind == "int4":  # below a 1 that means 128, and is taken away again
            lines.append(f"shr.b32 t, $4, {4 * pair}; lop3.b32 t, t, 0x000f000f, above, 0xea;")
            lines.append(f"fma.rn.bf16x2 ${pair}, t, one, ${5 + row};")
            if own:
                lines.append(f"fma.rn.bf16x2 ${pair}, ${pair}, ${7 + row}, none;")
            continue
        if pair < 3:
            lines.append(f"shl.b32 t, $4, {3 * pair}; and.b32 t, t, 0x81c081c0;")
        else:
            lines.append("shl.b32 t, $4, 1; and.b32 d, t, 0x80008000;")
            lines.append("shr.b32 t, $4, 3; and.b32 t, t, 0x01800180; or.b32 d, d, t;")
            lines.append("shr.b32 t, $4, 7; and.b32 t, t, 0x00400040; or.b32 t, d, t;")
        lines.append(f"fma.rn.bf16x2 ${pair}, t, ${5 + row}, none;")
    return "{" + " ".join(lines) + "}"


@triton.jit
def e2m1(codes):  # noqa: ANN201 - a kernel's part
    magnitude = (codes & 7).to(tl.int32)
    wide = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, wide)
    return tl.where((codes & 8) != 0, -value, value)


@triton.jit
def _number(words, PAIR: tl.constexpr, SECOND: tl.constexpr, KIND: tl.constexpr):
    """float32: one of the eight numbers of words."""
    half = words >> 16 * SECOND
    if KIND == INT4:
        value = ((half >> 4 * PAIR) & 15).to(tl.float32)
    elif PAIR < 3:
        value = e2m1(((half >> 6 - 3 * PAIR) & 7) | ((half >> 12 - 3 * PAIR) & 8))
    else:
        value = e2m1(((half >> 9) & 6) | ((half >> 13) & 1) | ((half >> 11) & 8))
    return value


@triton.jit
def scale_of(scale, E8M0: tl.constexpr):  # noqa: ANN201 - a kernel's part
    if E8M0:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def _pair(value):
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [value], tl.int32, True, 1
    )


@triton.jit
def both(pair, dtype: tl.constexpr):  # noqa: ANN201 - a kernel's part
    low = (pair & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return tl.join(low, (pair >> 16).to(tl.int16).to(dtype, bitcast=True))


@triton.jit
def _rows_of(numbers):
    """`[64 R, 64]` of what threads have, `[R, 128, 4, second, lower, behind]`."""
    tiles: tl.constexpr = numbers.shape[0]
    parts = tl.reshape(numbers, [tiles, 4, 8, 4, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, [0, 1, 6, 2, 4, 7, 3, 5]), [64 * tiles, 64])


@triton.jit
def _two(
    words, middle, by, PAIR: tl.constexpr, KIND: tl.constexpr, OWN: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    first, second = _number(words, PAIR, 0, KIND), _number(words, PAIR, 1, KIND)
    if KIND == INT4:
        middle = middle.to(tl.float32)[:, :, None]
        first, second = first - middle, second - middle
    if OWN:
        by = by[:, :, None]
        first, second = first * by, second * by
    return tl.join(first.to(dtype), second.to(dtype))


@triton.jit
def halves(  # noqa: ANN201 - a kernel's part
    words, less, scales, AT: tl.constexpr, KIND: tl.constexpr, OWN: tl.constexpr,
    E8M0: tl.constexpr, WIDENING: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """`[64 R, 64]` in 16 bits of words `[R, 128, 4]`; of each thread's two rows, from `AT` on, `[R,
    128]`: what means zero, and scales."""
    less, lower_less = less[AT], less[AT + 1]
    scale, lower_scale = scale_of(scales[AT], E8M0), scale_of(scales[AT + 1], E8M0)
    if WIDENING == "":
        a = _two(words, less, scale, 0, KIND, OWN, dtype)
        b = _two(words, lower_less, lower_scale, 1, KIND, OWN, dtype)
        c = _two(words, less, scale, 2, KIND, OWN, dtype)
        d = _two(words, lower_less, lower_scale, 3, KIND, OWN, dtype)
    else:
        if KIND == FP4:
            scale, lower_scale = _pair(scale * 2.0**119), _pair(lower_scale * 2.0**119)
            a, b, c, d = tl.inline_asm_elementwise(
                WIDENING, "=r,=r,=r,=r,r,r,r",
                [words, scale[:, :, None], lower_scale[:, :, None]],
                (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
            )  # fmt: skip
        else:
            less = (less.to(tl.int32) * 0x10001 - 0x3CFF3D00)[:, :, None]
            lower_less = (lower_less.to(tl.int32) * 0x10001 - 0x3CFF3D00)[:, :, None]
            if OWN:
                a, b, c, d = tl.inline_asm_elementwise(
                    WIDENING, "=r,=r,=r,=r,r,r,r,r,r",
                    [words, less, lower_less, _pair(scale)[:, :, None],
                     _pair(lower_scale)[:, :, None]],
                    (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
                )  # fmt: skip
            else:
                a, b, c, d = tl.inline_asm_elementwise(
                    WIDENING, "=r,=r,=r,=r,r,r,r", [words, less, lower_less],
                    (tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
                )  # fmt: skip
        a, b, c, d = both(a, dtype), both(b, dtype), both(c, dtype), both(d, dtype)
    return _rows_of(tl.join(tl.join(a, b), tl.join(c, d)))
