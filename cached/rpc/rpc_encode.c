/*
 * Answers of the session service.
 *
 * The structs of protobuf-c are filled from request_out field by field; ids are not copied, they
 * are pointed to, because request and message live and die together.  Only the stream of Decode is
 * written by hand: it is the one message sent thousands of times per request, and it must not take
 * arena each time.
 */

#include "cached/rpc/rpc_encode.h"

#include "admin.pb-c.h"
#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/format/kernels.h"
#include "session.pb-c.h"

#include <assert.h>

#define NS_PER_MS 1e6

typedef Cached__Session__V1__CheckpointInfo pb_checkpoint;
typedef Cached__Session__V1__SessionInfo pb_session;

#define FILL(message, init)                                                                        \
    do {                                                                                           \
        if ((message) == NULL) return NULL;                                                        \
        *(message) = (__typeof__(*(message)))init;                                                 \
    } while (0)

static ProtobufCBinaryData bytes16(const uint8_t id[16])
{
    return (ProtobufCBinaryData){16, (uint8_t *)id};
}

static char *text(const char *value)
{
    return (char *)(value == NULL ? "" : value);
}

/* NONE is no reason to give. */
static char *reason_text(enum kv_reason reason)
{
    return text(reason == KV_REASON_NONE ? "" : kv_reason_info(reason)->name);
}

static Cached__Session__V1__StageTimes *times(struct request *req)
{
    const struct request_times *t = &req->out.times;
    Cached__Session__V1__StageTimes *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__STAGE_TIMES__INIT);
    m->queue_ms = (double)t->queue_ns / NS_PER_MS;
    m->lookup_ms = (double)t->lookup_ns / NS_PER_MS;
    m->read_ms = (double)t->read_ns / NS_PER_MS;
    m->run_ms = (double)t->run_ns / NS_PER_MS;
    m->commit_ms = (double)t->commit_ns / NS_PER_MS;
    m->total_ms = (double)(kv_clock_stopwatch_ns() - t->arrived_ns) / NS_PER_MS;
    return m;
}

static char *kernels_text(struct kv_arena *arena, uint64_t kernels)
{
    char name[KV_KERNELS_NAME_BYTES];
    (void)kv_kernels_name(kernels, name);
    return kv_arena_strdup(arena, name, strlen(name));
}

static pb_checkpoint *checkpoint(struct kv_arena *arena, const struct request_checkpoint *c)
{
    pb_checkpoint *m = kv_arena_alloc(arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__CHECKPOINT_INFO__INIT);
    m->id = bytes16(c->id.bytes);
    if (c->has_parent) m->parent_id = bytes16(c->parent.bytes);
    m->position = c->position;
    m->digest = (ProtobufCBinaryData){sizeof(c->digest.bytes), (uint8_t *)c->digest.bytes};
    m->kind = (Cached__Session__V1__CheckpointKind)c->kind;
    m->rows_level = (Cached__Session__V1__Level)c->rows_level;
    m->window_level = (Cached__Session__V1__Level)c->window_level;
    m->rows_expire_ms = c->rows_expire_ms;
    m->window_expire_ms = c->window_expire_ms;
    m->approximate = c->approximate;
    m->approx_from = c->approx_from;
    m->kernels = kernels_text(arena, c->kernels);
    if (m->kernels == NULL) return NULL;
    m->session_id = text(c->session_name);
    m->bytes = c->bytes;
    m->age_ms = c->age_ms;
    m->leave_ms = c->leave_ms;
    m->pin_expire_ms = c->pin_ms;
    return m;
}

static pb_checkpoint **checkpoints(struct request *req)
{
    const uint32_t count = req->out.checkpoint_count;
    pb_checkpoint **list = kv_arena_alloc(req->arena, count * sizeof(*list));
    if (list == NULL) return NULL;
    for (uint32_t i = 0; i < count; i++) {
        list[i] = checkpoint(req->arena, &req->out.checkpoints[i]);
        if (list[i] == NULL) return NULL;
    }
    return list;
}

static pb_session *session(struct kv_arena *arena, const struct request_session *s)
{
    pb_session *m = kv_arena_alloc(arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__SESSION_INFO__INIT);
    m->session_id = text(s->name);
    m->parent_session_id = text(s->parent_name);
    m->kind = (Cached__Session__V1__SessionKind)s->kind;
    m->head_position = s->head_position;
    m->checkpoints = s->checkpoints;
    m->live = s->live;
    m->idle_ms = s->idle_ms;
    m->age_ms = s->age_ms;
    m->ttl_ms = s->ttl_ms;
    m->ttl_of_plan = s->ttl_of_plan;
    return m;
}

static Cached__Session__V1__Removal *removal(struct kv_arena *arena, const struct kv_removal *r)
{
    Cached__Session__V1__Removal *m = kv_arena_alloc(arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__REMOVAL__INIT);
    m->cause = text(kv_reason_info(r->cause)->name);
    m->rows_kept = r->part == KV_REMOVED_CHECKPOINT;
    m->from = r->from;
    m->to = r->to;
    m->checkpoints = r->checkpoints;
    m->removed_ms = r->removed_ms;
    m->limit_name = text(kv_limit_name(r->limit_of));
    m->limit = r->limit;
    m->value = r->value;
    return m;
}

/* What took the rows that are missing next; false: no memory. */
static bool removed(struct request *req, Cached__Session__V1__Removal **ret_removal)
{
    if (!req->out.has_removed) return true;
    *ret_removal = removal(req->arena, &req->out.removed);
    return *ret_removal != NULL;
}

static const ProtobufCMessage *encode_open(struct request *req, const struct rpc_about *about)
{
    Cached__Session__V1__OpenSessionResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__OPEN_SESSION_RESPONSE__INIT);
    m->created = req->out.created;
    m->head_position = req->out.head_position;
    m->model_fingerprint = (ProtobufCBinaryData){sizeof(about->model_fingerprint.bytes),
                                                 (uint8_t *)about->model_fingerprint.bytes};
    m->vocab_tokens = about->vocab_tokens;
    m->context_tokens = about->context_tokens;
    m->epoch = req->out.epoch;
    return &m->base;
}

static const ProtobufCMessage *encode_lookup(struct request *req)
{
    const struct request_out *out = &req->out;
    Cached__Session__V1__LookupResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__LOOKUP_RESPONSE__INIT);
    m->outcome = (Cached__Session__V1__Outcome)out->outcome;
    m->reason = reason_text(out->reason);
    m->hit_tokens = out->hit_tokens;
    m->replay_tokens = out->replayed_tokens;
    m->stored_tokens = out->stored_tokens;
    m->diverged = out->diverged;
    m->diverged_at = out->diverged_at;
    m->other_kernels = out->other_kernels;
    m->kernels = text(out->kernels);
    if (out->has_resumed) m->checkpoint_id = bytes16(out->resumed.bytes);
    return removed(req, &m->removed) ? &m->base : NULL;
}

static const ProtobufCMessage *encode_prefill(struct request *req)
{
    const struct request_out *out = &req->out;
    Cached__Session__V1__PrefillResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__PREFILL_RESPONSE__INIT);
    m->outcome = (Cached__Session__V1__Outcome)out->outcome;
    m->reason = reason_text(out->reason);
    m->prompt_tokens = out->prompt_tokens;
    m->hit_tokens = out->hit_tokens;
    m->replayed_tokens = out->replayed_tokens;
    m->computed_tokens = out->computed_tokens;
    m->diverged = out->diverged;
    m->diverged_at = out->diverged_at;
    m->approximate = out->approximate;
    m->approx_from = out->approx_from;
    if (out->has_resumed) m->resumed_checkpoint_id = bytes16(out->resumed.bytes);
    m->n_checkpoints = out->checkpoint_count;
    m->checkpoints = checkpoints(req);
    m->times = times(req);
    m->hbm_tokens = out->hbm_tokens;
    m->ssd_tokens = out->ssd_tokens;
    m->epoch = out->epoch;
    m->stored_tokens = out->stored_tokens;
    m->weakened = out->weakened;
    m->save_reason = reason_text(out->save_reason);
    m->other_kernels = out->other_kernels;
    m->kernels = text(out->kernels);
    if (!removed(req, &m->removed)) return NULL;
    return m->checkpoints == NULL || m->times == NULL ? NULL : &m->base;
}

static const ProtobufCMessage *encode_decode(struct request *req)
{
    const struct request_out *out = &req->out;
    Cached__Session__V1__DecodeResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    Cached__Session__V1__DecodeEnd *end = kv_arena_alloc(req->arena, sizeof(*end));
    FILL(m, CACHED__SESSION__V1__DECODE_RESPONSE__INIT);
    FILL(end, CACHED__SESSION__V1__DECODE_END__INIT);
    end->finish = out->stopped ? CACHED__SESSION__V1__DECODE_END__FINISH__FINISH_STOP
                               : CACHED__SESSION__V1__DECODE_END__FINISH__FINISH_LENGTH;
    end->tokens = out->tokens_sent;
    end->head_position = out->head_position;
    end->n_checkpoints = out->checkpoint_count;
    end->checkpoints = checkpoints(req);
    end->times = times(req);
    end->outcome = (Cached__Session__V1__Outcome)out->outcome;
    end->epoch = out->epoch;
    end->reason = reason_text(out->reason);
    end->save_reason = reason_text(out->save_reason);
    end->other_kernels = out->other_kernels;
    end->kernels = text(out->kernels);
    m->end = end;
    if (!removed(req, &end->removed)) return NULL;
    return end->checkpoints == NULL || end->times == NULL ? NULL : &m->base;
}

static const ProtobufCMessage *encode_checkpoint(struct request *req)
{
    Cached__Session__V1__CheckpointResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__CHECKPOINT_RESPONSE__INIT);
    m->epoch = req->out.epoch;
    m->times = times(req);
    if (m->times == NULL) return NULL;
    if (req->out.checkpoint_count == 0) return &m->base;
    m->checkpoint = checkpoint(req->arena, &req->out.checkpoints[0]);
    return m->checkpoint == NULL ? NULL : &m->base;
}

static const ProtobufCMessage *encode_wait(struct request *req)
{
    Cached__Session__V1__WaitDurableResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__WAIT_DURABLE_RESPONSE__INIT);
    m->rows_level = (Cached__Session__V1__Level)req->out.rows_level;
    return &m->base;
}

static const ProtobufCMessage *encode_rollback(struct request *req)
{
    Cached__Session__V1__RollbackResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__ROLLBACK_RESPONSE__INIT);
    m->head_position = req->out.head_position;
    m->epoch = req->out.epoch;
    return &m->base;
}

static const ProtobufCMessage *encode_compact(struct request *req)
{
    Cached__Session__V1__CompactResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__COMPACT_RESPONSE__INIT);
    m->head_position = req->out.head_position;
    m->epoch = req->out.epoch;
    return &m->base;
}

static const ProtobufCMessage *encode_pin(struct request *req)
{
    Cached__Session__V1__PinResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__PIN_RESPONSE__INIT);
    m->expire_ms = req->out.pin_ms;
    m->window_expire_ms = req->out.window_expire_ms;
    return &m->base;
}

static const ProtobufCMessage *encode_touch(struct request *req)
{
    Cached__Session__V1__TouchResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__TOUCH_RESPONSE__INIT);
    m->rows_expire_ms = req->out.rows_expire_ms;
    m->window_expire_ms = req->out.window_expire_ms;
    return &m->base;
}

static const ProtobufCMessage *encode_own_usage(struct request *req)
{
    const struct request_use *use = &req->out.use;
    Cached__Session__V1__GetUsageResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__GET_USAGE_RESPONSE__INIT);
    m->sessions = use->sessions;
    m->checkpoints = use->checkpoints;
    m->bytes_ssd = use->bytes_ssd;
    m->bytes_pool = use->bytes_pool;
    m->bytes_hbm = use->bytes_hbm;
    m->pins = use->pins;
    m->pinned_bytes_ssd = use->pinned_bytes_ssd;
    m->pinned_bytes_pool = use->pinned_bytes_pool;
    return &m->base;
}

static const ProtobufCMessage *encode_fork(struct request *req)
{
    Cached__Session__V1__ForkResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__FORK_RESPONSE__INIT);
    m->head_position = req->out.head_position;
    m->epoch = req->out.epoch;
    m->created = req->out.created;
    if (req->out.has_head_checkpoint) m->checkpoint_id = bytes16(req->out.head_checkpoint.bytes);
    return &m->base;
}

static const ProtobufCMessage *encode_close(struct request *req)
{
    Cached__Session__V1__CloseSessionResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__CLOSE_SESSION_RESPONSE__INIT);
    m->was_live = req->out.was_live;
    return &m->base;
}

static const ProtobufCMessage *encode_delete(struct request *req)
{
    Cached__Session__V1__DeleteSessionResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__DELETE_SESSION_RESPONSE__INIT);
    m->bytes = req->out.receipt.bytes;
    m->checkpoints = req->out.receipt.checkpoints;
    m->deleted = req->out.receipt.sessions > 0;
    return &m->base;
}

char *rpc_page_token(struct kv_arena *arena, const struct kv_session_id *id)
{
    static const char digits[] = "0123456789abcdef";
    char *token = kv_arena_alloc(arena, 2 * sizeof(id->bytes) + 1);
    if (token == NULL) return NULL;
    for (size_t i = 0; i < sizeof(id->bytes); i++) {
        token[2 * i] = digits[id->bytes[i] >> 4];
        token[2 * i + 1] = digits[id->bytes[i] & 15];
    }
    return token;
}

static const ProtobufCMessage *encode_list(struct request *req)
{
    const struct request_out *out = &req->out;
    Cached__Session__V1__ListSessionsResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__LIST_SESSIONS_RESPONSE__INIT);
    m->n_sessions = out->session_count;
    m->sessions = kv_arena_alloc(req->arena, out->session_count * sizeof(*m->sessions));
    if (m->sessions == NULL) return NULL;
    for (uint32_t i = 0; i < out->session_count; i++) {
        m->sessions[i] = session(req->arena, &out->sessions[i]);
        if (m->sessions[i] == NULL) return NULL;
    }
    if (!out->list_more) return &m->base;
    m->next_page_token = rpc_page_token(req->arena, &out->list_last);
    return m->next_page_token == NULL ? NULL : &m->base;
}

static Cached__Session__V1__TreeHead **heads(struct request *req)
{
    const struct request_out *out = &req->out;
    Cached__Session__V1__TreeHead **list = kv_arena_alloc(
        req->arena, (out->head_count + 1u) * sizeof(Cached__Session__V1__TreeHead *));
    for (uint32_t i = 0; list != NULL && i < out->head_count; i++) {
        const struct request_head *head = &out->heads[i];
        Cached__Session__V1__TreeHead *m = kv_arena_alloc(req->arena, sizeof(*m));
        FILL(m, CACHED__SESSION__V1__TREE_HEAD__INIT);
        m->session_id = text(head->session_name);
        m->position = head->position;
        if (head->has_checkpoint) m->checkpoint_id = bytes16(head->checkpoint.bytes);
        list[i] = m;
    }
    return list;
}

static const ProtobufCMessage *encode_get(struct request *req)
{
    const struct request_out *out = &req->out;
    Cached__Session__V1__GetSessionResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__SESSION__V1__GET_SESSION_RESPONSE__INIT);
    m->session = session(req->arena, &out->session);
    m->n_checkpoints = out->checkpoint_count;
    m->checkpoints = checkpoints(req);
    if (out->has_head_checkpoint) m->head_checkpoint_id = bytes16(out->head_checkpoint.bytes);
    m->epoch = out->epoch;
    m->reason = reason_text(out->reason);
    m->removals_cut = out->removals_cut;
    m->n_removals = out->removal_count;
    m->removals = kv_arena_alloc(req->arena, (out->removal_count + 1u) * sizeof(*m->removals));
    if (m->removals == NULL) return NULL;
    for (uint32_t i = 0; i < out->removal_count; i++) {
        m->removals[i] = removal(req->arena, &out->removals[i]);
        if (m->removals[i] == NULL) return NULL;
    }
    m->n_heads = out->head_count;
    m->heads = heads(req);
    return m->session == NULL || m->checkpoints == NULL || m->heads == NULL ? NULL : &m->base;
}

static const ProtobufCMessage *encode_clock(struct request *req)
{
    Cached__Admin__V1__AdvanceClockResponse *m = kv_arena_alloc(req->arena, sizeof(*m));
    FILL(m, CACHED__ADMIN__V1__ADVANCE_CLOCK_RESPONSE__INIT);
    m->wall_ms = req->out.wall_ms;
    return &m->base;
}

const ProtobufCMessage *rpc_encode(struct request *req, const struct rpc_about *about,
                                   const struct rpc_snapshot *snapshot)
{
    switch (req->method) {
    case REQUEST_OPEN_SESSION:
        return encode_open(req, about);
    case REQUEST_LOOKUP:
        return encode_lookup(req);
    case REQUEST_PREFILL:
        return encode_prefill(req);
    case REQUEST_DECODE:
        return encode_decode(req);
    case REQUEST_CHECKPOINT:
        return encode_checkpoint(req);
    case REQUEST_WAIT_DURABLE:
        return encode_wait(req);
    case REQUEST_ROLLBACK:
        return encode_rollback(req);
    case REQUEST_COMPACT:
        return encode_compact(req);
    case REQUEST_PIN:
        return encode_pin(req);
    case REQUEST_TOUCH:
        return encode_touch(req);
    case REQUEST_GET_USAGE:
        return encode_own_usage(req);
    case REQUEST_FORK:
        return encode_fork(req);
    case REQUEST_CLOSE_SESSION:
        return encode_close(req);
    case REQUEST_LIST_SESSIONS:
        return encode_list(req);
    case REQUEST_GET_SESSION:
        return encode_get(req);
    case REQUEST_GET_STATS:
        return rpc_encode_stats(req, about, snapshot);
    case REQUEST_ADVANCE_CLOCK:
        return encode_clock(req);
    case REQUEST_SCRUB:
        return rpc_encode_scrub(req);
    case REQUEST_DISK_USAGE:
        return rpc_encode_usage(req);
    case REQUEST_DELETE_SESSION:
        return encode_delete(req);
    case REQUEST_ERASE_USER:
        return rpc_encode_erase(req);
    case REQUEST_ROTATE_KEY:
        return rpc_encode_rotate(req);
    case REQUEST_WHY:
        return rpc_encode_why(req);
    case REQUEST_PURGE_MODEL:
        return rpc_encode_purge(req);
    case REQUEST_SET_QUOTA:
    case REQUEST_GET_QUOTA:
    case REQUEST_DELETE_QUOTA:
    case REQUEST_SET_PLAN:
    case REQUEST_LIST_PLANS:
    case REQUEST_LIST_USERS:
        return rpc_encode_quota(req);
    case REQUEST_METHOD_COUNT:
        break;
    }
    assert(false);
    return NULL;
}

static uint32_t varint_bytes(uint32_t value)
{
    uint32_t bytes = 1;
    for (; value >= 0x80; value >>= 7)
        bytes++;
    return bytes;
}

static uint8_t *put_varint(uint8_t *to, uint32_t value)
{
    for (; value >= 0x80; value >>= 7)
        *to++ = (uint8_t)(value | 0x80);
    *to++ = (uint8_t)value;
    return to;
}

size_t rpc_stream_bytes(uint32_t position, uint32_t count)
{
    assert(count <= KV_PROMPT_TOKENS_MAX);
    return 1 + varint_bytes(position) + 2 * (1 + (size_t)varint_bytes(4 * count) + 4ul * count);
}

/* DecodeResponse: position = 1 (varint), tokens = 2 (bytes), logits_crc = 3 (packed fixed32). */
void rpc_stream_encode(uint32_t position, const uint32_t *tokens, const uint32_t *logits_crc,
                       uint32_t count, uint8_t *to)
{
    *to++ = 1 << 3;
    to = put_varint(to, position);
    *to++ = 2 << 3 | 2;
    to = put_varint(to, 4 * count);
    for (uint32_t i = 0; i < count; i++, to += 4)
        kv_store32(to, tokens[i]);
    *to++ = 3 << 3 | 2;
    to = put_varint(to, 4 * count);
    for (uint32_t i = 0; i < count; i++, to += 4)
        kv_store32(to, logits_crc[i]);
}
