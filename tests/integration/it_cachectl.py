"""cachectl against the real daemon: every command, its help, its exit codes.

Goal: each command's --help has an example that runs and exits 0; --json is JSON on stdout with a
schema number; stdout is data only; the documented exit codes are what happens; the demo's lines are
all what they say, across a kill -9; a replay on a daemon of its own loses no token.
"""

import os
import shlex
import signal
import subprocess
import time

import daemon as d
from cli import CACHECTL, Tool, token_file

EXCERPT = os.path.join(d.SOURCE, "tests", "data", "agentic_excerpt.jsonl")
COMMANDS = ["status", "doctor", "session list", "session show", "session fork", "session checkpoint",
            "session compact", "session pin", "session touch", "session usage", "session delete",
            "user erase", "stats", "du", "scrub start", "scrub status", "scrub stop", "explain", "demo", "bench",
            "model inspect", "model verify", "trace convert", "trace stats", "trace replay"]


def start(flags=None, directory=None):
    return d.Daemon({"clock.mode": "virtual", **(flags or {})}, directory=directory).start()


def fill(server, name, tokens):
    client = server.client("alice", target="unix:" + server.socket)
    client.session.OpenSession(d.pb.OpenSessionRequest(session_id=name))
    client.session.Prefill(d.pb.PrefillRequest(session_id=name, tokens=d.pack(tokens)))
    for _ in client.session.Decode(d.pb.DecodeRequest(session_id=name, max_tokens=8,
                                                      ignore_eos=True)):
        pass
    return client


def test_help(user):
    """Every command says what it is for, with an example; the examples that need nothing run."""
    top = user.code(0, "--help").stdout
    for name in COMMANDS:
        d.check(name in top, f"--help lists {name}")
        text = user.code(0, *name.split(), "--help").stdout
        d.check("Example:" in text and "Exit codes" in text, f"{name} --help is complete")
        example = text.split("Example:")[1].strip().splitlines()[0].strip()
        d.check(example.startswith("cachectl " + name), f"example of {name}: {example}")
    d.check(user.code(0, "--version").stdout.startswith("cachectl "), "--version")
    d.check("session show" in user.code(0, "session", "--help").stdout, "session --help")


def test_examples(user, ops):
    """The examples of the commands that read, as they stand in the help."""
    for name in ("status", "doctor", "session list", "session show", "session checkpoint",
                 "session pin", "session touch", "session usage", "session delete", "stats", "du",
                 "scrub start", "scrub status", "scrub stop", "user erase", "explain"):
        tool = user if name.startswith("session") else ops
        text = tool.code(0, *name.split(), "--help").stdout
        words = shlex.split(text.split("Example:")[1].strip().splitlines()[0])
        d.equal(words[0], "cachectl", f"example of {name}")
        got = tool.code(0, *words[1:])
        d.check(got.stdout.strip() != "", f"the example of {name} prints something")


def test_status(ops):
    screen = ops.code(0, "status").stdout
    for word in ("cached ", "health", "SYNTHETIC", "VIRTUAL", "hbm", "pool", "ssd", "sessions",
                 "at start", "EXACT", "RSS", "budget", "tokens/s", "rows (encoder + decoder) of"):
        d.check(word in screen, f"status shows {word}")
    d.check("\x1b" not in screen, "no colours into a pipe")
    d.check(all(len(line) <= 100 for line in screen.splitlines()), "status fits a screen")
    d.check(len(screen.splitlines()) <= 24, "status is one screen")
    began = time.monotonic()
    ops.code(0, "status")
    d.check(time.monotonic() - began < 2.0, "status answers at once")
    state = ops.json("status", "--json")
    d.equal(state["daemon"]["backend"], "SYNTHETIC", "backend")
    d.equal(state["daemon"]["health"], "serving", "health")
    d.check(state["daemon"]["isa"] != "" and state["daemon"]["kernels"] != "", "kernels are named")
    d.check(state["engine"]["passes"] >= 0 and "pass_rows_mean" in state["engine"], "passes")
    d.equal([tier["name"] for tier in state["tiers"]], ["hbm", "pool", "ssd"], "tiers")
    d.equal(state["sessions"]["known"], 1, "sessions known")
    d.check(state["memory"]["rss_bytes"] > 0, "RSS")
    d.equal(state["resumes"]["miss"], 1, "the one prefill was a miss")


def test_model(user):
    """The figures of the specification, from the configs; a changed config changes them."""
    configs = os.path.join(d.SOURCE, "engine", "model", "configs")
    figures = {
        "v41-flash": ("backbone 551.57 B", "551.88 B with", "active decode 16.13 B",
                      "active prefill 7.90 B", "engram rows 196.61 B", "890 B/token",
                      "windows 2,703,360 B", "stored image 3,041,280 B",
                      "draft windows 202,752 B, stored 228,096 B", "tails 12,288 B", "sampler 4 B",
                      "95819 tensors", "engram reads 12,672 B/token"),
        "tiny": ("132.5 B/token", "windows 16,896 B", "all\t6,299,358\t6,219,390"),
        "small": ("890 B/token", "windows 1,081,344 B", "246,828,076"),
    }
    for name, words in figures.items():
        said = user.code(0, "model", "inspect", os.path.join(configs, name + ".json")).stdout
        for word in words:
            d.check(word in said, f"{name}: {word}")
    words = shlex.split(user.code(0, "model", "inspect", "--help").stdout.split("Example:")[1]
                        .strip().splitlines()[0])
    state = user.json(*words[1:], "--json")
    d.equal(state["parameters"]["engram_rows"], 196613849600, "engram rows")
    d.equal(state["state"]["bytes_per_token"], 890.0, "bytes per token")
    d.equal(sum(part["bytes"] for part in state["parts"]), state["weight_bytes"], "sum of the parts")

    with open(os.path.join(configs, "v41-flash.json"), encoding="ascii") as f:
        good = f.read()
    changed = os.path.join(d.scratch(), "config.json")
    for old, new, code, words in (
            ('"head_dim": 512', '"head_dim": 256', 0, ("530 B/token", "windows 1,351,680 B")),
            ('"head_dim": 512', '"head_dim": 500', 1, ("head_dim must be a multiple of 32",)),
            ('"num_hidden_layers": 40', '"num_hidden_layers": 41', 1, ("compress_ratios must",))):
        with open(changed, "w", encoding="ascii") as f:
            f.write(good.replace(old, new))
        got = user.code(code, "model", "inspect", changed)
        for word in words:
            d.check(word in got.stdout + got.stderr, f"{new}: {word}: {got.stdout} {got.stderr}")
    user.code(3, "model", "inspect", "/nowhere")
    user.code(3, "model", "verify", "/nowhere")
    user.code(2, "model", "verify")


def test_sessions(user):
    shown = user.json("session", "show", "chat-1", "--json")
    kinds = [c["kind"] for c in shown["checkpoints"]]
    d.equal(sorted(kinds), ["DECODE_END", "PREFILL_END"], "checkpoints of chat-1")
    d.equal(shown["session"]["session_id"], "chat-1", "its name")
    text = user.code(0, "session", "show", "chat-1").stdout
    d.check("POSITION\tKIND\tID" in text and "<- head" in text, "table and tree")
    listed = user.json("session", "list", "--json")["sessions"]
    d.equal([s["session_id"] for s in listed], ["chat-1"], "session list")
    d.check("chat-1\tmain\t" in user.code(0, "session", "list").stdout, "tabs into a pipe")
    user.code(3, "session", "show", "no-such-session")
    for name in ("not/a/name", "a b", "", "x" * 129):
        got = user.code(2, "session", "show", name)
        d.check("session_id" in got.stderr and got.stderr.count("\n") == 1, repr(got.stderr))


def test_stats_and_explain(ops):
    stats = ops.json("stats", "--json")
    d.check(len(stats["counters"]) > 5, "counters")
    names = {c["name"] for c in stats["counters"]} | {l["name"] for l in stats["latencies"]}
    for name in ("cached_engine_passes_total", "cached_engine_pass_rows",
                 "cached_engine_pass_sessions", "cached_engine_tokens_per_second",
                 "cached_engine_busy_seconds_total", "cached_engine_drafts_total",
                 "cached_engine_engram_rows_total", "stage_engine_queue", "stage_queue",
                 "stage_live_queue", "cached_live_in_use", "cached_live_waiting",
                 "cached_live_waits_total", "cached_live_refused_total", "cached_ssd_pages_total",
                 "cached_io_memory_bytes", "cached_io_memory_refused_errno"):
        d.check(name in names, f"stats has {name}")
    d.check(all(c["name"].startswith("cached_") and c["help"] for c in stats["counters"]),
            "every counter has a name of ours and a meaning")
    reasons = ops.json("explain", "--json")["reasons"]
    d.check(len(reasons) > 40 and all(r["cause"] and r["remedy"] for r in reasons), "reasons")
    for reason in ("EXPIRED", "session_busy", "ONLY_APPROXIMATE"):
        d.check("remedy" in ops.code(0, "explain", reason).stdout, f"explain {reason}")
    got = ops.code(3, "explain", "EXPIERD")
    d.check("EXPIRED" in got.stderr and got.stdout == "", "the nearest name, on stderr")


def test_doctor(ops, server):
    checks = ops.json("doctor", "--json")["checks"]
    states = {c["name"]: c["state"] for c in checks}
    for name in ("daemon", "io_uring", "O_DIRECT", "memlock", "space", "clock", "token", "io"):
        d.check(name in states, f"doctor looks at {name}")
    d.check(all(c["fix"] for c in checks if c["state"] != "ok"), "whatever is wrong has a fix")
    d.check("fail" not in states.values(), f"nothing fails here: {states}")
    got = ops.code(1, "doctor", "--model-dir", os.path.join(server.directory, "none"))
    d.check("model" in got.stdout and "fail" in got.stdout, "a model that is not there fails")


def test_exit_codes(user, ops, server, directory):
    d.equal(user.run().returncode, 2, "no command")
    for args in (["sttus"], ["status", "--jsn"], ["session"], ["session", "show"],
                 ["status", "extra"], ["--timeout", "0", "status"], ["--endpoint", "x", "status"],
                 ["trace", "replay", EXCERPT, "--spawn", "gpu"], ["demo", EXCERPT]):
        got = user.code(2, *args)
        d.check(got.stdout == "" and got.stderr != "", f"{args}: talk goes to stderr")
    d.check("did you mean status" in user.run("sttus").stderr, "the nearest command")
    d.check("did you mean --json" in user.run("status", "--jsn").stderr, "the nearest flag")

    user.code(4, "stats")  # A harness may not read the statistics.
    bad = os.path.join(directory, "bad.token")
    with open(bad, "w", encoding="ascii") as f:
        f.write("a-token-that-nobody-has-0123456789")
    got = user.code(4, "--token-file", bad, "status")
    d.check("TOKEN_UNKNOWN" in got.stderr, "the reason is named")
    user.code(4, "--token-file", os.path.join(directory, "none"), "status")
    none = Tool("unix:" + server.socket, None)
    d.check("TOKEN_MISSING" in none.code(4, "status").stderr, "no token at all")

    began = time.monotonic()
    for endpoint in ("unix:" + os.path.join(directory, "none"), "127.0.0.1:1"):
        got = ops.code(5, "--endpoint", endpoint, "status")
        d.check(endpoint in got.stderr, "the sentence names the endpoint")
    d.check(time.monotonic() - began < 10, "an endpoint that is not there is told soon")
    d.equal(ops.run("doctor", "--endpoint", "unix:/nowhere").returncode, 1,
            "doctor goes on without a daemon and fails")


def test_demo(directory):
    """The whole demo, kill -9 and restart included, on a daemon of its own."""
    home = d.scratch()
    pid_file = os.path.join(home, "pid")
    server = start({"server.pid_file": pid_file, "hbm.bytes": "64MiB", "ssd.bytes": "256MiB"},
                   directory=home)
    user = Tool("unix:" + server.socket, token_file(home, "alice"))
    # A killed child stays a zombie of this process; cachectl knows.
    restart = shlex.join(server.command()) + " >>" + shlex.quote(server.log_file) + " 2>&1"
    got = user.run("demo", EXCERPT, "--other-token-file", token_file(home, "bob"),
                   "--ops-token-file", token_file(home, "ops"), "--pid-file", pid_file,
                   "--restart", "exec " + restart)
    d.equal(got.returncode, 0, "demo: " + got.stdout + got.stderr)
    for word in ("MISS NEVER_STORED", "EXACT", "REPLAY EXPIRED", "kill -9", "Rollback",
                 "created=true", "health"):
        d.check(word in got.stdout, f"the demo shows {word}")
    d.check("WRONG" not in got.stdout, "every line is what it says")
    with open(pid_file, encoding="ascii") as f:
        os.kill(int(f.read()), signal.SIGTERM)
    server.kill()


def test_replay(directory):
    """On its own daemon, which is gone afterwards; synthetic, so every byte is checked."""
    tool = Tool("unix:" + os.path.join(directory, "none"), None)
    own = d.scratch()
    tool.env["TMPDIR"] = own
    got = tool.json("trace", "replay", EXCERPT, "--spawn", "synthetic", "--daemon", d.BINARY,
                    "--interleave", "4", "--json", "--quiet")
    d.equal(got.get("wrong_bytes"), 0, "wrong bytes")
    d.equal(got["all"]["turns"], 830, "turns of the excerpt")
    d.equal(got["all"]["short_turns"], 0, "turns that fell short")
    d.check(got["all"]["hit_tokens"] > 0.9 * got["all"]["prompt_tokens"], "most tokens are hits")
    text = tool.code(0, "trace", "replay", EXCERPT, "--spawn", "synthetic", "--daemon", d.BINARY,
                     "--sessions", "2", "--clock").stdout
    d.check("0 wrong bytes" in text, "the sentence the release looks for")
    d.equal(os.listdir(own), [], "directories left behind")

    # Ctrl-C in the middle: the daemon ends and its directory goes, too.
    process = subprocess.Popen([CACHECTL, "trace", "replay", EXCERPT, "--spawn", "synthetic",
                                "--daemon", d.BINARY], env=tool.env, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    process.stderr.readline()  # "started ..."
    process.send_signal(signal.SIGINT)
    talk = process.communicate(timeout=60)[1]
    d.equal(process.returncode, 130, "an interrupted replay fails: " + talk)
    d.check("interrupted" in talk, "and says so")
    d.equal(os.listdir(own), [], "directories left behind by an interrupted replay")


def test_session_calls(user, server):
    """Checkpoint, pin, touch, compact, usage: what they print, what show makes of it, wrong words."""
    fill(server, "calls", list(range(3, 403)))
    shown = user.json("session", "show", "calls", "--json")
    first = shown["checkpoints"][0]["id"]
    made = user.json("session", "checkpoint", "calls", "--json")
    d.equal((made["position"], made["rows_level"]), (407, "SSD"), "checkpoint")
    d.check("at 407 tokens, rows on SSD, with window" in
            user.code(0, "session", "checkpoint", "calls").stdout, "checkpoint in words")
    d.equal(user.json("session", "pin", "calls", first[:6], "--for", "300", "--json")["expire_ms"],
            300000, "pinned")
    d.check("pinned for 10m" in user.code(0, "session", "pin", "calls", "head").stdout, "in words")
    text = user.code(0, "session", "show", "calls").stdout
    d.check("pinned 5m" in text and "pinned 10m" in text, f"show says so: {text}")
    use = user.json("session", "usage", "--json")
    d.check(use["pins"] >= 2 and use["pinned_bytes_ssd"] > 0, f"usage: {use}")
    d.check("not pinned any more" in
            user.code(0, "session", "pin", "calls", first, "--for", "0").stdout, "ended")
    d.check("rows live" in user.code(0, "session", "touch", "calls", first[:8]).stdout, "touched")
    got = user.json("session", "compact", "calls", "--keep", "60", "--json")
    d.equal((got["head_position"], got["epoch"]), (0, 2), "compacted")
    shown = user.json("session", "show", "calls", "--json")
    d.check(all(0 < c["leave_ms"] <= 60000 for c in shown["checkpoints"]), "what goes")
    d.check("goes in " in user.code(0, "session", "show", "calls").stdout, "show says so")
    d.check("head at 0 tokens" in user.code(0, "session", "compact", "chat-1").stdout, "in words")
    for code, words in (
            (2, ("pin", "calls", "xyz")), (3, ("pin", "calls", "0" * 32)), (2, ("pin", "calls", "")),
            (3, ("touch", "calls", "head")), (3, ("pin", "nothing")), (2, ("pin", "a/b")),
            (2, ("pin", "calls", first, "--for", "601")), (2, ("pin", "calls", first, "--for", "x")),
            (2, ("compact", "calls", "--keep", "0")), (3, ("compact", "nothing")),
            (3, ("checkpoint", "nothing")), (2, ("checkpoint",)), (2, ("usage", "calls"))):
        user.code(code, "session", *words)


def main():
    if not os.access(d.BINARY, os.X_OK):
        d.skip("the daemon is not built")
    directory = d.scratch()
    server = start()
    user = Tool("unix:" + server.socket, token_file(server.directory, "alice"))
    ops = Tool("unix:" + server.socket, token_file(server.directory, "ops"))
    fill(server, "chat-1", list(range(3, 203)))

    test_help(user)
    test_examples(user, ops)
    test_model(user)
    test_status(ops)
    test_sessions(user)
    test_stats_and_explain(ops)
    test_doctor(ops, server)
    test_exit_codes(user, ops, server, directory)
    test_session_calls(user, server)
    server.kill()
    test_replay(directory)
    test_demo(directory)
    d.finish()


main()
