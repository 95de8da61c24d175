"""The emulator of kernels in CUDA C++ (tests/cuda): each thing that it finds, and each instruction that no kernel's
test is about."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
from tests.cuda.emulator import HERE, EmulatorError, Memory, missing
from torch import Tensor

from outrider.ops.cuda.runtime import FOLDER

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"kernels in CUDA C++ are not emulated: {missing()}")


class Mode(ctypes.Structure):
    _fields_ = [("mode", ctypes.c_int)]


def run(
    memory: Memory,
    body: str,
    values: list[Tensor],
    mode: int = 0,
    blocks: int = 1,
    threads: int = 32,
    shared: int = 1024,
    seed: int = 0,
    beside: str = "",
    **flags: int,
) -> None:
    """One kernel for all modes, so it is compiled once."""
    names = ", ".join(f"char* p{i}" for i in range(len(values)))
    source = f'{beside}struct Mode {{ int mode; }};\nextern "C" __global__ void k({names}, Mode m) {{\n{body}\n}}'
    memory.kernel(source, "k", flags, seed=seed)(blocks, threads, shared, [*(v.data_ptr() for v in values), Mode(mode)])


def test_every_instruction_has_a_twin() -> None:
    """One that is missing would be noticed by the first kernel that uses it, but not said so plainly."""
    headers = "".join(f.read_text() for f in sorted(FOLDER.glob("*.cuh")) if f.name in ("device.cuh", "warpgroup.cuh"))
    names = re.findall(r"^(?:template <.*> )?__device__ __forceinline__ \w+ (\w+)\(", headers, re.M)
    assert len(names) > 20
    twins = (HERE / "emulate.h").read_text()
    assert [name for name in names if not re.search(rf"^(?:template <.*> )?inline \w+ {name}\(", twins, re.M)] == []


FAULTS = """
    const u32 at = shared_room(), t = threadIdx.x;
    int* in = (int*)p0;
    switch (m.mode) {
    case 0: in[0] = in[10]; break;                                   // beyond the buffer
    case 1: in[9] = __ldcg(in + 10); break;                          // beyond the buffer
    case 2: in[-1] = 0; break;                                       // ahead of it
    case 3: __ldcg((uint4*)(in + 1)); break;
    case 4: take16(at + 4); break;
    case 5: take4(at + 1024); break;
    case 6: put8(at - 8, 0, 0); break;
    case 7: copy16(at + t * 16, p0), take4(at + t * 16); break;
    case 8: if (t < 31) __syncwarp(); else __syncthreads(); break;
    case 9: if (t) __shfl_sync(~0u, t, 0); break;
    case 10: while (look((u32*)in) != 5) {} break;
    case 11: stop(); break;
    case 12: if (t < 16) __syncwarp(); else __shfl_sync(~0u, t, 0); break;
    case 13: in[0] = deep(1 << 20); break;
    case 14: copy16(at + t * 16, p0 + 32); break;
    case 15: in[0] = ((int*)(u64)64)[0]; break;
    case 16: in[0] = in[500]; break;                                 // beyond the page
    }
"""
TREE_DEPTH = "__device__ __noinline__ int deep(int n) { volatile int v = n; return n ? deep(n - 1) + v : 0; }\n"
FOUND = [
    "behind the end of buffer 0 of 40 bytes", "behind the end of buffer 0 of 40 bytes",
    "writes 4 bytes ahead of buffer 0 of 40 bytes",
    "not aligned", "not aligned", "byte 1024 of 1024", "byte -8 of 1024", "still on its way",
    "all wait for ever: in block 0, warp 0, 31 of 32", "have left|leaves", "flag that nobody sets",
    "block 0, thread 0: stops the launch",
    "__shfl_sync where others wait at __syncwarp", "bytes of variables", "across the end", "in no buffer",
    "reads or writes 1960 bytes behind the end of buffer 0",
]  # fmt: skip


@pytest.mark.parametrize("mode", range(len(FOUND)))
def test_what_is_found(mode: int) -> None:
    memory = Memory()
    with pytest.raises(EmulatorError, match=FOUND[mode]):
        run(memory, FAULTS, [memory.hold(torch.zeros(10, dtype=torch.int32))], mode, beside=TREE_DEPTH)


ORDER = """
    const u32 at = shared_room(), t = threadIdx.x, warp = t / 32;
    u32 *data = (u32*)p0, *flag = data + 8;
    switch (m.mode) {
    case 0: put_float(at + t * 4, 1.f); take4(at + (t ^ 1) * 4); break;                 // a neighbour's, no barrier
    case 1: put_float(at + t * 4, 1.f); __syncwarp(); take4(at + (t ^ 32) * 4); break;  // another warp's, a barrier of the warp
    case 2: take4(at + (t ^ 1) * 4); put_float(at + t * 4, 1.f); break;                 // written while others may still read
    case 3: take4(at + 64); __syncwarp(); if (t == 40) put_float(at + 64, 1.f); break;
    case 4: put_float(at, 1.f); break;                                                  // all to one place
    case 5: put_float(at + t * 4, 1.f); __shfl_sync(~0u, t, 0); take4(at + (t ^ 1) * 4); break;  // a shuffle orders nothing
    case 6:                                                                             // a flag, but the other lane has not looked
        if (t == 0) __stcg(data, 5u), add_and_see(flag, 1);
        if (t == 32) while (!look(flag)) {}
        if (t == 33) { for (int i = 0; i < 9; i++) __nanosleep(9); __ldcg(data); }
        break;
    case 7: if (blockIdx.x == 0 && t == 0) __stcg(data, 5u); if (blockIdx.x && t == 0) __ldcg(data); break;
    case 8: { __shared__ float v[64]; v[t] = 1.f; *(volatile float*)(v + (t ^ 1)); } break;
    case 9: if (blockIdx.x == 0 && t == 0) data[0] = 5; if (blockIdx.x && t == 0) ((u16*)data)[16] = data[0]; break;  // plain ones
    case 10:                                                                            // all of this is right
        put_float(at + t * 4, 1.f); __syncthreads(); take4(at + (t ^ 33) * 4); __syncthreads();
        put_float(at + (t ^ 1) * 4, 2.f); __syncwarp(); take4(at + (t ^ 2) * 4);
        if (blockIdx.x == 0 && t == 5) __stcg(data, 5u);
        __syncthreads();
        if (blockIdx.x == 0 && t == 0) add_and_see(flag, 1);
        if (blockIdx.x && t == 0) while (!look(flag)) {}
        __syncthreads();
        if (blockIdx.x && (__ldcg(data) != 5 || data[0] != 5)) stop();
        if (blockIdx.x == 0 && t < 8) ((u16*)(data + 4))[t] = t;
        break;
    }
"""


@pytest.mark.parametrize("seed", [0, 5])
def test_what_nothing_orders_is_found_in_whatever_order_it_ran(seed: int) -> None:
    memory = Memory()
    data = memory.hold(torch.zeros(16, dtype=torch.int32))
    for mode in range(10):
        with pytest.raises(EmulatorError, match="nothing says in which order"):
            run(memory, ORDER, [data.zero_()], mode, blocks=2 if mode > 6 else 1, threads=64, seed=seed)
    run(memory, ORDER, [data.zero_()], 10, blocks=3, threads=64, seed=seed)


BLOCKS = """
    __shared__ int total;
    int* out = (int*)p0;
    u32* gate = (u32*)p1;
    if (threadIdx.x == 0) total = blockIdx.x * 100;
    __syncthreads();
    for (int round = 0; round < 3; round++) {   // each block waits for all others: they run side by side
        if (threadIdx.x == 0) {
            add_and_see(gate, 1);
            while (look(gate) < gridDim.x * (round + 1)) {}
            total += 1;
        }
        __syncthreads();
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = total + __shfl_xor_sync(~0u, (int)threadIdx.x, 1);
"""


@pytest.mark.parametrize("seed", [0, 7])
def test_blocks_wait_for_each_other_and_have_variables_of_their_own(seed: int) -> None:
    memory = Memory()
    out = memory.hold(torch.zeros(5, 64, dtype=torch.int32))
    gate = memory.hold(torch.zeros(1, dtype=torch.int32))
    run(memory, BLOCKS, [out, gate], blocks=5, threads=64, seed=seed)
    threads = torch.arange(64)
    assert torch.equal(out.long(), torch.arange(5)[:, None] * 100 + 3 + (threads ^ 1))


PRODUCT = """
    const u32 at = shared_room();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    for (int i = threadIdx.x; i < NT * 8 * 2; i += 128) {  // 8 columns of a token
        const uint4 v = __ldcg((uint4*)p1 + i);
        const u32 to = at + (i % 2 * NT + i / 16) * 128 + i / 2 % 8 * 16;
        put8(to, v.x, v.y), put8(to + 8, v.z, v.w);
    }
    if (m.mode != 2) show_to_matrix_units();
    __syncthreads();
    const u32* x = (u32*)p0 + (warp * 16 + g) * 8 + c;
    const u32 a[4] = {x[0], x[64], x[4], x[68]};
    float d[4 * NT], e[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4 * NT; i++) d[i] = 1;
    begin_multiplying();
    multiply_all<false>(d, a, matrix_at(at));
    multiply_all<true>(d, a, matrix_at(at));
    end_batch();
    if (m.mode == 3) __syncthreads(), put8(at + threadIdx.x * 8 % 768, 0, 0);
    if (m.mode == 0) wait_batches<0>(d);
    for (int j = 0; j < NT; j++)
        for (int i = 0; i < 4; i++) ((float*)p2)[(warp * 16 + g + i / 2 * 8) * (8 * NT) + j * 8 + c * 2 + i % 2] = d[4 * j + i];
    if (m.mode) wait_batches<0>(d);
    u32 b[4];
    take_matrices(b, at + (lane / 8 % 2) * NT * 128 + lane % 8 * 16);
    multiply(e, a[0], a[1], a[2], a[3], b[0], b[1]);
    for (int i = 0; i < 4; i++) ((float*)p3)[(warp * 16 + g + i / 2 * 8) * 8 + c * 2 + i % 2] = e[i];
"""


def test_matrix_instructions() -> None:
    memory = Memory()
    a, b = (memory.hold(torch.randn(n, 16, generator=torch.Generator().manual_seed(n)).bfloat16()) for n in (64, 24))
    d = memory.hold(torch.zeros(64, 24))
    e = memory.hold(torch.zeros(64, 8))
    run(memory, PRODUCT, [a, b, d, e], threads=128, shared=768, NT=3)
    wanted = a.double() @ b.double().T
    assert torch.allclose(d.double(), 2 * wanted, atol=1e-5) and torch.equal(e, wanted[:, :8].float())
    run(memory, PRODUCT, [a, b, d, e], 1, threads=128, shared=768, NT=3)
    assert d.isnan().all()  # read before they were waited for
    for mode, message in ((2, "not shown to the matrix units"), (3, "which a product still reads")):
        with pytest.raises(EmulatorError, match=message):
            run(memory, PRODUCT, [a, b, d, e], mode, threads=128, shared=768, NT=3)
