/*
 * Messages of the calls of sessions, checked field by field.
 */

#include "cached/rpc/rpc_decode_internal.h"

#include "kvstore/base/bytes.h"
#include "session.pb-c.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#define TEMPERATURE_MAX 10.0f

typedef Cached__Session__V1__PrefillRequest pb_prefill;
typedef Cached__Session__V1__DecodeRequest pb_decode;

static bool take_level(struct request *req, int level)
{
    if (level < 0 || level > LEVEL_SSD) {
        request_fail(req, KV_REASON_LEVEL_INVALID, "level", "0 to 3",
                     request_u64(req, (uint32_t)level), NULL);
        return false;
    }
    req->in.level = (enum request_level)level;
    return true;
}

static bool take_checkpoint_id(struct request *req, const char *field,
                               const ProtobufCBinaryData *data, struct kv_checkpoint_id *ret_id)
{
    if (data->len == sizeof(ret_id->bytes)) {
        memcpy(ret_id->bytes, data->data, sizeof(ret_id->bytes));
        return true;
    }
    request_fail(req, KV_REASON_CHECKPOINT_ID_INVALID, field, "16 bytes",
                 request_u64(req, data->len), NULL);
    return false;
}

static bool fail_token(struct rpc_decoder *d, const char *field, uint32_t index, uint32_t id)
{
    char text[48];
    const int used = snprintf(text, sizeof(text), "%s[%u]", field, index);
    request_fail(d->req, KV_REASON_TOKEN_OUT_OF_VOCAB,
                 kv_arena_strdup(d->req->arena, text, (size_t)used),
                 request_u64(d->req, d->vocab_tokens), request_u64(d->req, id), NULL);
    return false;
}

/* The list that split() took out: copied once, aligned, in host order, each id checked. */
static bool take_tokens(struct rpc_decoder *d, const char *field, struct request_tokens *ret_tokens)
{
    struct request *req = d->req;
    const uint64_t bytes = d->split.has_big ? d->split.big_bytes : 0;
    if (bytes % 4 != 0) {
        request_fail(req, KV_REASON_TOKENS_MALFORMED, field, "a multiple of 4 bytes",
                     request_u64(req, bytes), NULL);
        return false;
    }
    if (!rpc_check_max(req, KV_REASON_PROMPT_TOO_LONG, field, bytes / 4, d->context_tokens))
        return false;

    const uint32_t count = (uint32_t)(bytes / 4);
    uint32_t *ids = kv_arena_alloc(req->arena, (size_t)bytes);
    if (ids == NULL) {
        request_fail(req, KV_REASON_QUEUE_FULL, field, NULL, NULL, "No memory for the token list.");
        return false;
    }
    if (count > 0) {
        const bool read = rpc_cursor_read(&d->split.big, ids, bytes);
        assert(read); /* split() has checked the length. */
    }
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = kv_load32((const uint8_t *)&ids[i]);
        if (ids[i] >= d->vocab_tokens) return fail_token(d, field, i, ids[i]);
    }
    *ret_tokens = (struct request_tokens){.ids = ids, .count = count};
    return true;
}

static bool take_prompt(struct rpc_decoder *d, struct request_tokens *ret_tokens)
{
    if (!take_tokens(d, "tokens", ret_tokens)) return false;
    if (ret_tokens->count > 0) return true;
    request_fail(d->req, KV_REASON_TOKENS_EMPTY, "tokens", "1", "0", NULL);
    return false;
}

static bool decode_open(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__OpenSessionRequest *m =
        rpc_unpack(d, &cached__session__v1__open_session_request__descriptor);
    if (m == NULL || !rpc_take_session(req, m->session_id)) return false;
    if (!rpc_check_max(req, KV_REASON_SESSION_KIND_INVALID, "kind", (uint32_t)m->kind,
                       CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_EPHEMERAL))
        return false;

    const bool is_sub = m->kind == CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_SUB;
    const bool has_parent = m->parent_session_id[0] != '\0';
    if (is_sub != has_parent) {
        request_fail(req, KV_REASON_SESSION_KIND_INVALID, "parent_session_id",
                     is_sub ? "1 to 128 bytes" : "empty",
                     request_u64(req, strlen(m->parent_session_id)), NULL);
        return false;
    }
    if (has_parent && !rpc_check_name(req, "parent_session_id", m->parent_session_id)) return false;
    if (!rpc_check_max(req, KV_REASON_TTL_INVALID, "ttl_ms", m->ttl_ms, KV_TTL_MS_MAX))
        return false;
    req->in.u.open.kind =
        m->kind == 0 ? CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_MAIN : (uint32_t)m->kind;
    req->in.u.open.parent_name = has_parent ? m->parent_session_id : NULL;
    req->in.u.open.ttl_ms = m->ttl_ms;
    return true;
}

static bool decode_lookup(struct rpc_decoder *d)
{
    const Cached__Session__V1__LookupRequest *m =
        rpc_unpack(d, &cached__session__v1__lookup_request__descriptor);
    return m != NULL && rpc_take_session(d->req, m->session_id) &&
           take_prompt(d, &d->req->in.u.lookup.tokens);
}

/* With a parent the prompt's length is known to the shard only; then positions are checked there.
 */
static bool take_stops(const struct rpc_decoder *d, const pb_prefill *m)
{
    struct request *req = d->req;
    const uint32_t end =
        m->parent_checkpoint_id.len > 0 ? d->context_tokens : req->in.u.prefill.tokens.count;
    if (!rpc_check_max(req, KV_REASON_STABLE_TOKENS_INVALID, "stable_tokens", m->stable_tokens,
                       end))
        return false;
    req->in.u.prefill.stable_tokens = m->stable_tokens;
    if (!rpc_check_max(req, KV_REASON_ANCHORS_INVALID, "anchors", m->n_anchors, KV_ANCHORS_MAX))
        return false;

    uint32_t before = 0;
    for (uint32_t i = 0; i < m->n_anchors; i++) {
        if (m->anchors[i] <= before || m->anchors[i] > end) {
            request_fail(req, KV_REASON_ANCHORS_INVALID, "anchors", request_u64(req, end),
                         request_u64(req, m->anchors[i]), NULL);
            return false;
        }
        before = m->anchors[i];
        req->in.u.prefill.anchors[i] = before;
    }
    req->in.u.prefill.anchor_count = (uint32_t)m->n_anchors;
    return true;
}

static bool decode_prefill(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const pb_prefill *m = rpc_unpack(d, &cached__session__v1__prefill_request__descriptor);
    if (m == NULL || !rpc_take_session(req, m->session_id)) return false;
    if (!take_prompt(d, &req->in.u.prefill.tokens)) return false;
    req->in.u.prefill.has_parent = m->parent_checkpoint_id.len > 0;
    if (req->in.u.prefill.has_parent &&
        !take_checkpoint_id(req, "parent_checkpoint_id", &m->parent_checkpoint_id,
                            &req->in.u.prefill.parent))
        return false;
    if (!take_stops(d, m) || !take_level(req, (int)m->level)) return false;
    req->in.u.prefill.no_checkpoint = m->no_checkpoint;
    req->in.u.prefill.exact = m->exact;
    req->in.epoch = m->epoch;
    return true;
}

static bool fail_sampling(struct request *req, const char *field, const char *limit, double value)
{
    char text[40];
    const int used = snprintf(text, sizeof(text), "%g", value);
    request_fail(req, KV_REASON_SAMPLING_INVALID, field, limit,
                 kv_arena_strdup(req->arena, text, (size_t)used), NULL);
    return false;
}

/* Written so that a NaN fails. */
static bool take_sampling(struct request *req, const pb_decode *m)
{
    if (!(m->temperature >= 0.0f && m->temperature <= TEMPERATURE_MAX))
        return fail_sampling(req, "temperature", "0 to 10", (double)m->temperature);
    if (!(m->top_p >= 0.0f && m->top_p <= 1.0f))
        return fail_sampling(req, "top_p", "0 to 1", (double)m->top_p);
    req->in.u.decode.temperature = m->temperature;
    req->in.u.decode.top_p = m->top_p > 0.0f ? m->top_p : 1.0f; /* 0 and 1 both mean off. */
    req->in.u.decode.top_k = m->top_k;
    req->in.u.decode.seed = m->seed;
    return true;
}

static bool take_stop_tokens(struct rpc_decoder *d, const pb_decode *m)
{
    struct request *req = d->req;
    if (!rpc_check_max(req, KV_REASON_STOP_TOKENS_INVALID, "stop_tokens", m->n_stop_tokens,
                       KV_STOP_TOKENS_MAX))
        return false;
    for (uint32_t i = 0; i < m->n_stop_tokens; i++) {
        if (m->stop_tokens[i] >= d->vocab_tokens) {
            request_fail(req, KV_REASON_STOP_TOKENS_INVALID, "stop_tokens",
                         request_u64(req, d->vocab_tokens), request_u64(req, m->stop_tokens[i]),
                         NULL);
            return false;
        }
        req->in.u.decode.stop_tokens[i] = m->stop_tokens[i];
    }
    req->in.u.decode.stop_count = (uint32_t)m->n_stop_tokens;
    return true;
}

static bool decode_decode(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const pb_decode *m = rpc_unpack(d, &cached__session__v1__decode_request__descriptor);
    if (m == NULL || !rpc_take_session(req, m->session_id)) return false;
    if (m->max_tokens == 0 || m->max_tokens > KV_DECODE_TOKENS_MAX) {
        request_fail(req, KV_REASON_MAX_TOKENS_INVALID, "max_tokens", "1 to 65536",
                     request_u64(req, m->max_tokens), NULL);
        return false;
    }
    if (!take_sampling(req, m)) return false;
    if (!take_tokens(d, "forced_tokens", &req->in.u.decode.forced)) return false;
    if (!rpc_check_max(req, KV_REASON_MAX_TOKENS_INVALID, "forced_tokens",
                       req->in.u.decode.forced.count, m->max_tokens))
        return false;
    if (!take_stop_tokens(d, m) || !take_level(req, (int)m->level)) return false;
    if (!rpc_check_max(req, KV_REASON_FROM_POSITION_INVALID, "from_position", m->from_position,
                       d->context_tokens))
        return false;
    req->in.u.decode.max_tokens = m->max_tokens;
    req->in.u.decode.ignore_eos = m->ignore_eos;
    req->in.u.decode.no_checkpoint = m->no_checkpoint;
    req->in.u.decode.from_position = m->from_position;
    req->in.epoch = m->epoch;
    return true;
}

static bool decode_checkpoint(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__CheckpointRequest *m =
        rpc_unpack(d, &cached__session__v1__checkpoint_request__descriptor);
    if (m == NULL || !rpc_take_session(req, m->session_id)) return false;
    if (!rpc_check_max(req, KV_REASON_CHECKPOINT_KIND_INVALID, "kind", (uint32_t)m->kind,
                       KIND_MANUAL))
        return false;
    req->in.u.checkpoint.kind = m->kind == 0 ? KIND_MANUAL : (enum request_kind)m->kind;
    req->in.epoch = m->epoch;
    return take_level(req, (int)m->level);
}

static bool decode_wait(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__WaitDurableRequest *m =
        rpc_unpack(d, &cached__session__v1__wait_durable_request__descriptor);
    if (m == NULL || !rpc_take_session(req, m->session_id)) return false;
    if (!take_checkpoint_id(req, "checkpoint_id", &m->checkpoint_id, &req->in.u.wait_durable.id))
        return false;
    if ((int)m->level != LEVEL_RAM && (int)m->level != LEVEL_SSD) {
        request_fail(req, KV_REASON_LEVEL_INVALID, "level", "2 to 3",
                     request_u64(req, (uint32_t)m->level), NULL);
        return false;
    }
    return take_level(req, (int)m->level);
}

/* Position and digest: both or none, and no checkpoint id beside them. */
static bool take_boundary(struct rpc_decoder *d, uint32_t position,
                          const ProtobufCBinaryData *digest)
{
    struct request *req = d->req;
    const bool has_id = req->in.u.rollback.has_id;
    const size_t want = has_id ? 0 : sizeof(req->in.u.rollback.digest.bytes);
    if (!rpc_check_max(req, KV_REASON_CHECKPOINT_ID_INVALID, "position", position,
                       has_id ? 0 : d->context_tokens))
        return false;
    if (digest->len != want) {
        request_fail(req, KV_REASON_CHECKPOINT_ID_INVALID, "digest", has_id ? "empty" : "32 bytes",
                     request_u64(req, digest->len), NULL);
        return false;
    }
    req->in.u.rollback.position = position;
    if (!has_id) memcpy(req->in.u.rollback.digest.bytes, digest->data, want);
    return true;
}

static bool decode_rollback(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__RollbackRequest *m =
        rpc_unpack(d, &cached__session__v1__rollback_request__descriptor);
    if (m == NULL || !rpc_take_session(req, m->session_id)) return false;
    req->in.u.rollback.has_id = m->checkpoint_id.len > 0 || m->position == 0;
    if (req->in.u.rollback.has_id &&
        !take_checkpoint_id(req, "checkpoint_id", &m->checkpoint_id, &req->in.u.rollback.id))
        return false;
    if (!take_boundary(d, m->position, &m->digest)) return false;
    req->in.u.rollback.keep = m->keep;
    req->in.epoch = m->epoch;
    return true;
}

static bool decode_compact(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__CompactRequest *m =
        rpc_unpack(d, &cached__session__v1__compact_request__descriptor);
    if (m == NULL || !rpc_take_session(req, m->session_id)) return false;
    if (!rpc_check_max(req, KV_REASON_TTL_INVALID, "keep_old_for_ms", m->keep_old_for_ms,
                       KV_TTL_MS_MAX))
        return false;
    req->in.u.compact.keep_ms =
        m->keep_old_for_ms == 0 ? KV_OLD_BRANCH_KEEP_MS : m->keep_old_for_ms;
    req->in.epoch = m->epoch;
    return true;
}

static bool decode_pin(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__PinRequest *m =
        rpc_unpack(d, &cached__session__v1__pin_request__descriptor);
    if (m == NULL || !rpc_take_session(req, m->session_id)) return false;
    req->in.u.node.ttl_ms = m->ttl_ms;
    return take_checkpoint_id(req, "checkpoint_id", &m->checkpoint_id, &req->in.u.node.id) &&
           rpc_check_max(req, KV_REASON_PIN_INVALID, "ttl_ms", m->ttl_ms, KV_PIN_MS_MAX);
}

static bool decode_touch(struct rpc_decoder *d)
{
    const Cached__Session__V1__TouchRequest *m =
        rpc_unpack(d, &cached__session__v1__touch_request__descriptor);
    return m != NULL && rpc_take_session(d->req, m->session_id) &&
           take_checkpoint_id(d->req, "checkpoint_id", &m->checkpoint_id, &d->req->in.u.node.id);
}

static bool decode_own_usage(struct rpc_decoder *d)
{
    return rpc_unpack(d, &cached__session__v1__get_usage_request__descriptor) != NULL;
}

static bool decode_fork(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__ForkRequest *m =
        rpc_unpack(d, &cached__session__v1__fork_request__descriptor);
    if (m == NULL || !rpc_take_session(req, m->session_id)) return false;
    req->in.u.fork.has_id = m->checkpoint_id.len > 0;
    if (req->in.u.fork.has_id &&
        !take_checkpoint_id(req, "checkpoint_id", &m->checkpoint_id, &req->in.u.fork.id))
        return false;
    if (!rpc_check_name(req, "new_session_id", m->new_session_id)) return false;
    if (!rpc_check_max(req, KV_REASON_SESSION_KIND_INVALID, "kind", (uint32_t)m->kind,
                       CACHED__SESSION__V1__SESSION_KIND__SESSION_KIND_EPHEMERAL))
        return false;
    req->in.u.fork.session_name = m->new_session_id;
    req->in.u.fork.session = kv_session_id_of(&req->user, m->new_session_id);
    req->in.u.fork.kind = (uint32_t)m->kind;
    req->in.u.fork.ttl_ms = m->ttl_ms;
    req->in.epoch = m->epoch;
    return rpc_check_max(req, KV_REASON_TTL_INVALID, "ttl_ms", m->ttl_ms, KV_TTL_MS_MAX);
}

static bool decode_close(struct rpc_decoder *d)
{
    const Cached__Session__V1__CloseSessionRequest *m =
        rpc_unpack(d, &cached__session__v1__close_session_request__descriptor);
    return m != NULL && rpc_take_session(d->req, m->session_id);
}

static bool decode_get(struct rpc_decoder *d)
{
    const Cached__Session__V1__GetSessionRequest *m =
        rpc_unpack(d, &cached__session__v1__get_session_request__descriptor);
    return m != NULL && rpc_take_session(d->req, m->session_id);
}

static bool decode_list(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__ListSessionsRequest *m =
        rpc_unpack(d, &cached__session__v1__list_sessions_request__descriptor);
    if (m == NULL) return false;
    if (!rpc_check_max(req, KV_REASON_PAGE_SIZE_INVALID, "page_size", m->page_size,
                       KV_LIST_PAGE_MAX))
        return false;
    req->in.u.list.page_size = m->page_size == 0 ? LIST_PAGE_DEFAULT : m->page_size;
    return rpc_take_page_token(req, m->page_token, &req->in.u.list.has_after,
                               &req->in.u.list.after);
}

static bool decode_delete(struct rpc_decoder *d)
{
    struct request *req = d->req;
    const Cached__Session__V1__DeleteSessionRequest *m =
        rpc_unpack(d, &cached__session__v1__delete_session_request__descriptor);
    if (m == NULL || !rpc_take_session(req, m->session_id)) return false;
    req->in.u.remove.dry_run = m->dry_run;
    return true;
}

rpc_decode_fn *rpc_decode_session(enum request_method method)
{
    static rpc_decode_fn *const decoders[REQUEST_METHOD_COUNT] = {
        [REQUEST_OPEN_SESSION] = decode_open,     [REQUEST_LOOKUP] = decode_lookup,
        [REQUEST_PREFILL] = decode_prefill,       [REQUEST_DECODE] = decode_decode,
        [REQUEST_CHECKPOINT] = decode_checkpoint, [REQUEST_WAIT_DURABLE] = decode_wait,
        [REQUEST_ROLLBACK] = decode_rollback,     [REQUEST_CLOSE_SESSION] = decode_close,
        [REQUEST_LIST_SESSIONS] = decode_list,    [REQUEST_GET_SESSION] = decode_get,
        [REQUEST_DELETE_SESSION] = decode_delete, [REQUEST_FORK] = decode_fork,
        [REQUEST_COMPACT] = decode_compact,       [REQUEST_PIN] = decode_pin,
        [REQUEST_TOUCH] = decode_touch,           [REQUEST_GET_USAGE] = decode_own_usage,
    };
    assert(method < REQUEST_METHOD_COUNT);
    return decoders[method];
}
