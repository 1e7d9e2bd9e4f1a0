"""Number formats and quantizers of the specification (2.11, 4.1).

Values are float32 arrays; codes are uint8 (uint16 for bf16).  A packed row is
all codes first, then all scales; of two FP4 codes in a byte the even element
is the low nibble.
"""
import numpy as np

F32 = np.float32
F64 = np.float64

# ----------------------------------------------------------------- bf16

_probe = None        # see probe.py: watches roundings that noise could flip


def set_probe(probe):
    global _probe
    _probe = probe


def bf16_codes(x):
    """float32 -> bf16 codes, round to nearest, ties to even."""
    u = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    r = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (u >> 16) | 0x40, r).astype(np.uint16)


def bf16_decode(codes):
    return (np.asarray(codes).astype(np.uint32) << 16).view(F32)


def bf16_plain(x):
    """As decode(codes(x)), but quicker."""
    x = np.ascontiguousarray(x, F32)
    u = x.view(np.uint32)
    y = ((u + (((u >> 16) & 1) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)).view(F32)
    return bf16_decode(bf16_codes(x)) if np.isnan(x).any() else y


def bf16_next(y, up):
    """The bf16 number above or below the bf16 number y (not past 0)."""
    code = int(bf16_codes(np.array([y], F32))[0])
    if code & 0x7FFF == 0:
        code = 0x8001 if not up else 0x0001
    else:
        code = code + 1 if up != bool(code & 0x8000) else code - 1
    return bf16_decode([code])[0]


def bf16(x, noise=1):
    """Round to bf16 and hold the value as float32; noise: see probe.py."""
    x = np.asarray(x).astype(F32)
    y = bf16_plain(x)
    return y if _probe is None else _probe.visit(x, y, noise)


# ------------------------------------------------- e4m3, e2m1, ue8m0

def _e4m3_table():
    t = np.zeros(256, F32)
    for c in range(256):
        e, m = (c >> 3) & 15, c & 7
        v = m * 2.0 ** -9 if e == 0 else (8 + m) * 2.0 ** (e - 10)
        if c & 0x7F == 0x7F:
            v = np.nan
        t[c] = -v if c & 0x80 else v
    return t


E4M3 = _e4m3_table()
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6,
                 -0.0, -.5, -1, -1.5, -2, -3, -4, -6], F32)
_E2M1_MIDDLE = [.25, .75, 1.25, 1.75, 2.5, 3.5, 5.0]


def e4m3_codes(x):
    """Clamp to +-448, round to nearest even; the sign of zero is kept."""
    x = np.asarray(x, F32)
    a = np.minimum(np.abs(x), F32(448)).astype(F64)
    _, e = np.frexp(a)                        # a = m * 2^e, m in [.5, 1)
    e = np.where(a == 0, -6, np.maximum(e - 1, -6))
    q = np.rint(np.ldexp(a, 3 - e)).astype(np.int64)      # 0..16
    code = np.where(q < 8, q, ((e + 7) << 3) + (q - 8))   # q = 16 carries over
    return (code | (np.signbit(x).astype(np.int64) << 7)).astype(np.uint8)


def e4m3_decode(codes):
    return E4M3[codes]


def e2m1_codes(x):
    """Clamp to +-6, round to nearest, ties to the even code."""
    x = np.asarray(x, F32)
    a = np.minimum(np.abs(x), F32(6))
    code = np.zeros(a.shape, np.uint8)
    for k, mid in enumerate(_E2M1_MIDDLE):    # between code k and k + 1
        up = (a >= mid) if k % 2 else (a > mid)
        code += up.astype(np.uint8)
    return code | (np.signbit(x).astype(np.uint8) << 3)


def e2m1_decode(codes):
    return E2M1[codes]


def ue8m0_decode(codes):
    return np.ldexp(F32(1), np.asarray(codes).astype(np.int32) - 127).astype(F32)


def ue8m0_ceil(x):
    """The code of 2^ceil(log2 x), on the IEEE exponent; x normal and > 0."""
    u = np.ascontiguousarray(x, F32).view(np.uint32)
    return ((u >> 23) + ((u & 0x7FFFFF) != 0)).astype(np.uint8)


# ------------------------------------------------------------ quantizers

def _groups(x, size):
    x = np.asarray(x, F32)
    return x.reshape(x.shape[:-1] + (x.shape[-1] // size, size))


def _amax(g, floor):
    return np.maximum(np.max(np.abs(g), axis=-1), F32(floor)).astype(F32)


def fp8_quant(x, group=32):
    """-> codes [..., n], scales [..., n/group]: activations and window rows."""
    g = _groups(x, group)
    scale = ue8m0_ceil(_amax(g, 1e-4) / F32(448))
    v = g / ue8m0_decode(scale)[..., None]
    codes = e4m3_codes(np.clip(v, F32(-448), F32(448)))
    return codes.reshape(np.shape(x)), scale


def fp8_dequant(codes, scale):
    size = codes.shape[-1] // scale.shape[-1]
    g = E4M3[codes].reshape(scale.shape + (size,))
    return (g * ue8m0_decode(scale)[..., None]).astype(F32).reshape(codes.shape)


def index_quant(x, group=32):
    """FP4 of the indexer (keys and queries): ue8m0 scales."""
    g = _groups(x, group)
    scale = ue8m0_ceil(_amax(g, 6 * 2.0 ** -126) / F32(6))
    v = g / ue8m0_decode(scale)[..., None]
    codes = e2m1_codes(np.clip(v, F32(-6), F32(6)))
    return codes.reshape(np.shape(x)), scale


def index_dequant(codes, scale):
    size = codes.shape[-1] // scale.shape[-1]
    g = E2M1[codes].reshape(scale.shape + (size,))
    return (g * ue8m0_decode(scale)[..., None]).astype(F32).reshape(codes.shape)


def main_quant(x, group=16):
    """FP4 of the main KV rows: e4m3 scales."""
    g = _groups(x, group)
    scale = e4m3_codes(_amax(g, 6 * 2.0 ** -9) / F32(6))
    v = (g / E4M3[scale][..., None]).astype(F32)
    codes = e2m1_codes(np.clip(v, F32(-6), F32(6)))
    return codes.reshape(np.shape(x)), scale


def main_dequant(codes, scale):
    size = codes.shape[-1] // scale.shape[-1]
    g = E2M1[codes].reshape(scale.shape + (size,))
    return (g * E4M3[scale][..., None]).astype(F32).reshape(codes.shape)


def activation(x):
    """Quantize-dequantize of an fp8 linear's input; as the codes, but quicker."""
    g = _groups(x, 32)
    scale = ue8m0_decode(ue8m0_ceil(_amax(g, 1e-4) / F32(448)))[..., None]
    v = np.clip(g / scale, F32(-448), F32(448))
    e = ((v.view(np.uint32) >> 23) & 0xFF).astype(np.int32) - 127
    step = ((np.maximum(e, -6) + 124) << 23).view(F32)      # 2^(e-3)
    return (np.rint(v / step) * (step * scale)).reshape(np.shape(x))


def index_query(x):
    return index_dequant(*index_quant(x))


# ----------------------------------------------------------- packed rows

def nibbles_pack(codes):
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def nibbles_unpack(packed):
    out = np.empty(packed.shape[:-1] + (2 * packed.shape[-1],), np.uint8)
    out[..., 0::2] = packed & 15
    out[..., 1::2] = packed >> 4
    return out


def row_bytes(kind, n):
    return {"win": n + n // 32, "main": n // 2 + n // 16,
            "key": n // 2 + n // 32}[kind]


def split_row(kind, row, n):
    """Packed bytes -> codes [..., n] and scale bytes."""
    if kind == "win":
        return row[..., :n], row[..., n:]
    return nibbles_unpack(row[..., :n // 2]), row[..., n // 2:]


def pack_row(kind, x):
    if kind == "win":
        codes, scale = fp8_quant(x)
        return np.concatenate([codes, scale], -1)
    codes, scale = main_quant(x) if kind == "main" else index_quant(x)
    return np.concatenate([nibbles_pack(codes), scale], -1)


def unpack_row(kind, row, n):
    codes, scale = split_row(kind, row, n)
    return {"win": fp8_dequant, "main": main_dequant,
            "key": index_dequant}[kind](codes, scale)


# ------------------------------------------------------- stored weights

def weight_fp8(codes, scale):
    """Dense fp8: one ue8m0 per 32x32 tile (7.1)."""
    s = ue8m0_decode(scale)
    s = np.repeat(np.repeat(s, 32, 0)[:codes.shape[0]], 32, 1)[:, :codes.shape[1]]
    return (E4M3[codes] * s).astype(F32)


def weight_fp4(packed, scale):
    """Expert fp4: even column in the low nibble, one ue8m0 per 32 columns."""
    return index_dequant(nibbles_unpack(packed.view(np.uint8)), scale)
