"""The scalar dequantisers and the half-precision conversions of quant.c and quant.h against numpy and the gguf package.

Both sides do the same IEEE operations in the same order, so results are compared as bits. Only NaNs need a rule. An
operation on NaNs yields one of its operands' payloads, and which one (and the sign of a NaN made from infinities)
depends on the operand order that a compiler picks; so a NaN of arithmetic equals any other NaN. Where no arithmetic is
done (F32, BF16) the payload must be kept. F16 keeps it too, but numpy may use an instruction that sets the quiet bit,
so there the expectation is built from integers.
"""
import numpy as np
import pytest
import gguf
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Q

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
         "IQ4_NL", "IQ4_XS"]
# Where the half-precision numbers of a block lie, in bytes.
HALVES = dict(F16=[0], Q4_0=[0], Q4_1=[0, 2], Q5_0=[0], Q5_1=[0, 2], Q8_0=[0], Q2_K=[80, 82], Q3_K=[108],
              Q4_K=[0, 2], Q5_K=[0, 2], Q6_K=[208], IQ4_NL=[0], IQ4_XS=[0])


def dequantise(tool, name, raw):
    r = tool("dequant", str(int(Q[name])), stdin=raw.tobytes())
    assert r.rc == 0
    return np.frombuffer(r.out, np.float32)


def to_f16(tool, x):
    r = tool("dequant", "to-f16", stdin=np.asarray(x, np.float32).tobytes())
    assert r.rc == 0
    return np.frombuffer(r.out, np.uint16)


def random_blocks(name, rng):
    """Random bytes; every half of a block takes each of its 65,536 values in some block."""
    count = 1 << 16
    raw = rng.integers(0, 256, (count, GGML_QUANT_SIZES[Q[name]][1]), np.uint8)
    for at in HALVES.get(name, []):
        raw[:, at:at + 2] = rng.permutation(count).astype("<u2").view(np.uint8).reshape(count, 2)
    return raw


@pytest.mark.parametrize("name", TYPES)
def test_equals_the_gguf_package(tool, name):
    seed = TYPES.index(name)
    raw = random_blocks(name, np.random.default_rng(seed))
    with np.errstate(all="ignore"):
        want = np.asarray(gguf.quants.dequantize(raw, Q[name]), np.float32).ravel()
    got = dequantise(tool, name, raw)
    assert got.shape == want.shape
    same = got.view(np.uint32) == want.view(np.uint32)
    if name not in ("F32", "BF16"):
        same |= np.isnan(got) & np.isnan(want)
        assert np.isnan(want).any() and np.isinf(want).any() and ((want != 0) & (np.abs(want) < 1e-5)).any()
    bad = np.flatnonzero(~same)
    assert bad.size == 0, f"seed {seed}, weight {bad[0]}: {got[bad[0]]!r} instead of {want[bad[0]]!r}"


@pytest.mark.parametrize("name", TYPES)
def test_any_number_of_blocks(tool, name):
    """Blocks are independent: 0, 1, 2 and 5 of them give what they give within a longer run."""
    raw = random_blocks(name, np.random.default_rng(7))[:8]
    whole = dequantise(tool, name, raw).view(np.uint32)
    per = whole.size // 8
    assert per == GGML_QUANT_SIZES[Q[name]][0]
    for first, count in ((0, 0), (0, 1), (7, 1), (3, 2), (2, 5)):
        part = dequantise(tool, name, raw[first:first + count]).view(np.uint32)
        assert np.array_equal(part, whole[first * per:(first + count) * per])


def test_table(tool):
    rows = [line.split() for line in tool("dequant", "types").text.splitlines()]
    assert [int(number) for number, *_ in rows] == list(range(1000))
    names = {int(number): name for number, name, *_ in rows}
    supported = {own: (int(number), (int(block), int(size))) for number, _, block, size, own in rows if own != "-"}
    assert supported == {name: (int(Q[name]), GGML_QUANT_SIZES[Q[name]]) for name in TYPES}
    withdrawn = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
                 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
    known = {int(member): member.name for member in Q} | withdrawn
    newer = {n for n, name in names.items() if n not in known and name != "unknown"}
    assert all(names[n] == name for n, name in known.items()) and all(n > max(Q) for n in newer)


def test_every_half(tool):
    h = np.arange(1 << 16, dtype=np.uint16)
    got = dequantise(tool, "F16", h).view(np.uint32)
    nan = np.isnan(h.view(np.float16))
    want = h.view(np.float16).astype(np.float32).view(np.uint32)
    wide = h.astype(np.uint32)
    want[nan] = ((wide & 0x8000) << 16 | 0x7F800000 | (wide & 0x3FF) << 13)[nan]
    assert np.array_equal(got, want)
    back = to_f16(tool, got.view(np.float32))
    assert np.array_equal(back[~nan], h[~nan])
    assert np.array_equal(back[nan], h[nan] | 0x200)


def test_rounding_to_half(tool):
    """Every half, the midpoint to its neighbour, one float step to both sides of these, and 4 million random floats."""
    exact = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middle = (exact + np.append(exact[1:], 65536.0)) / 2
    x = np.concatenate([exact, middle, [65536.0, 1e30, np.inf, 1e-45, 2.0 ** -126]]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    x = np.concatenate([x, -x, np.random.default_rng(3).integers(0, 2 ** 32, 1 << 22, np.uint32).view(np.float32)])
    with np.errstate(all="ignore"):
        want = x.astype(np.float16)
    got = to_f16(tool, x)
    nan = np.isnan(x)
    assert got.shape == x.shape and nan.any()
    assert np.array_equal(got[~nan], want.view(np.uint16)[~nan])
    assert np.array_equal(got[nan] >> 9, np.where(np.signbit(x[nan]), 0x7F, 0x3F)), "a NaN stays a quiet NaN"
    # ties, by hand: 2049 lies between 2048 and 2050; 65519.996 is the last float that does not overflow
    hand = {2049.0: 0x6800, 2051.0: 0x6802, 65519.996: 0x7BFF, 65520.0: 0x7C00, 2.0 ** -25: 0, 3 * 2.0 ** -25: 2,
            np.float32(2.0 ** -25) * np.float32(1.0000001): 1, 1023.75 * 2.0 ** -24: 0x400}
    assert to_f16(tool, list(hand)).tolist() == list(hand.values())
