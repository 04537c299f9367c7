"""Two small kernels in PTX for the test programs, for NVIDIA GPUs and the emulated driver.

``busy_ns(ns)``: keeps the GPU busy for a time. ``add_u32(at, count, value, ns)``: adds ``value`` to ``count`` words
of device memory, and keeps the GPU busy as well.
"""

from __future__ import annotations

_WAIT = """
    mov.u64 %t1, %globaltimer;
WAIT:
    mov.u64 %t2, %globaltimer;
    sub.u64 %t2, %t2, %t1;
    setp.lt.u64 %p, %t2, %t0;
    @%p bra WAIT;
    ret;
"""

PTX = (
    """
.version 7.0
.target sm_70
.address_size 64

.visible .entry busy_ns(.param .u64 ns)
{
    .reg .pred %p;
    .reg .u64 %t<3>;
    ld.param.u64 %t0, [ns];
"""
    + _WAIT
    + """}

.visible .entry add_u32(.param .u64 at, .param .u64 count, .param .u32 value, .param .u64 ns)
{
    .reg .pred %p;
    .reg .u32 %r<7>;
    .reg .u64 %d<7>;
    .reg .u64 %t<3>;
    ld.param.u64 %d0, [at];
    ld.param.u64 %d1, [count];
    ld.param.u32 %r0, [value];
    ld.param.u64 %t0, [ns];
    cvta.to.global.u64 %d0, %d0;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %d2, %r1, %r2;
    cvt.u64.u32 %d3, %r3;
    add.u64 %d2, %d2, %d3;
    mul.wide.u32 %d4, %r2, %r4;
EACH:
    setp.ge.u64 %p, %d2, %d1;
    @%p bra DONE;
    shl.b64 %d5, %d2, 2;
    add.u64 %d5, %d0, %d5;
    ld.global.u32 %r5, [%d5];
    add.u32 %r5, %r5, %r0;
    st.global.u32 [%d5], %r5;
    add.u64 %d2, %d2, %d4;
    bra EACH;
DONE:
"""
    + _WAIT
    + "}\n"
).encode() + b"\0"
