"""cachectl trace convert and stats on the recorded traces, whole.

Goal: the counts known of these files, exactly: agentic sessions 34,156 / 411 / 33 / 632 / 360 / 25
in 571 sessions, Mooncake 8,522 sessions with 3,509 turns that go on; and tests/data/agentic_excerpt.jsonl
is, byte for byte, what its README says how to make.
Skipped (77) where the recorded traces are not beside the repository.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = os.environ.get("CACHED_SOURCE_ROOT") or os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("CACHED_BUILD_ROOT") or os.path.join(ROOT, "build")
CACHECTL = os.environ.get("CACHECTL") or os.path.join(BUILD, "tools", "cachectl")
TRACES = os.path.join(ROOT, "..", "shared", "traces")
AGENTIC = os.path.join(TRACES, "agentic_coding_sessions_0001-0600.jsonl.zst")
MOONCAKE = os.path.join(TRACES, "mooncake_conversation_trace.jsonl.gz")
checks = 0


def equal(got, want, what):
    global checks
    checks += 1
    if got != want:
        sys.exit("%s: got %r, want %r" % (what, got, want))


def run(*args):
    got = subprocess.run([CACHECTL, "trace", *args], capture_output=True, text=True, cwd=ROOT)
    equal(got.returncode, 0, "cachectl trace %s: %s" % (" ".join(args), got.stderr))
    return got.stdout


def stats(path):
    return json.loads(run("stats", path, "--json"))


def test_agentic(folder):
    out = os.path.join(folder, "agentic.jsonl")
    run("convert", AGENTIC, "-o", out, "--quiet")
    got = stats(out)
    equal(got["main"]["classes"], {"first": 571, "extend": 34156, "tail": 411, "older": 33,
                                   "fallback": 632, "cut": 360, "cut_older": 25}, "classes")
    equal((got["main"]["sessions"], got["main"]["turns"]), (571, 36188), "sessions and turns")
    equal((got["subagents"]["sessions"], got["subagents"]["turns"]), (63, 676), "sub-agents")
    equal((got["main"]["in_tokens"], got["main"]["out_tokens"]), (4889695991, 16329941), "tokens")
    equal(round(100 * got["main"]["ideal"]["share"], 2), 96.38, "ideal hit (a3)")
    with open(out) as file:
        next(file)
        equal(sum(1 for line in file), 36188 + 676, "lines")


def test_mooncake(folder):
    out = os.path.join(folder, "mooncake.jsonl")
    run("convert", MOONCAKE, "-o", out, "--quiet")
    got = stats(out)
    equal((got["main"]["sessions"], got["main"]["turns"]), (8522, 12031), "sessions and turns")
    equal(got["main"]["classes"]["extend"], 3509, "turns that go on")
    equal(sum(got["main"]["classes"].values()), 12031, "no other class")
    equal(round(100 * got["main"]["ideal"]["share"], 2), 30.27, "ideal hit (a2)")


def test_excerpt(folder):
    with open(os.path.join(ROOT, "tests", "data", "README.md")) as file:
        text = file.read()
    command = re.search(r"\n    cachectl trace convert (.*?)\n\n", text, re.S).group(1)
    words = shlex.split(command.replace("\\\n", " "))
    words[0] = AGENTIC
    out = os.path.join(folder, "excerpt.jsonl")
    words[words.index("-o") + 1] = out
    run("convert", *words, "--quiet")
    with open(out, "rb") as made, \
            open(os.path.join(ROOT, "tests", "data", "agentic_excerpt.jsonl"), "rb") as kept:
        equal(made.read() == kept.read(), True, "the excerpt is as the README makes it")


def main():
    for path in (AGENTIC, MOONCAKE):
        if not os.path.exists(path):
            print("SKIPPED: %s is not there" % os.path.normpath(path))
            sys.exit(77)
    with tempfile.TemporaryDirectory(prefix="it_trace_") as folder:
        test_mooncake(folder)
        test_agentic(folder)
        test_excerpt(folder)
    print("%d checks" % checks)
    if checks == 0:
        sys.exit("no checks ran")


main()
