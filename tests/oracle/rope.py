"""Rotary embedding (2.2).  Every step that defines the angle is an fp32 step."""
import math

import numpy as np

F32, F64 = np.float32, np.float64


def frequencies(cfg, yarn):
    """f_i, or the YaRN blend f'_i, i = 0 .. rope_dim/2 - 1."""
    r = cfg.rope_dim
    theta = F32(cfg.compress_theta if yarn else cfg.theta)
    exponent = (np.arange(0, r, 2, dtype=F32) / F32(r)).astype(F32)
    power = np.power(F64(theta), exponent.astype(F64)).astype(F32)
    f = (F32(1) / power).astype(F32)
    if not yarn:
        return f
    ramp = yarn_ramp(cfg)
    far = ((f / F32(cfg.scaling["factor"])).astype(F32) * ramp).astype(F32)
    return ((f * (F32(1) - ramp)).astype(F32) + far).astype(F32)


def yarn_limits(cfg):
    s, r = cfg.scaling, cfg.rope_dim

    def dim(rotations):
        original = s["original_max_position_embeddings"]
        return (r * math.log(original / (2 * math.pi * rotations))
                / (2 * math.log(cfg.compress_theta)))
    return (max(math.floor(dim(s["beta_fast"])), 0),
            min(math.ceil(dim(s["beta_slow"])), r - 1))


def yarn_ramp(cfg):
    low, high = yarn_limits(cfg)
    i = np.arange(cfg.rope_dim // 2, dtype=F32)
    ramp = (i - F32(low)) / F32(max(high - low, 0.001))
    return np.clip(ramp, F32(0), F32(1)).astype(F32)


def tables(cfg, yarn, pos, plant=()):
    """cos, sin [n, rope_dim/2] of the fp32 angle position * f'_i."""
    pos = np.asarray(pos)
    f = np.broadcast_to(frequencies(cfg, yarn), (len(pos), cfg.rope_dim // 2))
    if yarn and "yarn-past-65536" in plant:           # a planted error
        plain = frequencies_plain_compress(cfg)
        f = np.where((pos < 65536)[:, None], plain[None, :], f)
    angle = (pos.astype(F32)[:, None] * f).astype(F32).astype(F64)
    return np.cos(angle).astype(F32), np.sin(angle).astype(F32)


def frequencies_plain_compress(cfg):
    exponent = (np.arange(0, cfg.rope_dim, 2, dtype=F32) / F32(cfg.rope_dim))
    power = np.power(F64(cfg.compress_theta), exponent.astype(F64)).astype(F32)
    return (F32(1) / power).astype(F32)


def rotate(x, table, round_, inverse=False):
    """x [n, dim] or [n, heads, dim]: interleaved pairs of the last rope dims."""
    cos, sin = table
    r = 2 * cos.shape[1]
    if x.ndim == 3:
        cos, sin = cos[:, None, :], sin[:, None, :]
    if inverse:
        sin = -sin
    even, odd = x[..., -r::2], x[..., -r + 1::2]
    out = x.copy()
    out[..., -r::2] = (even * cos).astype(F32) - (odd * sin).astype(F32)
    out[..., -r + 1::2] = (odd * cos).astype(F32) + (even * sin).astype(F32)
    rotated = round_(out[..., -r:])
    out[..., -r:] = rotated
    return out
