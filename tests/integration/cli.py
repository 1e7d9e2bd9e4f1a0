"""cachectl as a program: what it prints, and how it ends."""

import json
import os
import subprocess

import daemon as d

CACHECTL = os.environ.get("CACHECTL") or os.path.join(d.BUILD, "tools", "cachectl")


def token_file(directory, user):
    path = os.path.join(directory, user + ".token")
    with open(path, "w", encoding="ascii") as f:
        os.chmod(path, 0o600)
        f.write(d.TOKENS[user][2])
    return path


class Tool:
    """cachectl with the variables it reads, and no others of the caller's."""

    def __init__(self, endpoint, token):
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("CACHED_")}
        self.env["CACHED_ENDPOINT"] = endpoint
        if token:
            self.env["CACHED_TOKEN_FILE"] = token

    def run(self, *args, timeout=120):
        return subprocess.run([CACHECTL, *args], capture_output=True, text=True, timeout=timeout,
                              env=self.env, cwd=d.SOURCE, check=False)

    def code(self, want, *args):
        got = self.run(*args)
        d.equal(got.returncode, want, f"exit code of {args}: {got.stderr.strip()}")
        return got

    def json(self, *args, code=0):
        got = self.code(code, *args)
        try:
            document = json.loads(got.stdout)
        except ValueError:
            d.check(False, f"{args}: no JSON on stdout: {got.stdout[:200]!r}")
            return {}
        d.equal(document.get("schema"), 1, f"{args}: schema")
        return document
