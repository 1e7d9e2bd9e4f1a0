"""DSpark (2.9): context rows of each stage and one greedy block of drafts."""
import numpy as np

import rope
from model import Context, block, embed, head

F32 = np.float32


def stage_rows(m, taps):
    """main_x of a run of positions from the taps (list, in target order)."""
    x = m.linear(np.concatenate(taps, 1), "mtp.0.main_proj.weight")
    return m.norm(x, "mtp.0.main_norm.weight")


def context_rows(m, stage, main_x, pos):
    """Window row codes of one stage for context positions."""
    p = "mtp.%d.attn." % stage
    kv = m.norm(m.linear(main_x, p + "wkv.weight"), p + "kv_norm.weight")
    table = rope.tables(m.cfg, m.cfg.ratio(m.cfg.layers + stage) > 0, pos, m.plants)
    return m.encode("win", m.rotate(kv, table))


def draft(m, token, last, windows, forced=None, copies=1, experts=None):
    """One block after position `last`; windows[s] = (first position, values).

    forced: the drafts of the other side, which the Markov head then follows.
    copies, experts: the same block so often, for a search of roundings.
    -> dict: draft, logits [block, V], confidence [block], experts per stage
    """
    c = m.cfg
    ids = np.array([token] + [c.draft_noise] * (c.draft_block - 1))
    X, g = embed(m, np.tile(ids, copies))
    chosen = []
    for stage in range(c.stages):
        ctx = Context(np.tile(last + 1 + np.arange(c.draft_block), copies))
        ctx.draft, ctx.history, ctx.copies = True, windows[stage], copies
        given = {} if experts is None else {"experts": np.tile(experts[stage], (copies, 1))}
        out = block(m, c.layers + stage, X, g, ctx, given)
        X, g = out["X"], out["g"]
        chosen.append(out["experts"])
    final = "mtp.%d." % (c.stages - 1)
    logits, collapsed = head(m, X, g, final + "norm.weight")
    if forced is None:
        out = markov(m, final, logits, collapsed, token)
    else:
        prev = np.tile(np.concatenate([[token], forced[:-1]]), copies)
        out = follow(m, final, logits, collapsed, prev)
    out["experts"] = chosen
    return out


def follow(m, p, logits, collapsed, prev):
    """The Markov head after the given ids `prev`."""
    e = m.w.value(p + "markov_head.embed.weight")[prev]
    row = (logits + m.linear_f32(e, p + "markov_head.head.weight")).astype(F32)
    both = np.concatenate([collapsed, e], 1)
    conf = m.linear_f32(both, p + "confidence_head.proj.weight")[:, 0]
    return {"draft": np.argmax(row, 1).astype(np.int32),       # equal: smaller id
            "logits": row, "confidence": conf.astype(F32)}


def markov(m, p, logits, collapsed, prev):
    """In sequence, each draft after the one before."""
    parts = []
    for i in range(len(logits)):
        parts.append(follow(m, p, logits[i:i + 1], collapsed[i:i + 1], [prev]))
        prev = int(parts[-1]["draft"][0])
    return {k: np.concatenate([t[k] for t in parts]) for k in parts[0]}
