"""The scalar dequantisers and the half-precision conversions of quant.c and quant.h against numpy and the gguf package.

Both sides do the same IEEE operations in the same order, so results are compared as bits. Only NaNs need a rule. An
operation on NaNs yields one of its operands' payloads, and which one (and the sign of a NaN made from infinities)
depends on the operand order that a compiler picks; so a NaN of arithmetic equals any other NaN. Where no arithmetic is
done (F32, BF16) the payload must be kept. F16 keeps it too, but numpy may use an instruction that sets the quiet bit,
so there the expectation is built from integers.
"""
import ctypes
import pathlib
import subprocess

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Q          # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
         "IQ4_NL", "IQ4_XS"]
# Where the half-precision numbers of a block lie, in bytes.
HALVES = dict(F16=[0], Q4_0=[0], Q4_1=[0, 2], Q5_0=[0], Q5_1=[0, 2], Q8_0=[0], Q2_K=[80, 82], Q3_K=[108],
              Q4_K=[0, 2], Q5_K=[0, 2], Q6_K=[208], IQ4_NL=[0], IQ4_XS=[0])
SHIM = """
#include "quant.h"
void to_f16(const float *src, uint16_t *dst, size_t n) { for (size_t i = 0; i < n; i++) dst[i] = f32_to_f16(src[i]); }
"""


class TypeInfo(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("block", ctypes.c_int), ("bytes", ctypes.c_int),
                ("dequantise", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t))]


@pytest.fixture(scope="module", params=["optimised", "undefined behaviour traps"])
def lib(request, tmp_path_factory):
    here = tmp_path_factory.mktemp("quant")
    (here / "shim.c").write_text(SHIM)
    flags = ["-O2"] if request.param == "optimised" else [
        "-O1", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    subprocess.run(["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", *flags, "-shared", "-fPIC",
                    f"-I{ROOT}", "-o", here / "quant.so", here / "shim.c", ROOT / "quant.c"], check=True)
    lib = ctypes.CDLL(str(here / "quant.so"))
    lib.type_info.restype = ctypes.POINTER(TypeInfo)
    lib.type_info.argtypes = [ctypes.c_uint32]
    lib.type_name.restype = ctypes.c_char_p
    lib.type_name.argtypes = [ctypes.c_uint32]
    return lib


def dequantise(lib, name, raw):
    info = lib.type_info(Q[name]).contents
    n = raw.size // info.bytes * info.block
    out = np.full(n + 16, 12345.0, np.float32)
    raw = np.ascontiguousarray(raw)
    info.dequantise(raw.ctypes.data, out.ctypes.data, n)
    assert (out[n:] == 12345.0).all(), "wrote past the end"
    return out[:n]


def to_f16(lib, x):
    x = np.ascontiguousarray(x, np.float32)
    out = np.full(x.size, 0x5555, np.uint16)
    lib.to_f16(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_size_t(x.size))
    return out


def random_blocks(name, rng):
    """Random bytes; every half of a block takes each of its 65,536 values in some block."""
    count = 1 << 16
    raw = rng.integers(0, 256, (count, GGML_QUANT_SIZES[Q[name]][1]), np.uint8)
    for at in HALVES.get(name, []):
        raw[:, at:at + 2] = rng.permutation(count).astype("<u2").view(np.uint8).reshape(count, 2)
    return raw


@pytest.mark.parametrize("name", TYPES)
def test_equals_the_gguf_package(lib, name):
    seed = TYPES.index(name)
    raw = random_blocks(name, np.random.default_rng(seed))
    with np.errstate(all="ignore"):
        want = np.asarray(gguf.quants.dequantize(raw, Q[name]), np.float32).ravel().copy()
    got = dequantise(lib, name, raw)
    assert got.shape == want.shape
    same = got.view(np.uint32) == want.view(np.uint32)
    if name not in ("F32", "BF16"):
        same |= np.isnan(got) & np.isnan(want)
    bad = np.flatnonzero(~same)
    assert bad.size == 0, f"seed {seed}, weight {bad[0]}: {got[bad[0]]!r} instead of {want[bad[0]]!r}"
    if name not in ("F32", "BF16"):
        assert np.isnan(want).any() and np.isinf(want).any() and ((want != 0) & (np.abs(want) < 1e-5)).any()


@pytest.mark.parametrize("name", TYPES)
def test_any_number_of_blocks(lib, name):
    """Blocks are independent: 0, 1, 2 and 5 of them give what they give within a longer run."""
    raw = random_blocks(name, np.random.default_rng(7))[:8]
    whole = dequantise(lib, name, raw).view(np.uint32)
    per = whole.size // 8
    for first, count in ((0, 0), (0, 1), (7, 1), (3, 2), (2, 5)):
        part = dequantise(lib, name, raw[first:first + count]).view(np.uint32)
        assert np.array_equal(part, whole[first * per:(first + count) * per])


def test_table(lib):
    for name in TYPES:
        info = lib.type_info(Q[name]).contents
        assert info.name.decode() == name and (info.block, info.bytes) == GGML_QUANT_SIZES[Q[name]]
    supported = {n for n in range(1000) if lib.type_info(n)}
    assert supported == {int(Q[name]) for name in TYPES}
    for number in (2 ** 31, 2 ** 32 - 1):
        assert not lib.type_info(number) and lib.type_name(number) == b"unknown"
    for member in Q:
        assert lib.type_name(member) == member.name.encode()
    withdrawn = {4: b"Q4_2", 5: b"Q4_3", 31: b"Q4_0_4_4", 32: b"Q4_0_4_8", 33: b"Q4_0_8_8", 36: b"IQ4_NL_4_4",
                 37: b"IQ4_NL_4_8", 38: b"IQ4_NL_8_8"}
    for number, name in withdrawn.items():
        assert lib.type_name(number) == name


def test_every_half(lib):
    h = np.arange(1 << 16, dtype=np.uint16)
    got = dequantise(lib, "F16", h.view(np.uint8)).view(np.uint32)
    nan = np.isnan(h.view(np.float16))
    want = h.view(np.float16).astype(np.float32).view(np.uint32)
    wide = h.astype(np.uint32)
    want[nan] = ((wide & 0x8000) << 16 | 0x7F800000 | (wide & 0x3FF) << 13)[nan]
    assert np.array_equal(got, want)
    back = to_f16(lib, got.view(np.float32))
    assert np.array_equal(back[~nan], h[~nan])
    assert np.array_equal(back[nan], h[nan] | 0x200)


def test_rounding_to_half(lib):
    """Every half, the midpoint to its neighbour, one float step to both sides of these, and 4 million random floats."""
    exact = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = (exact + np.append(exact[1:], 65536.0)) / 2
    x = np.concatenate([exact, middle, [65536.0, 1e30, np.inf, 1e-45, 2.0 ** -126]]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    x = np.concatenate([x, -x, np.random.default_rng(3).integers(0, 2 ** 32, 1 << 22, np.uint32).view(np.float32)])
    with np.errstate(all="ignore"):
        want = x.astype(np.float16)
    got = to_f16(lib, x)
    nan = np.isnan(x)
    assert np.array_equal(got[~nan], want.view(np.uint16)[~nan])
    assert np.array_equal(got[nan] >> 9, np.where(np.signbit(x[nan]), 0x7F, 0x3F)), "a NaN stays a quiet NaN"
    # ties, by hand: 2049 lies between 2048 and 2050; 65519.996 is the last float that does not overflow
    hand = {2049.0: 0x6800, 2051.0: 0x6802, 65519.996: 0x7BFF, 65520.0: 0x7C00, 2.0 ** -25: 0, 3 * 2.0 ** -25: 2,
            np.float32(2.0 ** -25) * np.float32(1.0000001): 1, 1023.75 * 2.0 ** -24: 0x400}
    assert to_f16(lib, list(hand)).tolist() == list(hand.values())
