/*
 * Facts that must hold whatever the bits are: which checkpoints exist, what a resume may claim, and
 * which of the reference's states it claims to have gone on from.
 *
 * The plan is predicted from outside: from the checkpoints that GetSession lists with and without a
 * window, and from the reference's own tokens.  So "EXACT where EXACT was possible" is checked, and
 * not only "what was called EXACT is exact".
 */

#include "tests/exactness/run.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/digest.h"

#include <string.h>

struct ex_point *check_point_find(struct ex_session *session, const struct ex_id *id)
{
    for (uint32_t i = 0; i < session->point_count; i++)
        if (ex_id_equal(&session->points[i].id, id)) return &session->points[i];
    return NULL;
}

/* From the digest and the positions of clipped replays.  has_more: rows is what a replay at `more`
 * goes on from. */
static void checkpoint_id(const struct ex_checkpoint *checkpoint, const struct ref_state *rows,
                          bool has_more, uint32_t more, struct ex_id *ret_id)
{
    uint8_t bytes[32 + 4 * (REF_REPLAYS_MAX + 1)];
    const uint32_t *replays;
    const uint32_t below = has_more ? more : checkpoint->position;
    uint32_t count = ref_replays(rows, below, &replays);
    struct kv_digest hash;
    memcpy(bytes, checkpoint->digest, 32);
    for (uint32_t i = 0; i < count; i++)
        kv_store32(bytes + 32 + 4 * i, replays[i]);
    if (has_more) kv_store32(bytes + 32 + 4 * count++, more);
    kv_sha256(bytes, 32 + 4 * (size_t)count, &hash);
    memcpy(ret_id->bytes, hash.bytes, sizeof(ret_id->bytes));
}

/* ---- views ---- */

/* Where branches part the daemon makes a checkpoint of its own: its tokens are a child's first
 * ones.
 */
static void learn_branch(struct ex_run *run, struct ex_session *session, const struct ex_view *view,
                         uint32_t at)
{
    const struct ex_checkpoint *branch = &view->points[at];
    for (uint32_t i = at + 1; i < view->point_count; i++) {
        const struct ex_checkpoint *child = &view->points[i];
        if (!child->has_parent || !ex_id_equal(&child->parent, &branch->id)) continue;
        const struct ex_point *point = check_point_find(session, &child->id);
        if (point == NULL || point->position <= branch->position) continue;
        struct ex_checkpoint known = *branch;
        known.durable = false; /* Nobody was promised anything. */
        check_checkpoint(run, session, &known, NULL, point->rows);
        return;
    }
    ex_wrong(run, "%s has a branch at %u with nothing below it", session->name, branch->position);
}

static void view_live(struct ex_run *run, struct ex_session *session, struct ex_view *view)
{
    if (view->live && session->live == NULL)
        ex_wrong(run, "%s is live at %u, and was not since it was closed", session->name,
                 view->head_position);
    if (view->live && view->head_position != ref_tokens(session->live))
        ex_wrong(run, "%s is live at %u, expected %u", session->name, view->head_position,
                 ref_tokens(session->live));
    if (!view->live) {
        ref_free(session->live);
        session->live = NULL;
    }
    if (view->idle_ms > EX_POOL_TTL_MS) view->live = false;
}

void check_view(struct ex_run *run, struct ex_session *session, struct ex_view *view)
{
    uint32_t acknowledged = 0;
    view_live(run, session, view);
    /* Parents stand before children, and are learned from them. */
    for (uint32_t i = view->point_count; i-- > 0;)
        if (view->points[i].branch && check_point_find(session, &view->points[i].id) == NULL)
            learn_branch(run, session, view, i);
    for (uint32_t i = 0; i < view->point_count; i++) {
        const struct ex_checkpoint *listed = &view->points[i];
        const struct ex_point *point = check_point_find(session, &listed->id);
        if (point == NULL || point->position != listed->position)
            ex_wrong(run, "%s lists a checkpoint at %u that was never answered", session->name,
                     listed->position);
        if (listed->window && point->image == NULL)
            ex_wrong(run, "%s has a window at %u, and none was ever taken there", session->name,
                     listed->position);
        if (point->acknowledged) acknowledged++;
    }
    for (uint32_t i = 0; i < session->point_count; i++)
        if (session->points[i].acknowledged) acknowledged--;
    if (acknowledged != 0) ex_wrong(run, "%s lost a durable checkpoint", session->name);
    if (view->has_head && check_point_find(session, &view->head) == NULL)
        ex_wrong(run, "%s has an unknown head", session->name);
}

/* ---- plans ---- */

/* R and E of the plan (kvstore/plan/plan.h), at most N - 1.  sure: E as far as windows on the
 * branch with the longest rows serve; what stands on other branches is worth having, and not
 * promised. */
struct found {
    uint32_t rows, image, sure;
};

static uint32_t serves(struct ex_run *run, const struct ref_state *state, const uint32_t *ids,
                       uint32_t most)
{
    const struct kv_image_state image = ref_image_state(state);
    const uint32_t shared = ref_shared(state, UINT32_MAX, ids, most);
    return shared == 0 ? 0 : kv_image_cut(ref_model_layout(run->model), &image, shared);
}

static const struct ex_checkpoint *parent_of(const struct ex_view *view,
                                             const struct ex_checkpoint *point)
{
    for (uint32_t i = 0; point->has_parent && i < view->point_count; i++)
        if (ex_id_equal(&view->points[i].id, &point->parent)) return &view->points[i];
    return NULL;
}

static uint32_t path_serves(struct ex_run *run, struct ex_session *session,
                            const struct ex_view *view, const struct ex_checkpoint *end,
                            const uint32_t *ids, uint32_t most)
{
    uint32_t best = 0;
    for (; end != NULL; end = parent_of(view, end)) {
        const struct ex_point *point = check_point_find(session, &end->id);
        if (end->window) best = KV_MAX(best, serves(run, point->image, ids, most));
    }
    return best;
}

static struct found find_best(struct ex_run *run, struct ex_session *session,
                              const struct ex_view *view, const uint32_t *ids, uint32_t count)
{
    struct found found = {0, 0, UINT32_MAX};
    uint32_t shared[EX_POINTS_MAX] = {0};
    for (uint32_t i = 0; i < view->point_count; i++) {
        if (view->points[i].expired) continue;
        const struct ex_point *point = check_point_find(session, &view->points[i].id);
        shared[i] = ref_shared(point->rows, point->position, ids, count - 1);
        found.rows = KV_MAX(found.rows, shared[i]);
        if (view->points[i].window)
            found.image = KV_MAX(found.image, serves(run, point->image, ids, count - 1));
    }
    for (uint32_t i = 0; i < view->point_count; i++) {
        if (shared[i] != found.rows) continue;
        const uint32_t sure = path_serves(run, session, view, &view->points[i], ids, count - 1);
        found.sure = KV_MIN(found.sure, sure);
    }
    if (found.rows == 0) found.sure = 0;
    if (!view->live) return found;
    const uint32_t live = serves(run, session->live, ids, count - 1);
    found.rows = KV_MAX(found.rows, ref_shared(session->live, UINT32_MAX, ids, count - 1));
    found.image = KV_MAX(found.image, live);
    found.sure = KV_MAX(found.sure, live);
    return found;
}

static struct ex_said expect_plan(uint32_t window, uint32_t rows, uint32_t image)
{
    const uint32_t even = rows - rows % 2;
    if (image > 0 && rows - image <= window)
        return (struct ex_said){.outcome = EX_EXACT, .hit_tokens = image};
    if (even > window) return (struct ex_said){.outcome = EX_REPLAY, .hit_tokens = even};
    if (image > 0) return (struct ex_said){.outcome = EX_EXACT, .hit_tokens = image};
    return (struct ex_said){.outcome = EX_MISS, .hit_tokens = 0};
}

static bool same_plan(const struct ex_said *a, const struct ex_said *b)
{
    return a->outcome == b->outcome && a->hit_tokens == b->hit_tokens;
}

/* The call ran alone, so what GetSession showed is what it found. */
static void check_alone(struct ex_run *run, const struct found *found, const struct ex_said *said)
{
    const uint32_t window = ref_model_layout(run->model)->window_tokens;
    const struct ex_said want = expect_plan(window, found->rows, found->image);
    const struct ex_said least = expect_plan(window, found->rows, found->sure);
    if (same_plan(said, &want)) return;
    const bool between = said->outcome == EX_EXACT && said->hit_tokens >= found->sure &&
                         said->hit_tokens < found->image;
    if (run->strict || (!same_plan(said, &least) && !between))
        ex_wrong(run,
                 "%s at %u; rows reach %u, a window serves %u, on that branch %u: expected %s "
                 "at %u",
                 ex_outcome_name(said->outcome), said->hit_tokens, found->rows, found->image,
                 found->sure, ex_outcome_name(want.outcome), want.hit_tokens);
    run->counts.missed++;
}

/* Tokens of the prompt that any state of this session ever had: nobody can hit more. */
static uint32_t shared_ever(const struct ex_session *session, const uint32_t *ids, uint32_t count)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < session->point_count; i++)
        most = KV_MAX(most,
                      ref_shared(session->points[i].rows, session->points[i].position, ids, count));
    if (session->live != NULL)
        most = KV_MAX(most, ref_shared(session->live, UINT32_MAX, ids, count));
    return most;
}

void check_plan(struct ex_run *run, struct ex_session *session, const struct ex_view *view,
                const uint32_t *ids, uint32_t count, const struct ex_said *said, bool alone)
{
    const uint32_t window = ref_model_layout(run->model)->window_tokens;
    const uint32_t ever = shared_ever(session, ids, count - 1);

    if (said->outcome == EX_MISS && said->hit_tokens != 0)
        ex_wrong(run, "MISS with a hit of %u tokens", said->hit_tokens);
    if (said->hit_tokens >= count)
        ex_wrong(run, "hit %u of %u tokens: nothing left to compute", said->hit_tokens, count);
    if (said->hit_tokens > ever)
        ex_wrong(run, "hit %u tokens, the history shares %u", said->hit_tokens, ever);
    if (said->outcome == EX_REPLAY && (said->hit_tokens % 2 != 0 || said->hit_tokens <= window))
        ex_wrong(run, "REPLAY at %u with a window of %u", said->hit_tokens, window);

    if (!alone) return;
    const struct found found = find_best(run, session, view, ids, count);
    check_alone(run, &found, said);
}

/* ---- sources ---- */

/* Of two that serve as much the unmarked one is taken: the window named, not the live head. */
static bool unmarked_instead(struct ex_run *run, const struct ex_session *session,
                             const struct ex_point *point, const uint32_t *ids, uint32_t count,
                             const struct ex_said *said)
{
    const uint32_t *unused;
    if (point == NULL || point->image == NULL) return false;
    if (serves(run, point->image, ids, count - 1) != said->hit_tokens) return false;
    return ref_replays(session->live, said->hit_tokens, &unused) > 0 &&
           ref_replays(point->image, said->hit_tokens, &unused) == 0;
}

static struct ref_state *exact_source(struct ex_run *run, struct ex_session *session,
                                      const struct ex_view *view, const uint32_t *ids,
                                      uint32_t count, const struct ex_said *said)
{
    struct ref_state *from = NULL;
    struct ex_point *point = said->has_resumed ? check_point_find(session, &said->resumed) : NULL;
    if (view->live && !unmarked_instead(run, session, point, ids, count, said)) {
        /* The live head is taken where nothing serves more: on a tie it is at hand. */
        const uint32_t tokens = serves(run, session->live, ids, count - 1);
        if (tokens > said->hit_tokens)
            ex_wrong(run, "EXACT at %u, the live head serves %u", said->hit_tokens, tokens);
        if (tokens == said->hit_tokens) from = session->live;
    }
    if (from != NULL) {
        run->counts.from_live++;
    } else {
        if (point == NULL || point->image == NULL)
            ex_wrong(run, "EXACT at %u from a checkpoint without a window", said->hit_tokens);
        const uint32_t tokens = serves(run, point->image, ids, count - 1);
        if (tokens != said->hit_tokens)
            ex_wrong(run, "EXACT at %u from the window at %u, which serves %u", said->hit_tokens,
                     point->position, tokens);
        from = point->image;
        run->counts.from_image++;
        if (said->hit_tokens < point->position) run->counts.from_image_cut++;
        if (said->hit_tokens % 2 == 1) run->counts.from_image_odd++;
    }
    struct ref_state *state = ref_copy(from);
    ref_cut(state, said->hit_tokens);
    return state;
}

/* Rows that reach H, as the daemon could have taken them. */
struct candidate {
    struct ref_state *rows;
    uint32_t shared, replays;
};

static bool candidate_fits(const struct candidate *candidate, const struct ex_said *said,
                           const struct ex_checkpoint *named)
{
    struct ex_id id;
    if (candidate->shared < said->hit_tokens) return false;
    if (named == NULL) return true;
    checkpoint_id(named, candidate->rows, true, said->hit_tokens, &id);
    return ex_id_equal(&id, &named->id);
}

static void consider(struct candidate *best, struct ref_state *rows, uint32_t limit,
                     const uint32_t *ids, uint32_t count, const struct ex_said *said,
                     const struct ex_checkpoint *named)
{
    const uint32_t *unused;
    const struct candidate candidate = {
        .rows = rows,
        .shared = ref_shared(rows, limit, ids, count),
        .replays = ref_replays(rows, said->hit_tokens, &unused),
    };
    if (!candidate_fits(&candidate, said, named)) return;
    if (best->rows != NULL && candidate.shared < best->shared) return;
    if (best->rows != NULL && candidate.shared == best->shared &&
        candidate.replays >= best->replays)
        return;
    *best = candidate;
}

static struct candidate best_rows(const struct ex_session *session, const uint32_t *ids,
                                  uint32_t count, const struct ex_said *said,
                                  const struct ex_checkpoint *named)
{
    struct candidate best = {0};
    for (uint32_t i = 0; i < session->point_count; i++)
        consider(&best, session->points[i].rows, session->points[i].position, ids, count, said,
                 named);
    if (session->live != NULL) consider(&best, session->live, UINT32_MAX, ids, count, said, named);
    return best;
}

static struct ref_state *replay_source(struct ex_run *run, struct ex_session *session,
                                       const uint32_t *ids, uint32_t count,
                                       const struct ex_said *said,
                                       const struct ex_checkpoint *named)
{
    const struct candidate best = best_rows(session, ids, count, said, named);
    if (best.rows == NULL)
        ex_wrong(run, "REPLAY at %u over rows that no branch of this history has",
                 said->hit_tokens);
    const struct candidate rule = best_rows(session, ids, count, said, NULL);
    if (rule.shared == best.shared && rule.replays < best.replays) run->counts.marked++;
    return ref_rows_only(best.rows, said->hit_tokens);
}

struct ref_state *check_source(struct ex_run *run, struct ex_session *session,
                               const struct ex_view *view, const uint32_t *ids, uint32_t count,
                               const struct ex_said *said, const struct ex_checkpoint *named)
{
    run->counts.turns++;
    run->counts.outcomes[said->outcome]++;
    switch (said->outcome) {
    case EX_EXACT:
        return exact_source(run, session, view, ids, count, said);
    case EX_REPLAY:
        return replay_source(run, session, ids, count, said, named);
    case EX_MISS:
        return ref_start(run->model);
    default:
        ex_wrong(run, "an answer without an outcome");
    }
}

/* ---- checkpoints ---- */

void check_checkpoint(struct ex_run *run, struct ex_session *session,
                      const struct ex_checkpoint *checkpoint, struct ref_state *image,
                      struct ref_state *rows)
{
    struct ex_id id;
    checkpoint_id(checkpoint, rows, false, 0, &id);
    if (!ex_id_equal(&id, &checkpoint->id))
        ex_wrong(run, "the id of the checkpoint at %u is not that of its digest and replays",
                 checkpoint->position);
    struct ex_point *point = check_point_find(session, &checkpoint->id);
    if (point != NULL && ref_shared(point->rows, checkpoint->position, ref_ids(rows),
                                    checkpoint->position) != checkpoint->position)
        ex_wrong(run, "the checkpoint at %u has the id of other tokens", checkpoint->position);
    if (point == NULL) {
        if (session->point_count == EX_POINTS_MAX) ex_wrong(run, "too many checkpoints");
        point = &session->points[session->point_count++];
        *point = (struct ex_point){.id = checkpoint->id, .position = checkpoint->position};
        point->rows = ref_keep(rows);
    }
    if (checkpoint->durable) point->acknowledged = true;
    if (image == NULL) return;
    ref_free(point->image);
    point->image = ref_keep(image);
}
