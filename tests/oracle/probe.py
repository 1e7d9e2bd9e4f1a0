"""Roundings that summation noise could decide either way.

2.11 leaves the summation order free, so a value that falls on the boundary
between two bf16 numbers may be rounded up by one implementation and down by
another, and all that follows from it differs without either being wrong.  A
Probe watches quant.bf16() during one evaluation: it lists the roundings that
are undecided within the noise of fp32 sums, and can flip chosen ones, so that
a judge can ask "is there a legal rounding that gives the other side's result?"
"""
import numpy as np

import quant

NOISE = 2.0 ** -19     # of max(|value|, rms of its vector): fp32 sums
SOFTMAX = 8            # times that for exp() of a score: |score| counts too


class Probe:
    def __init__(self, flip=()):
        self.sites = []
        self.near = {}             # site -> how close to the boundary, of the noise
        self.flip = set(flip)
        self.call = 0

    def visit(self, x, y, noise=1):
        rms = np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True))
        tol = noise * NOISE * np.maximum(np.abs(x), rms)
        lo, hi = quant.bf16_plain(x - tol), quant.bf16_plain(x + tol)
        where = np.flatnonzero((lo != hi).reshape(-1))
        out, low, high = y, lo.reshape(-1), hi.reshape(-1)
        middle = (low.astype(np.float64) + high) / 2
        noise = np.broadcast_to(np.maximum(tol, 1e-300), x.shape).reshape(-1)
        near = np.abs(x.reshape(-1) - middle) / noise
        for i in where:
            site = (self.call, int(i))
            self.sites.append(site)
            self.near[site] = near[i]
            if site in self.flip:
                if out is y:
                    out = y.copy()
                flat = out.reshape(-1)
                flat[i] = high[i] if flat[i] == low[i] else low[i]
        self.call += 1
        return out


def evaluate(fn, flip=()):
    """-> (fn(), undecided sites met, the closest to a boundary first)"""
    probe = Probe(flip)
    quant.set_probe(probe)
    try:
        return fn(), sorted(probe.sites, key=probe.near.get)
    finally:
        quant.set_probe(None)


def explain(fn, distance, rows=(), tries=400, depth=6):
    """True when a few legal changes bring distance(fn(...)) to <= 1.

    A change is the flip of one undecided rounding met in fn, or one of `rows`,
    alternatives that fn takes as a list of its own.  Greedy: of all single
    changes the best one is kept, then the next is sought.
    """
    out, sites = evaluate(lambda: fn([]))
    flips, swapped, best = [], [], distance(out)
    moves = [(None, r) for r in rows]
    moves += [(s, None) for s in list(dict.fromkeys(sites))[:tries]]
    for _ in range(depth):
        choice = None
        for site, row in moves:
            if site in flips or any(row is r for r in swapped if row is not None):
                continue
            f = flips + ([site] if site is not None else [])
            r = swapped + ([row] if row is not None else [])
            far = distance(evaluate(lambda: fn(r), f)[0])
            if far <= 1:
                return True
            if far < best:
                best, choice = far, (f, r)
        if choice is None:
            return False
        flips, swapped = choice
    return False
