/*
 * Planted bugs: a test that must find wrong bits is shown some.
 *
 * Only in builds with CACHED_TEST_HOOKS; others have no name for them and hand images through.
 */

#include "cached/worker/worker_internal.h"

#include "kvstore/base/bytes.h"

#include <string.h>

enum plant worker_plant_of(const char *name)
{
#ifdef CACHED_TEST_HOOKS
    if (name != NULL && strcmp(name, "window") == 0) return PLANT_WINDOW;
    if (name != NULL && strcmp(name, "tail") == 0) return PLANT_TAIL;
    if (name != NULL && strcmp(name, "import") == 0) return PLANT_IMPORT;
#else
    (void)name;
#endif
    return PLANT_NONE;
}

#ifdef CACHED_TEST_HOOKS
/* The sign of the largest value in the newest row of layer 0, which every token computed next
 * reads: large, so that no rounding hides it.  A row begins with its codes; scales end it. */
static void damage_window(const struct kv_layout *layout, uint8_t *image, uint32_t taken_at,
                          uint32_t tokens)
{
    const uint32_t row_index = tokens - 1 - kv_layout_image_base(layout, taken_at);
    uint8_t *row =
        image + kv_layout_window_offset(layout, 0) + row_index * layout->window_row_bytes;
    uint32_t largest = 0;
    for (uint32_t i = 1; i < layout->window_row_bytes / 2; i++)
        if ((row[i] & 0x7f) > (row[largest] & 0x7f)) largest = i;
    row[largest] ^= 0x80;
}

/* The largest float of the first tail, times or by two. */
static void damage_tail(const struct kv_layout *layout, uint8_t *image)
{
    uint32_t source = 0;
    while (source < layout->source_count && layout->sources[source].tail_bytes == 0)
        source++;
    if (source == layout->source_count) return;

    uint8_t *tail = image + layout->tails_offset; /* Sources before it have no tail. */
    uint32_t largest = 0;
    for (uint32_t i = 0; i + 4 <= layout->sources[source].tail_bytes; i += 4)
        if ((kv_load32(tail + i) & 0x7fffffffu) > (kv_load32(tail + largest) & 0x7fffffffu))
            largest = i;
    tail[largest + 2] ^= 0x80;
}
#endif

const uint8_t *worker_image(struct worker *worker, const struct worker_job *job)
{
#ifdef CACHED_TEST_HOOKS
    const struct kv_layout *layout = eng_model_layout(worker->model);
    const bool has_tails = job->start_tokens % 2 == 1;
    if (worker->plant == PLANT_NONE) return job->image;
    if (worker->plant == PLANT_TAIL && !has_tails) return job->image;

    memcpy(worker->plant_image, job->image, layout->image_bytes);
    if (worker->plant == PLANT_WINDOW)
        damage_window(layout, worker->plant_image, job->image_state.tokens, job->start_tokens);
    if (worker->plant == PLANT_TAIL) damage_tail(layout, worker->plant_image);
    return worker->plant_image;
#else
    (void)worker;
    return job->image;
#endif
}
