"""The PTX that NVIDIA's compilers make of our kernels, translated to C and run on this processor, computes what NumPy does.

No GPU takes part, nor the assembler that makes machine code of PTX.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import horoclone as hvd
from horoclone import ops
from horoclone.arrays.host_memory import dtype_of
from horoclone.runtime import native

sys.path.insert(0, str(Path(__file__).parent))
import checks
import kernels
import translator


def ptx(compiler: str, source: str, capability: int) -> str:
    try:
        return kernels.PTX_OF[compiler](source, capability)
    except kernels.Absent as why:
        pytest.skip(str(why))


def differences(text: str) -> list[str]:
    loaded = kernels.Kernels(kernels.built(text))
    found = []
    for name in re.findall(r"\.entry (\w+)", text):
        compared, differ = checks.differences(loaded, name)
        assert compared
        found += differ
    return found


# Without nvcc each turn is NVRTC's.
@pytest.mark.in_turn
@pytest.mark.timeout(400)
@pytest.mark.parametrize("capability", kernels.CAPABILITIES)
@pytest.mark.parametrize("compiler", [one for one in kernels.PTX_OF if one != "nvcc" or kernels.nvcc()])
def test_every_kernel_computes_what_numpy_does(compiler: str, capability: int) -> None:
    text = ptx(compiler, kernels.SOURCE, capability)
    assert set(re.findall(r"\.entry (\w+)", text)) == kernels.kernel_names()
    assert not differences(text)


def reduces() -> None:
    """A rank whose driver is the fake, with the kernels that HC_FAKE_KERNELS names."""
    hvd.init()
    rank, size, core = hvd.rank(), hvd.size(), native()
    cuda = ctypes.CDLL(os.environ["HOROCLONE_CUDA_LIBRARY"])
    context, stream, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    assert cuda.cuStreamCreateWithPriority(ctypes.byref(stream), 1, 0) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(8192)) == 0
    by_nccl = os.environ["HOROCLONE_GPU_OPERATIONS"] == "nccl"
    for kind in ("i16",) if by_nccl else ("i16", "f16"):  # NCCL sums float16 by itself
        for count, pre, post, op in ((1001, 1.0, 1.0, "Sum"), (513, 0.5, 3.0, "Sum"), (77, 1.0, 1.0, "Max")):
            given = [checks.some(np.random.default_rng(r), kind, count) for r in range(size)]
            device = (ctypes.c_char * given[0].nbytes).from_address(memory.value)
            device[:] = given[rank].tobytes()
            number = [name for name, _ in checks.REDUCTIONS].index(op)
            handle = core.submit(
                ops.ALLREDUCE, f"{kind} {count}", memory.value, memory.value, (count,), dtype_of(given[0]), number,
                pre, post, 0, 0, None, 0, rank, stream.value
            )  # fmt: skip
            core.wait(handle)
            core.stream_wait(handle, stream.value)
            assert cuda.cuStreamSynchronize(stream) == 0
            with np.errstate(all="ignore"):
                want = checks.reduced(kind, op, given, pre, post, 1)
            assert checks.same(np.frombuffer(bytes(device), given[0].dtype), want), (kind, count, op)
    assert cuda.hc_fake_count(b"launches", 0) >= 3
    assert os.environ["HC_FAKE_KERNELS"] in Path("/proc/self/maps").read_text(), "they were the PTX"
    hvd.shutdown()


@pytest.mark.in_turn("way")
@pytest.mark.parametrize("way", ["nccl", "peers"])
def test_allreduces_on_the_fake_of_the_driver_run_the_ptx(
    way: str, worker_pool: Any, on_fakes: dict[str, str]
) -> None:
    pytest.importorskip("horoclone._core", reason="the native module is not built")
    some = kernels.source_of("i16_i32|hc_(un)?pack_bytes|hc_reduce_[if]16")
    env = {
        **on_fakes,
        "HC_FAKE_KERNELS": str(kernels.built(ptx("nvrtc", some, 90))),
        "HOROCLONE_GPU_OPERATIONS": way,
    }
    team = worker_pool(reduces, 2, env=env)
    assert team.wait(120) == [0, 0], team.outputs()


# A line of the source as it is, as it would be wrong, and a kernel that then is.
PLANTED = {
    "another piece": ("const KernelPiece piece = a.piece[here.row];", "const KernelPiece piece = a.piece[here.row / 2];", "hc_pack_bytes|f32_f32"),
    "another lane": ("line[which * kAdasumLanes + here.first]", "line[which * kAdasumLanes + here.first / 2]", "hc_adasum_products_f32"),
    "no tail": ("i < count; i += here.step", "i < done; i += here.step", "hc_pack_bytes"),
    "one too many": ("i < a.count; i += here.step", "i <= a.count; i += here.step", "hc_reduce_u8"),
    "half rounded up": ("bits + 0x7fffu + ((bits >> 16) & 1u)", "bits + 0x8000u", "bf16_f32"),
    "half cut off": ("cvt.rn.f16.f32", "cvt.rz.f16.f32", "f16_f32"),
    "NaN as it comes": ("return canonical(v * (T)post)", "return v * (T)post", "hc_reduce_f64"),
    "NaN lost": ("next != next || (R == Reduce::kMin", "(R == Reduce::kMin", "hc_reduce_f32"),
    "another operation": ("acc & next : acc | next", "acc | next : acc & next", "hc_reduce_i32"),
    "scaled twice": ("return v * (T)pre; }", "return v * (T)pre * (T)pre; }", "hc_reduce_f64"),
    "scaled in float": ("(double)v * factor)", "(float)v * (float)factor)", "i32_i32"),
    "every other stride": ("c < chunks; c += here.step) {", "c < chunks; c += 2 * here.step) {", "hc_pack_bytes"),
    "unsigned": ("reduce_integers<hc::I8, hc::I32", "reduce_integers<hc::U8, hc::I32", "hc_reduce_i8"),
    "divided downwards": ("return v / divisor; }", "return (v - (v < 0 ? divisor - 1 : 0)) / divisor; }", "i64_i64"),
    "one address is enough": ("kVector && is_aligned(from) && is_aligned(to)", "kVector && is_aligned(from)", "f64_f64"),
    "written before it is read": ("HC_ONE_BY_ONE\n  for (int s = 1; s < a.sources; ++s) {", "pointer<Vector>(a.out[0])[at] = first;\n  HC_ONE_BY_ONE\n  for (int s = 1; s < a.sources; ++s) {", "hc_reduce_u16"),
    "one source's address": ("s < a.sources; ++s) aligned", "s < 1; ++s) aligned", "hc_reduce_f32"),
    "not the first destination's": ("for (int d = 0; d < a.destinations; ++d) aligned", "for (int d = 1; d < a.destinations; ++d) aligned", "hc_reduce_f32"),
    "another row's sums": ("3ull * row.place", "3ull * here.row", "hc_adasum_combine_f32"),
    "two bits of a bool": ("v.byte != 0", "(v.byte & 3) != 0", "hc_reduce_bool"),
    "one destination": ("d < a.destinations; ++d) pointer", "d < 1; ++d) pointer", "hc_reduce_bool"),
    "the other's sum": ("const double of_b = sums[2] == 0", "const double of_b = sums[0] == 0", "hc_adasum_combine_f64"),
    "a lane of the line before": ("(line * 3 + which) * a.lanes_in", "(line * 3 + which) * a.lanes_out", "hc_adasum_fold"),
    "beyond the arguments": ("a.sum[here.row];", "a.sum[here.row + kMaxAdasumSums];", "hc_adasum_fold"),
}  # fmt: skip


@pytest.mark.parametrize("fault", [pytest.param(name, marks=pytest.mark.long(4)) for name in PLANTED])
def test_a_fault_that_is_planted_in_a_kernel_is_noticed(fault: str) -> None:
    before, after, only = PLANTED[fault]
    assert before in kernels.SOURCE, "mend this line of PLANTED"
    right = kernels.source_of(only)
    assert not differences(ptx("nvrtc", right, 90))
    wrong = ptx("nvrtc", right.replace(before, after), 90)
    try:
        found = differences(wrong)
    except (AssertionError, translator.Unknown) as refused:
        found = [str(refused)]
    assert found


ENTRY = """
.version 9.0
.target sm_90
.address_size 64
.visible .entry hc_one(.param .align 8 .b8 hc_one_param_0[16])
.maxntid 256
{
  .reg .pred %p<2>;
  .reg .b32 %r<3>;
  STATEMENT
  ret;
}
"""


@pytest.mark.parametrize(
    "statement, named",
    [
        ("bar.sync 0;", "instruction bar.sync"),
        ("atom.global.add.u32 %r1, [%rd1], %r2;", "instruction atom.global.add.u32"),
        ("shfl.sync.down.b32 %r1|%p1, %r2, 1, 31, -1;", "instruction shfl.sync.down.b32"),
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", "instruction fma.rn.f32"),
        ("add.sat.s32 %r1, %r2, 1;", "instruction add.sat.s32"),
        ("@%p1 ex2.approx.ftz.f32 %f1, %f2;", "instruction ex2.approx.ftz.f32"),
        ("mov.u32 %r1, %laneid;", "register %laneid"),
        (".shared .align 4 .b8 scratch[1024];", "statement"),
        ("ld.global.b32 {%r1, %r2}, [%rd1];", "2 operands of 1"),
    ],
)
def test_what_the_translator_does_not_know_is_named(statement: str, named: str) -> None:
    with pytest.raises(translator.Unknown, match=re.escape(named)) as error:
        translator.translated(ENTRY.replace("STATEMENT", statement))
    assert statement[:10] in str(error.value)
