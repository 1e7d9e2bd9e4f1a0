/*
 * `cachectl model run`: the engine without a daemon, and everything it computed on the way.
 *
 * For people who check the engine: each tensor of the dump is what a layer really produced, so that
 * another implementation can be fed with this one's inputs and choices, layer by layer.  This file
 * reads the arguments and drives the run; model_run_tensors.c decides what is written.
 */

#include "tools/cachectl/commands.h"
#include "tools/cachectl/model_run.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOT_GIVEN UINT64_MAX

static const char details[] =
    "Runs the tokens of FILE (unsigned 32-bit little endian ids) through the model in DIR and\n"
    "writes one safetensors file.  Needs no daemon.\n"
    "\n"
    "A tensor with one row per position has a sibling NAME.pos, I32 [n]: the absolute positions,\n"
    "ascending.  L is a layer as the checkpoint numbers it, draft stage s being layer\n"
    "num_hidden_layers + s; S is a layer that owns rows.  Encoder layers have a row for every\n"
    "position computed, decoder layers for those the decoder ran over: the last window of them, "
    "or\n"
    "all with --prefill all.\n"
    "\n"
    "  tokens            I32 [N]             the ids given\n"
    "  stream.L          BF16 [n,4,hidden]   residual streams after layer L\n"
    "  premix.L          F32 [n,4]           pre-mix that layer L hands on\n"
    "  win.L             U8 [n,bytes]        window rows, draft stages too\n"
    "  rows.S            U8 [entries,bytes]  main rows from entry 0 on\n"
    "  keys.S            U8 [entries,bytes]  index keys from entry 0 on\n"
    "  topk.L            I32 [n,index_topk]  entries chosen by layer L, ascending, then -1\n"
    "  candidates        I32 [n,blocks]      candidate blocks, ascending, then -1\n"
    "  experts.L         I32 [n,active]      experts chosen, ascending\n"
    "  experts.L.weight  F32 [n,active]      and their weights\n"
    "  engram.L          I64 [n,columns]     rows read of layer L's table\n"
    "  logits            F32 [n,vocabulary]  wherever the decoder ran\n"
    "  draft             I32 [block]         greedy drafts behind the last token\n"
    "  draft.token       I32 [1]             the token they follow: argmax of the last logits\n"
    "  draft.logits      F32 [block,vocabulary]\n"
    "  draft.confidence  F32 [block]         before the sigmoid\n"
    "\n"
    "A packed row is all codes, then all scales: win one e4m3 a value and one ue8m0 for 32; rows\n"
    "e2m1 pairs (even element low) and one e4m3 for 16; keys e2m1 pairs and one ue8m0 for 32.  "
    "With\n"
    "--quant off they are BF16 [n,head_dim] or [entries,index_dim].  __metadata__ says model, "
    "isa,\n"
    "family, prefill, chunk, resume_at, replay and quant.\n"
    "\n"
    "--resume-at N runs [0,N), takes the image of that state, and continues from the image in a\n"
    "fresh session; the dump then begins at the first position computed after it.  With --replay\n"
    "the fresh session has the rows only and reruns the last window before N.";

static bool parse_choice(const char *flag, const char *text, const char *yes, const char *no,
                         bool *ret_value)
{
    const bool is_yes = strcmp(text, yes) == 0;
    if (!is_yes && strcmp(text, no) != 0) {
        ctl_error("%s takes %s or %s", flag, no, yes);
        return false;
    }
    *ret_value = is_yes;
    return true;
}

static bool check_options(const struct model_run_options *options)
{
    if (options->tokens == NULL || options->dump == NULL) {
        ctl_error("%s is missing; `cachectl model run --help` says more",
                  options->tokens == NULL ? "--tokens FILE" : "--dump OUT.safetensors");
        return false;
    }
    if (options->replay && !options->resumes) {
        ctl_error("--replay needs --resume-at N");
        return false;
    }
    return true;
}

/* The ids of FILE; `vocab` bounds them.  NULL: the sentence is printed. */
static uint32_t *read_tokens(const char *path, uint32_t vocab, uint32_t *ret_count)
{
    FILE *file = fopen(path, "rb");
    uint8_t bytes[4];
    uint32_t count = 0, max = 0;
    uint32_t *ids = NULL;
    size_t got = 0;

    if (file == NULL) {
        ctl_error("%s: %s", path, strerror(errno));
        return NULL;
    }
    while ((got = fread(bytes, 1, 4, file)) == 4) {
        if (count == KV_PROMPT_TOKENS_MAX) {
            ctl_error("%s: more than %u tokens, which is the longest context", path,
                      KV_PROMPT_TOKENS_MAX);
            goto fail;
        }
        if (count == max) {
            max = max == 0 ? 4096 : 2 * max;
            uint32_t *more = realloc(ids, max * sizeof(*ids));
            if (more == NULL) {
                ctl_error("%s: no memory for %u tokens", path, max);
                goto fail;
            }
            ids = more;
        }
        ids[count] = kv_load32(bytes);
        if (ids[count] >= vocab) {
            ctl_error("%s: token %u is id %u, the vocabulary has %u", path, count, ids[count],
                      vocab);
            goto fail;
        }
        count++;
    }
    if (ferror(file)) {
        ctl_error("%s: %s", path, strerror(errno));
    } else if (got != 0) {
        ctl_error("%s: not a multiple of 4 bytes: ids are unsigned 32-bit little endian", path);
    } else if (count == 0) {
        ctl_error("%s: no tokens", path);
    } else {
        (void)fclose(file);
        *ret_count = count;
        return ids;
    }

fail:
    (void)fclose(file);
    free(ids);
    return NULL;
}
