#pragma once

/*
 * Matching a prompt against a session's tree by digests.
 *
 * kv_match_run() walks the tree: nodes whose digest equals the prompt's are matched whole; where a
 * branch leaves the prompt inside an edge the page of the divergence is found from the chain tags,
 * and named as a probe: its ids must be looked at to know the exact position.  kv_match_resolve()
 * takes the answer of one probe.  Pure but for reading the tree; shard thread.
 */

#include "kvstore/index/session_index.h"

/* Branches that may leave one page and still all be looked into; of more, the most recently used.
 */
#define KV_MATCH_PROBES_MAX 64u

/* Nodes with a window that a prompt matches whole and that are still looked at; of more, the
 * deepest.
 */
#define KV_MATCH_WINDOWS_MAX 64u

struct kv_match_probe {
    struct kv_node *node; /* Whose edge the prompt leaves. */
    uint32_t page;        /* Page object to look into. */
    uint32_t lower;       /* The prompt shares at least this much with it, */
    uint32_t upper;       /* and at most this much. */
    bool resolved;
    bool optional;  /* Read for a window only: damage found there concerns another branch. */
    uint32_t share; /* Result: tokens shared. */
};

struct kv_match {
    const uint32_t *ids;
    uint32_t count;                /* N */
    const struct kv_digest *chain; /* N / 128 + 1 values: D_0 .. D_floor(N/128) */
    bool unmarked_only; /* Input: rows behind a clipped replay or of other kernels do not count. */
    uint64_t kernels;   /* Of this process; set by the run. */
    struct kv_node *node; /* Deepest node matched whole; NULL: none. */
    uint32_t whole;       /* Tokens of the deepest one, counted or not. */
    /* All that have a window, whichever branch they are of: the longest rows may lie on a branch
     * whose windows are gone, or go on below a node that another one of equal tokens hides. */
    struct kv_node *windows[KV_MATCH_WINDOWS_MAX];
    uint32_t window_count;
    uint32_t reach; /* A branch that leaves at most this much earlier is looked into as well: a
                       window there is worth as much as a replay.  The model's window. */
    uint32_t sure;  /* Tokens known to be shared with something before any page is looked into. */
    uint32_t probe_count;
    struct kv_match_probe probes[KV_MATCH_PROBES_MAX];
    bool expired_seen; /* Something was passed over because its time is up. */
    bool foreign_seen; /* ... because another model wrote it. */
    bool any_seen;     /* The tree holds at least one usable node. */
};

/* Chain values of a prompt: writes count / 128 + 1 digests. */
void kv_match_chain(const struct kv_digest *root, const uint32_t *ids, uint32_t count,
                    struct kv_digest *ret_chain);

void kv_match_run(struct kv_match *match, struct kv_index *index, struct kv_session *session,
                  uint64_t now_ms);

/* page_bytes: a verified page, or NULL when it cannot be read (share becomes lower). */
void kv_match_resolve(struct kv_match *match, struct kv_match_probe *probe,
                      const struct kv_page *object, const uint8_t *page_bytes);

/* Longest prefix of the prompt that `ret_source`'s path holds rows for. Needs all probes
 * resolved.  0 and NULL: nothing.  The first position at which the prompt differs from what is
 * stored is *ret_diverged (UINT32_MAX: it does not differ, it only goes on). */
uint32_t kv_match_rows(const struct kv_match *match, struct kv_node **ret_source,
                       uint32_t *ret_diverged);

/* Best node with a window for this prompt: the largest kv_image_cut, at most count - 1.  now_ns:
 * pool clock.  Returns E (0: none); on a tie the node with fewer replays below E. */
uint32_t kv_match_window(const struct kv_match *match, const struct kv_layout *layout,
                         struct kv_pool *pool, uint64_t now_ns, struct kv_node **ret_node);

/* Whether a window stands where the probe could turn out to end: worth reading its page for. */
bool kv_match_window_near(const struct kv_match_probe *probe, const struct kv_layout *layout,
                          struct kv_pool *pool, uint64_t now_ns);

/* Why no window serves position `tokens` of source's path: what became of the nearest one that
 * could (within the spare rows above, or one window below); else DIVERGED if the prompt left the
 * history there, or NEVER_STORED if it only ends there. */
enum kv_reason kv_match_window_reason(const struct kv_layout *layout, const struct kv_node *source,
                                      uint32_t tokens, bool diverged);
