"""Planted model errors, each in a copy of the oracle's own model: the judge must find it.

They try the judge (compare --plant), not an engine, which does not run.
"""
import os

import numpy as np

import cases
import run
from judge import Case, Dump, Judge
from measure import Table
from model import Model

# name given on the command line -> (switch in the model, what it does)
PLANTS = {
    "comb-index": "comb summed over the wrong index",
    "q-norm": "per-head RMS norm on q",
    "entry-position": "rope position of a compressed entry",
    "yarn-past-65536": "YaRN only past 65,536",
    "late-tap": "draft tap one layer late",
    "newest-block": "candidates: newest block not forced in",
    "sink-value": "sink as an extra value in the numerator",
    "group-16": "ue8m0 groups of 16 for 32",
    "raw-zero-pad": "Engram: id 0 for pad at negative positions",
    "rewrite-rows": "replay rewrites rows below H",
}


def make_dump(m, case, path):
    r = run.session(m, case.ids, case.mode, case.resume, case.replay)
    run.write_dump(path, m, r, case.mode, case.resume, case.replay)
    return Dump(path)


def judged(m, wrong, case, folder, table):
    """A dump of the model `wrong`, judged by the right one."""
    cold = None
    if case.resume:
        plain = Case(case.ids, case.mode, quant_on=case.quant_on)
        cold = make_dump(wrong, plain, os.path.join(folder, "cold.safetensors"))
    dump = make_dump(wrong, case, os.path.join(folder, "plant.safetensors"))
    Judge(m, table, dump, case, None, cold).all()


def run_cases(cfg, seed, quant_on):
    """Long enough that more blocks exist than candidates are kept."""
    n = max(cfg.cand_blocks * cfg.cand_size + 40, 2 * cfg.window + 9)
    ids = cases.prompt(cfg, n, np.random.default_rng(seed), False)
    return [Case(ids, "all", quant_on=quant_on),
            Case(ids, "ced", resume=n // 2 + 1, replay=True, quant_on=quant_on)]


def run_plants(folder, names, seed, scratch, quant_on=True):
    right = Model(folder, quant_on)
    todo = list(PLANTS) if names == "all" else names.split(",")
    if not quant_on:
        todo = [n for n in todo if n != "group-16"]    # nothing is quantized
    found = 0
    clean = Table()
    for case in run_cases(right.cfg, seed, quant_on):
        judged(right, right, case, scratch, clean)
    print("The planted errors are in the oracle's own copy of the model; no engine ran.")
    print("no plant: %d over bound" % clean.over())
    for name in todo:
        table = Table()
        for case in run_cases(right.cfg, seed, quant_on):
            judged(right, right.variant(plants=[name]), case, scratch, table)
            if table.over():
                break
        items = [i for i, r in table.rows.items() if r[4]]
        found += bool(table.over())
        print("%-16s %-44s %s  (%s)" % (
            name, PLANTS[name], "found" if table.over() else "MISSED",
            ", ".join(items) or "-"))
    print("%d of %d found" % (found, len(todo)))
    return 0 if found == len(todo) and clean.over() == 0 else 1
