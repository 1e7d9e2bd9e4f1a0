#pragma once

/* The configs of engine/model/configs, taken in when mkmodel is built (tools/embed_text.py), so
 * that it finds them wherever it runs.  Ends with a NULL name. */

struct embedded_text {
    const char *name, *text;
};

extern const struct embedded_text mkmodel_configs[];
