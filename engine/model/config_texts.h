#pragma once

/* The configs of engine/model/configs, taken in when the engine is built (tools/embed_text.py), so
 * that whoever wants one finds it wherever it runs.  For config.c, which has the way to look. */

struct eng_config_text {
    const char *name, *text;
};

extern const struct eng_config_text eng_config_texts[]; /* Ends with a NULL name. */
