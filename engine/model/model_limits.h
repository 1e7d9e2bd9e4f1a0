#pragma once

/*
 * The longest files of a model that are looked at, and how many.
 *
 * Apart from kvstore/base/limits.h: these are bounds of files read when a model is opened, so that
 * a wrong file is an error and not all the memory; no request, session or peer ever meets one, and
 * docs/limits.md, which lists what a user of the running system can, does not name them.
 */

#define ENG_CONFIG_BYTES_MAX (1u << 20) /* config.json; the released one has 2 KiB. */
#define ENG_CONFIG_DEPTH_MAX 32u        /* Its nesting; the released one's is 3. */

/* engram_ids.bin: 4 bytes for each id of the largest vocabulary (config.c), twice over. */
#define ENG_IDS_BYTES_MAX (1u << 23)

/* Shards of one checkpoint, and their index. */
#define ENG_SHARDS_MAX 256u
#define ENG_INDEX_BYTES_MAX (32u << 20)

/* A safetensors file, and its header.  The released header, were it one file, would be 12 MiB; a
 * parsed one takes ten times as much. */
#define ENG_SAFETENSORS_BYTES_MAX (1ull << 40)
#define ENG_HEADER_BYTES_MAX (32u << 20)

#define ENG_MAPPINGS_MAX 1024u /* Files mapped by one process. */
