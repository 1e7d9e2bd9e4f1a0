/* A time that does not jump. */

#include "kvstore/plan/timeline.h"

#include "kvstore/base/bytes.h"

static uint64_t distance(int64_t off_ms)
{
    return off_ms < 0 ? (uint64_t)-off_ms : (uint64_t)off_ms;
}

void kv_timeline_begin(struct kv_timeline *line, uint64_t wall_ms, uint64_t mono_ns,
                       uint64_t floor_ms, uint64_t before_ms)
{
    *line = (struct kv_timeline){.now_ms = wall_ms,
                                 .mono_ns = mono_ns,
                                 .begun_ms = wall_ms,
                                 .floor_ms = floor_ms,
                                 .before_ms = before_ms,
                                 .last_ms = floor_ms};
}

void kv_timeline_saw(struct kv_timeline *line, uint64_t used_ms)
{
    /* A directory that has been through a jump may hold uses of a future that never came: they say
     * nothing of this clock. */
    if (line->floor_ms > 0 && used_ms > line->now_ms + KV_TIMELINE_TOLERANCE_MS) return;
    /* Nor do those of before a long jump back, when the clock is where it was then. */
    const bool far_back = line->floor_ms + KV_TIMELINE_ERA_MS < line->before_ms;
    if (far_back && used_ms + KV_TIMELINE_ERA_MS > line->before_ms &&
        used_ms <= line->before_ms + KV_TIMELINE_TOLERANCE_MS)
        return;
    line->last_ms = KV_MAX(line->last_ms, used_ms);
}

static enum kv_timeline_event jump(struct kv_timeline *line, int64_t off_ms)
{
    line->off_ms = off_ms;
    line->jumped_ns = line->mono_ns;
    line->jumps++;
    return KV_TIMELINE_JUMPED;
}

enum kv_timeline_event kv_timeline_judge(struct kv_timeline *line)
{
    const uint64_t wall_ms = line->now_ms, last_ms = line->last_ms;
    const bool behind = wall_ms + KV_TIMELINE_TOLERANCE_MS < last_ms;
    const bool ahead = last_ms > 0 && wall_ms > last_ms + KV_TIMELINE_GAP_MS;
    if (!behind && !ahead) return KV_TIMELINE_NONE;
    line->now_ms = line->begun_ms = last_ms;
    return jump(line, (int64_t)(wall_ms - last_ms));
}

uint64_t kv_timeline_now_ms(const struct kv_timeline *line, uint64_t mono_ns)
{
    return line->now_ms + (mono_ns - line->mono_ns) / 1000000u;
}

/* Everything older counts as used now. */
static enum kv_timeline_event believe(struct kv_timeline *line, uint64_t wall_ms)
{
    line->before_ms = line->now_ms;
    line->now_ms = line->begun_ms = line->floor_ms = wall_ms;
    line->off_ms = 0;
    return KV_TIMELINE_BELIEVED;
}

enum kv_timeline_event kv_timeline_look(struct kv_timeline *line, uint64_t wall_ms,
                                        uint64_t mono_ns)
{
    const uint64_t now_ms = kv_timeline_now_ms(line, mono_ns);
    const int64_t off_ms = (int64_t)(wall_ms - now_ms);
    const bool was_off = line->off_ms != 0;
    if (distance(off_ms) <= KV_TIMELINE_TOLERANCE_MS) {
        line->now_ms = wall_ms;
        line->mono_ns = mono_ns;
        line->off_ms = 0;
        return was_off ? KV_TIMELINE_BACK : KV_TIMELINE_NONE;
    }
    /* What is left of a millisecond stays for the next look. */
    line->mono_ns += (now_ms - line->now_ms) * 1000000u;
    line->now_ms = now_ms;
    if (!was_off || distance(off_ms - line->off_ms) > KV_TIMELINE_TOLERANCE_MS)
        return jump(line, off_ms);
    if (mono_ns - line->jumped_ns >= KV_TIMELINE_GRACE_MS * 1000000u) {
        line->mono_ns = mono_ns;
        return believe(line, wall_ms);
    }
    return KV_TIMELINE_NONE;
}

uint64_t kv_timeline_used_ms(const struct kv_timeline *line, uint64_t used_ms)
{
    if (used_ms < line->floor_ms) return line->floor_ms;
    return used_ms > line->now_ms + KV_TIMELINE_TOLERANCE_MS ? line->begun_ms : used_ms;
}
