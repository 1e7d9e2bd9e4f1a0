#pragma once

/* Texts that come from files travel into messages and logs.  Pure; any thread. */

/* Everything but printable ASCII becomes a question mark. */
static inline void eng_printable(char *text)
{
    for (char *c = text; *c != '\0'; c++)
        if (*c < ' ' || *c > '~') *c = '?';
}
