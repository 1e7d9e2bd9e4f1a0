"""Turns text files into a C source with one array of their names and texts.

usage: embed_text.py ARRAY FILE...   writes to stdout; a text is named by its file without suffix
"""

import os
import sys


def main():
    array, files = sys.argv[1], sys.argv[2:]
    print("/* Made by tools/embed_text.py from " + ", ".join(map(os.path.basename, files)) + ". */")
    print('#include "tools/mkmodel_configs.h"\n')
    print("const struct embedded_text %s[] = {" % array)
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
