"""docs/examples/first_client.py does what the README says of it.

Goal: run as it stands, against a real daemon with a real (tiny) model, it prints two lines: a MISS, and
an EXACT hit of all but at most 2 tokens of the first prompt and its answer.  Without its variables it says
which one is missing, in one sentence.
"""

import os
import re
import subprocess

import daemon as d

EXAMPLE = os.path.join(d.SOURCE, "docs", "examples", "first_client.py")
MKMODEL = os.path.join(d.BUILD, "tools", "mkmodel")

# What `deploy/quickstart --keep` writes and says at its end, with the folders of this test.
KEEP = r"""
eval "$(sed -n '/^quoted() /,/^}/p; /^explain_keep() /,/^}/p' "$1")"
running_pid() { printf 1; }
ROOT=$2 BUILD=$3 WORK=$4 endpoint=$5
CACHED=$BUILD/cached/cached CACHECTL=$BUILD/tools/cachectl CONF=$WORK/c PID_FILE=$WORK/p DAEMON_LOG=$WORK/l
daemon_command=("$CACHED")
explain_keep
"""


def test_keep(endpoint, token):
    """The lines that quickstart and README show work in any shell, and twice."""
    work = os.path.join(d.scratch(), "it's here")
    os.mkdir(work)
    build = os.path.join(work, "build")
    os.symlink(d.BUILD, build)
    os.symlink(token, os.path.join(work, "demo.token"))
    said = subprocess.run(["bash", "-euc", KEEP, "bash", os.path.join(d.SOURCE, "deploy/quickstart"),
                           d.SOURCE, build, work, endpoint], capture_output=True, text=True,
                          timeout=60, check=False)
    d.equal(said.returncode, 0, said.stderr)
    d.check("\n                 cachectl session list\n" in said.stdout, said.stdout)
    for shell in ("sh", "bash"):
        got = subprocess.run(
            [shell, "-euc", '. "$0"/env; . "$0"/env; command -v cachectl; command -v mkmodel; '
             'cachectl session list >/dev/null; cachectl --version >/dev/null; printf %s "$PATH"', work],
            capture_output=True, text=True, timeout=60, check=False,
            env={"PATH": "/usr/bin:/bin:/a b"})
        tools = os.path.join(build, "tools")
        d.equal(got.returncode, 0, f"{shell}: {got.stderr}")
        d.equal(got.stdout, f"{tools}/cachectl\n{tools}/mkmodel\n{tools}:/usr/bin:/bin:/a b", shell)


def main():
    if not os.access(d.BINARY, os.X_OK) or not os.access(MKMODEL, os.X_OK):
        d.skip("the daemon or mkmodel is not built")
    home = d.scratch()
    model = os.path.join(home, "model")
    subprocess.run([MKMODEL, "--config", "tiny", model], check=True, stdout=subprocess.DEVNULL)
    server = d.Daemon({"engine.backend": "cpu", "engine.model_dir": model, "hbm.bytes": "32MiB"},
                      directory=home).start()
    token = os.path.join(home, "alice.token")
    with open(token, "w", encoding="ascii") as f:
        f.write(d.TOKENS["alice"][2] + "\n")

    with open(EXAMPLE, encoding="utf-8") as f:
        source = f.read()
    d.check(len(source.splitlines()) <= 50, "the example is about 40 lines")
    prompt = "".join(re.search(r'prompt = ids\((.*?)\)\nanswer', source, re.S).group(1).split("\n"))
    prompt_count = len("".join(re.findall(r'"([^"]*)"', prompt)).replace("\\n", "\n"))
    answer_count = int(re.search(r"max_tokens=(\d+)", source).group(1))
    for run in (1, 2):  # Again, because an example is run again.
        got = subprocess.run(["/usr/bin/python3", EXAMPLE], capture_output=True, text=True,
                             timeout=120, check=False,
                             env={**os.environ, "CACHED_ENDPOINT": "unix:" + server.socket,
                                  "CACHED_TOKEN_FILE": token})
        d.equal(got.returncode, 0, f"run {run}: {got.stderr[-500:]}")
        lines = got.stdout.splitlines()
        d.equal(len(lines), 2, f"run {run}: two lines: {lines}")
        d.equal(lines[0], "turn 1 MISS NEVER_STORED", f"run {run}")
        second = re.fullmatch(r"turn 2 EXACT hit=(\d+)", lines[-1])
        if d.check(second, f"run {run}: {lines[-1]}"):
            hit = int(second.group(1))
            whole = prompt_count + answer_count
            d.check(whole - 2 <= hit <= whole, f"run {run}: hit {hit} of {whole}")
    for absent in ("CACHED_ENDPOINT", "CACHED_TOKEN_FILE"):
        given = {"CACHED_ENDPOINT": "unix:" + server.socket, "CACHED_TOKEN_FILE": token}
        for value in (None, ""):
            env = {**os.environ, **given, absent: value}
            got = subprocess.run(["/usr/bin/python3", EXAMPLE], capture_output=True, text=True,
                                 timeout=60, check=False,
                                 env={k: v for k, v in env.items() if v is not None})
            d.equal(got.returncode, 1, f"without {absent}")
            d.equal(got.stderr, f"{absent} is not set: after `deploy/quickstart --keep`, run "
                    "`. .quickstart/env`\n", f"without {absent}: one sentence")
    test_keep("unix:" + server.socket, token)
    code, _ = server.stop()
    d.equal(code, 0, "the daemon stops")
    d.finish()


main()
