"""cachectl bench: its files, its progress, and its end.

Goal: a benchmark measures what it says, keeps to files of its own, says every now and then what is
under way, and ends at once when a signal wants it to: with what it has measured, the code that a
shell gives a signal, and without files or processes left behind.
"""

import json
import os
import pty
import resource
import select
import signal
import subprocess
import time

import daemon as d
from cli import CACHECTL, Tool

ALL = ("rpc", "gemm", "restart", "prefill", "threads", "resume", "decode", "draft", "batch-replay",
       "ssd-read", "ssd-commit")
UNDER_WAY = "s since the start"


def test_rpc(tool):
    got = tool.json("bench", "rpc", "--quick", "--quiet", "--json", "--daemon", d.BINARY)
    d.check(got["lookup"]["p50_us"] > 0 and got["echo"]["p50_us"] > 0, "both were measured")
    d.check(got["ratio_min"] <= got["ratio"] <= got["ratio_max"], "the median is between")
    tool.code(3, "bench", "nothing")


def test_files(tool):
    """A benchmark's own files stand in TMPDIR, and nothing of anybody else's is touched."""
    model, own = os.path.join(d.scratch(), "tiny"), d.scratch()
    done = subprocess.run([os.path.join(d.BUILD, "tools", "mkmodel"), "--config", "tiny",
                           model], check=False, capture_output=True, text=True)
    if not d.check(done.returncode == 0, f"mkmodel: {done.stderr}"):
        return
    got = tool.json("bench", "resume", "--quick", "--quiet", "--json", "--model", model)
    for line in got["comparisons"]:  # Times of so small a model are noise now and then.
        if line["ratio_min"] <= 0:
            d.check(not line["measurable"] and not line.get("met"), f"noise is no result: {line}")
        d.equal(line["measurable"], line["ratio_min"] > 0, f"{line}")
    rows = os.path.join(model, "session.rows")
    with open(rows, "w", encoding="ascii") as f:
        f.write("mine")
    names = sorted(os.listdir(model))
    tool.env = dict(tool.env or os.environ, TMPDIR="/nonexistent")
    got = tool.code(1, "bench", "resume", "--quick", "--model", model)
    d.equal(got.stderr, "cachectl: cannot make a file in /nonexistent: No such file or directory\n",
            "the place and the cause")
    d.equal(sorted(os.listdir(model)), names, "the model's directory is as it was")
    with open("/dev/full", "w", encoding="ascii") as full:
        got = subprocess.run([CACHECTL, "model", "verify", model], stdout=full, text=True,
                             stderr=subprocess.PIPE, check=False)
    d.equal((got.returncode, got.stderr), (1, "cachectl: stdout: No space left on device\n"),
            "a result that cannot be written")

    # A model that cannot be made: mkmodel is ended in the middle of it.
    tool.env["TMPDIR"] = own
    got = subprocess.run(
        [CACHECTL, "bench", "threads", "--quick", "--quiet"], capture_output=True, text=True,
        timeout=120, env=tool.env, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)))
    d.equal(got.returncode, 1, "bench threads without room: " + got.stderr)
    d.check("mkmodel" in got.stderr and "room for" not in got.stderr, got.stderr)
    d.equal(os.listdir(own), [], "directories left behind by a failed benchmark")


def test_ssd(tool):
    """Real reads and saves beside fio; without fio it says so, and nothing is left behind."""
    tool.env = dict(tool.env or os.environ, TMPDIR=d.scratch())
    own = tool.env["TMPDIR"]
    for name in ("ssd-read", "ssd-commit"):
        without = dict(tool.env, PATH="/nonexistent")
        got = subprocess.run([CACHECTL, "bench", name, "--quick"], env=without, text=True,
                             capture_output=True, check=False)
        d.equal((got.returncode, got.stderr),
                (5, "cachectl: the anchor of this benchmark is missing: no fio in PATH "
                    "(Debian package fio)\n"), f"bench {name} without fio")
        began = time.monotonic()
        done = tool.run("bench", name, "--quick", "--quiet", "--json")
        if done.returncode == 5 and "no fio" in done.stderr:
            print(f"not run: bench {name}: {done.stderr.strip()}")
            continue
        d.equal(done.returncode, 0, f"bench {name}: {done.stderr}")
        seconds = time.monotonic() - began
        d.check(seconds < 60, f"bench {name} --quick took {seconds:.0f} s")
        got = json.loads(done.stdout)
        for line in got["comparisons"]:
            d.check(line["pairs"] == 5 and line["seconds"] > 0 and line["anchor_seconds"] > 0,
                    f"{name}: {line}")
        facts = got["facts"]
        if name == "ssd-read":
            d.equal(len(got["comparisons"]), 15, "five lines for each of three lengths")
            d.check(0.01 < facts["16k: checksum's CPU seconds a GiB"] < 2, f"{facts}")
        else:
            for size in ("450 KB deltas", "30-token deltas"):
                d.check(facts[f"{size}: checkpoints a flush of the segment"] > 1,
                        f"{size}: one flush serves many checkpoints: {facts}")
        d.equal(os.listdir(own), [], f"bench {name}: directories left behind")


def test_help(tool):
    """Of one benchmark its own paragraph, of all of them each."""
    every = tool.code(0, "bench", "--help").stdout
    for name in ALL:
        for arguments in ((name, "--help"), ("--quick", name, "-h")):
            said = tool.code(0, "bench", *arguments).stdout
            d.check(f"Usage: cachectl bench {name} [flags]\n" in said, said[:200])
            d.check(f"cachectl bench {name} --quick\n" in said, f"{name}: an example")
            for other in ALL:
                text = f"\n{other:13} "
                d.check(text in every, f"--help has {other}")
                d.equal(text in said, other == name, f"bench {name} --help and {other}")
    for name, flag, takes in (
            (["prefill", "--hot"], "--hot", "--quick, --model, --threads"),
            (["rpc", "--model", "M"], "--model", "--quick, --daemon"),
            (["threads", "--threads", "3"], "--threads", "--quick, --model"),
            (["draft", "--threads", "0"], "--threads", "--quick, --model"),
            (["prefill", "--daemon", "x"], "--daemon", "--quick, --model, --threads"),
            (["gemm", "--seed", "1"], "--seed", "--quick, --hot"),
            (["ssd-read", "--dir", "x"], "--dir", "--quick"),
            (["fill", "--quick"], "--quick", "--daemon, --dir, --bytes, --ops-token-file"),
            (["rpc", "--bytes", "1"], "--bytes", "--quick, --daemon"),
            (["restart", "--model", "x"], "--model", "--quick, --daemon, --dir, --seed")):
        said = tool.code(2, "bench", *name).stderr
        d.equal(said, f"cachectl: bench {name[0]} does nothing with {flag}; its flags are {takes}\n",
                " ".join(name))
    said = tool.code(0, "bench", "nothing", "--help").stdout
    d.equal(said, every, "an unknown name")


def begin(tool, *arguments, **kwargs):
    kwargs.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen([CACHECTL, "bench", *arguments], env=tool.env, text=True,
                            stdout=subprocess.PIPE, **kwargs)


def children_of(directory):
    """Processes that were told of this directory: daemons, echo servers, mkmodel."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                if directory.encode() in f.read():
                    found.append(pid)
        except OSError:
            continue
    return found


def interrupt(tool, process, own, which, what):
    """Ends it; what it said on stderr from then on."""
    began = time.monotonic()
    process.send_signal(which)
    out, talk = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    d.equal(process.returncode, 128 + which, f"{what}: exit code: {talk}")
    d.check(seconds < 5, f"{what}: ended after {seconds:.1f} s")
    d.check(f"interrupted by {signal.Signals(which).name}; " in talk, f"{what}: {talk!r}")
    d.equal(out, "", f"{what}: nothing on stdout")
    d.equal(os.listdir(own), [], f"{what}: directories left behind")
    d.equal(children_of(own), [], f"{what}: processes left behind")
    return talk[talk.index("interrupted by"):]


def test_interrupted(tool):
    """Each of them: as soon as it has said something, and a little later."""
    for name in ALL:
        for pause, which in ((0, signal.SIGINT), (1.5, signal.SIGTERM)):
            own = d.scratch()
            tool.env["TMPDIR"] = own
            what = f"bench {name}, after {pause} s"
            process = begin(tool, name, *(["--daemon", d.BINARY] if name in ("rpc", "restart") else []))
            line = process.stderr.readline()
            if "the anchor of this benchmark is missing" in line:
                process.communicate(timeout=60)
                print(f"not interrupted: bench {name}: {line.strip()}")
                break
            time.sleep(pause)
            if process.poll() is not None:
                d.check(False, f"{what}: it has ended by itself: {process.communicate()}")
                continue
            interrupt(tool, process, own, which, what)


def test_stopping(tool):
    """Whatever is under way: within a second it is gone, or has said that it stops."""
    model = os.path.join(d.scratch(), "small")
    subprocess.run([os.path.join(d.BUILD, "tools", "mkmodel"), "--config", "small", model], check=True,
                   stdout=subprocess.DEVNULL)
    said = 0
    for name in ("prefill", "draft", "batch-replay"):
        for pause in (0.2, 2):
            own = d.scratch()
            tool.env["TMPDIR"] = own
            process = begin(tool, name, "--model", model)
            time.sleep(pause)
            process.send_signal(signal.SIGINT)
            try:
                _, talk = process.communicate(timeout=1)
            except subprocess.TimeoutExpired as late:
                talk = (late.stderr or b"").decode()
                d.check("cachectl: SIGINT: stopping when the step under way is done\n" in talk,
                        f"bench {name} after {pause} s: silent for a second: {talk!r}")
                said += 1
                talk = process.communicate(timeout=60)[1]
            d.equal(process.returncode, 130, f"bench {name} after {pause} s: {talk}")
            d.check("interrupted by SIGINT; " in talk, f"bench {name} after {pause} s: {talk!r}")
            d.equal(os.listdir(own), [], "directories left behind")
    print(f"{said} ends took longer than a second and said so")


def test_measured_so_far(tool):
    """What was measured before the end is told, also with --quiet."""
    for name, line, words in (("rpc", "round 2 of", "of 11 rounds; the last: Lookup "),
                              ("threads", "pair 2 of", " of 5 pairs")):
        own = d.scratch()
        tool.env["TMPDIR"] = own
        process = begin(tool, name, *(["--daemon", d.BINARY] if name == "rpc" else ["--quick"]))
        while line not in process.stderr.readline() and process.poll() is None:
            pass
        said = interrupt(tool, process, own, signal.SIGINT, f"bench {name}")
        d.check("measured so far:\n  " in said and words in said, f"bench {name}: {said!r}")
    tool.env["TMPDIR"] = own = d.scratch()
    process = begin(tool, "prefill", "--quiet")
    time.sleep(0.5)
    said = interrupt(tool, process, own, signal.SIGINT, "bench --quiet")
    d.equal(said, "interrupted by SIGINT; nothing was measured\n", "and nothing else")


def test_progress(tool):
    """A line each 2 s on a terminal, each 10 s elsewhere; the long prompt comes first."""
    tool.env["TMPDIR"] = own = d.scratch()
    main, side = pty.openpty()
    on_terminal = begin(tool, "prefill", "--threads", "1", stderr=side)
    os.close(side)
    talk, end = "", time.monotonic() + 60
    while UNDER_WAY not in talk and time.monotonic() < end:
        if select.select([main], [], [], 1)[0]:
            talk += os.read(main, 4096).decode()
    on_terminal.send_signal(signal.SIGINT)
    on_terminal.communicate(timeout=60)
    os.close(main)
    d.check(UNDER_WAY in talk, f"on a terminal: {talk!r}")
    d.equal(os.listdir(own), [], "directories left behind")

    process = begin(tool, "prefill", "--threads", "1")
    began = time.monotonic()
    while UNDER_WAY not in process.stderr.readline() and process.poll() is None:
        began = time.monotonic()
    silent = time.monotonic() - began
    d.check(9 < silent < 20, f"into a pipe the first line comes after {silent:.1f} s of silence")
    interrupt(tool, process, own, signal.SIGTERM, "bench prefill")


def main():
    if not os.access(d.BINARY, os.X_OK):
        d.skip("the daemon is not built")
    tool = Tool("unix:/nowhere", None)
    test_rpc(tool)
    test_files(tool)
    test_ssd(tool)
    test_help(tool)
    test_interrupted(tool)
    test_stopping(tool)
    test_measured_so_far(tool)
    test_progress(tool)
    d.finish()


main()
