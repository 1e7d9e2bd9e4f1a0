"""One layer of the text model (2.1, 2.3 - 2.7), for a run of positions at once."""
import numpy as np

import engram
import quant
import rope
from config import Weights, dot, load_config, total
from probe import SOFTMAX

F32, F64 = np.float32, np.float64


class Model:
    def __init__(self, folder, quant_on=True, plants=()):
        self.folder = folder
        self.cfg = load_config(folder)
        self.w = Weights(folder)
        self.q = quant_on
        self.plants = frozenset(plants)
        self.hash = engram.Hash(self.cfg, engram.load_ids(folder, self.cfg.vocab))

    def variant(self, quant_on=None, plants=None):
        """The same weights under another switch."""
        other = Model.__new__(Model)
        other.__dict__.update(self.__dict__)
        if quant_on is not None:
            other.q = quant_on
        if plants is not None:
            other.plants = frozenset(plants)
        return other

    # --- roundings, linear maps and norms (2.11)

    def round(self, x, noise=1):
        """A bf16 rounding of 2.11; none with quant off."""
        return quant.bf16(x, noise) if self.q else np.asarray(x).astype(F32)

    def rotate(self, x, table, inverse=False):
        return rope.rotate(x, table, self.round, inverse)

    def act(self, x):
        """Input of an fp8 linear: quantized per 32."""
        if not self.q:
            return x
        if "group-16" in self.plants:
            return quant.fp8_dequant(*quant.fp8_quant(x, 16))
        return quant.activation(x)

    def linear(self, x, name):
        """fp8 x fp8 or fp8 x fp4, output bf16."""
        return self.round(dot(self.act(x), self.w.matrix(name)))

    def linear_bf16(self, x, name):
        return self.round(dot(x, self.w.matrix(name)))

    def linear_f32(self, x, name):
        return dot(x, self.w.matrix(name))

    def rms(self, x, weight):
        mean = total(np.square(x, dtype=F64)) / F32(x.shape[-1])
        r = (F32(1) / np.sqrt(mean + self.cfg.eps)).astype(F32)
        return self.round(x.astype(F64) * r[..., None].astype(F64) * weight)

    def norm(self, x, name):
        return self.rms(x, self.w.value(name))

    @staticmethod
    def sigmoid(x):
        return (1 / (1 + np.exp(-x.astype(F64)))).astype(F32)

    # --- cache rows (4.1): codes and the values they stand for; quant off: values

    def width(self, kind):
        n = self.cfg.index_dim if kind == "key" else self.cfg.head_dim
        return quant.row_bytes(kind, n) if self.q else n

    def encode(self, kind, x):
        if not self.q:
            return np.asarray(x, F32)
        if "group-16" in self.plants and kind != "main":
            return _rows_of_16(kind, x)
        return quant.pack_row(kind, x)

    def decode(self, kind, codes):
        if not self.q:
            return codes
        n = self.cfg.index_dim if kind == "key" else self.cfg.head_dim
        return quant.unpack_row(kind, codes, n)

    def code_dtype(self):
        return np.uint8 if self.q else F32


def _rows_of_16(kind, x):
    """Planted error: groups of 16; a row keeps each first half's scale."""
    n = x.shape[-1]
    codes, scale = (quant.fp8_quant if kind == "win" else quant.index_quant)(x, 16)
    codes = codes if kind == "win" else quant.nibbles_pack(codes)
    return np.concatenate([codes, scale[..., 0:n // 16:2]], -1)


class Rows:
    """Main KV rows and index keys of every source layer, entry j at index j."""

    def __init__(self, m, tokens):
        self.m, self.codes, self.values, self.have = m, {}, {}, {}
        for s in m.cfg.kv_sources:
            n = tokens // m.cfg.ratio(s)
            for kind in ("main", "key"):
                w = m.width(kind)
                d = m.cfg.index_dim if kind == "key" else m.cfg.head_dim
                self.codes[kind, s] = np.zeros((n, w), m.code_dtype())
                self.values[kind, s] = np.zeros((n, d), F32)
            self.have[s] = np.zeros(n, bool)

    def put(self, kind, source, at, codes):
        n = len(codes)
        self.codes[kind, source][at:at + n] = codes
        self.values[kind, source][at:at + n] = self.m.decode(kind, codes)
        self.have[source][at:at + n] = True

    def copy_below(self, other, source, n):
        for kind in ("main", "key"):
            self.codes[kind, source][:n] = other.codes[kind, source][:n]
            self.values[kind, source][:n] = other.values[kind, source][:n]
        self.have[source][:n] = True


class Context:
    """What one layer needs besides its input."""

    def __init__(self, pos, clip=0, dead=None, floor=0, rows=None):
        self.pos = pos                # absolute, contiguous, ascending
        self.clip = clip              # window rows below are not attended
        self.dead = np.zeros(len(pos), bool) if dead is None else dead
        self.floor = floor            # tokens whose rows are given (3.3)
        self.rows = rows
        self.history = None           # (first position, values) before pos[0]
        self.tail = None              # (a, b) of token pos[0] - 1
        self.topk = None              # list published last [n, topk], -1 padded
        self.candidates = None
        self.engram_rows = None
        self.draft = False
        # A judge tries many roundings at once: the same positions `copies`
        # times, one after the other; copy v sees spare[r] at window row `at`
        # for every (v, at, r) of swaps.
        self.copies, self.swaps, self.spare = 1, (), None


# ------------------------------------------------------------ mHC (2.1)

def hc(m, name, X):
    """-> pre [n,4], post [n,4], comb [n,4,4]"""
    c, n = m.cfg, m.cfg.hc
    v = X.reshape(len(X), -1)
    s = F32(1) / np.sqrt(total(np.square(v, dtype=F64)) / F32(v.shape[1]) + c.eps)
    z = (m.linear_f32(v, name + "_fn") * s[:, None]).astype(F32)
    scale, base = m.w.value(name + "_scale"), m.w.value(name + "_base")
    pre = m.sigmoid(z[:, :n] * scale[0] + base[:n]) + c.hc_eps
    post = F32(2) * m.sigmoid(z[:, n:2 * n] * scale[1] + base[n:2 * n])
    t = (z[:, 2 * n:] * scale[2] + base[2 * n:]).astype(F64).reshape(-1, n, n)
    t = np.exp(t - t.max(-1, keepdims=True))
    M = (t / t.sum(-1, keepdims=True)).astype(F32) + c.hc_eps
    M = M / (M.sum(1, keepdims=True) + c.hc_eps)
    for _ in range(c.hc_iters - 1):
        M = M / (M.sum(2, keepdims=True) + c.hc_eps)
        M = M / (M.sum(1, keepdims=True) + c.hc_eps)
    return pre.astype(F32), post.astype(F32), M.astype(F32)


def collapse(m, X, g):
    return m.round(total(X.astype(F64) * g[:, :, None], 1))


def expand(m, post, comb, o, X):
    """bf16(post_j * o + sum_i comb[i,j] X_i): over the FIRST index of comb."""
    if "comb-index" in m.plants:
        comb = comb.transpose(0, 2, 1)
    mixed = np.matmul(comb.transpose(0, 2, 1).astype(F64), X.astype(F64))
    return m.round(post[:, :, None].astype(F64) * o[:, None, :] + mixed)


# ------------------------------------------------------- compressor (2.4)

def compress(m, layer, x, ctx):
    """-> first entry, latents before rope, (a, b) of the last token"""
    p, ratio = m.cfg.prefix(layer) + "attn.compressor.", m.cfg.ratio(layer)
    if ratio == 1:
        latent = m.norm(m.linear_bf16(x, p + "wkv.weight"), p + "norm.weight")
        return int(ctx.pos[0]), latent, None
    a = m.linear_f32(x, p + "wkv.weight")
    b = m.linear_f32(x, p + "wgate.weight")
    last, first = (a[-1], b[-1]), int(ctx.pos[0])
    if ctx.copies > 1 and (first % 2 or len(a) != 2 * ctx.copies):
        a, b, first = a[:0], b[:0], first + first % 2
    if first % 2 and ctx.tail is not None:
        a = np.concatenate([ctx.tail[0][None], a])
        b = np.concatenate([ctx.tail[1][None], b])
        first -= 1
    elif first % 2:
        a, b, first = a[1:], b[1:], first + 1
    n = len(a) // 2
    a, b = (t[:2 * n].reshape(n, 2, a.shape[1]).astype(F64) for t in (a, b))
    w = np.exp(b - b.max(1, keepdims=True))
    w = (w / w.sum(1, keepdims=True)).astype(F32)
    pooled = m.round(total(w * a, 1))
    return first // 2, m.norm(pooled, p + "norm.weight"), last


def entry_positions(m, ratio, j):
    return j * ratio + (ratio if "entry-position" in m.plants else 0)


def make_rows(m, layer, x, ctx, out):
    """Full layers: new main KV rows and index keys, written above the floor."""
    c, p = m.cfg, m.cfg.prefix(layer) + "attn.indexer."
    ratio = c.ratio(layer)
    j0, latent, out["tail"] = compress(m, layer, x, ctx)
    j = np.tile(j0 + np.arange(len(latent) // ctx.copies), ctx.copies)
    table = rope.tables(c, True, entry_positions(m, ratio, j), m.plants)
    key = m.norm(m.linear_bf16(latent, p + "wk.weight"), p + "k_norm.weight")
    main = m.encode("main", m.rotate(latent, table))
    key = m.encode("key", m.rotate(key, table))
    out["rows"], out["keys"] = (j0, main), (j0, key)
    # 3.3: a pair that straddles the floor is completed, nothing below rewritten
    cut = 0 if "rewrite-rows" in m.plants else max(ctx.floor // ratio - j0, 0)
    ctx.rows.put("main", layer, j0 + cut, main[cut:])
    ctx.rows.put("key", layer, j0 + cut, key[cut:])


# ------------------------------------------------- indexer (2.5), 2.6

def index_scores(m, layer, x, qr, ctx):
    """I(p, j) for every stored entry, float32; invisible ones -inf."""
    c, p = m.cfg, m.cfg.prefix(layer) + "attn.indexer."
    n, H, d = len(x), c.index_heads, c.index_dim
    iq = m.linear(qr, p + "wq_b.weight").reshape(n, H, d)
    iq = m.rotate(iq, rope.tables(c, True, ctx.pos, m.plants))
    if m.q:
        iq = (quant.index_dequant(*quant.index_quant(iq, 16))
              if "group-16" in m.plants else quant.index_query(iq))
    w = m.linear_bf16(x, p + "weights_proj.weight")
    w = (w * F32(F64(d) ** -0.5 * F64(H) ** -0.5)).astype(F32)
    keys = ctx.rows.values["key", c.kv_source(layer)]
    if not len(keys):
        return np.zeros((n, 0), F32)
    s = np.maximum(dot(iq, keys.T.astype(F64)), F32(0))
    s = total(s.astype(F64) * w[:, :, None], 1)
    visible = (ctx.pos + 1) // c.ratio(layer)
    return np.where(np.arange(len(keys)) < visible[:, None], s, F32(-np.inf))


def top(scores, k):
    """The k largest per row above -inf; ties by smaller index; ascending."""
    out = np.full((len(scores), k), -1, np.int64)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    for i in range(len(scores)):
        pick = order[i][scores[i, order[i]] > -np.inf]
        out[i, :len(pick)] = np.sort(pick)
    return out


def block_scores(m, scores, pos):
    """2.6: best visible entry of each block; the newest block is forced in."""
    size, n = m.cfg.cand_size, scores.shape[1]
    blocks = -(-n // size)
    padded = np.full((len(scores), blocks * size), -np.inf, F32)
    padded[:, :n] = scores
    best = padded.reshape(len(scores), blocks, size).max(-1)
    if "newest-block" not in m.plants:
        visible = (pos + 1) // m.cfg.ratio(m.cfg.cand_source)
        best[np.arange(len(best)), (visible - 1) // size] = np.inf
    return best


def allowed(candidates, size, entries):
    """Mask [n, entries] of the entries inside the kept blocks."""
    out = np.zeros((len(candidates), -(-entries // size) * size), bool)
    for i, row in enumerate(candidates):
        for b in row[row >= 0]:
            out[i, b * size:(b + 1) * size] = True
    return out[:, :entries]


def index_layer(m, layer, x, qr, ctx, out, forced):
    """An index source publishes its list (and layer 20 the candidates)."""
    c = m.cfg
    scores = index_scores(m, layer, x, qr, ctx)
    if layer == c.cand_source:
        out["block_scores"] = block_scores(m, scores, ctx.pos)
        out["candidates"] = top(out["block_scores"], c.cand_blocks)
        ctx.candidates = forced.get("candidates", out["candidates"])
    elif layer > c.cand_source:
        keep = allowed(ctx.candidates, c.cand_size, scores.shape[1])
        scores = np.where(keep, scores, F32(-np.inf))
    out["scores"] = scores
    out["topk"] = top(scores, c.topk)
    ctx.topk = forced.get("topk", out["topk"])


# --------------------------------------------------------- attention (2.3)

def attend(m, q, K, valid, sink):
    """q [n,H,d], K [n,C,d], valid [n,C]: online softmax in blocks of 64."""
    n, H, d = q.shape
    scale = F32(F64(d) ** -0.5)
    top_ = np.full((n, H, 1), -1e30, F32)
    den = np.zeros((n, H, 1), F32)
    acc = np.zeros((n, H, d), F64)
    for at in range(0, K.shape[1], 64):
        k, ok = K[:, at:at + 64].astype(F64), valid[:, None, at:at + 64]
        s = np.matmul(q.astype(F64), k.transpose(0, 2, 1)).astype(F32) * scale
        s = np.where(ok, s, F32(-np.inf))
        new = np.maximum(top_, s.max(-1, keepdims=True))
        fix = np.exp(top_.astype(F64) - new).astype(F32)
        p = np.exp(s.astype(F64) - new).astype(F32)
        den = (den * fix + total(p)[..., None]).astype(F32)
        acc = acc * fix + np.matmul(m.round(p, SOFTMAX).astype(F64), k)
        top_ = new
    extra = np.exp(sink.astype(F64)[None, :, None] - top_).astype(F32)
    den = den + extra
    if "sink-value" in m.plants:                  # a planted error
        acc = acc + extra
    return m.round(acc / den)


def copy_columns(ctx, columns, before, first):
    """Every copy has its own rows behind the `before` common ones."""
    k = len(ctx.pos) // ctx.copies
    own = np.repeat(np.arange(ctx.copies) * k, k)[:, None]
    out = np.where(columns >= before, columns + own, columns)
    for v, at, r in ctx.swaps:
        here = slice(v * k, (v + 1) * k)
        out[here][columns[here] == at - first] = before + len(ctx.pos) + r
    return out


def window_columns(m, ctx, first):
    """Column numbers into the window rows, which start at position `first`."""
    W = m.cfg.window
    last = np.full(len(ctx.pos), ctx.pos[0] - 1) if ctx.draft else ctx.pos
    low = np.maximum(np.maximum(last - W + 1, ctx.clip), first)
    at = low[:, None] + np.arange(W)          # position order, empty ones last
    ok = at <= last[:, None]
    return np.where(ok, at - first, 0), ok


def attention(m, layer, x, ctx, out, forced):
    c, p = m.cfg, m.cfg.prefix(layer) + "attn."
    n, H, d = len(x), c.heads, c.head_dim
    yarn = c.ratio(layer) > 0
    table = rope.tables(c, yarn, ctx.pos, m.plants)
    qr = m.norm(m.linear(x, p + "wq_a.weight"), p + "q_norm.weight")
    q = m.linear(qr, p + "wq_b.weight").reshape(n, H, d)
    if "q-norm" in m.plants:
        q = m.rms(q, np.ones(d, F32))
    q = m.rotate(q, table)
    kv = m.norm(m.linear(x, p + "wkv.weight"), p + "kv_norm.weight")
    out["win"] = m.encode("win", m.rotate(kv, table))
    if layer in c.kv_sources:
        make_rows(m, layer, x, ctx, out)
    if layer in c.index_sources:
        index_layer(m, layer, x, qr, ctx, out, forced)
    codes = out["win"]
    if "win" in forced:                           # the other side's stored rows
        there, theirs = forced["win"]
        codes = np.where(there[:, None], theirs, codes)
    own = m.decode("win", codes)
    o = gather_attend(m, layer, q, own, ctx)
    o = m.rotate(o, table, inverse=True)
    return output(m, p, o)


def attend_step(c):
    """Positions attended at a time, for memory's sake."""
    return max(8, (1 << 24) // ((c.window + c.topk) * c.head_dim))


def gather_attend(m, layer, q, own, ctx):
    """Window columns, then compressed rows (or the draft block's rows)."""
    c, first = m.cfg, int(ctx.pos[0])
    window = own
    if ctx.history is not None and len(ctx.history[1]):
        first = ctx.history[0]
        window = np.concatenate([ctx.history[1], own])
    columns, ok = window_columns(m, ctx, first)
    if ctx.copies > 1 and not ctx.draft:
        columns = copy_columns(ctx, columns, int(ctx.pos[0]) - first, first)
        window = window if ctx.spare is None else np.concatenate([window, ctx.spare])
    sink = m.w.value(c.prefix(layer) + "attn.attn_sink")
    main = None
    if c.ratio(layer) > 0 and not ctx.draft:
        main = ctx.rows.values["main", c.kv_source(layer)]
    parts = []
    step = attend_step(c)
    for i in range(0, len(q), step):
        rows = slice(i, min(i + step, len(q)))
        K, V = window[columns[rows]], ok[rows]
        if ctx.draft:
            k = len(own) // ctx.copies
            block = own.reshape(ctx.copies, k, -1)[np.arange(rows.start, rows.stop) // k]
            K = np.concatenate([K, block], 1)
            V = np.concatenate([V, np.ones((len(K), k), bool)], 1)
        elif main is not None and len(main):
            j = ctx.topk[rows]
            K = np.concatenate([K, main[np.maximum(j, 0)]], 1)
            V = np.concatenate([V, j >= 0], 1)
        parts.append(attend(m, q[rows], K, V, sink))
    return np.concatenate(parts)


def output(m, p, o):
    """Grouped output LoRA: wo_a on bf16 input, wo_b as an fp8 linear."""
    c = m.cfg
    n, width = len(o), c.heads // c.o_groups * c.head_dim
    o = o.reshape(n, c.o_groups, width)
    a = m.w.matrix(p + "wo_a.weight").reshape(width, c.o_groups, c.o_lora)
    z = [m.round(dot(o[:, g], np.ascontiguousarray(a[:, g]))) for g in range(c.o_groups)]
    return m.linear(np.concatenate(z, 1), p + "wo_b.weight")


# -------------------------------------------------------------- MoE (2.7)

def route(m, p, x, ctx, draft, forced, out):
    c = m.cfg
    active = c.draft_active if draft else c.active
    z = m.linear_f32(x, p + "gate.weight").astype(F64)
    s = np.sqrt(np.logaddexp(0, z)).astype(F32)
    bias = np.broadcast_to(m.w.value(p + "gate.bias"), s.shape)
    if not draft and ctx.dead.any():
        bias = np.where(ctx.dead[:, None], m.w.value(p + "gate.bias_vl"), bias)
    out["route_scores"] = (s + bias).astype(F32)
    out["experts"] = top(out["route_scores"], active)
    chosen = forced.get("experts", out["experts"]).astype(np.int64)
    w = np.take_along_axis(s, chosen, 1)
    if active > 1:
        w = w / (total(w)[:, None] + F32(1e-20))
    w = (w * F32(c.route_scale)).astype(F32)
    out["weights"] = w
    return chosen, w


def expert(m, p, x, weight):
    lim = F32(m.cfg.swiglu_limit)
    a = np.minimum(m.linear(x, p + "w1.weight"), lim)
    b = np.clip(m.linear(x, p + "w3.weight"), -lim, lim)
    silu = (a.astype(F64) / (1 + np.exp(-a.astype(F64)))).astype(F32)
    h = (silu * b).astype(F32)
    if weight is not None:
        h = (h * weight[:, None]).astype(F32)
    return m.linear(m.round(h), p + "w2.weight")


def moe(m, layer, x, ctx, forced, out):
    p = m.cfg.prefix(layer) + "ffn."
    chosen, w = route(m, p, x, ctx, layer >= m.cfg.layers, forced, out)
    y = np.zeros(x.shape, F32)
    for e in np.unique(chosen):                   # ascending expert number
        row, col = np.nonzero(chosen == e)
        y[row] += expert(m, p + "experts.%d." % e, x[row], w[row, col])
    return m.round(y + expert(m, p + "shared_experts.", x, None))


# ---------------------------------------------------------- a layer (2.1)

def block(m, layer, X, g, ctx, forced=None):
    """-> dict: X, g, win, rows, keys, topk, experts, weights, tap, ..."""
    forced, out = forced or {}, {}
    p = m.cfg.prefix(layer)
    if layer in m.cfg.engram_layers and layer < m.cfg.layers:
        X = engram.apply(m, layer, X, ctx.engram_rows, ctx.dead)
    out["after_engram"] = X
    out["tap"] = tap(m, X)
    post_a = hc(m, p + "hc_attn", X)
    x = m.norm(collapse(m, X, g), p + "attn_norm.weight")     # the INCOMING g
    out["x"] = x
    o = attention(m, layer, x, ctx, out, forced)
    X = expand(m, post_a[1], post_a[2], o, X)
    pre, post, comb = hc(m, p + "hc_ffn", X)
    x = m.norm(collapse(m, X, post_a[0]), p + "ffn_norm.weight")
    f = moe(m, layer, x, ctx, forced, out)
    out["X"], out["g"] = expand(m, post, comb, f, X), pre
    if "late-tap" in m.plants:
        out["tap"] = tap(m, out["X"])
    return out


def tap(m, X):
    """Mean over the 4 streams, bf16."""
    return m.round(total(X, 1) / F32(X.shape[1]))


def rows_only(m, layer, X, g, ctx):
    """3.1: the row source for a token that needs no logits."""
    out = {}
    if layer in m.cfg.engram_layers:
        X = engram.apply(m, layer, X, ctx.engram_rows, ctx.dead)
    x = m.norm(collapse(m, X, g), m.cfg.prefix(layer) + "attn_norm.weight")
    make_rows(m, layer, x, ctx, out)
    return out


def embed(m, ids):
    """-> X [n, 4, D], one-hot pre-mix"""
    e = m.w.value("embed.weight")[ids]
    g = np.zeros((len(ids), m.cfg.hc), F32)
    g[:, 0] = 1
    return np.repeat(e[:, None, :], m.cfg.hc, 1), g


def head(m, X, g, norm="norm.weight"):
    """-> logits float32, the collapse before the norm"""
    y = collapse(m, X, g)
    return m.linear_f32(m.norm(y, norm), "head.weight"), y


def stored(m, layer, X, g, ctx):
    """Only what a layer stores: window row, main KV rows, index keys."""
    c, p, out = m.cfg, m.cfg.prefix(layer), {}
    if layer in c.engram_layers and layer < c.layers:
        X = engram.apply(m, layer, X, ctx.engram_rows, ctx.dead)
    x = m.norm(collapse(m, X, g), p + "attn_norm.weight")
    kv = m.norm(m.linear(x, p + "attn.wkv.weight"), p + "attn.kv_norm.weight")
    table = rope.tables(c, c.ratio(layer) > 0, ctx.pos, m.plants)
    out["win"] = m.encode("win", m.rotate(kv, table))
    if layer in c.kv_sources:
        make_rows(m, layer, x, ctx, out)
    return out
