/*
 * Resume, second part: the plan.
 *
 * Everything is reduced to two numbers, rows R and window E, and given to the pure rule
 * (kvstore/plan); what the rule chose is then turned into a source: the live session, or a path of
 * the tree.  A window is verified here, before anything relies on it; a damaged one is forgotten
 * and the rule asked again.
 */

#include "cached/shard/shard_internal.h"

#include "kvstore/base/bytes.h"

#include <assert.h>
#include <string.h>

/* Verifies the window before anything relies on it. */
static bool take_image(struct flow *flow, struct kv_node *node)
{
    struct kv_store *store = flow->shard->store;
    struct kv_image_header header;
    struct kv_error err = {0};
    const uint8_t *image = kv_pool_get(store->pool, &node->image, kv_store_now_ns(store));
    if (image == NULL) return false;
    const bool good =
        kv_image_decode(&store->layout, image, &header, &err) == KV_OK &&
        header.generation == node->image.generation &&
        memcmp(header.user.bytes, node->session->user->id.bytes, sizeof(header.user.bytes)) == 0 &&
        memcmp(header.model.bytes, store->options.model.bytes, 32) == 0 &&
        memcmp(header.digest.bytes, node->digest.bytes, 32) == 0 &&
        header.state.tokens == node->tokens && header.kernels == node->kernels;
    if (!good) {
        kv_log(store->options.log, KV_LOG_ERROR, "image_damaged", "position=%u cause=\"%s\"",
               node->tokens, err.text[0] != '\0' ? err.text : "identity differs");
        store->counters.corrupt_images++;
        flow->req->out.weakened++;
        flow->shard->counters.weakened++;
        kv_pool_unpin(store->pool, node->image.slot);
        kv_pool_drop(store->pool, &node->image, KV_REASON_CORRUPT);
        return false;
    }
    flow->image_slot = node->image.slot;
    flow->image_state = header.state;
    return true;
}

/* Clipped replays below h since the deepest checkpoint at or below h: what the next checkpoint's
 * edge starts with.  Returns how many there are. */
static uint32_t edge_replays(struct flow *flow, bool from_live, const struct kv_node *node,
                             uint32_t h)
{
    const struct live *live = flow->session->live;
    struct kv_node *path = from_live ? live->node : (struct kv_node *)(uintptr_t)node;
    const struct kv_node *anchor = kv_index_ancestor(path, h);
    const uint32_t from = anchor == NULL ? 0 : anchor->tokens;
    const uint32_t count = from_live
                               ? live_replays(live, from, h, flow->replays, KV_REPLAYS_MAX)
                               : kv_index_replays(node, from, h, flow->replays, KV_REPLAYS_MAX);
    flow->replay_count = KV_MIN(count, KV_REPLAYS_MAX);
    return count;
}

/* What the tree and the live session offer, as numbers for the pure rule. */
struct offer {
    uint32_t rows_tree, rows, image_tree, image_live, image;
    struct kv_node *rows_node, *image_node;
    uint32_t diverged;
};

static struct offer weigh(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    const struct live *live = flow->session->live;
    const uint32_t most = flow->count - 1;
    struct offer offer = {0};

    offer.rows_tree = kv_match_rows(&flow->match, &offer.rows_node, &offer.diverged);
    offer.rows = KV_MAX(offer.rows_tree, flow->live_match);
    flow->req->out.stored_tokens = offer.rows;
    if (flow->live_match >= offer.rows_tree && live != NULL && !live->busy) {
        const bool leaves = flow->live_match < KV_MIN(flow->count, live->state.tokens);
        offer.diverged = leaves ? flow->live_match : UINT32_MAX;
    }
    offer.rows = KV_MIN(offer.rows, most);
    offer.image_tree = kv_match_window(&flow->match, &store->layout, store->pool,
                                       kv_store_now_ns(store), &offer.image_node);
    if (flow->live_match > 0)
        offer.image_live =
            kv_image_cut(&store->layout, &live->state, KV_MIN(flow->live_match, most));
    offer.image = KV_MAX(offer.image_tree, offer.image_live);
    return offer;
}

/* Whether the edge of the next checkpoint has no room for one more clipped replay. */
static bool replays_exhausted(struct flow *flow, const struct offer *offer)
{
    if (offer->rows == 0 || flow->exact) return false;
    const bool from_live = offer->rows_tree <= flow->live_match;
    return edge_replays(flow, from_live, offer->rows_node, offer->rows & ~1u) >= KV_REPLAYS_MAX;
}

static bool is_of_others(const struct flow *flow)
{
    return flow->kernels != flow->shard->store->options.kernels;
}

/* Enough is stored, but not as what an exact call may use. */
static bool is_only_approximate(const struct flow *flow, const struct offer *offer)
{
    const uint32_t stored = KV_MIN(flow->match.whole, flow->count - 1);
    if (!flow->exact || stored <= offer->rows) return false;
    return offer->rows == 0 || stored > resume_reach(flow);
}

static enum kv_reason plan_reason(const struct flow *flow, const struct offer *offer)
{
    if (flow->req->out.reason == KV_REASON_CORRUPT) return KV_REASON_CORRUPT;
    if (flow->req->out.reason == KV_REASON_READ_FAILED) return KV_REASON_READ_FAILED;
    if (is_of_others(flow)) return KV_REASON_OTHER_KERNELS;
    if (flow->plan.kind == KV_PLAN_EXACT) return KV_REASON_NONE;
    if (flow->plan.kind == KV_PLAN_REPLAY) {
        const bool diverged = offer->diverged < flow->count;
        if (offer->rows_tree < flow->live_match)
            return diverged ? KV_REASON_DIVERGED : KV_REASON_NEVER_STORED;
        return kv_match_window_reason(flow->shard->layout, offer->rows_node,
                                      flow->plan.restore_tokens, diverged);
    }
    if (is_only_approximate(flow, offer)) return KV_REASON_ONLY_APPROXIMATE;
    if (offer->rows > 0) return KV_REASON_TOO_SHORT;
    if (flow->match.any_seen) return KV_REASON_DIVERGED;
    if (flow->match.expired_seen) return KV_REASON_EXPIRED;
    if (flow->match.foreign_seen) return KV_REASON_MODEL_CHANGED;
    return why_missed(flow->session);
}

/* Says whose bits the state has; what claims to be EXACT has ours. */
static void plan_kernels(struct flow *flow)
{
    struct request_out *out = &flow->req->out;
    char name[KV_KERNELS_NAME_BYTES];
    out->other_kernels = is_of_others(flow);
    out->kernels = NULL;
    if (!out->other_kernels) return;
    (void)kv_kernels_name(flow->kernels, name);
    out->kernels = kv_arena_strdup(flow->req->arena, name, strlen(name));
    out->outcome = OUTCOME_REPLAY;
    out->reason = KV_REASON_OTHER_KERNELS;
}

static void plan_outcome(struct flow *flow, const struct offer *offer)
{
    static const enum request_outcome outcomes[] = {
        [KV_PLAN_MISS] = OUTCOME_MISS,
        [KV_PLAN_REPLAY] = OUTCOME_REPLAY,
        [KV_PLAN_EXACT] = OUTCOME_EXACT,
    };
    struct request_out *out = &flow->req->out;
    out->reason = plan_reason(flow, offer);
    out->outcome = outcomes[flow->plan.kind];
    out->prompt_tokens = flow->count;
    out->hit_tokens = flow->plan.restore_tokens;
    out->replayed_tokens = flow->plan.restore_tokens - flow->plan.replay_from;
    out->computed_tokens = flow->count - flow->plan.restore_tokens;
    out->diverged = offer->diverged < flow->count && flow->match.any_seen;
    out->diverged_at = out->diverged ? offer->diverged : 0;
    why_resumed(flow, out->stored_tokens, offer->diverged < flow->count);
    plan_kernels(flow);
}

/* As far without a mark is better; else the live session, which has everything in memory. */
static bool takes_live(struct flow *flow, const struct offer *offer, bool exact)
{
    const uint32_t by_live = exact ? offer->image_live : flow->live_match;
    const uint32_t by_tree = exact ? offer->image_tree : offer->rows_tree;
    const struct kv_node *node = exact ? offer->image_node : offer->rows_node;
    if (by_live != by_tree || node == NULL) return by_live >= by_tree;
    const bool live_marked = live_replays(flow->session->live, 0, by_live, NULL, 0) > 0;
    return !live_marked || node->approx_from < by_tree;
}

/* Deepest position <= h of the path that other kernels computed; 0: none. */
static uint32_t path_other_until(const struct kv_node *node, uint32_t h, uint64_t ours)
{
    while (node != NULL && h > 0) {
        while (node->parent != NULL && node->parent->tokens >= h)
            node = node->parent;
        if (node->kernels != ours) return h;
        h = node->parent == NULL ? 0 : node->parent->tokens;
        node = node->parent;
    }
    return 0;
}

static bool mark_fits(struct flow *flow)
{
    const bool marks = is_of_others(flow) && flow->plan.kind == KV_PLAN_EXACT;
    return !marks || flow->replays[flow->replay_count - 1] == flow->plan.restore_tokens;
}

/* State of other kernels is used, but what follows is approximate from there, as after a replay. */
static void note_kernels(struct flow *flow)
{
    const struct shard *shard = flow->shard;
    const struct live *live = flow->session->live;
    const uint64_t ours = shard->store->options.kernels;
    const uint32_t h = flow->plan.restore_tokens;
    flow->kernels = ours;
    flow->other_until = 0;
    if (flow->source == SOURCE_LIVE) {
        flow->kernels = live_kernels_at(shard, live, h);
        flow->other_until = KV_MIN(live->other_until, h);
    } else if (flow->source == SOURCE_NODE) {
        flow->kernels = kv_index_kernels_at(flow->node, h);
        flow->other_until = path_other_until(flow->node, h, ours);
    }
    if (flow->kernels == ours || flow->plan.kind != KV_PLAN_EXACT) return;
    if (flow->replay_count < KV_REPLAYS_MAX) flow->replays[flow->replay_count++] = h;
}

/* EXACT takes the window with its path, REPLAY the path with the most rows. */
static bool choose_source(struct flow *flow, const struct offer *offer)
{
    const uint32_t h = flow->plan.restore_tokens;
    const bool exact = flow->plan.kind == KV_PLAN_EXACT;
    flow->source = SOURCE_NONE;
    flow->node = NULL;
    flow->replay_count = 0;
    flow->kernels = flow->shard->store->options.kernels;
    flow->other_until = 0;
    if (flow->plan.kind == KV_PLAN_MISS) return true;
    if (takes_live(flow, offer, exact)) {
        flow->source = SOURCE_LIVE;
        (void)edge_replays(flow, true, NULL, h);
    } else {
        flow->source = SOURCE_NODE;
        flow->node = exact ? offer->image_node : offer->rows_node;
        if (exact && !flow->plan_only && !take_image(flow, flow->node)) return false;
        (void)edge_replays(flow, false, flow->node, h);
    }
    if (!exact && !flow->exact) flow->replays[flow->replay_count++] = h;
    note_kernels(flow);
    return true;
}

/* Decode from a stored head: an image with its pending token is taken at its own position. */
static bool plan_pending(struct flow *flow)
{
    struct kv_store *store = flow->shard->store;
    struct kv_node *head = flow->session->head;
    if (flow->unread || !flow->want_pending || flow->session->live != NULL || head == NULL)
        return false;
    if (head->tokens != flow->count || !head->image_state.has_pending) return false;
    if (!kv_pool_has(store->pool, &head->image, kv_store_now_ns(store))) return false;
    if (!take_image(flow, head)) return false;
    flow->plan = (struct kv_plan){.kind = KV_PLAN_EXACT,
                                  .replay_from = head->tokens,
                                  .restore_tokens = head->tokens,
                                  .prompt_tokens = head->tokens};
    flow->source = SOURCE_NODE;
    flow->node = head;
    flow->replay_count = 0;
    note_kernels(flow);
    return true;
}

void resume_plan(struct flow *flow)
{
    const uint32_t reach = resume_reach(flow);
    if (plan_pending(flow)) {
        flow->req->out.outcome = OUTCOME_EXACT;
        flow->req->out.hit_tokens = flow->count;
        plan_kernels(flow);
        resume_read(flow);
        return;
    }
    struct offer offer;
    const bool unread_all = flow->unread && flow->unread_from == 0;
    bool nothing = unread_all || flow->req->out.weakened > RESUME_WEAKEN_MAX;
    do {
        offer = weigh(flow);
        const struct kv_found found = {
            .rows_tokens = nothing ? 0 : offer.rows,
            .image_tokens = nothing ? 0 : offer.image,
            .replays_exhausted = replays_exhausted(flow, &offer),
        };
        flow->plan = kv_plan_resume(reach, found, flow->count);
        /* A damaged window is gone the next time round.  A mark that finds no room any more is no
         * mark: then everything is computed. */
        const bool chosen = choose_source(flow, &offer);
        if (chosen && !nothing && !mark_fits(flow))
            nothing = true;
        else if (chosen)
            break;
    } while (true);
    plan_outcome(flow, &offer);
    if (flow->source == SOURCE_NODE && flow->plan.kind == KV_PLAN_EXACT) {
        flow->req->out.has_resumed = true;
        flow->req->out.resumed = flow->node->id;
    } else if (flow->source == SOURCE_LIVE && flow->plan.kind == KV_PLAN_EXACT) {
        const struct live *live = flow->session->live;
        flow->req->out.has_resumed = live->node != NULL;
        if (live->node != NULL) flow->req->out.resumed = live->node->id;
    }
    flow->req->out.times.lookup_ns += resume_lap(flow);
    if (flow->plan_only)
        flow->ready(flow);
    else
        resume_read(flow);
}
