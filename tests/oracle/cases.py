"""Prompts and runs that cross every edge (7.2)."""
import numpy as np

from judge import Case

CHUNKS = (None, 7, 1, 16, None, 5, 64, 33)


def lengths(cfg, count, rng):
    """Edge lengths first, in an order that mixes them, then random ones."""
    W, k = cfg.window, cfg.topk
    budget = cfg.cand_blocks * cfg.cand_size
    top = min(300, 3 * W + 60)
    edges = [70, top, 1, budget + 9, 2, W, 2 * k + 1, 17, 2 * W + 1, W + 1, 31, 15,
             budget, 32, W - 1, budget + 1, 33, k, 2 * k, k + 1, 16, 2 * W, 300,
             3 * W, 4 * W + 1, budget + cfg.cand_size, 2 * k + 2, 3, 4, 5, 8 * W + 2]
    out = []
    for n in edges:
        n = min(int(n), 300)
        if n > 0 and n not in out:
            out.append(n)
    while len(out) < count:
        out.append(int(rng.integers(1, 301)))
    return out[:count]


def prompt(cfg, n, rng, image):
    ids = rng.integers(0, cfg.vocab - 2, n)      # not the image, not the noise id
    if n > 8 and rng.integers(0, 2):             # a repeated stretch
        k = n // 3
        ids[n - k:] = ids[:k]
    if image and n > 4:
        at = int(rng.integers(0, n - 2))
        ids[at:at + int(rng.integers(1, 4))] = cfg.image_id
    return ids


def prompts(cfg, count, seed, images=True, given=None):
    """`given`: prompts of these lengths instead of `count`."""
    rng = np.random.default_rng([seed, 4100])
    return [prompt(cfg, n, rng, images and i % 4 == 3)
            for i, n in enumerate(given or lengths(cfg, count, rng))]


def resume_points(cfg, n):
    """Odd and even, below, at and above window multiples."""
    W = cfg.window
    want = [W + 1, 2 * W, n - 1, n // 2, 2 * W + 3, W, n - W - 1, n - W, 1, W // 2,
            n - 2, 2 * W - 1, n // 3, 3 * W + 1, n - W + 1]
    return [h for h in dict.fromkeys(want) if 0 < h < n]


def runs(cfg, ids, index, quant_on):
    """A cold run of a prompt and a resumed or replayed one.

    Mode, chunk and point vary from prompt to prompt; quant off takes the
    modes that quant on does not.
    """
    n, chunk = len(ids), CHUNKS[index % len(CHUNKS)]
    turn = index + (0 if quant_on else 1)
    out = [Case(ids, ("all", "ced")[turn % 2], chunk, quant_on=quant_on)]
    points = resume_points(cfg, n)
    if points:
        mode, replay = (("ced", False), ("all", True), ("ced", True), ("all", False))[
            (turn + turn // 4) % 4]
        out.append(Case(ids, mode, chunk, points[(4 * index + 7) % len(points)],
                        replay, quant_on))
    return out


def replays(ids, quant_on):
    """Cold runs of a prompt, then it replayed at every position of it."""
    out = [Case(ids, mode, None, quant_on=quant_on) for mode in ("all", "ced")]
    return out + [Case(ids, ("all", "ced")[at // 2 % 2], CHUNKS[at % len(CHUNKS)], at, True, quant_on)
                  for at in range(1, len(ids))]


def edges(cfg, cases):
    """Names of the edges (7.2) that a list of cases does not cross."""
    W, k = cfg.window, cfg.topk
    budget = cfg.cand_blocks * cfg.cand_size
    want = {"t = %d" % t for t in (1, 2, W - 1, W, W + 1, 2 * W - 1, 2 * W, 2 * W + 1)}
    want |= {"%s %s %s" % (what, side, name)
             for what, name in (("visible", "top-k, ratio 1"), ("visible", "top-k, ratio 2"),
                                ("visible", "candidate budget"))
             for side in ("<", "=", ">")}
    for how in ("resume", "replay"):
        want |= {"%s %s, %s" % (how, x, mode) for mode in ("all", "ced")
                 for x in ("odd", "even")}
        want |= {"%s, H %s W" % (how, side) for side in ("<", "=", ">")}
        want |= {"%s, suffix %s W" % (how, side) for side in ("<=", ">")}
    want |= {"replay start > 0", "image tokens", "chunks", "images, resumed"}
    for c in cases:
        n, H = len(c.ids), c.resume
        want.discard("t = %d" % n)
        for v, name, limit in ((n, "top-k, ratio 1", k), (n // 2, "top-k, ratio 2", k),
                               (n, "candidate budget", budget)):
            want.discard("visible %s %s" % (_side(v, limit), name))
        image = (np.asarray(c.ids) == cfg.image_id).any()
        if image:
            want -= {"image tokens", "images, resumed" if H else ""}
        if c.chunk:
            want.discard("chunks")
        if H:
            how = "replay" if c.replay else "resume"
            want -= {"%s %s, %s" % (how, "odd" if H % 2 else "even", c.mode),
                     "%s, H %s W" % (how, _side(H, W)),
                     "%s, suffix %s W" % (how, "<=" if n - H <= W else ">")}
            if c.replay and H > W:
                want.discard("replay start > 0")
    return sorted(want)


def _side(v, limit):
    return "<" if v < limit else "=" if v == limit else ">"
