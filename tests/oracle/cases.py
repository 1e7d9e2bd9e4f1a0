"""Prompts and runs that cross every edge (7.2)."""
import numpy as np

from judge import Case

CHUNKS = (None, 7, 1, 16, None, 5, 64, 33)


def lengths(cfg, count, rng):
    """Edge lengths first, in an order that mixes them, then random ones."""
    W, k = cfg.window, cfg.topk
    budget = cfg.cand_blocks * cfg.cand_size
    top = min(300, 3 * W + 60)
    edges = [70, 2 * W + 1, 1, budget + 9, 2, W, 2 * k + 1, 17, top, W + 1, 31, 15,
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


def prompts(cfg, count, seed, images=True):
    rng = np.random.default_rng([seed, 4100])
    return [prompt(cfg, n, rng, images and i % 4 == 3)
            for i, n in enumerate(lengths(cfg, count, rng))]


def resume_points(cfg, n):
    """Odd and even, below, at and above window multiples."""
    W = cfg.window
    want = [W + 1, 2 * W, n - 1, n // 2, 2 * W + 3, W, n - W - 1, n - W, 1, W // 2,
            n - 2, 2 * W - 1, n // 3, 3 * W + 1, n - W + 1]
    return [h for h in dict.fromkeys(want) if 0 < h < n]


def runs(cfg, ids, index, quant_on):
    """The cold runs of a prompt, and one resumed and one replayed run."""
    n, chunk = len(ids), CHUNKS[index % len(CHUNKS)]
    out = [Case(ids, "all", chunk, quant_on=quant_on),
           Case(ids, "ced", chunk, quant_on=quant_on)]
    points = resume_points(cfg, n)
    if points:
        modes = ("all", "ced") if index % 2 else ("ced", "all")
        a = points[index % len(points)]
        b = points[(3 * index + 1) % len(points)]
        out.append(Case(ids, modes[0], chunk, a, False, quant_on))
        out.append(Case(ids, modes[1], chunk, b, True, quant_on))
    return out
