#!/usr/bin/python3
"""fixtures.py --out DIR --model DIR
fixtures.py --check [DIR] [--mkmodel PATH]

A fixture set for tests without Python, from the oracle and the model of
`mkmodel --config tiny --seed 1`: three dumps (prefill all, ced, quant off),
quantizer tables over every edge, Engram row numbers with the real constants,
and rope tables.  README describes them.  --check makes model and set again
(with make_model.py when there is no PATH) and fails on any difference; DIR is
fixtures/ beside this file when not given.
"""
import argparse
import os
import subprocess
import sys
import tempfile

import numpy as np

import engram
import make_model
import quant
import rope
import run
import safetensors
import toyconfig
from judge import Case, Dump, Judge, Search
from measure import Table
from model import Model

F32 = np.float32


# ----------------------------------------------------------- quantizers

def amax_classes():
    """bf16 amax values: every mantissa around each scale change, both ends."""
    codes = [0, 1, 2, 0x7F, 0x80, 0x81, 0x7F7F]
    for e in range(1, 255):
        step = 1 if 112 <= e <= 136 else 32
        codes += [(e << 7) | m for m in range(0, 128, step)]
        codes += [(e << 7) | m for m in (1, 63, 64, 65, 95, 96, 97, 127)]
    return quant.bf16_decode(np.unique(np.array(codes, np.uint16)))


def group_inputs(group):
    """Groups of bf16 values: the amax in front, then ties, zeros, extremes."""
    amax = amax_classes()
    x = np.zeros((len(amax), group), F32)
    ratios = np.concatenate([
        [1, -1, 0, -0.0], quant._E2M1_MIDDLE / np.float64(6),
        -np.float64(quant._E2M1_MIDDLE) / 6, [2.0 ** -k for k in range(1, 18)]])
    for i in range(group):
        x[:, i] = np.float64(amax) * ratios[i % len(ratios)]
    x[:, 0] = amax
    return quant.bf16(x)


def value_grid():
    """Direct values: all codes, all midpoints, their neighbours, saturation."""
    def around(t):
        mid = (t[:-1].astype(np.float64) + t[1:]) / 2
        v = np.concatenate([t, mid]).astype(F32)
        v = np.concatenate([v, np.nextafter(v, F32(1e9)), np.nextafter(v, F32(-1e9))])
        return np.concatenate([v, -v])
    return (np.concatenate([around(quant.E4M3[:127]), [449, 464, 480, 1e6, -1e6]]).astype(F32),
            np.concatenate([around(quant.E2M1[:8]), [6.5, 7, 100, -100]]).astype(F32))


def quantizer_tables():
    e4, e2 = value_grid()
    x32, x16 = group_inputs(32), group_inputs(16)
    f = np.concatenate([np.ldexp(F32(1.5), np.arange(-126, 120)),
                        np.ldexp(F32(1), np.arange(-126, 120)),
                        quant.bf16_decode(np.arange(0x3F00, 0x3FC0, dtype=np.uint16))
                        * F32(1 + 2.0 ** -8)]).astype(F32)
    out = [("bf16.in", "F32", f), ("bf16.codes", "BF16", quant.bf16_codes(f)),
           ("e4m3.in", "F32", e4), ("e4m3.codes", "U8", quant.e4m3_codes(e4)),
           ("e2m1.in", "F32", e2), ("e2m1.codes", "U8", quant.e2m1_codes(e2)),
           ("fp8.in", "BF16", quant.bf16_codes(x32)),
           ("fp8.rows", "U8", quant.pack_row("win", x32)),
           ("key.in", "BF16", quant.bf16_codes(x32)),
           ("key.rows", "U8", quant.pack_row("key", x32)),
           ("main.in", "BF16", quant.bf16_codes(x16)),
           ("main.rows", "U8", quant.pack_row("main", x16))]
    rng = np.random.default_rng(11)
    wide = quant.bf16(rng.standard_normal((16, 512)) * 2.0 ** rng.integers(-6, 7, (16, 1)))
    for kind, n in (("win", 512), ("main", 512), ("key", 128)):
        row = quant.pack_row(kind, wide[:, :n])
        out += [("wide.%s.in" % kind, "BF16", quant.bf16_codes(wide[:, :n])),
                ("wide.%s.rows" % kind, "U8", row),
                ("wide.%s.values" % kind, "F32", quant.unpack_row(kind, row, n))]
    return out


# ------------------------------------------------------- engram and rope

def engram_tables():
    vocab, layers = 99092, [1, 14]
    rng = np.random.default_rng(12)
    quads = rng.integers(0, vocab, (200, 4))
    quads[:6] = [[0] * 4, [vocab - 1] * 4, [2] * 4, [5, 2, 2, 2], [1, 2, 3, 4], [4, 3, 2, 1]]
    primes = engram.buckets(16000000, layers, 4, 8)
    out = [("compressed", "I64", quads.astype(np.int64))]
    for l in layers:
        mult = engram.multipliers(l, vocab)
        out += [("multipliers.%d" % l, "I64", mult),
                ("primes.%d" % l, "I64", np.array(primes[l], np.int64)),
                ("rows.%d" % l, "I64", engram.row_numbers(mult, primes[l], quads, 8))]
    return out


class RealRope:
    rope_dim, theta, compress_theta = 64, 10000, 160000
    scaling = {"factor": 16, "beta_fast": 32, "beta_slow": 1,
               "original_max_position_embeddings": 65536}


def rope_tables():
    pos = np.array([0, 1, 2, 3, 15, 16, 127, 128, 129, 1000, 4095, 65535, 65536,
                    65537, 131072, 524287, 1048574, 1048575], np.int32)
    out = [("positions", "I32", pos)]
    for name, cfg in (("real", RealRope), ("tiny", toy_rope())):
        for yarn in (False, True):
            key = "%s.%s" % (name, "yarn" if yarn else "plain")
            cos, sin = rope.tables(cfg, yarn, pos)
            out += [(key + ".freq", "F32", rope.frequencies(cfg, yarn)),
                    (key + ".cos", "F32", cos), (key + ".sin", "F32", sin)]
    return out


def toy_rope():
    from config import Config
    return Config(toyconfig.tiny())


# ---------------------------------------------------------------- dumps

RUNS = (("tiny-all", 51, "all", True), ("tiny-ced", 45, "ced", True),
        ("tiny-off", 33, "all", False))


class Robust(Judge):
    """Finds the positions that no legal rounding can move out of bounds."""

    def __init__(self, *args):
        super().__init__(*args)
        self.safe = {}

    def done(self, job):
        job.theirs["win"] = (np.ones(len(job.pos), bool), job.window)
        self.safe[job.layer] = (job.pos, np.array(
            [Search(job, i, False).robust() for i in range(len(job.pos))], np.uint8))


def extras(m, r, judge):
    """What a dump does not hold: all window rows, tails, robust positions."""
    code, out = "U8" if m.q else "F32", []

    def put(name, dtype, a, pos):
        out.append((name, dtype, a))
        out.append((name + ".pos", "I32", np.asarray(pos, np.int32)))
    for l in range(m.cfg.layers):
        put("win.%d.all" % l, code, r.layer[l][1]["win"], r.layer[l][0])
    for s in range(m.cfg.stages):
        put("win.%d.all" % (m.cfg.layers + s), code, r.stage[s][1], r.stage[s][0])
    for s in m.cfg.kv_sources:
        tail = r.layer[s][1].get("tail")
        if tail is not None and len(r.ids) % m.cfg.ratio(s):
            out.append(("tail.%d" % s, "F32", np.stack(tail).astype(F32)))
    for l, (pos, safe) in (judge.safe if judge else {}).items():
        put("safe.%d" % l, "U8", safe, pos)
    return out


def dumps(folder, out):
    right = Model(folder)
    for name, n, mode, quant_on in RUNS:
        m = right.variant(quant_on=quant_on)
        ids = np.random.default_rng([13, n]).integers(0, m.cfg.vocab - 2, n)
        ids[20:23] = m.cfg.image_id
        r, judge = run.session(m, ids, mode), None
        path = os.path.join(out, name + ".safetensors")
        run.write_dump(path, m, r, mode)
        if name == "tiny-all":
            judge = Robust(m, Table(), Dump(path), Case(ids, mode))
            judge.all()
            if judge.t.over():
                raise RuntimeError("%s: the oracle judges itself wrong" % name)
        run.write_dump(path, m, r, mode, more=extras(m, r, judge))


def write_set(folder, out):
    os.makedirs(out, exist_ok=True)
    dumps(folder, out)
    for name, tensors in (("quantizers", quantizer_tables()),
                          ("engram", engram_tables()), ("rope", rope_tables())):
        safetensors.write(os.path.join(out, name + ".safetensors"), tensors,
                          {"family": "oracle"})


def same_set(a, b):
    bad = 0
    names = sorted(set(os.listdir(a)) | set(os.listdir(b)))
    for name in (n for n in names if n.endswith(".safetensors")):
        both = [os.path.join(d, name) for d in (a, b)]
        if not all(os.path.exists(p) for p in both):
            print("%s: only on one side" % name)
            bad += 1
            continue
        what = differing(*both)
        if what:
            bad += 1
            print("%s: differs: %s" % (name, what))
    return bad


def same(x, y):
    """Codes and numbers exactly; fp32 results to the last bits, which another
    machine's float64 sums may round the other way."""
    if x.dtype != np.float32:
        return np.array_equal(x, y)
    return x.shape == y.shape and bool(
        np.all(np.abs(x - y) <= 1e-6 * max(float(np.max(np.abs(y))), 1e-30)))


def differing(a, b):
    a, b = safetensors.File(a), safetensors.File(b)
    if a.metadata != b.metadata:
        return "metadata"
    if a.names() != b.names():
        return "names"
    return ", ".join(n for n in a.names() if not same(a.get(n), b.get(n)))


def make_tiny(mkmodel, folder):
    if mkmodel:
        subprocess.run([mkmodel, "--config", "tiny", "--seed", "1", folder],
                       check=True, stdout=subprocess.DEVNULL)
    else:
        make_model.make(toyconfig.tiny(), 1, folder)


def main():
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures")
    p = argparse.ArgumentParser()
    p.add_argument("--model", help="a model folder made before")
    p.add_argument("--mkmodel", help="program that makes the model")
    p.add_argument("--out")
    p.add_argument("--check", nargs="?", const=here)
    a = p.parse_args()
    if not (a.out or a.check):
        p.error("--out DIR or --check [DIR]")
    with tempfile.TemporaryDirectory(prefix="oracle-") as scratch:
        folder = a.model or os.path.join(scratch, "model")
        if not a.model:
            make_tiny(a.mkmodel, folder)
        out = a.out or os.path.join(scratch, "set")
        write_set(folder, out)
        total = sum(os.path.getsize(os.path.join(out, n)) for n in os.listdir(out))
        print("%d bytes" % total)
        if a.check:
            bad = same_set(a.check, out)
            print("%d of the set differ" % bad)
            return 1 if bad else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
