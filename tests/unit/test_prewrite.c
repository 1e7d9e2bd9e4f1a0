/*
 * How far ahead of its use space on SSD is made.
 *
 * Goal: a little for a new store, as much as is in use for a growing one, two segments at most; the
 * pages that are there first, another segment only when it is allowed and needed.
 * Method: a table for the rule; then a store that grows page by page, where the next page is always
 * written through and never more than two segments are ahead.
 */

#include "kvstore/plan/prewrite.h"
#include "tests/harness.h"

static void test_rule(void)
{
    const struct {
        const char *what;
        struct kv_prewrite state; /* used, free, written, segment, least, may_make */
        enum kv_prewrite_step want;
    } cases[] = {
        {"a new store", {0, 585, 0, 585, 9, true}, KV_PREWRITE_PAGES},
        {"with its little", {0, 585, 9, 585, 9, true}, KV_PREWRITE_NOTHING},
        {"in use: as much again", {100, 485, 99, 585, 9, true}, KV_PREWRITE_PAGES},
        {"that is there", {100, 485, 100, 585, 9, true}, KV_PREWRITE_NOTHING},
        {"its segment will not do", {300, 285, 285, 585, 9, true}, KV_PREWRITE_SEGMENT},
        {"first what is there", {300, 285, 284, 585, 9, true}, KV_PREWRITE_PAGES},
        {"none may be made", {300, 285, 285, 585, 9, false}, KV_PREWRITE_NOTHING},
        {"two segments are enough", {9000, 1170, 1170, 585, 9, true}, KV_PREWRITE_NOTHING},
        {"and wanted", {9000, 1169, 1169, 585, 9, true}, KV_PREWRITE_SEGMENT},
        {"segments smaller than the little", {0, 8, 8, 8, 128, true}, KV_PREWRITE_SEGMENT},
        {"two of these", {0, 16, 16, 8, 128, true}, KV_PREWRITE_NOTHING},
        {"a full tier", {8, 0, 0, 8, 1, false}, KV_PREWRITE_NOTHING},
        {"no segment yet", {0, 0, 0, 8, 1, true}, KV_PREWRITE_SEGMENT},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        (void)printf("  %s\n", cases[i].what);
        EXPECT_EQ_U32(kv_prewrite_next(&cases[i].state), cases[i].want);
    }
}

static void test_growth(void)
{
    struct kv_prewrite state = {.segment_pages = 64, .least = 4, .may_make = true};
    uint32_t made = 0;
    for (uint32_t page = 0; page < 10000; page++) {
        enum kv_prewrite_step step;
        while ((step = kv_prewrite_next(&state)) != KV_PREWRITE_NOTHING) {
            if (step == KV_PREWRITE_SEGMENT) {
                state.free += state.segment_pages;
                made++;
            } else {
                state.written++;
            }
        }
        EXPECT(state.written >= 1);
        EXPECT(state.free <= 3 * state.segment_pages);
        state.used++;
        state.free--;
        state.written--;
    }
    EXPECT(made * 64 <= 10000 + 3 * 64);
}

int main(void)
{
    test_rule();
    test_growth();
    HARNESS_END();
}
