"""mkstate: directories of many checkpoints, and a daemon that starts on them.

Goal: what it writes is a state directory like any other, of as many checkpoints as were asked for;
what it is not to touch it leaves alone; `cachectl bench restart` measures a daemon on it and finds
every checkpoint.
"""

import hashlib
import os
import re
import subprocess

import daemon as d
from cli import Tool
from state_files import State

MKSTATE = os.path.join(d.BUILD, "tools", "mkstate")
KVDUMP = os.path.join(d.BUILD, "tools", "kvdump")


def mkstate(*arguments):
    return subprocess.run([MKSTATE, *arguments], capture_output=True, text=True, timeout=60,
                          check=False)


def verify(directory, what):
    done = subprocess.run([KVDUMP, "verify", directory], capture_output=True, text=True, timeout=60,
                          check=False)
    d.equal((done.returncode, done.stderr), (0, ""), f"{what}: {done.stdout}")
    return done.stdout


def test_shapes():
    """(checkpoints, options, users, sessions): the sum is exact, sessions differ by a quarter."""
    for count, options, users, sessions in (
            (1000, (), 2, 40), (100, (), 1, 20), (1, (), 1, 1),
            (999, ("--users", "3", "--sessions", "1"), 3, 3),
            (7, ("--users", "7", "--sessions", "1"), 7, 7)):
        directory = os.path.join(d.scratch(), "state")
        done = mkstate("--checkpoints", str(count), *options, directory)
        what = f"{count} {options}"
        d.equal((done.returncode, done.stderr), (0, ""), f"{what}: exit code, stderr")
        d.check(re.match(rf"{count} checkpoints of {sessions} sessions of {users} users: ",
                         done.stdout) is not None, f"{what}: {done.stdout!r}")
        d.check(verify(directory, what).startswith(f"OK: {count} checkpoints, "), what)
        state = State(directory)
        trees = [len(t.nodes) for t in state.trees.values()]
        d.equal((len(state.users), len(state.sessions), len(trees), sum(trees)),
                (users, sessions, sessions, count), what)
        mean = count / sessions
        d.check(all(mean * 0.7 - 1 <= t <= mean * 1.3 + 1 for t in trees), f"{what}: {trees}")
        d.equal(state.recorded(), {p.place for p in state.pages()}, f"{what}: places in use")
        if mean < 100:
            d.equal(len(state.pages()), sessions, f"{what}: a page holds all of a session")


def digests(directory):
    """Token ids of all pages: the same seed writes the same."""
    state = State(directory)
    ids = sorted(state.read(page)[256:768] for page in state.pages())
    return hashlib.sha256(b"".join(ids)).hexdigest()


def test_seed():
    made = []
    for seed in ("1", "1", "2"):
        directory = os.path.join(d.scratch(), "state")
        d.equal(mkstate("--checkpoints", "60", "--seed", seed, directory).returncode, 0, "made")
        made.append(digests(directory))
    d.equal(made[0], made[1], "the same seed")
    d.check(made[0] != made[2], "another seed")


def test_refusals():
    directory = d.scratch()
    mine = os.path.join(directory, "mine")
    with open(mine, "w", encoding="ascii") as f:
        f.write("mine")
    done = mkstate("--checkpoints", "10", directory)
    d.equal((done.returncode, done.stderr),
            (1, f"mkstate: {directory}: it is not empty, and nothing in it is touched\n"), "not empty")
    d.equal(os.listdir(directory), ["mine"], "nothing is added")
    done = mkstate("--checkpoints", "10", mine)
    d.equal((done.returncode, done.stderr), (1, f"mkstate: {mine}: Not a directory\n"), "a file")
    done = mkstate("--checkpoints", "10", "/nonexistent/state")
    d.equal((done.returncode, done.stderr),
            (1, "mkstate: /nonexistent/state: No such file or directory\n"), "no parent")
    fresh = os.path.join(directory, "fresh")
    for wrong, words in (
            ((), "--checkpoints is missing"), (("--checkpoints", "10"), "the directory is missing"),
            (("--checkpoints", "0", fresh), "--checkpoints must be 1 to 100000000, found 0"),
            (("--checkpoints", "x", fresh), "found x"),
            (("--checkpoints", "5", "--users", "6", "--sessions", "1", fresh),
             "more sessions than checkpoints: 6 users x 1 sessions"),
            (("--checkpoints", "50000", "--users", "1", "--sessions", "1", fresh),
             "more than 4096 checkpoints a session"),
            (("--checkpoints", "2000000", "--users", "1048576", "--sessions", "2", fresh),
             "more sessions than"),
            (("--checkpoints", "5", fresh, "more"), "unexpected argument more"),
            (("--what", fresh), "usage: mkstate")):
        done = mkstate(*wrong)
        d.equal(done.returncode, 2, f"mkstate {wrong}: {done.stderr}")
        d.check(words in done.stderr, f"mkstate {wrong}: {done.stderr!r}")
        d.check(not os.path.exists(fresh), f"mkstate {wrong}: nothing is made")
    d.check("--checkpoints N" in mkstate("--help").stdout, "--help")


def test_bench_restart():
    """A daemon starts on it, is killed under load, starts again and hits."""
    directory = os.path.join(d.scratch(), "state")
    mkstate("--checkpoints", "1000", directory)
    tool = Tool("unix:/nowhere", None)
    arguments = ("bench", "restart", "--quiet", "--quick", "--daemon", d.BINARY, "--dir", directory)
    got = tool.json(*arguments, "--json")
    d.equal(len(got["starts"]), 4, "starts")
    for start in got["starts"]:
        d.check(start["recovered"] >= 1000 and start["dropped"] == 0, f"{start}")
        d.check(start["hit_tokens"] > 60 and start["ready_ms"] > 0, f"{start}")
        d.equal(start["sessions"], 40, "sessions")
    d.check(any(start["saved_before"] > 0 for start in got["starts"]), "there was load")
    d.equal(got["index_ram"], "256MiB", "the budget")
    verify(directory, "after it")
    said = tool.code(0, *arguments).stdout
    d.check("kill -9 under load" in said and ", dropped 0; index.ram is 256MiB" in said, said)
    done = tool.code(1, *arguments, "--seed", "5")
    d.check("a directory of another --seed?" in done.stderr, done.stderr)

    few = os.path.join(d.scratch(), "few")
    mkstate("--checkpoints", "100", "--sessions", "2", few)
    done = tool.code(3, "bench", "restart", "--quiet", "--daemon", d.BINARY, "--dir", few)
    d.check("at least 16 sessions a user" in done.stderr, done.stderr)
    verify(few, "a directory that does not do")


def main():
    test_shapes()
    test_seed()
    test_refusals()
    test_bench_restart()
    d.finish()


main()
