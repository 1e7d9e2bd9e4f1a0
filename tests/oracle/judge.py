"""Judge a dump layer by layer.

Each layer gets the dump's own input streams, stored rows, published lists and
expert choices; what the oracle makes of them must be what the dump says.
"""
import numpy as np

import draft as dspark
import measure
import probe
import quant
import run
import safetensors
from model import Context, Rows, block, embed, head, rows_only, stored, tap

F32 = np.float32
BOUND_OF = {"stream": measure.UPDATE, "premix": measure.FP32,
            "expert weights": measure.FP32}
PROBE_SHARE = 0.08     # more positions of a layer off than this: no excuses


class Dump:
    def __init__(self, path):
        self.f = safetensors.File(path)
        self.meta = self.f.metadata

    def get(self, name):
        a = self.f.get(name)
        if self.f.dtype(name) == "BF16" and name.startswith("stream."):
            return quant.bf16_decode(a)
        return a

    def pos(self, name):
        if name.endswith(".weight") and name + ".pos" not in self.f:
            name = name[:-len(".weight")]
        p = self.f.get(name + ".pos")
        if len(p) > 1 and not (np.diff(p) > 0).all():
            raise ValueError(name + ".pos is not ascending")
        return p


def codes_per_row(m, kind):
    """Elements and scales of one stored row."""
    n = m.cfg.index_dim if kind == "key" else m.cfg.head_dim
    return m.width(kind) + (n // 2 if m.q and kind != "win" else 0)


class FrozenRows(Rows):
    """The dump's rows; what the oracle computes is compared, not stored."""

    def load(self, dump):
        for s in self.m.cfg.kv_sources:
            for kind, name in (("main", "rows.%d"), ("key", "keys.%d")):
                a = dump.get(name % s)
                if a.shape != self.codes[kind, s].shape:
                    raise ValueError("%s: shape %s, expected %s" % (
                        name % s, a.shape, self.codes[kind, s].shape))
                Rows.put(self, kind, s, 0, a)
        return self

    def put(self, *_):
        pass


class Case:
    """One run of the other side: what it was asked to do."""

    def __init__(self, ids, mode="all", chunk=None, resume=None, replay=False,
                 quant_on=True):
        self.ids, self.mode, self.chunk = np.asarray(ids), mode, chunk
        self.resume, self.replay, self.quant_on = resume, replay, quant_on

    def name(self):
        return "n=%d %s%s%s%s quant=%s" % (
            len(self.ids), self.mode,
            " chunk=%d" % self.chunk if self.chunk else "",
            " resume=%d" % self.resume if self.resume else "",
            " replay" if self.replay else "", "on" if self.quant_on else "off")


class Judge:
    def __init__(self, m, table, dump, case, prefix=None, cold=None):
        self.m, self.t, self.d, self.case = m, table, dump, case
        self.prefix, self.cold = prefix, cold
        c, n, H = m.cfg, len(case.ids), case.resume
        self.start = 0
        if H:
            self.start = max(0, H - c.window) if case.replay else H
        self.floor = H if case.replay else 0
        self.clip = self.start if case.replay else 0
        self.dec = max(self.start, n - c.window) if case.mode == "ced" else self.start
        self.ids = np.asarray(case.ids, np.int64)
        self.dead = run.dead_mask(m, self.ids)

    # --- reading the dump: own positions, and history from the prefix's dump

    def from_(self, layer):
        return self.dec if layer >= self.m.cfg.first_decoder else self.start

    def use_prefix(self, layer):
        if self.prefix is None or self.case.replay or not self.case.resume:
            return False
        return layer < self.m.cfg.first_decoder or self.dec == self.start

    def read(self, name, layer):
        """-> positions, values: from `from_` on, after up to W of history."""
        lo = self.from_(layer)
        pos, a = self.d.pos(name), self.d.get(name)
        a, pos = a[pos >= lo], pos[pos >= lo]
        if self.use_prefix(layer):
            old, b = self.prefix.pos(name), self.prefix.get(name)
            keep = (old >= lo - self.m.cfg.window) & (old < lo)
            pos, a = np.concatenate([old[keep], pos]), np.concatenate([b[keep], a])
        return pos, a

    def expect(self, layer):
        pos, _ = self.read("premix.%d" % layer, layer)
        n, lo = len(self.ids), self.from_(layer)
        want = np.arange(lo, n)
        if not np.array_equal(pos[pos >= lo], want) or not (np.diff(pos) == 1).all():
            raise ValueError("layer %d: positions %s, expected %d..%d" % (
                layer, pos, lo, n - 1))
        return pos

    def aligned(self, name, layer, pos):
        p, a = self.read(name, layer)
        if not np.array_equal(p, pos):
            raise ValueError("%s: positions differ from the layer's" % name)
        return a

    def window_rows(self, layer, pos):
        """(mask, codes) of the dump's window rows at these positions."""
        name = "win.%d" % layer
        a = self.d.get(name)
        out = np.zeros((len(pos), a.shape[1]), a.dtype)
        there = np.zeros(len(pos), bool)
        sources = [(self.d.pos(name), a)]
        if self.use_prefix(min(layer, self.m.cfg.layers - 1)):
            sources.insert(0, (self.prefix.pos(name), self.prefix.get(name)))
        for p, codes in sources:
            keep = (p >= pos[0]) & (p <= pos[-1])
            out[p[keep] - pos[0]] = codes[keep]
            there[p[keep] - pos[0]] = True
        if a.shape[1] != self.m.width("win"):
            raise ValueError("%s: row of %d" % (name, a.shape[1]))
        return there, out

    # --- the whole dump

    def all(self):
        try:
            self.header()
            self.layers()
            self.ending()
        except (KeyError, ValueError, IndexError) as e:
            self.t.add("dump readable", 1, 1, over=1)
            self.t.note("%s: %s: %s" % (self.case.name(), type(e).__name__, e))
        else:
            self.t.add("dump readable", 1)

    def header(self):
        if not np.array_equal(self.d.get("tokens"), self.ids):
            raise ValueError("tokens differ")
        truth = ("on", "1", "true") if self.case.quant_on else ("off", "0", "false")
        for k, v in (("prefill", (self.case.mode,)), ("quant", truth)):
            if self.d.meta.get(k) not in v:
                raise ValueError("metadata %s = %s" % (k, self.d.meta.get(k)))
        self.given_rows()

    def given_rows(self):
        """Rows below H: byte for byte those of a run that never stopped."""
        if not self.case.resume:
            return
        for other in (self.cold, self.prefix):
            for s in self.m.cfg.kv_sources if other is not None else ():
                n = self.case.resume // self.m.cfg.ratio(s)
                for name in ("rows.%d" % s, "keys.%d" % s):
                    bad = (self.d.get(name)[:n] != other.get(name)[:n]).any(1).sum()
                    self.t.add("rows below H", n, bad, over=bad)

    def layers(self):
        c = self.m.cfg
        self.rows = FrozenRows(self.m, len(self.ids)).load(self.d)
        self.taps, topk, cands = [], None, None
        for layer in range(c.layers):
            job = LayerJob(self, layer, topk, cands)
            out = job.judge()
            topk, cands = job.ctx.topk, job.ctx.candidates
            if layer == c.first_decoder - 1:
                topk = cands = None
            if layer in c.draft_targets:
                self.taps.append(out["tap"])
        self.dec_pos = job.pos

    def inputs(self, layer, pos):
        if layer == 0:
            return embed(self.m, self.ids[pos])
        p, X = self.read("stream.%d" % (layer - 1), layer - 1)
        g = self.aligned("premix.%d" % (layer - 1), layer - 1, p)
        keep = (p >= pos[0]) & (p <= pos[-1])
        return X[keep], g[keep]

    # --- logits and drafts

    def ending(self):
        c, m, last = self.m.cfg, self.m, self.m.cfg.layers - 1
        pos = self.dec_pos
        own = pos >= self.dec
        X = self.aligned("stream.%d" % last, last, pos)
        g = self.aligned("premix.%d" % last, last, pos)
        lpos = self.d.pos("logits")
        theirs = self.d.get("logits")[lpos >= self.dec]
        if not np.array_equal(lpos[lpos >= self.dec], pos[own]):
            raise ValueError("logits: positions")
        mine = head(m, X[own], g[own])[0]
        differ, bad, worst = measure.close(mine, theirs, measure.LOGITS)
        self.t.add("logits", mine.size, differ.sum(), worst.max(), bad.sum())
        self.drafts(theirs[-1], pos)

    def drafts(self, last_logits, pos):
        m, c = self.m, self.m.cfg
        main_x = dspark.stage_rows(m, self.taps)
        windows = []
        for s in range(c.stages):
            there, theirs = self.window_rows(c.layers + s, pos)
            mine = dspark.context_rows(m, s, main_x, pos)
            self.stage_codes(s, pos, mine, theirs, there & (pos >= self.dec))
            codes = np.where(there[:, None], theirs, mine)
            cut = max(0, len(codes) - c.window)
            windows.append((int(pos[0]) + cut, m.decode("win", codes[cut:])))
        token, drafts = int(self.d.get("draft.token")[0]), self.d.get("draft")
        logits, conf = self.d.get("draft.logits"), self.d.get("draft.confidence")
        greedy = np.concatenate([[np.argmax(last_logits)], np.argmax(logits, 1)])
        bad = (greedy != np.concatenate([[token], drafts])).sum()
        self.t.add("draft tokens", len(greedy), bad, over=bad)

        def once(_rows):
            return dspark.draft(m, token, int(pos[-1]), windows, drafts)
        self.draft_values(once, logits, conf)

    def draft_values(self, once, logits, conf):
        def off(r):
            return (measure.close(r["logits"].reshape(1, -1), logits.reshape(1, -1),
                                  measure.LOGITS),
                    measure.close(r["confidence"].reshape(1, -1),
                                  conf.reshape(1, -1), measure.LOGITS))
        a, b = off(once([]))
        bad = bool(a[1][0] or b[1][0])
        fine = bad and probe.explain(
            once, lambda r: max(x[2][0] for x in off(r)) / measure.LOGITS)
        if bad and not fine:
            self.t.note("%s: draft logits %.2g, confidence %.2g" % (
                self.case.name(), a[2][0], b[2][0]))
        self.t.add("draft.logits", logits.size, a[0].sum(), 0 if fine else a[2][0],
                   int(bad and not fine), int(bool(fine)))
        self.t.add("draft.confidence", conf.size, b[0].sum(), 0 if fine else b[2][0])

    def stage_codes(self, stage, pos, mine, theirs, mask):
        differ, bad, worst = measure.codes(self.m, "win", mine[mask], theirs[mask])
        excused = np.zeros(len(bad), bool)
        where = np.flatnonzero(differ)
        if len(where) <= 3 + PROBE_SHARE * len(bad):
            for i in where:
                k = np.flatnonzero(mask)[i]
                excused[i] = self.explain_stage(stage, pos, k, theirs)
        over = (bad & ~excused).sum()
        if over:
            self.t.note("%s: draft stage %d window rows" % (self.case.name(), stage))
        self.t.add("codes win draft", mine[mask].size, differ[~excused].sum(),
                   worst[~excused].max(initial=0), over, excused.sum())

    def explain_stage(self, stage, pos, k, theirs):
        m = self.m
        taps = [t[k:k + 1] for t in self.taps]

        def once(_rows):
            x = dspark.stage_rows(m, taps)
            return dspark.context_rows(m, stage, x, pos[k:k + 1])
        return probe.explain(once, lambda c: (c != theirs[k:k + 1]).sum() + 0.5)


class LayerJob:
    """One layer of one dump."""

    def __init__(self, j, layer, topk, cands):
        self.j, self.m, self.layer = j, j.m, layer
        c = j.m.cfg
        self.pos = pos = j.expect(layer)
        self.own = pos >= j.from_(layer)
        self.others = {}                       # see other_rows()
        self.X, self.g = j.inputs(layer, pos)
        self.theirs = {
            "X": j.aligned("stream.%d" % layer, layer, pos),
            "g": j.aligned("premix.%d" % layer, layer, pos),
            "experts": j.aligned("experts.%d" % layer, layer, pos),
            "weights": j.aligned("experts.%d.weight" % layer, layer, pos),
            "win": j.window_rows(layer, pos)}
        if layer in c.index_sources:
            self.theirs["topk"] = j.aligned("topk.%d" % layer, layer, pos)
        if layer == c.cand_source:
            self.theirs["candidates"] = j.aligned("candidates", layer, pos)
        self.ctx = self.context(slice(0, len(pos)))
        self.ctx.topk, self.ctx.candidates = topk, cands

    def context(self, part):
        j, pos = self.j, self.pos[part]
        clip = j.clip
        if self.layer >= j.m.cfg.first_decoder and j.dec > j.start:
            clip = max(clip, j.dec)
        ctx = Context(pos, clip, j.dead[pos], j.floor, j.rows)
        if self.layer in j.m.cfg.engram_layers:
            ctx.engram_rows = run.engram_rows(j.m, j.ids, self.layer)[pos]
        return ctx

    def forced(self, part):
        out = {k: v[part] for k, v in self.theirs.items()
               if k in ("topk", "candidates", "experts")}
        out["win"] = tuple(a[part] for a in self.theirs["win"])
        return out

    def judge(self):
        j = self.j
        self.engram_item()
        self.early_rows()
        out = block(self.m, self.layer, self.X, self.g, self.ctx,
                    self.forced(slice(0, len(self.pos))))
        there, codes = self.theirs["win"]
        self.window = np.where(there[:, None], codes, out["win"])
        found = self.check(out, slice(0, len(self.pos)))
        excused = self.excuses(found)
        for item, (mask, differ, bad, worst, size) in found.items():
            keep = mask & self.own
            over = (bad & keep & ~excused).sum()
            free = keep & ~excused
            self.j.t.add(item, size * keep.sum(), differ[free].sum(),
                         worst[free].max(initial=0), over,
                         ((differ > 0) & keep & excused).sum()
                         if item.startswith("codes") else (bad & keep & excused).sum())
            if over:
                where = self.pos[bad & keep & ~excused]
                j.t.note("%s: layer %d %s: %d positions, first %d, worst %.3g" % (
                    j.case.name(), self.layer, item, over, where[0],
                    worst[free].max()))
        return out

    def engram_item(self):
        if self.layer not in self.m.cfg.engram_layers:
            return
        a = self.j.aligned("engram.%d" % self.layer, self.layer, self.pos)[self.own]
        bad = (a != self.ctx.engram_rows[self.own]).sum()
        self.j.t.add("engram rows", a.size, bad, over=bad)
        if bad:
            self.j.t.note("%s: engram rows of layer %d" % (self.j.case.name(), self.layer))

    def entries(self, kind, out, part):
        """(mask, mine, theirs): the entry that each position completes."""
        j, s, pos = self.j, self.layer, self.pos[part]
        ratio = self.m.cfg.ratio(s)
        j0, mine = out["rows" if kind == "main" else "keys"]
        e = (pos + 1) // ratio - 1
        mask = ((pos + 1) % ratio == 0) & (e >= j0) & (e - j0 < len(mine))
        mask &= e >= j.floor // ratio
        theirs = j.rows.codes[kind, s]
        if not mask.any():
            blank = np.zeros((len(pos), theirs.shape[1]), theirs.dtype)
            return mask, blank, blank
        return (mask, mine[np.clip(e - j0, 0, len(mine) - 1)],
                theirs[np.clip(e, 0, len(theirs) - 1)])

    def code_items(self, out, part):
        there, win = (a[part] for a in self.theirs["win"])
        items = {"codes win": ("win", there, out["win"], win)}
        if self.layer in self.m.cfg.kv_sources:
            items["codes main"] = ("main",) + self.entries("main", out, part)
            items["codes key"] = ("key",) + self.entries("key", out, part)
        found = {}
        for item, (kind, mask, mine, theirs) in items.items():
            mine = np.where(mask[:, None], mine, theirs)
            differ, bad, worst = measure.codes(self.m, kind, mine, theirs)
            size = codes_per_row(self.m, kind)
            found[item] = (mask, differ, bad, worst, size)
        return found

    def check(self, out, part):
        th, found = self.theirs, self.code_items(out, part)
        every = np.ones(len(self.pos[part]), bool)

        def put(item, r, size):
            found[item] = (every,) + tuple(r) + (size,)
        if "topk" in th:
            put("topk lists", measure.choices(out["topk"], th["topk"][part],
                                              out["scores"]), 1)
        if "candidates" in th:
            put("candidates", measure.choices(
                out["candidates"], th["candidates"][part], out["block_scores"]), 1)
        put("experts", measure.choices(out["experts"], th["experts"][part],
                                       out["route_scores"]), 1)
        put("expert weights", measure.close(out["weights"], th["weights"][part],
                                            measure.FP32), out["weights"].shape[1])
        put("stream", measure.stream(out["X"], th["X"][part], self.X[part]),
            out["X"][0].size)
        put("premix", measure.close(out["g"], th["g"][part], measure.FP32),
            out["g"].shape[1])
        return found

    # --- roundings that noise could decide (probe.py)

    def excuses(self, found):
        excused = np.zeros(len(self.pos), bool)
        off, only_codes = np.zeros(len(self.pos), bool), np.ones(len(self.pos), bool)
        for item, (mask, differ, bad, _, _) in found.items():
            wrong = mask & (differ > 0 if item.startswith("codes") else bad)
            off |= wrong
            if not item.startswith("codes"):
                only_codes &= ~wrong
        off &= self.own
        self.j.t.add("excused (position, layer)", self.own.sum())
        if off.sum() > 3 + PROBE_SHARE * self.own.sum():
            return excused
        for i in np.flatnonzero(off):
            excused[i] = self.explain(int(i), bool(only_codes[i]))
        self.j.t.add("excused (position, layer)", 0, excused.sum())
        return excused

    def explain(self, i, only_codes):
        """Is there a legal rounding under which position i is all right?"""
        part = slice(max(0, i - 1), i + 1)
        ctx = self.context(part)
        for name in ("topk", "candidates"):
            full = getattr(self.ctx, name)
            setattr(ctx, name, None if full is None else full[part])
        first = max(0, part.start - self.m.cfg.window)
        window = self.window[first:part.start]
        args = (self.m, self.layer, self.X[part], self.g[part], ctx)

        def once(rows):
            codes = window.copy()
            for k, row in rows:
                codes[k - first] = row
            ctx.history = (int(self.pos[first]), self.m.decode("win", codes))
            if only_codes:
                return stored(*args)
            ctx.topk = None if self.ctx.topk is None else self.ctx.topk[part]
            return block(*args, self.forced(part))

        def distance(out):
            found = self.code_items(out, part) if only_codes else self.check(out, part)
            far = 0.0
            for item, (mask, differ, bad, worst, size) in found.items():
                if not mask[-1]:
                    continue
                if item.startswith("codes"):       # one stray single step is fine
                    far = max(far, 1 + differ[-1] if bad[-1] else differ[-1] / 1.5)
                elif bad[-1]:
                    far = max(far, worst[-1] / BOUND_OF.get(item, measure.TIE), 1.01)
            return far
        rows = [] if only_codes else self.other_rows(first, part.start)
        return probe.explain(once, distance, rows)

    def other_rows(self, first, end):
        """Window rows the dump no longer holds, as noise could have made them."""
        out, (there, _) = [], self.theirs["win"]
        for k in np.flatnonzero(~there[first:end]) + first:
            if k not in self.others:
                self.others[k] = self.row_variants(slice(k, k + 1))
            out += self.others[k]
        return out

    def row_variants(self, part):
        ctx = self.context(part)

        def once():
            return stored(self.m, self.layer, self.X[part], self.g[part], ctx)["win"]
        base, sites = probe.evaluate(once)
        rows = [probe.evaluate(once, [s])[0][0] for s in dict.fromkeys(sites)]
        return [(part.start, r) for r in rows if not np.array_equal(r, base[0])]

    def early_rows(self):
        """Row source of a "ced" run: tokens before the decoder's (3.1)."""
        j = self.j
        if self.layer != self.m.cfg.first_decoder or j.dec == j.start:
            return
        early = EarlyRows(j, self.layer)
        found = early.code_items(rows_only(
            early.m, early.layer, early.X, early.g, early.ctx), slice(0, len(early.pos)))
        excused = early.excuses(found)
        for item, (mask, differ, bad, worst, size) in found.items():
            keep = mask & early.own
            over = (bad & keep & ~excused).sum()
            free = keep & ~excused
            j.t.add(item, size * keep.sum(), differ[free].sum(),
                    worst[free].max(initial=0), over, ((differ > 0) & keep & excused).sum())
            if over:
                j.t.note("%s: %s before the decoder" % (j.case.name(), item))


class EarlyRows(LayerJob):
    def __init__(self, j, layer):
        self.j, self.m, self.layer = j, j.m, layer
        p, X = j.read("stream.%d" % (layer - 1), layer - 1)
        g = j.aligned("premix.%d" % (layer - 1), layer - 1, p)
        keep = (p >= j.start) & (p < j.dec)
        self.pos, self.X, self.g = p[keep], X[keep], g[keep]
        self.own = np.ones(len(self.pos), bool)
        self.ctx = self.context(slice(0, len(self.pos)))
        self.window = np.zeros((len(self.pos), j.m.width("win")), j.m.code_dtype())

    def code_items(self, out, part):
        found = {}
        for item, kind in (("codes main", "main"), ("codes key", "key")):
            mask, mine, theirs = self.entries(kind, out, part)
            mine = np.where(mask[:, None], mine, theirs)
            differ, bad, worst = measure.codes(self.m, kind, mine, theirs)
            size = codes_per_row(self.m, kind)
            found[item] = (mask, differ, bad, worst, size)
        return found
