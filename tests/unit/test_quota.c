/*
 * Quotas, the decisions.
 *
 * Goal: nothing is admitted that would pass a limit, whatever the numbers are; of several
 * victims the order is the documented one, and an order.
 * Method: edges, then random use against a plain sum.
 */

#include "kvstore/plan/quota.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/checksum.h"
#include "tests/harness.h"

static uint64_t seed = 11;

static uint64_t random64(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return seed ^ seed >> 29;
}

static uint32_t random_below(uint32_t limit)
{
    return (uint32_t)(random64() >> 33) % limit;
}

static void test_names(void)
{
    for (unsigned i = 0; i < KV_QUOTA_COUNT; i++) {
        enum kv_quota_kind kind = KV_QUOTA_COUNT;
        EXPECT(kv_quota_find(kv_quota_name((enum kv_quota_kind)i), &kind) && kind == i);
        EXPECT(kv_quota_least(kind) <= kv_quota_most(kind));
        EXPECT(kv_quota_is_valid(kind, KV_QUOTA_UNLIMITED));
        EXPECT(kv_quota_is_valid(kind, kv_quota_least(kind)));
        EXPECT(kv_quota_is_valid(kind, kv_quota_most(kind)));
        EXPECT(!kv_quota_is_valid(kind, kv_quota_most(kind) + 1));
        if (kv_quota_least(kind) > 0) EXPECT(!kv_quota_is_valid(kind, kv_quota_least(kind) - 1));
    }
    enum kv_quota_kind kind;
    EXPECT(!kv_quota_find("", &kind) && !kv_quota_find("Sessions", &kind));
}

static void test_merge(void)
{
    struct kv_quota plan = kv_quota_unlimited();
    plan.limits[KV_QUOTA_SESSIONS] = 20;
    plan.limits[KV_QUOTA_TURNS] = 10;
    struct kv_quota_own own = {.set = 1u << KV_QUOTA_TURNS | 1u << KV_QUOTA_BYTES_SSD};
    plan.limits[KV_QUOTA_TTL_MS] = 3600000;
    own.quota.limits[KV_QUOTA_TURNS] = 2;
    own.quota.limits[KV_QUOTA_BYTES_SSD] = KV_QUOTA_UNLIMITED;
    own.quota.limits[KV_QUOTA_SESSIONS] = 1; /* Not set: does not count. */
    const struct kv_quota quota = kv_quota_merge(&plan, &own);
    EXPECT_EQ_U64(quota.limits[KV_QUOTA_SESSIONS], 20);
    EXPECT_EQ_U64(quota.limits[KV_QUOTA_TURNS], 2);
    EXPECT_EQ_U64(quota.limits[KV_QUOTA_BYTES_SSD], KV_QUOTA_UNLIMITED);
    EXPECT_EQ_U64(quota.limits[KV_QUOTA_SAVES], KV_QUOTA_UNLIMITED);
    EXPECT_EQ_U64(quota.limits[KV_QUOTA_TTL_MS], 3600000);
}

static void test_admits(void)
{
    struct kv_quota quota = kv_quota_unlimited();
    EXPECT(kv_quota_admits(&quota, KV_QUOTA_SESSIONS, UINT64_MAX, UINT64_MAX));
    EXPECT_EQ_U64(kv_quota_over(&quota, KV_QUOTA_SESSIONS, UINT64_MAX), 0);
    quota.limits[KV_QUOTA_SESSIONS] = 20;
    EXPECT(kv_quota_admits(&quota, KV_QUOTA_SESSIONS, 19, 1));
    EXPECT(!kv_quota_admits(&quota, KV_QUOTA_SESSIONS, 20, 1));
    EXPECT(kv_quota_admits(&quota, KV_QUOTA_SESSIONS, 20, 0));
    EXPECT(!kv_quota_admits(&quota, KV_QUOTA_SESSIONS, 21, 0));         /* It was lowered. */
    EXPECT(!kv_quota_admits(&quota, KV_QUOTA_SESSIONS, 1, UINT64_MAX)); /* No overflow. */
    EXPECT(!kv_quota_admits(&quota, KV_QUOTA_SESSIONS, UINT64_MAX, 2));
    EXPECT_EQ_U64(kv_quota_over(&quota, KV_QUOTA_SESSIONS, 20), 0);
    EXPECT_EQ_U64(kv_quota_over(&quota, KV_QUOTA_SESSIONS, 23), 3);
    for (uint32_t round = 0; round < harness_count(1000); round++) {
        const uint64_t limit = random_below(1000000);
        uint64_t used = 0, sum = 0;
        quota.limits[KV_QUOTA_BYTES_SSD] = limit;
        for (uint32_t i = 0; i < 100; i++) {
            const uint64_t more = random_below(50000);
            const bool fits = used + more <= limit;
            EXPECT(kv_quota_admits(&quota, KV_QUOTA_BYTES_SSD, used, more) == fits);
            if (fits) used += more;
            sum += more;
            EXPECT(used <= limit && used <= sum);
            if (random_below(4) == 0) used -= random_below((uint32_t)used + 1);
        }
    }
}

static struct kv_quota_victim random_victim(void)
{
    return (struct kv_quota_victim){
        .kind = (enum kv_quota_class)random_below(3),
        .is_held = random_below(4) == 0,
        .used_ms = random_below(3),
        .tokens = random_below(3),
        .session = {{(uint8_t)random_below(3)}},
    };
}

static void test_victims(void)
{
    const struct kv_quota_victim window = {.kind = KV_QUOTA_WINDOW, .used_ms = 9},
                                 turn = {.kind = KV_QUOTA_TURN, .used_ms = 5},
                                 session = {.kind = KV_QUOTA_SESSION, .used_ms = 1},
                                 held = {.kind = KV_QUOTA_WINDOW, .is_held = true};
    EXPECT(kv_quota_victim_before(&window, &turn) && kv_quota_victim_before(&turn, &session));
    EXPECT(kv_quota_victim_before(&session, &held) && !kv_quota_victim_before(&held, &session));
    /* A strict order: never both ways, never to itself, transitive. */
    for (uint32_t i = 0; i < harness_count(200000); i++) {
        const struct kv_quota_victim a = random_victim(), b = random_victim(), c = random_victim();
        const bool ab = kv_quota_victim_before(&a, &b), ba = kv_quota_victim_before(&b, &a);
        EXPECT(!(ab && ba) && !kv_quota_victim_before(&a, &a));
        if (ab && kv_quota_victim_before(&b, &c)) EXPECT(kv_quota_victim_before(&a, &c));
    }
    EXPECT_EQ_U32(kv_quota_helps(KV_QUOTA_TURNS), 1u << KV_QUOTA_TURN);
    EXPECT_EQ_U32(kv_quota_helps(KV_QUOTA_REQUESTS_PER_S), 0);
}

/* The bytes of docs/format.md, and what is refused of them. */
static void test_records(void)
{
    static const uint8_t want[] = "\x01\x05"
                                  "alice\x02s1\x02\x00\x00\x00"
                                  "\0\0\0\0\0\0\0\0\x0a\0\0\0\0\0\0\0"
                                  "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
                                  "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
                                  "\0\0\0\0\0\0\0";
    const struct kv_record_quota quota = {
        .user = "alice", .plan = "s1", .set = 2, .limits = {0, 10}};
    const struct kv_record_plan plan = {.name = "s1", .limits = {1, 2, 3, 4, 5, 6, UINT64_MAX}};
    struct kv_record_quota got;
    struct kv_record_plan got_plan;
    uint8_t buf[KV_RECORD_QUOTA_MAX], key[KV_KEY_QUOTA_MAX];
    uint32_t bytes = kv_record_quota_encode(&quota, buf);
    EXPECT_EQ_U32(bytes, sizeof(want) + 4);
    EXPECT_EQ_MEM(buf, want, sizeof(want));
    EXPECT(kv_record_quota_decode(buf, bytes, &got) == KV_OK);
    EXPECT_EQ_STR(got.user, "alice");
    EXPECT_EQ_STR(got.plan, "s1");
    EXPECT(got.set == 2 && got.limits[1] == 10);
    for (uint32_t i = 0; i < bytes; i++) {
        buf[i] ^= 1;
        EXPECT(kv_record_quota_decode(buf, bytes, &got) == KV_CORRUPT);
        buf[i] ^= 1;
    }
    for (uint32_t i = 0; i < bytes; i++)
        EXPECT(kv_record_quota_decode(buf, i, &got) == KV_CORRUPT);
    buf[10] = 0x40; /* A bit without a limit. */
    kv_store32(buf + bytes - 4, kv_checksum(buf, bytes - 4));
    EXPECT(kv_record_quota_decode(buf, bytes, &got) == KV_CORRUPT);
    bytes = kv_record_plan_encode(&plan, buf);
    EXPECT(kv_record_plan_decode(buf, bytes, &got_plan) == KV_OK);
    EXPECT_EQ_MEM(got_plan.limits, plan.limits, sizeof(plan.limits));
    EXPECT(kv_record_plan_decode(buf, bytes - 1, &got_plan) == KV_CORRUPT);
    EXPECT_EQ_U32(kv_key_plan("s1", key), 3);
    EXPECT_EQ_MEM(key, "Ys1", 3);
    EXPECT_EQ_U32(kv_key_quota(&(struct kv_user_id){{7}}, key), 17);
    EXPECT(key[0] == 'B' && key[1] == 7);
}

int main(void)
{
    test_records();
    test_names();
    test_merge();
    test_admits();
    test_victims();
    HARNESS_END();
}
