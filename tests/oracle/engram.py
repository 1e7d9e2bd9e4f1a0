"""Engram (2.8): compressed ids, multipliers, buckets, hash, gate."""
import numpy as np

import quant
from config import dot, total

F32, F64 = np.float32, np.float64


def multipliers(layer, compressed_vocab, orders=4):
    """2.8.2: 2v + 1, v drawn below B."""
    bound = ((2 ** 63 - 1) // compressed_vocab) // 2
    rng = np.random.default_rng(10007 * layer)
    return 2 * rng.integers(0, bound, orders, dtype=np.int64) + 1


def _is_prime(n):
    """Trial division by odd numbers (n is at most a few 10^7)."""
    if n < 4:
        return n >= 2
    if n % 2 == 0:
        return False
    d = np.arange(3, int(n ** 0.5) + 2, 2, dtype=np.int64)
    return not bool(np.any(n % d[d < n] == 0))


def buckets(base, layers, orders, heads):
    """2.8.3: {layer: [prime per column]}; column = (order - 2) * heads + head."""
    used, out = set(), {}
    for layer in layers:
        out[layer] = []
        for _order in range(2, orders + 1):
            at = base - 1                    # the search restarts here
            for _head in range(heads):
                at += 1
                while at in used or not _is_prime(at):
                    at += 1
                used.add(at)
                out[layer].append(at)
    return out


class Hash:
    """The row numbers of one model."""

    def __init__(self, cfg, table):
        self.cfg, self.table = cfg, table.astype(np.int64)
        n = cfg.engram_ngram
        self.mult = {l: multipliers(l, cfg.engram_ids, n)
                     for l in cfg.engram_layers}
        self.primes = buckets(cfg.engram_base, cfg.engram_layers, n,
                              cfg.engram_heads)

    def context(self, ids, dead, pad_at_start=True):
        """2.8.4: t_s for every position, [N, orders]."""
        n = len(ids)
        compressed, pad = self.table[ids], self.table[self.cfg.engram_pad]
        out = np.empty((n, self.cfg.engram_ngram), np.int64)
        blocked = np.zeros(n, bool)
        before = pad if pad_at_start else self.table[0]
        for s in range(self.cfg.engram_ngram):
            t = np.full(n, before, np.int64)
            d = np.zeros(n, bool)
            t[s:] = compressed[:n - s] if s < n else t[s:]
            d[s:] = dead[:n - s] if s < n else d[s:]
            blocked = blocked | d            # sticky: p-s, or any nearer one
            out[:, s] = np.where(blocked, pad, t)
        return out

    def rows(self, layer, context):
        """[n, orders] compressed ids -> [n, columns] table row numbers."""
        return row_numbers(self.mult[layer], self.primes[layer], context,
                           self.cfg.engram_heads)


def row_numbers(mult, primes, context, heads):
    offset = np.concatenate([[0], np.cumsum(primes)[:-1]]).astype(np.int64)
    out = np.empty((len(context), len(primes)), np.int64)
    r = context[:, 0] * mult[0]
    for s in range(1, context.shape[1]):
        r = r ^ (context[:, s] * mult[s])
        for h in range(heads):
            c = (s - 1) * heads + h
            out[:, c] = r % primes[c] + offset[c]
    return out


def load_ids(folder, vocab):
    """engram_ids.bin: one little-endian int32 per vocabulary id."""
    table = np.fromfile(folder + "/engram_ids.bin", "<i4")
    if len(table) != vocab:
        raise ValueError("engram_ids.bin: %d entries, not %d" % (len(table), vocab))
    return table


def apply(m, layer, X, rows, dead):
    """2.8.5-6: X [n, 4, D] -> X with the gated lookup added."""
    cfg, w, p = m.cfg, m.w, m.cfg.prefix(layer) + "engram."
    n = len(X)
    looked = m.round(w.rows(p + "embed.weight", rows)).reshape(n, -1)
    kv = m.linear(looked, p + "wkv.weight")
    keys = kv[:, :cfg.hc * cfg.D].reshape(n, cfg.hc, cfg.D)
    value = kv[:, cfg.hc * cfg.D:]
    qk = (w.value(p + "q_weight").astype(F64) * w.value(p + "k_weight"))
    scale = _rms_inverse(X, cfg.eps) * _rms_inverse(keys, cfg.eps)
    d = total(X.astype(F64) * qk * keys) * scale / F32(np.sqrt(F64(cfg.D)))
    d = d.astype(F32)
    root = np.sqrt(np.maximum(np.abs(d), F32(1e-6)))
    g = m.sigmoid(np.where(d >= 0, root, -root))
    g = np.where(dead[:, None], F32(0), g)
    return m.round(X + (g[:, :, None] * value[:, None, :]).astype(F32))


def _rms_inverse(x, eps):
    mean = total(np.square(x, dtype=F64)) / F32(x.shape[-1])
    return (F32(1) / np.sqrt(mean + eps)).astype(F32)
