"""docs/examples/first_client.py does what the README says of it.

Goal: run as it stands, against a real daemon with a real (tiny) model, it prints two lines: a MISS, and
an EXACT hit of all but at most 2 tokens of the first prompt and its answer.
"""

import os
import re
import subprocess

import daemon as d

EXAMPLE = os.path.join(d.SOURCE, "docs", "examples", "first_client.py")
MKMODEL = os.path.join(d.BUILD, "tools", "mkmodel")


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
    code, _ = server.stop()
    d.equal(code, 0, "the daemon stops")
    d.finish()


main()
