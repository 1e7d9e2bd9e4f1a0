/*
 * Who gets the next live slot, and who may wait for one.
 *
 * Goal: the order (fewest slots, then users in turn, then arrival), the limits of the queue, and
 * what follows from them: however much one user sends, another waits for a counted number of turns.
 * Method: tables for the rules; then users that hammer, played call by call, against one that does
 * not.
 */

#include "kvstore/plan/admission.h"
#include "tests/harness.h"

static struct kv_user_id user(uint32_t number)
{
    struct kv_user_id id = {{0}};
    memcpy(id.bytes, &number, sizeof(number));
    return id;
}

static void push(struct kv_waiting_queue *queue, uint32_t of, uintptr_t call)
{
    const struct kv_user_id id = user(of);
    kv_waiting_push(queue, &id, (void *)call);
}

static struct kv_admission enter(const struct kv_waiting_queue *queue, uint32_t of)
{
    const struct kv_user_id id = user(of);
    return kv_admission_enter(queue, &id);
}

static void test_order(void)
{
    const struct {
        const char *what;
        uint32_t count, want;
        struct {
            uint32_t turn, in_use;
        } waiting[4];
    } cases[] = {
        {"one alone", 1, 0, {{7, 9}}},
        {"calls of one user: the first", 3, 0, {{1, 2}, {1, 2}, {1, 2}}},
        {"fewer slots before an earlier turn", 2, 1, {{1, 1}, {2, 0}}},
        {"equal slots: the earlier turn", 3, 1, {{3, 1}, {2, 1}, {4, 1}}},
        {"the first call of the one who is next", 4, 1, {{2, 0}, {1, 0}, {1, 0}, {2, 0}}},
        {"none has none: still the fewest", 3, 2, {{1, 8}, {2, 8}, {3, 7}}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kv_waiting waiting[4] = {0};
        for (uint32_t k = 0; k < cases[i].count; k++) {
            waiting[k].turn = cases[i].waiting[k].turn;
            waiting[k].in_use = cases[i].waiting[k].in_use;
        }
        (void)printf("  %s\n", cases[i].what);
        EXPECT_EQ_U32(kv_admission_next(waiting, cases[i].count), cases[i].want);
    }
}

static void test_round(void)
{
    struct kv_waiting_queue queue = {0};
    static const uint32_t come[] = {1, 1, 2, 1, 3, 2};
    /* In turn; the calls of one user in the order they came. */
    static const uintptr_t served[] = {10, 12, 14, 11, 15, 13};
    for (uint32_t i = 0; i < 6; i++)
        push(&queue, come[i], 10 + i);
    EXPECT_EQ_U32(kv_waiting_find(&queue, (void *)(uintptr_t)14), 4);
    EXPECT_EQ_U32(kv_waiting_find(&queue, (void *)(uintptr_t)99), 6);
    for (uint32_t i = 0; i < 6; i++) {
        const uint32_t at = kv_admission_next(queue.waiting, queue.count);
        EXPECT_EQ_U64((uintptr_t)kv_waiting_take(&queue, at, true), served[i]);
    }
    EXPECT_EQ_U32(queue.count, 0);

    /* Leaving is no turn: the other call of user 1 keeps its place. */
    push(&queue, 1, 20);
    push(&queue, 2, 21);
    push(&queue, 1, 22);
    EXPECT_EQ_U64((uintptr_t)kv_waiting_take(&queue, 0, false), 20);
    EXPECT_EQ_U32(kv_admission_next(queue.waiting, queue.count), 1);
    /* Coming back does not win one either. */
    EXPECT_EQ_U64((uintptr_t)kv_waiting_take(&queue, 1, false), 22);
    push(&queue, 1, 23);
    EXPECT_EQ_U32(kv_admission_next(queue.waiting, queue.count), 0);
}

static void test_limits(void)
{
    struct kv_waiting_queue queue = {0};
    const uint32_t users = KV_LIVE_WAITING_MAX / KV_LIVE_WAITING_PER_USER_MAX;
    uintptr_t call = 0;

    for (uint32_t i = 0; i < KV_LIVE_WAITING_PER_USER_MAX; i++) {
        EXPECT(enter(&queue, 1).kind == KV_ADMISSION_WAIT);
        push(&queue, 1, ++call);
    }
    EXPECT(enter(&queue, 1).kind == KV_ADMISSION_USER_FULL);
    EXPECT(enter(&queue, 2).kind == KV_ADMISSION_WAIT);
    for (uint32_t of = 2; of <= users; of++) {
        for (uint32_t i = 0; i < KV_LIVE_WAITING_PER_USER_MAX; i++)
            push(&queue, of, ++call);
    }
    EXPECT_EQ_U32(queue.count, KV_LIVE_WAITING_MAX);

    /* Full: others make room, each time the newest call of the user with the most, until all have
     * as many but for one. */
    uint32_t entered = 0;
    for (;; entered++) {
        const struct kv_admission got = enter(&queue, 100);
        if (got.kind != KV_ADMISSION_REPLACE) {
            EXPECT(got.kind == KV_ADMISSION_FULL);
            break;
        }
        const struct kv_user_id loses = queue.waiting[got.at].user;
        for (uint32_t k = got.at + 1; k < queue.count; k++)
            EXPECT(!kv_id_equal(queue.waiting[k].user.bytes, loses.bytes));
        (void)kv_waiting_take(&queue, got.at, false);
        push(&queue, 100, ++call);
    }
    EXPECT(entered >= KV_LIVE_WAITING_MAX / (users + 1) - 1);
    for (uint32_t of = 1; of <= users; of++) {
        const struct kv_admission got = enter(&queue, of);
        EXPECT(got.kind == KV_ADMISSION_FULL);
    }
}

static void test_full_of_single_calls(void)
{
    struct kv_waiting_queue queue = {0};
    for (uint32_t i = 0; i < KV_LIVE_WAITING_MAX; i++)
        push(&queue, i, i + 1);
    EXPECT(enter(&queue, KV_LIVE_WAITING_MAX).kind == KV_ADMISSION_FULL);
    EXPECT(enter(&queue, 0).kind == KV_ADMISSION_FULL);
    (void)kv_waiting_take(&queue, 5, true);
    EXPECT(enter(&queue, KV_LIVE_WAITING_MAX).kind == KV_ADMISSION_WAIT);
}

enum { PLAY_SLOTS_MAX = 8, PLAY_TURNS = 2000 };

/* Hammering users always have `each` calls waiting or running; user 0 has one at a time.  Each
 * round one slot, the next in a fixed order, becomes free.  Returns the most turns of others that
 * ended between two of user 0. */
static uint32_t play(uint32_t slots, uint32_t hammering, uint32_t each)
{
    struct kv_waiting_queue queue = {0};
    uint32_t running[PLAY_SLOTS_MAX];
    uint32_t most = 0, since = 0, served = 0;

    for (uint32_t i = 0; i < slots; i++)
        running[i] = 1 + i % hammering;
    for (uint32_t of = 1; of <= hammering; of++) {
        for (uint32_t i = 0; i < each; i++) {
            if (enter(&queue, of).kind == KV_ADMISSION_WAIT) push(&queue, of, of + 1);
        }
    }
    push(&queue, 0, 1);
    for (uint32_t turn = 0; turn < PLAY_TURNS; turn++) {
        const uint32_t slot = turn % slots;
        const uint32_t ended = running[slot];
        running[slot] = UINT32_MAX;
        since += ended != 0;
        for (uint32_t i = 0; i < queue.count; i++) {
            uint32_t of;
            memcpy(&of, queue.waiting[i].user.bytes, sizeof(of));
            queue.waiting[i].in_use = 0;
            for (uint32_t k = 0; k < slots; k++)
                queue.waiting[i].in_use += running[k] == of;
        }
        const uint32_t at = kv_admission_next(queue.waiting, queue.count);
        running[slot] = (uint32_t)(uintptr_t)kv_waiting_take(&queue, at, true) - 1;
        if (running[slot] == 0) {
            most = since > most ? since : most;
            since = 0;
            served++;
        }
        /* Who ended sends the next call at once. */
        if (enter(&queue, ended).kind == KV_ADMISSION_WAIT) push(&queue, ended, ended + 1);
    }
    EXPECT(served > 0);
    return most;
}

static void test_a_quiet_user_is_served(void)
{
    for (uint32_t slots = 1; slots <= PLAY_SLOTS_MAX; slots++) {
        for (uint32_t hammering = 1; hammering <= 3; hammering++) {
            for (uint32_t each = 12; each <= 2 * KV_LIVE_WAITING_PER_USER_MAX; each += 26) {
                const uint32_t most = play(slots, hammering, each);
                (void)printf("  %u slots, %u users with %u calls each: %u turns of others\n", slots,
                             hammering, each, most);
                /* The slots that were running when it came, and one turn of each other user. */
                EXPECT(most <= slots + hammering);
            }
        }
    }
}

int main(void)
{
    test_order();
    test_round();
    test_limits();
    test_full_of_single_calls();
    test_a_quiet_user_is_served();
    HARNESS_END();
}
