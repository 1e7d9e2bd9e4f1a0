/*
 * The slab of window images.
 *
 * Goal: refs always tell the truth (image or cause), life is enforced on every look and not only by
 * the tick, victims go in the promised order and never while pinned, and no byte of one image
 * reaches the next.
 * Method: rules one by one on a pool of four slots, then 100,000 random steps against a plain model
 * of every ref, with a pattern written into every slot handed out.
 */

#include "kvstore/tier/tier_pool.h"
#include "tests/harness.h"

enum { IMAGE = 5000, SLOT = 8192, SLOTS = 4, TTL = 1000000 };

static struct kv_pool *create(void)
{
    const struct kv_pool_options options = {
        .bytes = SLOTS * SLOT + SLOT - 1,
        .image_bytes = IMAGE,
        .ttl_ns = TTL,
        .generation_base = 1000,
    };
    struct kv_pool *pool = NULL;
    EXPECT(kv_pool_create(&options, &pool, NULL) == KV_OK);
    return pool;
}

static struct kv_pool_ref no_image(void)
{
    return (struct kv_pool_ref){.slot = KV_POOL_SLOT_NONE, .lost = KV_REASON_NEVER_STORED};
}

static bool is_zero(const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != 0) return false;
    return true;
}

/* Stores an image filled with `fill`; the slot it got must have been empty. */
static void store(struct kv_pool *pool, struct kv_pool_ref *ref, uint8_t fill, uint64_t now)
{
    uint32_t slot;
    EXPECT(kv_pool_reserve(pool, now, &slot) == KV_OK);
    EXPECT(is_zero(kv_pool_bytes(pool, slot), SLOT));
    memset(kv_pool_bytes(pool, slot), fill, IMAGE);
    const uint64_t generation = kv_pool_next_generation(pool);
    kv_pool_commit(pool, slot, generation, ref, now);
    EXPECT_EQ_U32(ref->slot, slot);
    EXPECT_EQ_U64(ref->generation, generation);
}

static bool read_back(struct kv_pool *pool, struct kv_pool_ref *ref, uint8_t fill, uint64_t now)
{
    const uint8_t *bytes = kv_pool_get(pool, ref, now);
    if (bytes == NULL) return false;
    EXPECT_EQ_U32(bytes[0], fill);
    EXPECT_EQ_U32(bytes[IMAGE - 1], fill);
    kv_pool_unpin(pool, ref->slot);
    return true;
}

static void test_too_small(void)
{
    struct kv_pool *pool = NULL;
    struct kv_error err;
    const struct kv_pool_options options = {.bytes = SLOT - 1, .image_bytes = IMAGE, .ttl_ns = 1};
    EXPECT(kv_pool_create(&options, &pool, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "at least 1") != NULL);
    kv_pool_destroy(NULL);
}

static void test_store_and_get(void)
{
    struct kv_pool *pool = create();
    struct kv_pool_ref ref = no_image();

    EXPECT(kv_pool_get(pool, &ref, 1) == NULL);
    EXPECT(!kv_pool_has(pool, &ref, 1));
    EXPECT_EQ_U64(kv_pool_ttl_ms(pool, &ref, 1), 0);
    store(pool, &ref, 0x11, 5);
    EXPECT_EQ_U64(ref.generation, 1000);
    EXPECT(read_back(pool, &ref, 0x11, 6));
    store(pool, &ref, 0x22, 7); /* Replaces. */
    EXPECT_EQ_U64(ref.generation, 1001);
    EXPECT(read_back(pool, &ref, 0x22, 8));

    const struct kv_pool_usage usage = kv_pool_usage(pool);
    EXPECT_EQ_U32(usage.slots, SLOTS);
    EXPECT_EQ_U32(usage.slots_used, 1);
    EXPECT_EQ_U32(usage.slots_pinned, 0);
    EXPECT_EQ_U64(usage.bytes_used, SLOT);
    EXPECT_EQ_U64(usage.bytes_capacity, SLOTS * SLOT);
    EXPECT_EQ_U64(usage.commits, 2);
    EXPECT_EQ_U64(usage.hits, 2);
    kv_pool_destroy(pool);
}

static void test_life(void)
{
    struct kv_pool *pool = create();
    struct kv_pool_ref a = no_image();
    struct kv_pool_ref b = no_image();

    store(pool, &a, 1, 100);
    EXPECT(kv_pool_has(pool, &a, 100 + TTL - 1));
    EXPECT_EQ_U64(kv_pool_ttl_ms(pool, &a, 100), TTL / 1000000);
    /* A get renews; a look does not. */
    EXPECT(read_back(pool, &a, 1, 100 + TTL - 1));
    EXPECT(kv_pool_has(pool, &a, 100 + 2 * TTL - 2));
    EXPECT(!kv_pool_has(pool, &a, 100 + 2 * TTL - 1));
    EXPECT_EQ_U32(a.slot, KV_POOL_SLOT_NONE);
    EXPECT(a.lost == KV_REASON_EXPIRED);

    store(pool, &a, 1, 10 * TTL);
    store(pool, &b, 2, 10 * TTL + 5);
    EXPECT(kv_pool_get(pool, &a, 11 * TTL) == NULL);
    EXPECT(a.lost == KV_REASON_EXPIRED);
    EXPECT(read_back(pool, &b, 2, 11 * TTL));
    EXPECT_EQ_U32(kv_pool_usage(pool).slots_used, 1);
    EXPECT_EQ_U64(kv_pool_usage(pool).evicted_expired, 2);
    kv_pool_destroy(pool);
}

static void test_tick_takes_only_what_is_past(void)
{
    struct kv_pool *pool = create();
    struct kv_pool_ref refs[SLOTS];

    for (uint32_t i = 0; i < SLOTS; i++) {
        refs[i] = no_image();
        store(pool, &refs[i], 1, 10 * i);
    }
    kv_pool_demote(pool, &refs[1]);
    EXPECT(read_back(pool, &refs[0], 1, 50)); /* Now the youngest. */
    EXPECT_EQ_U32(kv_pool_tick(pool, TTL + 9, 10), 0);
    EXPECT_EQ_U32(kv_pool_tick(pool, TTL + 30, 2), 2);
    EXPECT(refs[1].lost == KV_REASON_EXPIRED && refs[1].slot == KV_POOL_SLOT_NONE);
    EXPECT(refs[2].lost == KV_REASON_EXPIRED && refs[2].slot == KV_POOL_SLOT_NONE);
    EXPECT_EQ_U32(kv_pool_tick(pool, TTL + 30, 2), 1);
    EXPECT(refs[3].slot == KV_POOL_SLOT_NONE);
    EXPECT_EQ_U32(kv_pool_tick(pool, TTL + 49, 2), 0);
    EXPECT(kv_pool_has(pool, &refs[0], TTL + 49));
    kv_pool_destroy(pool);
}

static void test_victims(void)
{
    struct kv_pool *pool = create();
    struct kv_pool_ref refs[SLOTS];
    struct kv_pool_ref more[SLOTS];
    uint32_t slot;
    uint32_t none;

    for (uint32_t i = 0; i < SLOTS; i++) {
        refs[i] = no_image();
        store(pool, &refs[i], (uint8_t)i, i + 1);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        more[i] = no_image();
    kv_pool_demote(pool, &refs[3]);
    kv_pool_demote(pool, &refs[1]);
    kv_pool_demote(pool, &refs[1]);
    EXPECT(read_back(pool, &refs[1], 1, 10)); /* It still serves while there. */

    const uint32_t order[] = {3, 1, 0, 2}; /* Demoted first, then least recently used. */
    for (uint32_t i = 0; i < SLOTS; i++) {
        store(pool, &more[i], 9, 20 + i);
        EXPECT_EQ_U32(refs[order[i]].slot, KV_POOL_SLOT_NONE);
        EXPECT(refs[order[i]].lost == KV_REASON_CAPACITY);
        EXPECT_EQ_U64(kv_pool_usage(pool).evicted_capacity, i + 1);
    }

    /* Pinned ones are passed over; with all pinned it is busy. */
    EXPECT(kv_pool_get(pool, &more[0], 30) != NULL);
    EXPECT(kv_pool_get(pool, &more[2], 31) != NULL);
    EXPECT(kv_pool_get(pool, &more[3], 32) != NULL);
    EXPECT(kv_pool_reserve(pool, 33, &slot) == KV_OK);
    EXPECT(more[1].lost == KV_REASON_CAPACITY);
    EXPECT(kv_pool_reserve(pool, 34, &none) == KV_BUSY);
    EXPECT_EQ_U32(kv_pool_usage(pool).slots_pinned, SLOTS);
    kv_pool_cancel(pool, slot);
    EXPECT(kv_pool_reserve(pool, 34, &slot) == KV_OK);
    kv_pool_destroy(pool);
}

/* What is held neither expires nor makes room, and does not keep others from it. */
static void test_hold(void)
{
    struct kv_pool *pool = create();
    struct kv_pool_ref refs[SLOTS + 1];
    for (int i = 0; i <= SLOTS; i++)
        refs[i] = no_image();
    for (int i = 0; i < SLOTS; i++)
        store(pool, &refs[i], (uint8_t)(i + 1), (uint64_t)i);
    kv_pool_hold(pool, &refs[0], 3 * TTL);
    kv_pool_hold(pool, &refs[SLOTS], 3 * TTL); /* No image: nothing to hold. */
    kv_pool_demote(pool, &refs[0]);
    EXPECT_EQ_U64(kv_pool_ttl_ms(pool, &refs[0], TTL), 2 * TTL / 1000000);
    /* The oldest, and demoted: another one goes. */
    store(pool, &refs[SLOTS], 9, 10);
    EXPECT(refs[1].slot == KV_POOL_SLOT_NONE && refs[1].lost == KV_REASON_CAPACITY);
    EXPECT(read_back(pool, &refs[0], 1, 10));
    /* Those behind it expire. */
    EXPECT_EQ_U32(kv_pool_tick(pool, 2 * TTL, 8), 3);
    EXPECT(refs[2].lost == KV_REASON_EXPIRED && refs[SLOTS].lost == KV_REASON_EXPIRED);
    EXPECT(read_back(pool, &refs[0], 1, 2 * TTL));
    /* One that takes its place is held as well. */
    store(pool, &refs[0], 7, 2 * TTL);
    kv_pool_hold(pool, &refs[0], 5 * TTL);
    store(pool, &refs[0], 8, 2 * TTL);
    EXPECT(kv_pool_has(pool, &refs[0], 4 * TTL));
    EXPECT(!kv_pool_has(pool, &refs[0], 5 * TTL));
    EXPECT(refs[0].lost == KV_REASON_EXPIRED);
    /* All held: there is no room.  Dropped all the same. */
    for (int i = 0; i < SLOTS; i++) {
        store(pool, &refs[i], 1, 6 * TTL);
        kv_pool_hold(pool, &refs[i], 9 * TTL);
    }
    uint32_t slot;
    EXPECT(kv_pool_reserve(pool, 6 * TTL, &slot) == KV_BUSY);
    kv_pool_hold(pool, &refs[1], 0);
    EXPECT(kv_pool_reserve(pool, 6 * TTL, &slot) == KV_OK);
    EXPECT(refs[1].lost == KV_REASON_CAPACITY);
    kv_pool_cancel(pool, slot);
    kv_pool_drop(pool, &refs[0], KV_REASON_DELETED);
    EXPECT(refs[0].lost == KV_REASON_DELETED);
    kv_pool_destroy(pool);
}

static void test_room_is_made_of_expired_ones_first(void)
{
    struct kv_pool *pool = create();
    struct kv_pool_ref refs[SLOTS];
    struct kv_pool_ref more = no_image();

    for (uint32_t i = 0; i < SLOTS; i++) {
        refs[i] = no_image();
        store(pool, &refs[i], (uint8_t)i, 10 * (i + 1));
    }
    kv_pool_demote(pool, &refs[3]);
    /* The oldest is past its time but read: it frees nothing, so the next expired one goes too. */
    EXPECT(kv_pool_get(pool, &refs[0], 10) != NULL);
    const uint32_t read_slot = refs[0].slot;
    for (uint32_t i = 1; i < SLOTS; i++)
        EXPECT(read_back(pool, &refs[i], (uint8_t)i, 20));
    EXPECT(read_back(pool, &refs[2], 2, 100));
    EXPECT(read_back(pool, &refs[3], 3, 100));
    store(pool, &more, 9, TTL + 20);
    EXPECT(refs[0].lost == KV_REASON_EXPIRED && refs[1].lost == KV_REASON_EXPIRED);
    EXPECT(kv_pool_has(pool, &refs[2], TTL + 20) && kv_pool_has(pool, &refs[3], TTL + 20));
    EXPECT_EQ_U64(kv_pool_usage(pool).evicted_capacity, 0);
    /* The reader's bytes are whole until it lets go. */
    EXPECT_EQ_U32(kv_pool_bytes(pool, read_slot)[IMAGE - 1], 0);
    kv_pool_unpin(pool, read_slot);
    EXPECT_EQ_U32(kv_pool_usage(pool).slots_used, 3);
    kv_pool_destroy(pool);
}

static void test_drop_while_read(void)
{
    struct kv_pool *pool = create();
    struct kv_pool_ref ref = no_image();

    store(pool, &ref, 0x77, 1);
    const uint8_t *first = kv_pool_get(pool, &ref, 2);
    const uint8_t *second = kv_pool_get(pool, &ref, 3);
    const uint32_t slot = ref.slot;
    EXPECT(first == second);
    EXPECT_EQ_U32(kv_pool_usage(pool).slots_pinned, 1);
    kv_pool_drop(pool, &ref, KV_REASON_CORRUPT);
    EXPECT(ref.slot == KV_POOL_SLOT_NONE && ref.lost == KV_REASON_CORRUPT);
    EXPECT_EQ_U64(kv_pool_usage(pool).dropped_corrupt, 1);
    EXPECT_EQ_U32(first[0], 0x77);
    kv_pool_unpin(pool, slot);
    EXPECT_EQ_U32(first[0], 0x77);
    EXPECT_EQ_U32(kv_pool_usage(pool).slots_used, 1);
    kv_pool_unpin(pool, slot);
    EXPECT(is_zero(first, SLOT));
    EXPECT_EQ_U32(kv_pool_usage(pool).slots_used, 0);
    EXPECT_EQ_U32(kv_pool_usage(pool).slots_pinned, 0);

    /* No image: only the cause changes. */
    kv_pool_drop(pool, &ref, KV_REASON_DELETED);
    EXPECT(ref.lost == KV_REASON_DELETED);
    kv_pool_demote(pool, &ref);
    kv_pool_destroy(pool);
}

static void test_move(void)
{
    struct kv_pool *pool = create();
    struct kv_pool_ref from = no_image();
    struct kv_pool_ref to; /* Fresh memory: nothing in it may matter. */
    memset(&to, 0, sizeof(to));

    store(pool, &from, 3, 1);
    kv_pool_move(pool, &from, &to);
    EXPECT(from.slot == KV_POOL_SLOT_NONE && from.lost == KV_REASON_NEVER_STORED);
    EXPECT(read_back(pool, &to, 3, 2));
    EXPECT_EQ_U32(kv_pool_tick(pool, 3 + TTL, 5), 1);
    EXPECT(to.lost == KV_REASON_EXPIRED);
    kv_pool_move(pool, &to, &from);
    EXPECT(from.lost == KV_REASON_EXPIRED && from.slot == KV_POOL_SLOT_NONE);
    kv_pool_destroy(pool);
}

enum { REFS = 8 };

struct model {
    struct kv_pool_ref refs[REFS];
    uint8_t fill[REFS];
    uint64_t used[REFS];
    uint32_t pins[REFS];
};

static void model_step(struct kv_pool *pool, struct model *model, uint64_t random, uint64_t now)
{
    const uint32_t i = (uint32_t)(random >> 20) % REFS;
    const uint32_t other = (uint32_t)(random >> 30) % REFS;
    struct kv_pool_ref *ref = &model->refs[i];
    const uint8_t fill = (uint8_t)(random >> 50 | 1);

    switch (random % 6) {
    case 0:
    case 1:
        if (model->pins[i] > 0 || kv_pool_usage(pool).slots_pinned == SLOTS) break;
        store(pool, ref, fill, now);
        model->fill[i] = fill;
        model->used[i] = now;
        break;
    case 2:
        if (model->pins[i] > 0 || kv_pool_get(pool, ref, now) == NULL) break;
        EXPECT(now - model->used[i] < TTL);
        EXPECT_EQ_U32(kv_pool_bytes(pool, ref->slot)[IMAGE - 1], model->fill[i]);
        model->used[i] = now;
        model->pins[i] = 1;
        break;
    case 3:
        kv_pool_demote(pool, ref);
        if (model->pins[i] == 0 && random >> 60 == 0) kv_pool_drop(pool, ref, KV_REASON_DELETED);
        break;
    case 4:
        (void)kv_pool_tick(pool, now, 2);
        break;
    default:
        if (model->pins[i] > 0 || model->refs[other].slot != KV_POOL_SLOT_NONE) break;
        kv_pool_move(pool, ref, &model->refs[other]);
        model->fill[other] = model->fill[i];
        model->used[other] = model->used[i];
        break;
    }
}

static void model_check(struct kv_pool *pool, struct model *model)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < REFS; i++) {
        const struct kv_pool_ref *ref = &model->refs[i];
        if (ref->slot == KV_POOL_SLOT_NONE) continue;
        used++;
        EXPECT(ref->slot < SLOTS);
        EXPECT_EQ_U32(kv_pool_bytes(pool, ref->slot)[0], model->fill[i]);
    }
    EXPECT_EQ_U32(kv_pool_usage(pool).slots_used, used);
}

static void test_random_steps(void)
{
    struct kv_pool *pool = create();
    struct model model = {.fill = {0}};
    uint64_t random = 88172645463325252u;
    uint64_t now = 1;

    for (uint32_t i = 0; i < REFS; i++)
        model.refs[i] = no_image();
    for (uint64_t step = harness_count(100000); step > 0; step--) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        now += random >> 48; /* About 30 steps a life. */
        model_step(pool, &model, random, now);
        /* Pins are short, so that a pinned ref is never expired or dropped under its reader. */
        for (uint32_t i = 0; i < REFS; i++) {
            if (model.pins[i] == 0 || random % 3 == 0) continue;
            kv_pool_unpin(pool, model.refs[i].slot);
            model.pins[i] = 0;
        }
        for (uint32_t i = 0; i < REFS; i++) {
            if (model.pins[i] == 0 || now + 65536 - model.used[i] < TTL) continue;
            kv_pool_unpin(pool, model.refs[i].slot);
            model.pins[i] = 0;
        }
        model_check(pool, &model);
    }
    EXPECT(kv_pool_usage(pool).evicted_capacity > 0);
    EXPECT(kv_pool_usage(pool).evicted_expired > 0);
    kv_pool_destroy(pool);
}

int main(void)
{
    test_too_small();
    test_store_and_get();
    test_life();
    test_tick_takes_only_what_is_past();
    test_victims();
    test_hold();
    test_room_is_made_of_expired_ones_first();
    test_drop_while_read();
    test_move();
    test_random_steps();
    HARNESS_END();
}
