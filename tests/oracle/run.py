"""Whole runs: prefill "all" and "ced" (3.1, 3.2), resume, encoder replay (3.3).

A run computes positions start .. N-1.  Encoder layers run over all of them,
decoder layers over all (mode "all") or over the last `window` (mode "ced"),
with the window clipped at the first one.
"""
import hashlib

import numpy as np

import draft as dspark
import quant
import safetensors
from model import Context, Rows, block, embed, head, rows_only

F32 = np.float32


class Result:
    """Everything the dump holds, and the state to go on from."""

    def __init__(self, ids):
        self.ids = ids
        self.layer = {}          # layer -> (positions, block() output)
        self.history = {}        # layer -> (first position, codes) before these
        self.stage = {}          # stage -> (positions, window row codes)
        self.rows = None
        self.engram = {}         # layer -> (positions, row numbers)
        self.logits = None       # (positions, values)
        self.draft = None
        self.token = None
        self.clip = {}


def dead_mask(m, ids):
    return ids == m.cfg.image_id


def engram_rows(m, ids, layer):
    ctx = m.hash.context(ids, dead_mask(m, ids), "raw-zero-pad" not in m.plants)
    return m.hash.rows(layer, ctx)


def window_tail(m, history, pos, codes):
    """The last `window` rows after a run, as (first position, codes)."""
    first = int(pos[0])
    if history is not None and len(history[1]):
        first, codes = history[0], np.concatenate([history[1], codes])
    cut = max(0, len(codes) - m.cfg.window)
    return first + cut, codes[cut:]


def forward(m, ids, mode, start=0, before=None, floor=0, clip=0,
            decoder_tail=None, forced=None):
    """before: Result to resume from, windows included (None: windows missing).

    floor: tokens whose rows are given (already in `rows` of a replay).
    forced: {layer: {"topk", "candidates", "experts"}} of another dump.
    """
    c, ids = m.cfg, np.asarray(ids, np.int64)
    n, out = len(ids), Result(np.asarray(ids))
    dead = dead_mask(m, ids)
    rows = Rows(m, n)
    given = before if before is not None else None
    if isinstance(floor, tuple):                       # (tokens, Result)
        floor, given = floor
    if given is not None:
        for s in c.kv_sources:
            upto = (floor or start) // c.ratio(s)
            rows.copy_below(given.rows, s, upto)
    tail = c.window if decoder_tail is None else decoder_tail
    dec = max(start, n - tail) if mode == "ced" else start
    X, g = embed(m, ids[start:])
    pos = np.arange(start, n)
    topk = cands = None
    out.dec, out.rows, taps = dec, rows, []
    for layer in range(c.layers):
        if layer == c.first_decoder and dec > start:
            ctx = Context(pos[:dec - start], clip, dead[start:dec], floor, rows)
            rows_only(m, layer, X[:dec - start], g[:dec - start], ctx)
            X, g, pos = X[dec - start:], g[dec - start:], pos[dec - start:]
        decoder = layer >= c.first_decoder
        ctx = Context(pos, max(clip, dec) if decoder and dec > start else clip,
                      dead[pos], floor, rows)
        ctx.topk, ctx.candidates = topk, cands
        history = None
        if before is not None and not (decoder and dec > start):
            history = before.windows(m, layer)
            ctx.history = (history[0], m.decode("win", history[1]))
            ctx.tail = before.layer[layer][1].get("tail")
        if layer in c.engram_layers:
            out.engram[layer] = (pos, engram_rows(m, ids, layer)[pos])
            ctx.engram_rows = out.engram[layer][1]
        r = block(m, layer, X, g, ctx, (forced or {}).get(layer))
        r["codes"] = r["win"]
        out.layer[layer], out.history[layer] = (pos, r), history
        X, g, topk, cands = r["X"], r["g"], ctx.topk, ctx.candidates
        if layer in c.draft_targets:
            taps.append(r["tap"])
    out.logits = (pos, head(m, X, g)[0])
    finish(m, out, pos, taps, before if dec == start else None)
    return out


def finish(m, out, pos, taps, before):
    """Draft window rows, then the greedy block after the last token."""
    c = m.cfg
    main_x = dspark.stage_rows(m, taps)
    windows = []
    for s in range(c.stages):
        out.stage[s] = (pos, dspark.context_rows(m, s, main_x, pos))
        old = before.windows(m, c.layers + s) if before is not None else None
        out.history[c.layers + s] = old
        first, codes = window_tail(m, old, *out.stage[s])
        windows.append((first, m.decode("win", codes)))
    out.token = int(np.argmax(out.logits[1][-1]))
    out.draft = dspark.draft(m, out.token, int(pos[-1]), windows)


def _windows(self, m, layer):
    if layer >= m.cfg.layers:
        pos, codes = self.stage[layer - m.cfg.layers]
    else:
        pos, codes = self.layer[layer][0], self.layer[layer][1]["win"]
    return window_tail(m, self.history.get(layer), pos, codes)


Result.windows = _windows


def session(m, ids, mode, resume_at=None, replay=False, depth=None, forced=None,
            forced_before=None):
    """A cold run, a resumed one, or one with encoder replay before resume_at."""
    if resume_at is None:
        return forward(m, ids, mode, forced=forced)
    before = forward(m, ids[:resume_at], mode, forced=forced_before)
    if not replay:
        return forward(m, ids, mode, resume_at, before, forced=forced)
    start = max(0, resume_at - (m.cfg.window if depth is None else depth))
    return forward(m, ids, mode, start, None, (resume_at, before), start,
                   forced=forced)


# ------------------------------------------------------------------- dump

def model_id(folder):
    h = hashlib.sha256()
    for name in ("config.json", "model.safetensors", "engram_ids.bin"):
        try:
            with open(folder + "/" + name, "rb") as f:
                h.update(f.read())
        except FileNotFoundError:
            pass
    return h.hexdigest()


def _padded(a):
    return a.astype(np.int32)


def dump_tensors(m, r):
    c, t = m.cfg, []
    code = "U8" if m.q else "F32"

    def put(name, dtype, a, pos=None):
        t.append((name, dtype, a))
        if pos is not None:
            t.append((name + ".pos", "I32", np.asarray(pos, np.int32)))

    put("tokens", "I32", r.ids.astype(np.int32))
    for l in range(c.layers):
        pos, o = r.layer[l]
        if m.q:
            put("stream.%d" % l, "BF16", quant.bf16_codes(o["X"]), pos)
        else:
            put("stream.%d" % l, "F32", o["X"], pos)
        put("premix.%d" % l, "F32", o["g"], pos)
        if l in c.index_sources:
            put("topk.%d" % l, "I32", _padded(o["topk"]), pos)
        if l == c.cand_source:
            put("candidates", "I32", _padded(o["candidates"]), pos)
        put("experts.%d" % l, "I32", o["experts"].astype(np.int32), pos)
        put("experts.%d.weight" % l, "F32", o["weights"], pos)
        if l in c.engram_layers:
            put("engram.%d" % l, "I64", r.engram[l][1], r.engram[l][0])
    for l in range(c.layers + c.stages):
        first, codes = r.windows(m, l)
        put("win.%d" % l, code, codes, np.arange(first, first + len(codes)))
    for s in c.kv_sources:
        put("rows.%d" % s, code, r.rows.codes["main", s])
        put("keys.%d" % s, code, r.rows.codes["key", s])
    put("logits", "F32", r.logits[1], r.logits[0])
    put("draft", "I32", r.draft["draft"])
    put("draft.token", "I32", np.array([r.token], np.int32))
    put("draft.logits", "F32", r.draft["logits"])
    put("draft.confidence", "F32", r.draft["confidence"])
    return t


def write_dump(path, m, r, mode, resume_at=None, replay=False, more=()):
    meta = {"model": model_id(m.folder), "isa": "numpy", "family": "oracle",
            "prefill": mode, "chunk": 0, "resume_at": resume_at or 0,
            "replay": int(bool(replay)), "quant": "on" if m.q else "off"}
    safetensors.write(path, dump_tensors(m, r) + list(more), meta)
