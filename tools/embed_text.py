"""Turns text files into a C source with one array of their names and texts.

usage: embed_text.py HEADER STRUCT ARRAY FILE...

Writes to stdout.  HEADER declares the array; a text is named by its file without suffix.
"""

import os
import sys


def main():
    header, struct, array, files = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
    print("/* Made by tools/embed_text.py from " + ", ".join(map(os.path.basename, files)) + ". */")
    print('#include "%s"\n' % header)
    print("const struct %s %s[] = {" % (struct, array))
    for path in files:
        with open(path, "rb") as file:
            data = file.read()
        name = os.path.splitext(os.path.basename(path))[0]
        print('    {"%s",' % name)
        for line in data.decode("ascii").splitlines(keepends=True):
            text = line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            print('     "%s"' % text)
        print("    },")
    print("    {0, 0},\n};")


if __name__ == "__main__":
    main()
