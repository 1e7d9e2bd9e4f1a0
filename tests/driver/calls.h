#pragma once

/* The daemon's calls as plain structs: what is sent, what came back.  Every function returns false
 * with a sentence in `why` when the call failed. */

#include "tools/client/client.h"

#define EX_TOKENS_MAX 1600u   /* Of a prompt with its answer. */
#define EX_ANSWER_MAX 32u     /* Tokens of one decode. */
#define EX_POINTS_MAX 160u    /* Checkpoints of a session. */
#define EX_CALL_POINTS_MAX 8u /* Checkpoints made by one call. */
#define EX_WHY_BYTES 640u
#define EX_NAME_BYTES 48u /* Of a session, its zero included. */

/* As in the interface. */
enum ex_level { EX_LEVEL_DEFAULT, EX_LEVEL_ACCEPTED, EX_LEVEL_RAM, EX_LEVEL_SSD };

enum ex_outcome { EX_NO_OUTCOME, EX_EXACT, EX_REPLAY, EX_MISS };

const char *ex_outcome_name(enum ex_outcome outcome);

struct ex_id {
    uint8_t bytes[16];
};

struct ex_checkpoint {
    struct ex_id id, parent;
    bool has_parent;
    uint32_t position;
    uint8_t digest[32];
    bool window;  /* Its image is there. */
    bool durable; /* Its rows survive a crash. */
    bool expired; /* Its rows are past their time. */
    bool branch;  /* Nobody asked for it: branches part there. */
    bool approximate;
    uint32_t approx_from;
};

struct ex_prefill {
    const char *session;
    const uint32_t *ids; /* What is sent: the prompt, or what follows the parent. */
    uint32_t count;
    bool has_parent;
    struct ex_id parent;
    uint32_t stable_tokens;
    uint32_t anchors[4];
    uint32_t anchor_count;
    bool no_checkpoint;
    uint32_t level;
};

struct ex_prefill_answer {
    enum ex_outcome outcome;
    char reason[32], save_reason[32];
    uint32_t prompt_tokens, hit_tokens, replayed_tokens, computed_tokens, stored_tokens;
    bool approximate;
    uint32_t approx_from;
    bool has_resumed;
    struct ex_id resumed;
    uint32_t weakened, hbm_tokens, ssd_tokens;
    struct ex_checkpoint points[EX_CALL_POINTS_MAX];
    uint32_t point_count;
};

struct ex_decode {
    const char *session;
    uint32_t max_tokens;
    float temperature, top_p;
    uint32_t top_k;
    uint64_t seed;
    uint32_t forced[EX_ANSWER_MAX];
    uint32_t forced_count;
    uint32_t stops[16];
    uint32_t stop_count;
    bool ignore_eos, no_checkpoint;
    uint32_t level;
};

struct ex_decode_answer {
    uint32_t first_position;
    uint32_t tokens[EX_ANSWER_MAX];
    uint32_t crcs[EX_ANSWER_MAX];
    uint32_t count;
    bool ended, stopped, torn; /* torn: messages that do not follow each other. */
    uint32_t end_tokens, head_position;
    enum ex_outcome outcome;
    char reason[32], save_reason[32];
    struct ex_checkpoint points[1];
    uint32_t point_count;
};

/* A session as GetSession shows it. */
struct ex_view {
    bool live, has_head;
    uint64_t idle_ms;
    uint32_t head_position;
    uint64_t epoch;
    struct ex_id head;
    struct ex_checkpoint points[EX_POINTS_MAX];
    uint32_t point_count;
};

struct ex_lookup_answer {
    enum ex_outcome outcome;
    uint32_t hit_tokens, stored_tokens;
    bool has_resumed;
    struct ex_id resumed;
};

/* Names of a user's sessions. */
struct ex_list {
    char (*names)[EX_NAME_BYTES];
    uint32_t count, capacity;
};

struct ex_stats {
    uint64_t wrong_bytes, recovered, dropped, checkpoints, lost_batches;
    uint32_t page_bytes, image_bytes;
};

bool ex_call_open(struct client *client, const char *session, char *why);
/* Whose rows live for this long after their last use. */
bool ex_call_open_ttl(struct client *client, const char *session, uint64_t ttl_ms, char *why);
bool ex_call_view(struct client *client, const char *session, struct ex_view *ret_view, char *why);
bool ex_call_lookup(struct client *client, const char *session, const uint32_t *ids, uint32_t count,
                    struct ex_lookup_answer *ret_answer, char *why);
bool ex_call_prefill(struct client *client, const struct ex_prefill *call,
                     struct ex_prefill_answer *ret_answer, char *why);
bool ex_call_decode(struct client *client, const struct ex_decode *call,
                    struct ex_decode_answer *ret_answer, char *why);
bool ex_call_checkpoint(struct client *client, const char *session, enum ex_level level,
                        struct ex_checkpoint *ret_checkpoint, char *why);
/* Until its rows are on SSD. */
bool ex_call_wait(struct client *client, const char *session, const struct ex_id *id, char *why);
bool ex_call_rollback(struct client *client, const char *session, const struct ex_id *id,
                      uint32_t *ret_position, char *why);
/* All pages of the list, as far as `list` has room; count is what there is. */
bool ex_call_list(struct client *client, struct ex_list *list, char *why);
bool ex_call_stats(struct client *client, struct ex_stats *ret_stats, char *why);
bool ex_call_delete(struct client *client, const char *session, char *why);
bool ex_call_close(struct client *client, const char *session, char *why);
bool ex_call_advance(struct client *client, uint64_t ms, char *why);

static inline bool ex_id_equal(const struct ex_id *a, const struct ex_id *b)
{
    for (int i = 0; i < 16; i++)
        if (a->bytes[i] != b->bytes[i]) return false;
    return true;
}
