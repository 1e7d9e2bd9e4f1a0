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
TRIES = 1000           # changes tried at each step of a search
DEPTH = 6              # steps
EFFORT = 3000          # evaluations of one search


class Probe:
    """Lists the undecided roundings of one evaluation."""

    def __init__(self):
        self.near = {}             # site -> how close to the boundary, of the noise
        self.call = 0

    def visit(self, x, y, noise):
        rms = np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True))
        tol = noise * NOISE * np.maximum(np.abs(x), rms)
        lo, hi = quant.bf16_plain(x - tol), quant.bf16_plain(x + tol)
        for at in zip(*np.nonzero(lo != hi)):
            middle = (float(lo[at]) + float(hi[at])) / 2
            self.near[self.call, int(np.ravel_multi_index(at, x.shape))] = (
                abs(float(x[at]) - middle) / max(np.broadcast_to(tol, x.shape)[at], 1e-300))
        self.call += 1
        return y


class Flips:
    """Rounds chosen sites the other way; sites[v] are those of copy v."""

    def __init__(self, sites):
        self.copies, self.call, self.by_call = len(sites), 0, {}
        for v, flips in enumerate(sites):
            for call, i in flips:
                self.by_call.setdefault(call, []).append((v, i))

    def visit(self, x, y, _noise):
        for v, i in self.by_call.get(self.call, ()):
            at = v * (x.size // self.copies) + i
            up = y.reshape(-1)[at] <= x.reshape(-1)[at]
            y.reshape(-1)[at] = quant.bf16_next(y.reshape(-1)[at], up)
        self.call += 1
        return y


def watched(fn, probe):
    quant.set_probe(probe)
    try:
        return fn()
    finally:
        quant.set_probe(None)


def undecided(fn):
    """-> fn(), the sites met, the closest to a boundary first"""
    probe = Probe()
    out = watched(fn, probe)
    return out, sorted(probe.near, key=probe.near.get)


def flipped(fn, sites):
    """fn() with one set of flips for each of the copies that fn computes."""
    return watched(fn, Flips(sites))


def explain(sites, best, distances, rows=(), batch=1, effort=EFFORT):
    """True when a few legal changes bring the distance, now `best`, to <= 1.

    A change is the flip of one of `sites`, or one of `rows`.  distances(list of
    (flips, rows)) gives the distance under each; up to `batch` are asked for at
    once.  Greedy: of the single changes the best one is kept, then the next is
    sought.  False: no change helps.  None: given up, or not all were tried.
    """
    moves = [(s, None) for s in sites] + [(None, r) for r in range(len(rows))]
    cut = len(moves) > TRIES
    flips, swapped, spent = [], [], 0
    for _ in range(DEPTH):
        choice, at = None, 0
        tries = [(flips + [s] * (s is not None), swapped + [r] * (r is not None))
                 for s, r in moves[:TRIES] if s not in flips and r not in swapped]
        while at < len(tries):
            if spent >= effort:
                return None
            some = tries[at:at + batch]
            far = distances(some)
            at, spent = at + batch, spent + len(some)
            k = int(np.argmin(far))
            if far[k] <= 1:
                return True
            if far[k] < best:
                best, choice = far[k], some[k]
        if choice is None:
            return None if cut else False
        flips, swapped = choice
    return None
