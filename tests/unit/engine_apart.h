#pragma once

/*
 * A backend whose windows, tails and pages lie in memory of its own, as those of an accelerator
 * do.  Addresses of that memory fault whenever somebody else looks behind them; the backend opens
 * it for the length of one copy.  To compute, it copies what a pass needs into the memory of a CPU
 * session, runs the CPU backend there, copies what changed back, and wipes the rest: whatever the
 * generic side or a later pass needs must have gone through backend.h.
 *
 * Private to tests/unit/test_engine_apart.c.
 */

#include "engine/backend/host.h"
#include "kvstore/base/bytes.h"
#include "tests/harness.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { APART_BYTES = 32 << 20, APART_PAGES_MAX = 64 };

struct apart_model {
    struct eng_model inner; /* The same model with the CPU backend. */
    uint8_t *memory;        /* APART_BYTES, without access. */
    size_t used;
    uint64_t copies;
};

struct apart_session {
    struct eng_session shadow; /* Of the inner model; its memory is scratch. */
    uint8_t *ring, *tails, *saved;
    uint32_t saved_tokens;
    uint8_t *pages[APART_PAGES_MAX]; /* Scratch of the shadow. */
};

static inline struct apart_model *apart_of(const struct eng_model *model)
{
    return model->backend;
}

static inline void apart_open_memory(struct apart_model *apart, int rights)
{
    EXPECT_EQ_I64(mprotect(apart->memory, APART_BYTES, rights), 0);
    apart->copies++;
}

static inline void apart_read(struct apart_model *apart, const uint8_t *from, void *to,
                              size_t count)
{
    apart_open_memory(apart, PROT_READ);
    memcpy(to, from, count);
    apart_open_memory(apart, PROT_NONE);
}

static inline void apart_write(struct apart_model *apart, uint8_t *to, const void *from,
                               size_t count)
{
    apart_open_memory(apart, PROT_READ | PROT_WRITE);
    memcpy(to, from, count);
    apart_open_memory(apart, PROT_NONE);
}

/* Never given back: a test is short. */
static inline uint8_t *apart_take(struct apart_model *apart, size_t bytes)
{
    uint8_t *part = apart->memory + apart->used;
    apart->used += (size_t)kv_round_up(bytes, 64);
    EXPECT(apart->used <= APART_BYTES);
    return part;
}

/* ---- model ---- */

static inline kv_status apart_open(struct eng_model *model, const char *dir, struct kv_error *err)
{
    struct apart_model *apart = calloc(1, sizeof(*apart));
    EXPECT(apart != NULL);
    memcpy(&apart->inner, model, sizeof(*model));
    apart->inner.ops = &eng_backend_cpu;
    EXPECT(eng_backend_cpu.open(&apart->inner, dir, err) == KV_OK);
    apart->memory = mmap(NULL, APART_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT(apart->memory != MAP_FAILED);
    model->weights_digest = apart->inner.weights_digest;
    model->bytes = apart->inner.bytes;
    model->backend = apart;
    return KV_OK;
}

static inline void apart_close(struct eng_model *model)
{
    struct apart_model *apart = apart_of(model);
    eng_backend_cpu.close(&apart->inner);
    EXPECT_EQ_I64(munmap(apart->memory, APART_BYTES), 0);
    free(apart);
    model->backend = NULL;
}

static inline const char *apart_kind(const struct eng_model *model)
{
    return "apart";
}

/* ---- sessions ---- */

static inline size_t apart_ring_bytes(const struct eng_model *model)
{
    return (size_t)model->layer_count * model->ring_rows * model->layout.window_row_bytes;
}

static inline size_t apart_session_bytes(const struct eng_model *model)
{
    return sizeof(struct apart_session);
}

static inline kv_status apart_session_init(struct eng_session *session, void *memory,
                                           struct kv_error *err)
{
    struct apart_model *apart = apart_of(session->model);
    struct apart_session *own = memory;
    const struct eng_model *inner = &apart->inner;
    const size_t bytes = (size_t)kv_round_up(eng_backend_cpu.session_bytes(inner), 64);
    own->shadow.model = &apart->inner;
    own->shadow.backend = aligned_alloc(64, bytes);
    EXPECT(own->shadow.backend != NULL);
    memset(own->shadow.backend, 0, bytes);
    EXPECT(eng_backend_cpu.session_init(&own->shadow, own->shadow.backend, err) == KV_OK);
    own->ring = apart_take(apart, apart_ring_bytes(inner));
    own->tails = apart_take(apart, (size_t)ENG_TAIL_SLOTS * inner->tails_bytes);
    own->saved = apart_take(apart, inner->tails_bytes);
    for (uint32_t i = 0; i < APART_PAGES_MAX; i++)
        own->pages[i] = NULL;
    return KV_OK;
}

static inline void apart_session_fini(struct eng_session *session)
{
    struct apart_session *own = session->backend;
    eng_backend_cpu.session_fini(&own->shadow);
    free(own->shadow.backend);
    for (uint32_t i = 0; i < APART_PAGES_MAX; i++)
        free(own->pages[i]);
}

static inline void apart_copy(struct apart_model *apart, uint8_t *to, const uint8_t *from,
                              size_t count)
{
    uint8_t *between = malloc(count);
    EXPECT(between != NULL);
    apart_read(apart, from, between, count);
    apart_write(apart, to, between, count);
    free(between);
}

static inline void apart_session_copy(struct eng_session *to, const struct eng_session *from)
{
    struct apart_model *apart = apart_of(to->model);
    struct apart_session *own = to->backend;
    const struct apart_session *other = from->backend;
    apart_copy(apart, own->ring, other->ring, apart_ring_bytes(to->model));
    apart_copy(apart, own->tails, other->tails, (size_t)ENG_TAIL_SLOTS * to->model->tails_bytes);
}

static inline uint8_t *apart_row(const struct eng_session *session, uint32_t layer,
                                 uint32_t position)
{
    const struct apart_session *own = session->backend;
    const struct eng_model *model = session->model;
    const size_t row = (size_t)layer * model->ring_rows + position % model->ring_rows;
    return own->ring + row * model->layout.window_row_bytes;
}

static inline void apart_window_read(const struct eng_session *session, uint32_t layer,
                                     uint32_t first, uint32_t count, uint8_t *rows)
{
    const uint32_t bytes = session->model->layout.window_row_bytes;
    for (uint32_t i = 0; i < count; i++)
        apart_read(apart_of(session->model), apart_row(session, layer, first + i),
                   rows + (size_t)i * bytes, bytes);
}

static inline void apart_window_write(struct eng_session *session, uint32_t layer, uint32_t first,
                                      uint32_t count, const uint8_t *rows)
{
    const uint32_t bytes = session->model->layout.window_row_bytes;
    for (uint32_t i = 0; i < count; i++)
        apart_write(apart_of(session->model), apart_row(session, layer, first + i),
                    rows + (size_t)i * bytes, bytes);
}

static inline uint8_t *apart_tails(const struct eng_session *session, uint32_t position)
{
    const struct apart_session *own = session->backend;
    const uint32_t slot = position / 2 % ENG_TAIL_SLOTS;
    EXPECT(position % 2 == 0);
    return own->tails + (size_t)slot * session->model->tails_bytes;
}

static inline void apart_tails_read(const struct eng_session *session, uint32_t position,
                                    uint8_t *tails)
{
    apart_read(apart_of(session->model), apart_tails(session, position), tails,
               session->model->tails_bytes);
}

static inline void apart_tails_write(struct eng_session *session, uint32_t position,
                                     const uint8_t *tails)
{
    apart_write(apart_of(session->model), apart_tails(session, position), tails,
                session->model->tails_bytes);
}

static inline void apart_ids_write(struct eng_session *session, uint32_t first, uint32_t count,
                                   const uint32_t *ids)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t position = first + i;
        uint8_t id[4];
        kv_store32(id, ids[i]);
        apart_write(apart_of(session->model),
                    session->pages[position / KV_PAGE_TOKENS] + KV_PAGE_IDS_OFFSET +
                        (size_t)4 * (position % KV_PAGE_TOKENS),
                    id, sizeof(id));
    }
}

static inline void apart_moved(struct eng_session *session, const uint32_t *ids,
                               const uint8_t *image, const struct kv_image_state *state)
{
}

static inline void apart_begin(struct eng_session *session)
{
    struct apart_session *own = session->backend;
    own->saved_tokens = session->tokens % 2 == 1 ? session->tokens : 0;
    if (own->saved_tokens > 0)
        apart_copy(apart_of(session->model), own->saved, apart_tails(session, session->tokens - 1),
                   session->model->tails_bytes);
}

static inline void apart_rewound(struct eng_session *session, const uint32_t *ids)
{
    struct apart_session *own = session->backend;
    if (own->saved_tokens > 0 && own->saved_tokens == session->tokens)
        apart_copy(apart_of(session->model), apart_tails(session, session->tokens - 1), own->saved,
                   session->model->tails_bytes);
}

/* ---- computing ---- */

/* The shadow becomes the session: generic fields, windows, tails and pages. */
static inline struct eng_session *apart_load(struct eng_session *session)
{
    struct apart_model *apart = apart_of(session->model);
    struct apart_session *own = session->backend;
    struct eng_session *shadow = &own->shadow;
    struct eng_host *host = eng_host_of(shadow);
    void *backend = shadow->backend;

    memcpy(shadow, session, sizeof(*shadow));
    shadow->model = &apart->inner;
    shadow->backend = backend;
    shadow->pages = own->pages;
    apart_read(apart, own->ring, host->ring, apart_ring_bytes(session->model));
    apart_read(apart, own->tails, host->tails,
               (size_t)ENG_TAIL_SLOTS * session->model->tails_bytes);
    EXPECT(session->page_count <= APART_PAGES_MAX);
    for (uint32_t i = 0; i < session->page_count; i++) {
        if (own->pages[i] == NULL) own->pages[i] = malloc(session->model->layout.page_bytes);
        EXPECT(own->pages[i] != NULL);
        apart_read(apart, session->pages[i], own->pages[i], session->model->layout.page_bytes);
    }
    return shadow;
}

/* What the pass changed goes back; nothing stays in the shadow. */
static inline void apart_store(struct eng_session *session)
{
    struct apart_model *apart = apart_of(session->model);
    struct apart_session *own = session->backend;
    struct eng_host *host = eng_host_of(&own->shadow);
    const size_t ring = apart_ring_bytes(session->model);
    const size_t tails = (size_t)ENG_TAIL_SLOTS * session->model->tails_bytes;
    const uint32_t page_bytes = session->model->layout.page_bytes;

    apart_write(apart, own->ring, host->ring, ring);
    apart_write(apart, own->tails, host->tails, tails);
    memset(host->ring, 0x5a, ring);
    memset(host->tails, 0x5a, tails);
    for (uint32_t i = 0; i < session->page_count; i++) {
        if (i >= session->run.floor / KV_PAGE_TOKENS)
            apart_write(apart, session->pages[i], own->pages[i], page_bytes);
        memset(own->pages[i], 0x5a, page_bytes);
    }
}

static inline bool apart_holds(const struct eng_span *spans, uint32_t count,
                               const struct eng_session *session)
{
    for (uint32_t i = 0; i < count; i++)
        if (spans[i].session == session) return true;
    return false;
}

static inline void apart_pass(struct eng_model *model, const struct eng_pass_spans *spans)
{
    struct apart_model *apart = apart_of(model);
    struct eng_span *encode = apart->inner.spans;
    struct eng_span *decode = encode + model->pass_rows;
    struct eng_session *sessions[2 * 64];
    uint32_t count = 0;

    /* The outer model's spans lie in the same array. */
    for (uint32_t i = 0; i < spans->encode_count; i++)
        sessions[count++] = spans->encode[i].session;
    for (uint32_t i = 0; i < spans->decode_count; i++)
        if (!apart_holds(spans->encode, spans->encode_count, spans->decode[i].session))
            sessions[count++] = spans->decode[i].session;
    for (uint32_t i = 0; i < count; i++)
        (void)apart_load(sessions[i]);
    for (uint32_t i = 0; i < spans->encode_count; i++)
        encode[i].session = &((struct apart_session *)encode[i].session->backend)->shadow;
    for (uint32_t i = 0; i < spans->decode_count; i++)
        decode[i].session = &((struct apart_session *)decode[i].session->backend)->shadow;
    apart->inner.probe = model->probe;
    eng_backend_cpu.pass(&apart->inner, spans);
    for (uint32_t i = 0; i < count; i++)
        apart_store(sessions[i]);
}

static inline void apart_draft(struct eng_model *model, const struct eng_draft_item *items,
                               uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        struct eng_draft_item item = items[i];
        item.session = apart_load(items[i].session);
        eng_backend_cpu.draft(&apart_of(model)->inner, &item, 1);
        apart_store(items[i].session);
    }
}

static const struct eng_backend_ops apart_ops = {
    .name = "apart",
    .revision = "apart 1",
    .open = apart_open,
    .close = apart_close,
    .family = apart_kind,
    .isa = apart_kind,
    .session_bytes = apart_session_bytes,
    .session_init = apart_session_init,
    .session_fini = apart_session_fini,
    .session_copy = apart_session_copy,
    .window_read = apart_window_read,
    .window_write = apart_window_write,
    .tails_read = apart_tails_read,
    .tails_write = apart_tails_write,
    .ids_write = apart_ids_write,
    .moved = apart_moved,
    .rewound = apart_rewound,
    .begin = apart_begin,
    .pass = apart_pass,
    .draft = apart_draft,
};
