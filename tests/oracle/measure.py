"""Comparisons of one layer's results, position by position, and the table.

Every function returns three arrays, one value per position: how many elements
differ, whether the position is outside its bound by itself, and how far it is.
"""
import math

import numpy as np

import quant

F64 = np.float64
UNDECIDED = "undecided (position, layer)"
UNDECIDED_DRAFTS = "undecided drafts"
OPEN_SHARE = {UNDECIDED: 1 / 500, UNDECIDED_DRAFTS: 1 / 2}    # of those compared
DRAFTS = 0.05         # quant on: of an undecided one; three layers in one
UPDATE = 2.3e-3       # 2.11: relative rms of a layer's update
FP32 = 1e-4           # fp32 results of a layer: pre-mix, expert weights
TIE = 1e-5            # two scores this close are a tie
LOGITS = 1e-3
CODE_RATE = 10000     # one code in so many may differ, by one step
OFF = 1e-5            # quant off: rows, a layer's update, pre-mix, weights, logits
DRAFTS_OFF = 1e-4     # quant off: three layers and a sum over them
SINGLE_STEPS = 0.02   # share of a position's stream elements one bf16 step off


class Table:
    """item -> compared, differing, excused, worst, over"""

    def __init__(self):
        self.rows, self.notes = {}, []

    def add(self, item, compared, differing=0, worst=0.0, over=0, excused=0):
        r = self.rows.setdefault(item, [0, 0, 0, 0.0, 0])
        r[0] += int(compared)
        r[1] += int(differing)
        r[2] += int(excused)
        r[3] = max(r[3], float(worst))
        r[4] += int(over)

    def note(self, text):
        if len(self.notes) < 40:
            self.notes.append(text)

    def over_bound(self, item):
        compared, differing, _, _, over = self.rows[item]
        if item.startswith("codes "):
            over += max(0, differing - math.ceil(compared / CODE_RATE))
        if item in OPEN_SHARE:
            over += max(0, differing - math.ceil(compared * OPEN_SHARE[item]))
        return over

    def over(self):
        return sum(self.over_bound(item) for item in self.rows)

    def empty(self):
        return [item for item, r in self.rows.items() if r[0] == 0]

    def show(self):
        print("%-27s %12s %10s %8s %10s %6s" % (
            "item", "compared", "differing", "excused", "worst", "over"))
        for item, r in self.rows.items():
            print("%-27s %12d %10d %8d %10.3g %6d" % (item, r[0], r[1], r[2], r[3],
                                                       self.over_bound(item)))
        for text in self.notes:
            print("  " + text)


def _ordinal(codes, bits):
    """Signed place of a sign-magnitude code; -0 stands just below +0."""
    codes = codes.astype(np.int64)
    mag = codes & ((1 << (bits - 1)) - 1)
    return np.where(codes >> (bits - 1), -mag - 1, mag)


def codes(m, kind, mine, theirs):
    """Code by code; each may be one step of its format off, scales too.

    quant off: values."""
    if not m.q:
        return close(mine, theirs, OFF)
    n = m.cfg.index_dim if kind == "key" else m.cfg.head_dim
    (a, sa), (b, sb) = (quant.split_row(kind, t, n) for t in (mine, theirs))
    step = np.abs(_ordinal(a, 8 if kind == "win" else 4)
                  - _ordinal(b, 8 if kind == "win" else 4))
    per = n // sa.shape[1]
    moved = np.abs(sa.astype(np.int64) - sb.astype(np.int64))
    same = np.repeat(moved == 0, per, 1)
    differ = (step * same > 0).sum(1) + (moved > 0).sum(1)
    bad = (step * same > 1).any(1) | (moved > 1).any(1)
    if (moved == 1).any():                     # compare values instead
        va, vb = m.decode(kind, mine), m.decode(kind, theirs)
        bad |= (~same & (np.abs(va - vb) > _step(kind, va, vb, sa, sb, per))).any(1)
    return differ, bad, np.maximum((step * same).max(1), moved.max(1))


def _step(kind, va, vb, sa, sb, per):
    """One step of the coarser scale at the larger of two values."""
    read = quant.E4M3.__getitem__ if kind == "main" else quant.ue8m0_decode
    scale = np.repeat(np.maximum(read(sa), read(sb)), per, 1)
    big = np.maximum(np.abs(va), np.abs(vb)) / scale
    if kind == "win":
        _, e = np.frexp(np.maximum(big, 2.0 ** -6))
        return np.ldexp(scale, e - 4) * 1.0001
    return scale * np.where(big < 2, .5, np.where(big < 4, 1, 2)) * 1.0001


def choices(mine, theirs, scores, ordered=True):
    """Chosen sets; a difference counts unless the scores tie within TIE."""
    n = len(mine)
    differ, bad = np.zeros(n, np.int64), np.zeros(n, bool)
    worst = np.zeros(n)
    for i in np.flatnonzero((mine != theirs).any(1)):
        a = set(int(v) for v in mine[i] if v >= 0)
        t = theirs[i][theirs[i] >= 0]
        b = set(int(v) for v in t)
        differ[i] = len(a ^ b)
        k = len(b)
        legal = (len(a) == k == len(t) and (np.diff(t) > 0).all()
                 and (theirs[i][k:] == -1).all()
                 and all(v < scores.shape[1] for v in b))
        if not legal or not (a ^ b):
            bad[i], worst[i] = True, np.inf
            continue
        lost = max(scores[i, v] for v in a - b)
        won = min(scores[i, v] for v in b - a)
        if not np.isfinite(won) or not np.isfinite(lost):
            bad[i], worst[i] = True, np.inf
            continue
        gap = (lost - won) / max(abs(lost), abs(won), 1e-30)
        worst[i] = gap
        bad[i] = gap > TIE
    return differ, bad, worst


def stream(m, mine, theirs, before):
    """Update of a layer: relative rms, or rare single bf16 steps."""
    n = len(mine)
    a, b = mine.reshape(n, -1).astype(F64), theirs.reshape(n, -1).astype(F64)
    update = a - before.reshape(n, -1)
    rms = np.sqrt((update ** 2).mean(1)) + 1e-30
    rel = np.sqrt(((a - b) ** 2).mean(1)) / rms
    rel = np.nan_to_num(rel, nan=np.inf)
    if not m.q:
        return (a != b).sum(1), ~(rel <= OFF), rel
    step = np.abs(_ordinal(quant.bf16_codes(a), 16) - _ordinal(quant.bf16_codes(b), 16))
    rare = (step <= 1).all(1) & ((step > 0).mean(1) <= SINGLE_STEPS)
    return (step > 0).sum(1), ~((rel <= UPDATE) | rare), rel


def close(mine, theirs, bound):
    """fp32 vectors per position: max|a-b| <= bound * max|a|."""
    n = len(mine)
    a, b = mine.reshape(n, -1).astype(F64), theirs.reshape(n, -1).astype(F64)
    rel = np.abs(a - b).max(1) / (np.abs(a).max(1) + 1e-30)
    return (a != b).sum(1), ~(rel <= bound), np.nan_to_num(rel, nan=np.inf)
