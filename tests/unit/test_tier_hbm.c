/*
 * The arena of pages.
 *
 * Goal: states of a slot (free, pinned, cached) and the counts of them, order of victims, and that
 * no byte of one owner reaches the next.
 * Method: rules one by one on an arena of four slots, then 100,000 random steps against a plain
 * model of what each slot must be, writing a pattern into every page handed out.
 */

#include "kvstore/tier/tier_hbm.h"
#include "tests/harness.h"

enum { PAGE = 4096, SLOTS = 4, MANY = 16 };

/* What the evict callback heard. */
struct heard {
    uint32_t count;
    uint32_t owner;
    uint32_t slot;
};

static void on_evicted(void *context, uint32_t owner, uint32_t slot)
{
    struct heard *heard = context;
    heard->count++;
    heard->owner = owner;
    heard->slot = slot;
}

static struct kv_hbm *create(uint32_t slots, kv_hbm_evict_fn *fn, void *context)
{
    const struct kv_hbm_options options = {
        .bytes = (uint64_t)slots * PAGE + PAGE - 1,
        .page_bytes = PAGE,
        .evicted = fn,
        .context = context,
    };
    struct kv_hbm *hbm = NULL;
    EXPECT(kv_hbm_create(&options, &hbm, NULL) == KV_OK);
    return hbm;
}

static bool is_zero(const uint8_t *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != 0) return false;
    return true;
}

static void test_too_small(void)
{
    struct kv_hbm *hbm = NULL;
    struct kv_error err;
    const struct kv_hbm_options options = {.bytes = 2 * PAGE - 1, .page_bytes = PAGE};
    EXPECT(kv_hbm_create(&options, &hbm, &err) == KV_INVALID);
    EXPECT(strstr(err.text, "at least 2") != NULL);
    EXPECT(hbm == NULL);
    kv_hbm_destroy(NULL);
}

static void test_all_pinned_is_busy(void)
{
    struct kv_hbm *hbm = create(SLOTS, NULL, NULL);
    uint32_t slots[SLOTS];
    uint32_t more;
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < SLOTS; i++) {
        EXPECT_EQ_U32(kv_hbm_available(hbm), SLOTS - i);
        EXPECT(kv_hbm_alloc(hbm, &slots[i]) == KV_OK);
        EXPECT_EQ_U32(slots[i], i);
        EXPECT(kv_hbm_bytes(hbm, slots[i]) == kv_hbm_base(hbm, &bytes) + i * PAGE);
    }
    EXPECT_EQ_U64(bytes, SLOTS * PAGE);
    EXPECT(kv_hbm_alloc(hbm, &more) == KV_BUSY);
    EXPECT_EQ_U32(kv_hbm_usage(hbm).pinned, SLOTS);
    kv_hbm_unpin(hbm, slots[2]);
    EXPECT_EQ_U32(kv_hbm_usage(hbm).free, 1);
    EXPECT(kv_hbm_alloc(hbm, &more) == KV_OK);
    EXPECT_EQ_U32(more, slots[2]);
    kv_hbm_destroy(hbm);
}

static void test_victim_is_least_recently_unpinned(void)
{
    struct heard heard = {0};
    struct kv_hbm *hbm = create(SLOTS, on_evicted, &heard);
    uint32_t slots[SLOTS];
    uint32_t more;

    for (uint32_t i = 0; i < SLOTS; i++) {
        EXPECT(kv_hbm_alloc(hbm, &slots[i]) == KV_OK);
        kv_hbm_set_owner(hbm, slots[i], 100 + i);
    }
    kv_hbm_unpin(hbm, slots[1]);
    kv_hbm_unpin(hbm, slots[0]);
    kv_hbm_unpin(hbm, slots[2]);
    EXPECT_EQ_U32(kv_hbm_usage(hbm).cached, 3);
    EXPECT_EQ_U32(kv_hbm_available(hbm), 3);

    /* Used again: no longer the oldest. */
    kv_hbm_pin(hbm, slots[1]);
    EXPECT_EQ_U32(kv_hbm_usage(hbm).cached, 2);
    kv_hbm_unpin(hbm, slots[1]);

    const uint32_t order[] = {0, 2, 1};
    for (uint32_t i = 0; i < 3; i++) {
        EXPECT(kv_hbm_alloc(hbm, &more) == KV_OK);
        EXPECT_EQ_U32(heard.count, i + 1);
        EXPECT_EQ_U32(heard.owner, 100 + order[i]);
        EXPECT_EQ_U32(heard.slot, slots[order[i]]);
        EXPECT_EQ_U32(more, slots[order[i]]);
    }
    EXPECT(kv_hbm_alloc(hbm, &more) == KV_BUSY);
    EXPECT_EQ_U64(kv_hbm_usage(hbm).evictions, 3);
    kv_hbm_destroy(hbm);
}

/* One for a read keeps its bytes, for the reader alone: given back unread they are wiped. */
static void test_alloc_to_read(void)
{
    struct heard heard = {0};
    struct kv_hbm *hbm = create(SLOTS, on_evicted, &heard);
    uint32_t slots[SLOTS], slot;
    for (uint32_t i = 0; i < SLOTS; i++) {
        EXPECT(kv_hbm_alloc(hbm, &slots[i]) == KV_OK);
        memset(kv_hbm_bytes(hbm, slots[i]), 0x5a, PAGE);
        kv_hbm_set_owner(hbm, slots[i], 100 + i);
    }
    EXPECT(kv_hbm_alloc_to_read(hbm, &slot) == KV_BUSY);
    kv_hbm_unpin(hbm, slots[3]);
    EXPECT(kv_hbm_alloc_to_read(hbm, &slot) == KV_OK);
    EXPECT_EQ_U32(slot, slots[3]);
    EXPECT_EQ_U32(heard.owner, 103);
    EXPECT_EQ_U64(kv_hbm_usage(hbm).evictions, 1);
    EXPECT(!is_zero(kv_hbm_bytes(hbm, slot), PAGE)); /* That is what it saves. */
    kv_hbm_unpin(hbm, slot);
    EXPECT_EQ_U32(kv_hbm_usage(hbm).free, 1);
    EXPECT(is_zero(kv_hbm_bytes(hbm, slot), PAGE));
    EXPECT(kv_hbm_alloc_to_read(hbm, &slot) == KV_OK); /* A free one is wiped already. */
    EXPECT(is_zero(kv_hbm_bytes(hbm, slot), PAGE));
    kv_hbm_destroy(hbm);
}

static void test_owner_gone_frees(void)
{
    struct heard heard = {0};
    struct kv_hbm *hbm = create(SLOTS, on_evicted, &heard);
    uint32_t slot;

    EXPECT(kv_hbm_alloc(hbm, &slot) == KV_OK);
    kv_hbm_set_owner(hbm, slot, 7);
    memset(kv_hbm_bytes(hbm, slot), 0xa5, PAGE);
    kv_hbm_pin(hbm, slot);
    kv_hbm_unpin(hbm, slot);
    EXPECT_EQ_U32(kv_hbm_usage(hbm).pinned, 1);
    kv_hbm_unpin(hbm, slot);
    EXPECT_EQ_U32(kv_hbm_usage(hbm).cached, 1);
    EXPECT(!is_zero(kv_hbm_bytes(hbm, slot), PAGE));
    kv_hbm_set_owner(hbm, slot, KV_HBM_OWNER_NONE);
    EXPECT_EQ_U32(kv_hbm_usage(hbm).free, SLOTS);
    EXPECT(is_zero(kv_hbm_bytes(hbm, slot), PAGE));
    EXPECT_EQ_U32(heard.count, 0);

    /* The owner leaves while it is pinned: it stays until the pin goes. */
    EXPECT(kv_hbm_alloc(hbm, &slot) == KV_OK);
    kv_hbm_set_owner(hbm, slot, 8);
    kv_hbm_set_owner(hbm, slot, KV_HBM_OWNER_NONE);
    EXPECT_EQ_U32(kv_hbm_usage(hbm).pinned, 1);
    kv_hbm_unpin(hbm, slot);
    EXPECT_EQ_U32(kv_hbm_usage(hbm).free, SLOTS);
    kv_hbm_destroy(hbm);
}

/* A plain model: pins and owner of each slot. */
struct model {
    uint32_t pins[MANY];
    uint32_t owner[MANY];
    uint32_t evicted;
};

static void on_model_evicted(void *context, uint32_t owner, uint32_t slot)
{
    struct model *model = context;
    EXPECT_EQ_U32(model->pins[slot], 0);
    EXPECT_EQ_U32(model->owner[slot], owner);
    model->owner[slot] = KV_HBM_OWNER_NONE;
    model->evicted++;
}

static void check_counts(const struct kv_hbm *hbm, const struct model *model)
{
    const struct kv_hbm_usage usage = kv_hbm_usage(hbm);
    uint32_t pinned = 0;
    uint32_t cached = 0;
    for (uint32_t i = 0; i < MANY; i++) {
        if (model->pins[i] > 0) pinned++;
        if (model->pins[i] == 0 && model->owner[i] != KV_HBM_OWNER_NONE) cached++;
    }
    EXPECT_EQ_U32(usage.pinned, pinned);
    EXPECT_EQ_U32(usage.cached, cached);
    EXPECT_EQ_U32(usage.free, MANY - pinned - cached);
    EXPECT_EQ_U64(usage.evictions, model->evicted);
    EXPECT_EQ_U32(kv_hbm_available(hbm), MANY - pinned);
}

static void alloc_one(struct kv_hbm *hbm, struct model *model)
{
    uint32_t slot;
    const bool possible = kv_hbm_available(hbm) > 0;
    EXPECT((kv_hbm_alloc(hbm, &slot) == KV_OK) == possible);
    if (!possible) return;
    EXPECT_EQ_U32(model->pins[slot], 0);
    EXPECT_EQ_U32(model->owner[slot], KV_HBM_OWNER_NONE);
    EXPECT(is_zero(kv_hbm_bytes(hbm, slot), PAGE));
    memset(kv_hbm_bytes(hbm, slot), 0xa5, PAGE);
    model->pins[slot] = 1;
}

static void test_random_steps(void)
{
    struct model model = {.evicted = 0};
    for (uint32_t i = 0; i < MANY; i++)
        model.owner[i] = KV_HBM_OWNER_NONE;
    struct kv_hbm *hbm = create(MANY, on_model_evicted, &model);
    uint64_t random = 88172645463325252u;

    for (uint64_t step = harness_count(100000); step > 0; step--) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        const uint32_t slot = (uint32_t)(random >> 8) % MANY;
        const bool free = model.pins[slot] == 0 && model.owner[slot] == KV_HBM_OWNER_NONE;
        switch (random % 5) {
        case 0:
            alloc_one(hbm, &model);
            break;
        case 1:
            if (free || model.pins[slot] > 3) break;
            kv_hbm_pin(hbm, slot);
            model.pins[slot]++;
            break;
        case 2:
            if (free) break;
            model.owner[slot] =
                (random >> 40) % 4 == 0 ? KV_HBM_OWNER_NONE : (uint32_t)(random >> 42);
            kv_hbm_set_owner(hbm, slot, model.owner[slot]);
            break;
        default:
            if (model.pins[slot] == 0) break;
            kv_hbm_unpin(hbm, slot);
            model.pins[slot]--;
            break;
        }
        check_counts(hbm, &model);
    }
    EXPECT(model.evicted > 0);
    kv_hbm_destroy(hbm);
}

int main(void)
{
    test_too_small();
    test_all_pinned_is_busy();
    test_victim_is_least_recently_unpinned();
    test_alloc_to_read();
    test_owner_gone_frees();
    test_random_steps();
    HARNESS_END();
}
