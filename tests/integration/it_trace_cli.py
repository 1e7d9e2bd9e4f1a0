"""cachectl trace convert and stats on small files: values, exit codes, damage with its line.

Goal: each field of a converted line is what tools/cachectl/trace_file.h says, on inputs small
enough to check by hand; wrong usage is 2; a damaged input is 1, names file and line, and leaves no
output behind.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile

ROOT = os.environ.get("CACHED_SOURCE_ROOT") or os.path.dirname(
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("CACHED_BUILD_ROOT") or os.path.join(ROOT, "build")
CACHECTL = os.environ.get("CACHECTL") or os.path.join(BUILD, "tools", "cachectl")
EXCERPT = os.path.join(ROOT, "tests", "data", "agentic_excerpt.jsonl")
checks = 0


def check(ok, what):
    global checks
    checks += 1
    if not ok:
        sys.exit("expected: %s" % (what,))


def equal(got, want, what):
    check(got == want, "%s: got %r, want %r" % (what, got, want))


def run(verb, *args):
    return subprocess.run([CACHECTL, "trace", verb, *args], capture_output=True, text=True,
                          timeout=60)


def convert(path, *args):
    out = path + ".out"
    got = run("convert", path, "-o", out, *args)
    equal(got.returncode, 0, "convert: " + got.stderr)
    with open(out) as lines:
        rows = [json.loads(line) for line in lines]
    os.unlink(out)
    return rows


def request(t, length, ids, out=100, **more):
    row = {"t": t, "type": "n", "in": length, "out": out, "hash_ids": ids,
           "input_types": ["text"]}
    row.update(more)
    return row


def agentic_line():
    agent = {"t": 4.5, "type": "subagent", "tool_tokens": 10, "system_tokens": 20,
             "requests": [request(0, 130, [1, 9], api_time=1.25),
                          request(2, 200, [1, 9, 10], input_types=["tool_result"])]}
    return {"id": "trace_0042", "block_size": 64, "tool_tokens": 30, "system_tokens": 40,
            "requests": [
                request(0, 150, [1, 2], api_time=2.0),
                request(3, 330, [1, 2, 3, 4, 5], think_time=1.5, input_types=["tool_result"]),
                agent,
                request(9, 270, [1, 2, 3, 6], think_time=20.0, input_types=["text", "thinking"]),
                request(10, 66, [7], think_time=0.25, out=0)]}


def test_agentic(folder):
    path = os.path.join(folder, "agentic.txt")
    with open(path, "w") as out:
        out.write(json.dumps(agentic_line()) + "\n")
        out.write(json.dumps(dict(agentic_line(), id="trace_0043")) + "\n")
    head, *rows = convert(path, "--sessions", "1", "--users", "1")
    equal(head, {"trace": 1, "name": "agentic", "block": 64, "clock": "session",
                 "users": "made-up", "tail": 2, "scope": "session"}, "header")
    main = {"user": 1, "sess": 42, "sys": [30000040, 70], "dur": 0, "out": 100}
    sub = {"user": 1, "sess": 1042000, "sub": 42, "sys": [10000020, 30], "dur": 0, "out": 100}
    want = [
        dict(main, t=0, dur=2000, turn=0, par=-1, keep=0, **{"in": 150}, ids=[[1, 2]], kind="text"),
        dict(main, t=3000, gap=1500, turn=1, par=0, keep=128, **{"in": 330}, ids=[[3, 3]],
             kind="tool"),
        dict(sub, t=4500, dur=1250, turn=0, par=-1, keep=0, **{"in": 130}, ids=[[1, 1], [9, 1]],
             kind="text"),
        dict(sub, t=6500, turn=1, par=0, keep=128, **{"in": 200}, ids=[[10, 1]], kind="tool"),
        # think_time 20 s counts an earlier pause too: the difference of the times is less.
        dict(main, t=9000, gap=6000, turn=2, par=1, keep=192, **{"in": 270}, ids=[[6, 1]],
             kind="other"),
        dict(main, t=10000, gap=250, turn=3, par=-1, keep=0, **{"in": 66}, out=0, ids=[[7, 1]],
             kind="text"),
    ]
    equal(len(rows), len(want), "lines")
    for got, expected in zip(rows, want):
        equal(got, expected, "line")

    head, *rows = convert(path, "--scale", "64", "--no-subagents", "--session-ids", "43")
    equal((head["block"], head["scale"], head["tail"]), (1, 64, 2), "scaled header")
    equal([row["in"] for row in rows], [4, 7, 6, 3], "floor(in / 64) + 2")
    equal([row["out"] for row in rows], [1, 1, 1, 1], "answers of at least one token")
    equal([row["raw"] for row in rows], [[150, 100], [330, 100], [270, 100], [66, 0]], "raw")
    equal([row["keep"] for row in rows], [0, 2, 3, 0], "scaled keep")
    equal({row["sess"] for row in rows}, {43}, "session")


def test_mooncake(folder):
    path = os.path.join(folder, "mooncake.gz")
    def row(t, length, out, ids):
        return json.dumps({"timestamp": t, "input_length": length, "output_length": out,
                           "hash_ids": ids}) + "\n"
    with gzip.open(path, "wt") as out:
        out.write(row(0, 1100, 50, [1, 2, 3]))      # 2 full blocks, the third is partial
        out.write(row(3, 1100, 50, [1, 2, 4]))      # no room for prompt + answer: its own session
        out.write(row(6, 1600, 10, [1, 2, 5, 6]))   # goes on from the newest holder of block 2
        out.write(row(9, 300, 10, [7]))
        for i in range(120):                        # block 50: a shared system prompt
            out.write(row(10, 1024, 1, [50, 100 + i]))
        out.write(row(11, 2000, 1, [50, 990, 991, 992]))
        out.write(row(12, 2000, 1, [50, 100, 993, 994]))
    head, *rows = convert(path)
    equal((head["block"], head["clock"], head["scope"], head["tail"]), (512, "global", "global", 0),
          "header")
    equal(rows[0], {"t": 0, "dur": 0, "user": 1, "sess": 1, "turn": 0, "par": -1, "keep": 0,
                    "in": 1100, "out": 50, "ids": [[1, 2]]}, "first request")
    equal((rows[1]["sess"], rows[1]["par"]), (2, -1), "no room for the answer")
    equal(rows[2], {"t": 6, "dur": 0, "user": 2, "sess": 2, "turn": 1, "par": 0, "keep": 1024,
                    "in": 1600, "out": 10, "ids": [[5, 1]]}, "goes on")
    equal(rows[3]["ids"], [], "no full block")
    equal(rows[-2]["par"], -1, "a shared system prompt is no link")
    equal(rows[-2]["sys"], [50, 512], "shared system prompt")
    equal((rows[-1]["par"], rows[-1]["keep"]), (0, 1024), "a link beyond the shared prompt")


def test_usage(folder):
    for verb in ("convert", "stats"):
        got = run(verb, "--help")
        equal(got.returncode, 0, verb + " --help")
        check("Example:" in got.stdout, verb + " --help has an example")
        for args in ([], ["a", "b", "-o", "c"], ["a", "--wrong"], ["--wrong=1"]):
            got = run(verb, *args)
            equal(got.returncode, 2, "%s %s" % (verb, args))
            check(got.stderr.startswith("cachectl trace " + verb), "says who: " + got.stderr)
            equal(got.stdout, "", "stdout is for data")
    for args in (["--scale", "0"], ["--scale", "x"], ["--sessions", "-1"], ["--session-ids", "1,"],
                 ["--session-ids", "a"], ["--seed"], ["-o"]):
        equal(run("convert", EXCERPT, "-o", os.path.join(folder, "no"), *args).returncode, 2, args)
    equal(run("convert", EXCERPT).returncode, 2, "no output named")


def test_damage(folder):
    good = json.dumps(agentic_line()) + "\n"
    lost = json.loads(good)
    del lost["requests"][1]["hash_ids"]
    cases = [("", 1, "empty"), ("no json\n", 1, "not JSON"), ("{}\n", 1, "neither"),
             (good + good, 2, "appears twice"),
             (good + json.dumps(dict(lost, id="trace_0007")) + "\n", 2, "hash_ids"),
             (good + good[:300], 2, "not JSON"),
             ('{"trace":1,"block":64}\n', 1, "converted trace already")]
    path = os.path.join(folder, "bad")
    out = os.path.join(folder, "out")
    for text, line, words in cases:
        with open(path, "w") as file:
            file.write(text)
        got = run("convert", path, "-o", out)
        equal(got.returncode, 1, "damaged input, line %d" % line)
        check("%s:%d: " % (path, line) in got.stderr, "line %d in: %s" % (line, got.stderr))
        check(words in got.stderr, "%r in: %s" % (words, got.stderr))
        equal([name for name in os.listdir(folder) if name.startswith("out")], [], "no output")
    with open(path, "w") as file:
        file.write(good)
    for args in (["--session-ids", "41"], ["--scale", "7"]):
        got = run("convert", path, "-o", out, *args)
        equal(got.returncode, 1, args)
        equal([name for name in os.listdir(folder) if name.startswith("out")], [], "no output")

    with open(EXCERPT) as file:
        lines = file.readlines()
    for number in (2, 100, len(lines)):
        with open(path, "w") as file:
            file.writelines(lines[:number - 1] + [lines[number - 1][:40] + "\n"] + lines[number:])
        got = run("stats", path)
        equal(got.returncode, 1, "damaged trace")
        check("%s:%d: " % (path, number) in got.stderr, "line %d in: %s" % (number, got.stderr))


def test_excerpt():
    got = run("stats", EXCERPT, "--json")
    equal(got.returncode, 0, "stats: " + got.stderr)
    stats = json.loads(got.stdout)
    equal(stats["schema"], 1, "schema")
    equal(stats["scale"], 64, "scale")
    equal(stats["main"]["classes"], {"first": 31, "extend": 721, "tail": 14, "older": 4,
                                     "fallback": 9, "cut": 36, "cut_older": 3}, "classes")
    equal((stats["main"]["turns"], stats["subagents"]["turns"]), (818, 12), "turns")
    equal(stats["replay"]["new_tokens"], 33794, "new tokens")
    text = run("stats", EXCERPT).stdout
    for words in ("sessions       31", "cut in older            3", "fall-back               9"):
        check(words in text, "%r in the table" % words)


def main():
    with tempfile.TemporaryDirectory(prefix="it_trace_") as folder:
        test_agentic(folder)
        test_mooncake(folder)
        test_usage(folder)
        test_damage(folder)
    test_excerpt()
    print("%d checks" % checks)
    if checks == 0:
        sys.exit("no checks ran")


main()
