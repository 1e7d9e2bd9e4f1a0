"""The fault harnesses as somebody meets them who tries the planted bugs: help, wrong usage, bugs.

A bug that a harness cannot meet is refused with those that can: a run that passes would prove nothing.
tests/mutation and the tests crash_plant_*, powercut_plant_* and crashimage_plant_* find them.
"""

import os
import re
import subprocess

import daemon as d
from daemon import check, equal

HARNESSES = ("crash", "powercut", "bitflip", "crashimage", "iofail")
with open(os.path.join(d.SOURCE, "kvstore/base/plant.h"), encoding="utf-8") as _file:
    PLANTS = re.findall(r'X\(\w+, "([a-z-]+)"\)', _file.read())


def run(name, *arguments):
    done = subprocess.run([os.path.join(d.BUILD, "tests", name), *arguments], capture_output=True,
                          text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def listed(name):
    code, out, err = run(name, "--help")
    equal((code, err), (0, ""), f"{name} --help")
    check("2 wrong usage" in out, f"{name} --help: exit codes")
    return out.split("planted bugs that it finds:\n")[1].split()


check(len(PLANTS) >= 13, f"plants: {PLANTS}")
finds = {name: listed(name) for name in HARNESSES}
for name in HARNESSES:
    check(finds[name] and set(finds[name]) <= set(PLANTS), f"{name} finds {finds[name]}")
    for arguments in (("--plant", "nonsense"), ("--plant",), ("--nonsense",), ("more",)):
        code, out, err = run(name, *arguments)
        equal((code, out), (2, ""), f"{name} {arguments}: {err}")
    code, _, err = run(name, "--plant", "nonsense")
    check("no planted bug 'nonsense'" in err and all(plant in err for plant in finds[name]),
          f"{name}: it names those it finds: {err!r}")
    for plant in set(PLANTS) - set(finds[name]):
        code, out, err = run(name, "--plant", plant)
        equal((code, out), (2, ""), f"{name} --plant {plant}")
        others = [other for other in HARNESSES if plant in finds[other]] or ["it_"]
        check(f"cannot find the planted bug '{plant}'" in err
              and all(other in err for other in others), f"{name} --plant {plant}: {err!r}")
d.finish()
