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
    return m.encode("win", rope.rotate(kv, table))


def draft(m, token, last, windows, forced=None):
    """One block after position `last`; windows[s] = (first position, values).

    forced: the drafts of the other side, which the Markov head then follows.
    -> dict: draft, logits [block, V], confidence [block]
    """
    c = m.cfg
    ids = np.array([token] + [c.draft_noise] * (c.draft_block - 1))
    X, g = embed(m, ids)
    for stage in range(c.stages):
        ctx = Context(last + 1 + np.arange(c.draft_block))
        ctx.draft, ctx.history = True, windows[stage]
        out = block(m, c.layers + stage, X, g, ctx)
        X, g = out["X"], out["g"]
    final = "mtp.%d." % (c.stages - 1)
    logits, collapsed = head(m, X, g, final + "norm.weight")
    return markov(m, final, logits, collapsed, token, forced)


def markov(m, p, logits, collapsed, prev, forced):
    drafts, confidence, rows = [], [], []
    for i in range(len(logits)):
        e = m.w.value(p + "markov_head.embed.weight")[[prev]]
        row = logits[i] + m.linear_f32(e, p + "markov_head.head.weight")[0]
        both = np.concatenate([collapsed[[i]], e], 1)
        conf = m.linear_f32(both, p + "confidence_head.proj.weight")
        rows.append(row.astype(F32))
        confidence.append(conf[0, 0])
        drafts.append(int(np.argmax(row)))       # equal logits: smaller id
        prev = drafts[-1] if forced is None else int(forced[i])
    return {"draft": np.array(drafts, np.int32), "logits": np.stack(rows),
            "confidence": np.array(confidence, F32)}
