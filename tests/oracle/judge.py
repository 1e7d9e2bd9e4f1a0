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
from model import Context, Rows, attend_step, block, embed, head, rows_only, stored

F32 = np.float32
BOUND_OF = {"stream": measure.UPDATE, "premix": measure.FP32,
            "expert weights": measure.FP32}
DRAFT_EFFORT = 800     # evaluations of a search for roundings of a draft block
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
        p = self.f.get(name + ".pos")
        if len(p) > 1 and not (np.diff(p) > 0).all():
            raise ValueError(name + ".pos is not ascending")
        return p


def codes_per_row(m, kind):
    """Elements and scales of one stored row; quant off: elements."""
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

    def add(self, item, *args, **more):
        """Items of runs with quant off have a name of their own."""
        if not self.m.q:
            item = item.replace("codes ", "values ") + ", off"
        self.t.add(item, *args, **more)

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
            self.add("dump readable", 1, 1, over=1)
            self.t.note("%s: %s: %s" % (self.case.name(), type(e).__name__, e))
        else:
            self.add("dump readable", 1)

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
                    self.add("rows below H", n, bad, over=bad)

    def layers(self):
        c = self.m.cfg
        self.rows = FrozenRows(self.m, len(self.ids)).load(self.d)
        self.taps, topk, cands = [], None, None
        for layer in range(c.layers):
            job = LayerJob(self, layer, topk, cands)
            out = job.judge()
            topk, cands = job.ctx.topk, job.ctx.candidates
            self.done(job)
            if layer == c.first_decoder - 1:
                topk = cands = None
            if layer in c.draft_targets:
                self.taps.append(out["tap"])
        self.dec_pos = job.pos

    def done(self, job):
        """A layer is judged; for those who want more of it."""

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
        differ, bad, worst = measure.close(
            mine, theirs, measure.LOGITS if m.q else measure.OFF)
        self.add("logits", mine.size, differ.sum(), worst.max(), bad.sum())
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
        self.add("draft tokens", len(greedy), bad, over=bad)

        def once(copies, experts=None):
            return dspark.draft(m, token, int(pos[-1]), windows, drafts, copies, experts)
        self.draft_values(once, logits, conf)

    def draft_values(self, once, logits, conf):
        m = self.m
        bound = measure.LOGITS if m.q else measure.DRAFTS_OFF

        def off(r, copies=1):
            return [measure.close(r[k].reshape(copies, -1),
                                  np.tile(b.reshape(1, -1), (copies, 1)), bound)
                    for k, b in (("logits", logits), ("confidence", conf))]

        def far(r, copies=1):
            return np.maximum(*(t[2] for t in off(r, copies))) / bound
        plain = once(1)
        (a, b), legal = off(plain), False
        bad = a[1][0] or b[1][0]
        if bad and m.q:
            _, sites = probe.undecided(lambda: once(1))
            legal = probe.explain(
                sites, far(plain)[0], lambda tries: far(probe.flipped(
                    lambda: once(len(tries), plain["experts"]), [f for f, _ in tries]),
                    len(tries)),
                (), max(1, min(128, attend_step(m.cfg) // m.cfg.draft_block)),
                DRAFT_EFFORT)
            if legal is None and not far(plain)[0] * bound <= measure.DRAFTS:
                legal = False
        if m.q:
            self.add(measure.UNDECIDED_DRAFTS, 1, legal is None)
        fine = legal is not False
        if bad and not fine:
            self.t.note("%s: draft logits %.2g, confidence %.2g" % (
                self.case.name(), a[2][0], b[2][0]))
        self.add("draft.logits", logits.size, a[0].sum(), 0 if fine else a[2][0],
                 bad and not fine, legal is True)
        self.add("draft.confidence", conf.size, b[0].sum(), 0 if fine else b[2][0])

    def stage_codes(self, stage, pos, mine, theirs, mask):
        differ, bad, worst = measure.codes(self.m, "win", mine[mask], theirs[mask])
        excused = np.zeros(len(bad), bool)
        where = np.flatnonzero(differ)
        if self.m.q and len(where) <= 3 + PROBE_SHARE * len(bad):
            for i in where:
                k = np.flatnonzero(mask)[i]
                excused[i] = self.explain_stage(stage, pos, k, theirs) is True
        over = (bad & ~excused).sum()
        if over:
            self.t.note("%s: draft stage %d window rows" % (self.case.name(), stage))
        self.add("codes win draft", mine[mask].size, differ[~excused].sum(),
                   worst[~excused].max(initial=0), over, excused.sum())

    def explain_stage(self, stage, pos, k, theirs):
        def once(copies):
            x = dspark.stage_rows(self.m, [t[np.full(copies, k)] for t in self.taps])
            return dspark.context_rows(self.m, stage, x, pos[np.full(copies, k)])

        def far(codes):
            return (codes != theirs[k]).sum(1) + 0.5
        out, sites = probe.undecided(lambda: once(1))
        return probe.explain(
            sites, far(out)[0], lambda tries: far(probe.flipped(
                lambda: once(len(tries)), [f for f, _ in tries])), (), 128)


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
            self.j.add(item, size * keep.sum(), differ[free].sum(),
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
        self.j.add("engram rows", a.size, bad, over=bad)
        if bad:
            self.j.t.note("%s: engram rows of layer %d" % (self.j.case.name(), self.layer))

    def entries(self, kind, out, part, copies=1):
        """(mask, mine, theirs): the entry that each position completes."""
        j, s, pos = self.j, self.layer, self.pos[part]
        ratio = self.m.cfg.ratio(s)
        j0, mine = out["rows" if kind == "main" else "keys"]
        e = (pos + 1) // ratio - 1
        each = len(mine) // copies
        mask = ((pos + 1) % ratio == 0) & (e >= j0) & (e - j0 < each)
        mask &= e >= j.floor // ratio
        theirs = j.rows.codes[kind, s]
        if not mask.any():
            blank = np.zeros((len(pos), theirs.shape[1]), theirs.dtype)
            return mask, blank, blank
        own = np.repeat(np.arange(copies) * each, len(pos) // copies)
        return (mask, mine[own + np.clip(e - j0, 0, each - 1)],
                theirs[np.clip(e, 0, len(theirs) - 1)])

    def code_items(self, out, part, copies=1):
        there, win = (a[part] for a in self.theirs["win"])
        items = {"codes win": ("win", there, out["win"], win)}
        if self.layer in self.m.cfg.kv_sources:
            items["codes main"] = ("main",) + self.entries("main", out, part, copies)
            items["codes key"] = ("key",) + self.entries("key", out, part, copies)
        found = {}
        for item, (kind, mask, mine, theirs) in items.items():
            mine = np.where(mask[:, None], mine, theirs)
            differ, bad, worst = measure.codes(self.m, kind, mine, theirs)
            size = codes_per_row(self.m, kind)
            found[item] = (mask, differ, bad, worst, size)
        return found

    def check(self, out, part, copies=1):
        th, found = self.theirs, self.code_items(out, part, copies)
        every = np.ones(len(self.pos[part]), bool)
        fp32 = measure.FP32 if self.m.q else measure.OFF

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
                                            fp32), out["weights"].shape[1])
        put("stream", measure.stream(self.m, out["X"], th["X"][part], self.X[part]),
            out["X"][0].size)
        put("premix", measure.close(out["g"], th["g"][part], fp32),
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
        if not self.m.q:
            return excused
        item = "excused (position, layer)"
        self.j.add(item, self.own.sum())
        if off.sum() > 3 + PROBE_SHARE * self.own.sum():
            return excused
        open_ = 0
        for i in np.flatnonzero(off):
            legal = self.explain(int(i), bool(only_codes[i]))
            excused[i] = legal is not False
            open_ += legal is None
        self.j.add(item, 0, excused.sum() - open_, 0, 0, excused.sum() - open_)
        self.j.add(measure.UNDECIDED, self.own.sum(), open_)
        return excused

    def explain(self, i, only_codes):
        """Is there a legal rounding under which position i is all right?"""
        return Search(self, i, only_codes).explain()

    def other_rows(self, first, end):
        """Window rows the dump no longer holds, as noise could have made them."""
        out, (there, _) = [], self.theirs["win"]
        for k in np.flatnonzero(~there[first:end]) + first:
            if k not in self.others:
                self.others[k] = self.row_variants(int(k))
            out += self.others[k]
        return out

    def row_variants(self, k):
        """(index, codes) for every flip that changes the window row."""
        def once(copies):
            part = np.full(copies, k)
            ctx = self.context(part)
            ctx.copies = copies
            return stored(self.m, self.layer, self.X[part], self.g[part], ctx)["win"]
        base, sites = probe.undecided(lambda: once(1))
        sites = sites[:probe.TRIES]
        if not sites:
            return []
        rows = probe.flipped(lambda: once(len(sites)), [[s] for s in sites])
        return [(k, r) for r in np.unique(rows, axis=0) if (r != base[0]).any()]

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
            j.add(item, size * keep.sum(), differ[free].sum(),
                    worst[free].max(initial=0), over, ((differ > 0) & keep & excused).sum())
            if over:
                j.t.note("%s: %s before the decoder" % (j.case.name(), item))


class Search:
    """Legal roundings of one position of a layer; many tried at once."""

    def __init__(self, job, i, only_codes):
        self.job, self.only_codes = job, only_codes
        c, layer = job.m.cfg, job.layer
        pair = (i > 0 and job.pos[i] % 2 and layer in c.kv_sources
                and c.ratio(layer) == 2)                 # whose entry ends at i
        self.part = np.arange(i - 1 if pair else i, i + 1)
        self.first = max(0, int(self.part[0]) - job.m.cfg.window)
        self.rows = [] if only_codes else job.other_rows(self.first, int(self.part[0]))
        self.batch = max(1, attend_step(job.m.cfg) // len(self.part))

    def explain(self):
        out, sites = probe.undecided(lambda: self.layer(1, ()))
        best = self.far(out, 1)[0]
        return probe.explain(sites, best, self.distances, self.rows,
                             min(self.batch, 128))

    def robust(self):
        """True when no single legal change moves the position out of bounds."""
        out, sites = probe.undecided(lambda: self.layer(1, ()))
        moves = [([s], []) for s in sites] + [([], [r]) for r in range(len(self.rows))]
        step = min(self.batch, 128)
        return self.far(out, 1)[0] <= 1 and all(
            (self.distances(moves[k:k + step]) <= 1).all()
            for k in range(0, len(moves), step))

    def distances(self, tries):
        swaps = [(v, self.rows[r][0] + int(self.job.pos[0]), r)
                 for v, (_, rows) in enumerate(tries) for r in rows]
        out = probe.flipped(lambda: self.layer(len(tries), swaps),
                            [flips for flips, _ in tries])
        return self.far(out, len(tries))

    def layer(self, copies, swaps):
        job, first = self.job, self.first
        part = np.tile(self.part, copies)
        ctx = job.context(part)
        ctx.copies, ctx.swaps = copies, swaps
        ctx.history = (int(job.pos[first]),
                       job.m.decode("win", job.window[first:self.part[0]]))
        if self.rows:
            ctx.spare = job.m.decode("win", np.stack([r for _, r in self.rows]))
        args = (job.m, job.layer, job.X[part], job.g[part], ctx)
        if self.only_codes:
            return stored(*args)
        for name in ("topk", "candidates"):
            full = getattr(job.ctx, name)
            setattr(ctx, name, None if full is None else full[part])
        return block(*args, job.forced(part))

    def far(self, out, copies):
        """The distance of every copy from the other side; at most 1 is fine."""
        job, k = self.job, len(self.part)
        part = np.tile(self.part, copies)
        find = job.code_items if self.only_codes else job.check
        far = np.zeros(copies)
        for item, (mask, differ, bad, worst, _) in find(out, part, copies).items():
            mask, differ, bad, worst = (t[k - 1::k] for t in (mask, differ, bad, worst))
            if item.startswith("codes"):       # one stray single step is fine
                d = np.where(bad, 1 + differ, differ / 1.5)
            else:
                d = worst / BOUND_OF.get(item, measure.TIE)
                d = np.where(bad, np.maximum(d, 1.01), 0)
            far = np.maximum(far, np.where(mask, d, 0))
        return far


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

    def code_items(self, out, part, copies=1):
        found = {}
        for item, kind in (("codes main", "main"), ("codes key", "key")):
            mask, mine, theirs = self.entries(kind, out, part, copies)
            mine = np.where(mask[:, None], mine, theirs)
            differ, bad, worst = measure.codes(self.m, kind, mine, theirs)
            size = codes_per_row(self.m, kind)
            found[item] = (mask, differ, bad, worst, size)
        return found
