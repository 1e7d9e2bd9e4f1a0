/*
 * When free places that still hold something are written over.
 *
 * Goal: each within the time stated, whenever it became free and however many there are, with no
 * more steps than that needs; nothing where nothing is stated.
 * Method: a disk that takes a while for a step, and places that become free at random, each with
 * its time; time moves from one event to the next.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/plan/erase.h"
#include "tests/harness.h"

#define PLACES 4000u
#define STEP 64u
#define MS 1000000ull

struct world {
    struct kv_erase erase;
    uint64_t freed_ns[PLACES]; /* 0: it holds nothing. */
    uint32_t at, left;
    uint64_t steps, latest_ns;
};

static void set_free(struct world *world, uint32_t place, uint64_t now_ns)
{
    if (world->freed_ns[place] != 0) return;
    world->freed_ns[place] = now_ns;
    world->left++;
}

/* As the tier does it; `most` places of one step lie apart, so it may take fewer. */
static void turn(struct world *world, uint64_t now_ns, uint32_t most)
{
    uint32_t count = 0;
    if (world->left == 0) world->at = 0;
    if (!kv_erase_due(&world->erase, now_ns, world->left, STEP)) return;
    for (; world->at < PLACES && count < most; world->at++) {
        if (world->freed_ns[world->at] == 0) continue;
        world->latest_ns = KV_MAX(world->latest_ns, now_ns - world->freed_ns[world->at]);
        world->freed_ns[world->at] = 0;
        world->left--;
        count++;
    }
    if (count == 0) {
        kv_erase_pass_over(&world->erase);
        world->at = 0;
        return;
    }
    world->steps++;
    kv_erase_took(&world->erase, now_ns, count, world->left);
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* All of them in time, if a step takes 1 ms; `most`: places of a step. */
static void test_in_time(uint32_t most, uint32_t freed_each_ms, uint64_t within_ms)
{
    static struct world world;
    uint32_t random = most;
    world = (struct world){.erase = {.within_ns = within_ms * MS}};
    uint64_t now_ns = 77 * MS;
    const uint64_t begun_ns = now_ns;
    for (; now_ns < begun_ns + 5 * within_ms * MS; now_ns += MS) {
        for (uint32_t i = 0; i < freed_each_ms; i++)
            if (next_random(&random) % 4 == 0)
                set_free(&world, next_random(&random) % PLACES, now_ns);
        turn(&world, now_ns, most);
    }
    for (; world.left > 0 && now_ns < begun_ns + 7 * within_ms * MS; now_ns += MS)
        turn(&world, now_ns, most);
    (void)printf("  %u places a step: %llu steps, the last one %llu ms after\n", most,
                 (unsigned long long)world.steps, (unsigned long long)(world.latest_ns / MS));
    EXPECT_EQ_U32(world.left, 0);
    EXPECT(world.steps > 0);
    EXPECT(world.latest_ns <= within_ms * MS);
}

/* A few places wait for each other: one step a pass. */
static void test_few(void)
{
    static struct world world;
    world = (struct world){.erase = {.within_ns = 1600 * MS}};
    for (uint32_t i = 0; i < 10; i++)
        set_free(&world, i, 1 + i * MS);
    uint64_t now_ns = 10 * MS;
    for (; world.left > 0 && now_ns < 10000 * MS; now_ns += MS)
        turn(&world, now_ns, STEP);
    EXPECT_EQ_U64(world.steps, 1);
    EXPECT(now_ns >= 700 * MS && now_ns <= 720 * MS); /* No sooner: others may take them. */
}

static void test_never(void)
{
    struct kv_erase erase = {0};
    for (uint64_t now_ns = 0; now_ns < 1000000 * MS; now_ns += 1000 * MS)
        EXPECT(!kv_erase_due(&erase, now_ns, 100, STEP));
    erase.within_ns = 1000 * MS;
    for (uint64_t now_ns = 0; now_ns < 1000000 * MS; now_ns += 1000 * MS)
        EXPECT(!kv_erase_due(&erase, now_ns, 0, STEP));
}

int main(void)
{
    test_in_time(STEP, 10, 2000);
    test_in_time(STEP, 1, 2000);
    test_in_time(7, 10, 2000);
    test_in_time(STEP, 100, 500);
    test_few();
    test_never();
    HARNESS_END();
}
