#!/usr/bin/python3
"""Quick tests of the oracle against what the specification states."""
import os
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

import cases
import engram
import make_model
import quant
import rope
import run
import toyconfig
from config import Config
from model import Model

F32 = np.float32
FAILED = []


def check(what, ok):
    print("%-66s %s" % (what, "ok" if ok else "FAILED"))
    if not ok:
        FAILED.append(what)


def all_bf16(sign=False):
    """Every finite bf16 value >= 0 (or of both signs)."""
    codes = np.arange(0, 0x7F80, dtype=np.uint16)
    if sign:
        codes = np.concatenate([codes, codes | 0x8000])
    return quant.bf16_decode(codes)


def nearest(values, x):
    """Index of the nearest value, ties to the even index (brute force)."""
    d = np.abs(values[None, :].astype(np.float64) - x[:, None])
    best = d.min(1)
    out = np.empty(len(x), np.int64)
    for i in range(len(x)):
        tied = np.flatnonzero(d[i] == best[i])
        out[i] = tied[0] if len(tied) == 1 else [t for t in tied if t % 2 == 0][0]
    return out


def formats():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(0, 460, 2000), 2.0 ** rng.uniform(-12, 9, 4000),
                        quant.E4M3[:127], (quant.E4M3[:126] + quant.E4M3[1:127]) / 2])
    x = x.astype(F32)
    want = nearest(quant.E4M3[:127], np.minimum(x, 448))
    check("e4m3: nearest, ties to even code, saturated", (quant.e4m3_codes(x) == want).all())
    check("e4m3: sign kept, -0 too", (quant.e4m3_codes(-x) == (want | 128)).all()
          and quant.e4m3_codes(F32(-0.0)) == 128)
    check("e4m3: every code survives",
          all(quant.e4m3_codes(quant.E4M3[[c]])[0] == c for c in range(256) if c & 127 != 127))
    y = np.arange(0, 8, 1 / 64, dtype=F32)
    want = nearest(quant.E2M1[:8], np.minimum(y, 6))
    check("e2m1: nearest, ties to even code, saturated", (quant.e2m1_codes(y) == want).all())
    check("e2m1: sign kept, -0 too", (quant.e2m1_codes(-y) == (want | 8)).all())
    b = all_bf16(True)
    check("bf16: every finite code survives",
          (quant.bf16_decode(quant.bf16_codes(b)).view(np.uint32) == b.view(np.uint32)).all())
    check("bf16: the quick way gives the same", all(
        (quant.bf16_plain(t).view(np.uint32) == quant.bf16_decode(
            quant.bf16_codes(t)).view(np.uint32)).all() for t in (
                b, b * F32(1.0071), rng.standard_normal(4000).astype(F32), x, np.array([np.nan]))))
    g = quant.bf16(rng.standard_normal((3000, 64)) * 2.0 ** rng.integers(-30, 20, (3000, 1)))
    check("activation: the quick way gives the same",
          (quant.activation(g).view(np.uint32) == quant.fp8_dequant(
              *quant.fp8_quant(g)).view(np.uint32)).all())
    half = F32(1 + 2.0 ** -8)
    check("bf16: ties to even", quant.bf16_codes(np.array([half]))[0] == 0x3F80)
    powers = np.ldexp(F32(1), np.arange(-126, 127)).astype(F32)
    check("ue8m0: exact powers of two do not round up",
          (quant.ue8m0_decode(quant.ue8m0_ceil(powers)) == powers).all())
    up = np.nextafter(powers[:-1], F32(np.inf))
    check("ue8m0: anything above does",
          (quant.ue8m0_decode(quant.ue8m0_ceil(up)) == 2 * powers[:-1]).all())


def division_or_reciprocal():
    """2.11: for every bf16 amax both give the same scale."""
    a = all_bf16()
    for floor, by in ((1e-4, 448), (6 * 2.0 ** -126, 6)):
        m = np.maximum(a, F32(floor))
        r = (m * (F32(1) / F32(by))).astype(F32)
        check("amax / %d and amax * (1/%d): same ue8m0" % (by, by),
              (quant.ue8m0_ceil(m / F32(by)) == quant.ue8m0_ceil(r)).all())
    m = np.maximum(a, F32(6 * 2.0 ** -9))
    r = (m * (F32(1) / F32(6))).astype(F32)
    check("amax / 6 and amax * (1/6): same e4m3 scale",
          (quant.e4m3_codes(m / F32(6)) == quant.e4m3_codes(r)).all())


def rows():
    x = quant.bf16(np.random.default_rng(1).standard_normal((50, 512)))
    check("row bytes 528, 288, 68", [quant.row_bytes(*a) for a in (
        ("win", 512), ("main", 512), ("key", 128))] == [528, 288, 68])
    check("890 B per token", (288 + 68) * (3 / 2 + 1) == 890)
    for kind in ("win", "main", "key"):
        r = quant.pack_row(kind, x)
        v = quant.unpack_row(kind, r, 512)
        worst = np.abs(v - x).max() / np.abs(x).max()
        check("%s row: round trip within the format" % kind,
              r.shape[1] == quant.row_bytes(kind, 512) and worst < (.04 if kind == "win" else .2))
        check("%s row: values are exact in bf16" % kind, (quant.bf16(v) == v).all())
    r = quant.pack_row("key", np.array([[.5, 6] + [0] * 30], F32))
    check("even element in the low nibble, scales last", r[0, 0] == 0x71 and r[0, 16] == 127)


def constants():
    """2.8 and 2.2"""
    v = 99092
    check("engram: multipliers of layer 1", engram.multipliers(1, v).tolist() == [
        76632096046245, 4839876093313, 35959672319349, 73987337458391])
    check("engram: multipliers of layer 14", engram.multipliers(14, v).tolist() == [
        67716810739261, 51510806800915, 30921347202721, 82619226485591])
    p = engram.buckets(16000000, [1, 14], 4, 8)
    check("engram: primes of layer 1", (p[1][0], p[1][-1], sum(p[1])) == (
        16000057, 16000463, 384006168))
    check("engram: primes of layer 14", (p[14][0], p[14][-1], sum(p[14])) == (
        16000477, 16000889, 384016682))
    real = real_rope()
    check("yarn limits 15, 25", rope.yarn_limits(real) == (15, 25))
    tiny = Config(toyconfig.tiny())
    check("yarn limits of tiny 0, 2", rope.yarn_limits(tiny) == (0, 2))
    f = rope.frequencies(real, True).astype(np.float64)
    exact = exact_frequencies()
    angle = (F32(1048575) * f.astype(F32)).astype(np.float64)
    off = np.abs(angle - 1048575 * exact)
    check("fp32 angle at 1,048,575: up to 0.024 rad off, at pair 1",
          0.02 < off.max() < 0.028 and off.argmax() == 1)
    ids = make_model.toy_ids(512)
    check("toy compressed ids: 486 of 512, 8166 of 8192",
          len(set(ids)) == 486 and len(set(make_model.toy_ids(8192))) == 8166)


def prompts():
    cfg = Config(toyconfig.tiny())
    for seed in (1, 3):
        for quant_on in (True, False):
            runs = [c for i, ids in enumerate(cases.prompts(cfg, 20, seed))
                    for c in cases.runs(cfg, ids, i, quant_on)]
            left = cases.edges(cfg, runs)
            check("20 prompts, seed %d, quant %s: every edge of 7.2 crossed%s" % (
                seed, "on" if quant_on else "off", "".join("; not " + e for e in left)),
                not left)


class real_rope:
    """The fields that rope.py reads, with the real model's values."""
    rope_dim, theta, compress_theta = 64, 10000, 160000
    scaling = {"factor": 16, "beta_fast": 32, "beta_slow": 1,
               "original_max_position_embeddings": 65536}


def exact_frequencies():
    i = np.arange(32)
    f = 160000.0 ** (-2 * i / 64)
    ramp = np.clip((i - 15) / 10, 0, 1)
    return f * (1 - ramp) + f / 16 * ramp


def same(a, b):
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def depths(m):
    """Executed figures of 3.2 and 3.3 on `tiny`.

    The model's attention has a large gain: one row too few reaches the result
    through eight windows and would be lost in roundings otherwise.
    """
    c, reach = m.cfg, 8 * (m.cfg.window - 1)
    prompts = [np.random.default_rng(s).integers(0, c.vocab - 2, 125) for s in range(2)]

    def tail(n):
        for ids in prompts:
            full = run.forward(m, ids, "all")
            r = run.forward(m, ids, "ced", decoder_tail=n)
            yield same(r.logits[1][-1], full.logits[1][-1])

    def replay(H, n):
        for ids in prompts:
            full = run.forward(m, ids[:H + 3], "all")
            r = run.session(m, ids[:H + 3], "all", H, True, n)
            yield encoder_same(m, r, full, H)
    check("decoder tail %d: last logits exact" % (reach + 1),
          all(tail(reach + 1)))
    check("decoder tail %d: not exact" % reach, not all(tail(reach)))
    for H in (120, 121):
        check("encoder replay %d before %d: exact" % (reach, H + 1),
              all(replay(H + 1, reach)))
        check("encoder replay %d before %d: not exact" % (reach - 1, H),
              not all(replay(H, reach - 1)))


def encoder_same(m, r, full, H):
    """Window rows that a query at p >= H reads, and all rows."""
    c = m.cfg
    for layer in range(c.first_decoder):
        pos, out = r.layer[layer]
        keep = pos >= H - c.window + 1
        if not np.array_equal(out["win"][keep], full.layer[layer][1]["win"][pos[keep]]):
            return False
    return all(np.array_equal(r.rows.codes[k], full.rows.codes[k]) for k in r.rows.codes)


def resume(m):
    ids = np.random.default_rng(6).integers(0, m.cfg.vocab - 2, 70)
    full = run.forward(m, ids, "all")
    for H in (1, 15, 16, 33, 64):
        r = run.session(m, ids, "all", H)
        check("resume at %d: logits and rows of the uninterrupted run" % H,
              same(r.logits[1], full.logits[1][H:]) and all(
                  np.array_equal(r.rows.codes[k], full.rows.codes[k])
                  for k in r.rows.codes))


def compare(root, *arguments, scratch=None):
    """compare as a person starts it, with the build folder `root`."""
    here = os.path.dirname(os.path.abspath(__file__))
    return subprocess.run([sys.executable, os.path.join(here, "compare"), "--prompts", "1",
                           "--quant", "off", *arguments], capture_output=True, text=True,
                          timeout=120, env={**os.environ, "CACHED_BUILD_ROOT": root,
                                            **({"TMPDIR": scratch} if scratch else {})})


def who_is_judged():
    """The build's engine unless asked otherwise: one that fails must show as that."""
    with tempfile.TemporaryDirectory(prefix="oracle-") as root:
        none = compare(root)
        check("no engine: refused in one sentence", none.returncode == 2 and not none.stdout
              and none.stderr.count("\n") == 1 and "there is no " + root in none.stderr)
        mixed = compare(root, "--self", "--engine", "x")
        check("--self with --engine: refused", mixed.returncode == 2)
        os.mkdir(os.path.join(root, "tools"))
        here = os.path.dirname(os.path.abspath(__file__))
        for name, text in (("cachectl", "echo planted >&2; exit 3"),
                           ("mkmodel", "exec %s %s/make_model.py \"$@\"" % (sys.executable, here))):
            path = os.path.join(root, "tools", name)
            with open(path, "w") as f:
                f.write("#!/bin/sh\n%s\n" % text)
            os.chmod(path, 0o755)
        broken = compare(root)
        check("the build's engine runs, and its failure is over the bound",
              broken.returncode == 1 and "exit 3: planted" in broken.stdout
              and "judged: " + root in broken.stdout)
        alone = compare(root, "--self")
        check("--self says that no engine ran", alone.returncode == 0
              and "no engine ran" in alone.stdout
              and "0 over bound (the oracle against itself)" in alone.stdout)
        plant = compare(root, "--plant", "q-norm")
        check("--plant says where its errors are", plant.returncode == 0
              and "in the oracle's own copy of the model; no engine ran" in plant.stdout)


def wrong_usage():
    """Refused in one sentence before anything runs; nothing temporary stays."""
    with tempfile.TemporaryDirectory(prefix="oracle-") as root:
        empty = os.path.join(root, "empty")
        os.mkdir(empty)
        with open(os.path.join(root, "half.json"), "w") as f:
            f.write("{")
        for arguments, words in (
                (["--prompts", "0"], "--prompts: must be 1 to 1000, found 0"),
                (["--prompts", "-1"], "--prompts"),
                (["--prompts", "x"], "--prompts: must be 1 to 1000, found x"),
                (["--prompts", "1001"], "--prompts: must be 1 to 1000, found 1001"),
                (["--lengths", "3,0"], "--lengths: must be 1 to 1048576, found 0"),
                (["--lengths", "3,"], "--lengths: must be 1 to 1048576, found "),
                (["--seed", str(2**64)], "--seed: must be 0 to"),
                (["--config", "foo"], "--config foo is neither tiny nor small"),
                (["--config", os.path.join(root, "half.json")], "no model of --config"),
                (["--model", "/nonexistent"], "--model /nonexistent is no folder"),
                (["--model", empty], "is no model that can be judged"),
                (["--plant", "nosuch"], "--plant nosuch is no planted error; there are: all,"),
                (["--plant", "q-norm,"], "is no planted error"),
                (["--plant", "group-16"], "needs --quant on"),
                (["--keep", "/proc/x"], "--keep /proc/x: ")):
            got = compare(root, "--self", *arguments, scratch=root)
            check("compare %s: refused" % " ".join(arguments)[:40], got.returncode == 2
                  and not got.stdout and got.stderr.count("\n") == 1 and words in got.stderr
                  and got.stderr.startswith("compare: "))
        told = compare(root, "--help").stdout
        check("--help: prompts, seed, an example", "1 to 1000 (default 20)" in told
              and "of the model's weights and of the prompts" in told
              and "example: compare --config tiny" in told)
        here = os.path.dirname(os.path.abspath(__file__))
        for number in (signal.SIGTERM, signal.SIGINT):
            run = subprocess.Popen(
                [sys.executable, os.path.join(here, "compare"), "--self", "--prompts", "1000"],
                env={**os.environ, "TMPDIR": root}, stderr=subprocess.PIPE, text=True)
            while run.poll() is None and not any(
                    n.startswith("oracle-") for n in os.listdir(root)):
                time.sleep(0.02)
            run.send_signal(number)
            said = run.communicate(timeout=60)[1]
            check("ended by signal %d: says so, exit %d" % (number, 128 + number),
                  run.returncode == 128 + number and said == "compare: ended by signal %d\n" % number)
        check("nothing temporary stays", sorted(os.listdir(root)) == ["empty", "half.json"])


def main():
    began = time.time()
    prompts()
    formats()
    division_or_reciprocal()
    rows()
    constants()
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        make_model.make(toyconfig.tiny(), 3, folder)
        m = Model(folder)
        size = os.path.getsize(folder + "/model.safetensors") - m.w.store.files[
            folder + "/model.safetensors"].base
        check("tiny: 6,219,390 bytes of tensors (7.2)", size == 6219390)
        resume(m)
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        make_model.make(toyconfig.tiny(), 3, folder, 16.0)
        depths(Model(folder))
    who_is_judged()
    wrong_usage()
    print("%d failed, %.0f s" % (len(FAILED), time.time() - began))
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
