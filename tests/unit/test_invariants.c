/*
 * Space adds up, whatever the store did (invariants I3 and I4).
 *
 * Goal: after random histories of saves, restores, deletes, moves and restarts every page in use
 * has one record, what is charged to users is that, and free, used and closed pages are all of the
 * files; and that the check sees it when they do not. Method: the script of tests/seam/work.c on a
 * disk in memory.  Then the same with a planted bug: every few pages one that should be free is
 * not, or is charged twice.
 */

#include "tests/harness.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/stack.h"
#include "tests/seam/work.h"

#define ROUNDS 60u

enum bug { BUG_NONE, BUG_LEAK, BUG_LOST_CHARGE };

static enum bug bug;
static uint32_t calls;

/* In place of those of the store (--wrap). */
void __real_kv_ssd_free(struct kv_ssd *ssd, uint32_t page);
void __wrap_kv_ssd_free(struct kv_ssd *ssd, uint32_t page);
void __real_kv_index_session_pages(struct kv_index *index, struct kv_session_entry *entry,
                                   uint32_t pages);
void __wrap_kv_index_session_pages(struct kv_index *index, struct kv_session_entry *entry,
                                   uint32_t pages);

void __wrap_kv_ssd_free(struct kv_ssd *ssd, uint32_t page)
{
    if (bug == BUG_LEAK && ++calls % 5 == 0) return;
    __real_kv_ssd_free(ssd, page);
}

/* What a session holds. */
void __wrap_kv_index_session_pages(struct kv_index *index, struct kv_session_entry *entry,
                                   uint32_t pages)
{
    if (bug == BUG_LOST_CHARGE && pages > 0) entry->user->pages++;
    __real_kv_index_session_pages(index, entry, pages);
}

static struct work *run(uint64_t seed)
{
    struct stack stack;
    struct work *work = calloc(1, sizeof(*work));
    EXPECT(work != NULL);
    stack_init(&stack, KV_PLANT_NONE, mem_disk_create(STACK_DIR, seed));
    work_run(work, &(struct work_options){.disk = stack.disk,
                                          .manifest = stack.manifest,
                                          .recorder = stack.recorder,
                                          .faulty = &stack.faulty,
                                          .dir = STACK_DIR,
                                          .seed = seed,
                                          .rounds = ROUNDS});
    stack_fini(&stack);
    return work;
}

static void test_even(uint64_t seeds)
{
    uint64_t saves = 0, drops = 0, moves = 0, erased = 0;
    for (uint64_t seed = 1; seed <= seeds; seed++) {
        struct work *work = run(seed);
        if (work->uneven)
            (void)fprintf(stderr, "seed %llu: %s\n", (unsigned long long)seed, work->uneven_why);
        EXPECT(!work->uneven && !work->stuck);
        EXPECT_EQ_U64(work->wrong, 0);
        EXPECT_EQ_U64(work->damaged, 0);
        saves += work->saves;
        drops += work->drops;
        moves += work->moves;
        erased += work->erased;
        free(work);
    }
    (void)printf("  %llu histories: %llu saves, %llu deletes, %llu pages moved, %llu erased\n",
                 (unsigned long long)seeds, (unsigned long long)saves, (unsigned long long)drops,
                 (unsigned long long)moves, (unsigned long long)erased);
    EXPECT(saves > 20 * seeds && drops > 2 * seeds && moves > 2 * seeds && erased > 2 * seeds);
}

static void test_planted(enum bug plant, const char *name)
{
    uint64_t seed = 1;
    bool is_seen = false;
    for (bug = plant; seed <= 20 && !is_seen; seed++) {
        struct work *work = run(seed);
        is_seen = work->uneven;
        if (is_seen) (void)printf("  planted %s: %s\n", name, work->uneven_why);
        free(work);
    }
    bug = BUG_NONE;
    EXPECT(is_seen);
}

int main(void)
{
    test_even(harness_count(200));
    test_planted(BUG_LEAK, "a page that is never free again");
    test_planted(BUG_LOST_CHARGE, "pages charged twice");
    HARNESS_END();
}
