/* What a power cut could leave. */

#include "tests/seam/image.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/segment_header.h"
#include "tests/seam/mem_disk.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define FILES_MAX 512u
#define PAGE_HEADER_SAME_FROM 12u /* Count, position and size of a page; generation follows. */
#define PAGE_HEADER_SAME_BYTES 12u
#define PAGE_USER_AT 32u
#define PAGE_USER_BYTES 16u

struct build {
    const struct recorder *recorder;
    uint64_t tick;
    struct ex_random *random;
    uint32_t lied; /* Event that is lied about; UINT32_MAX: none. */
    enum image_lie lie;
    uint8_t *bytes; /* The file being built. */
    uint64_t size;
};

static bool is_call(const struct record_event *event, enum kv_disk_verb verb, uint32_t file)
{
    return event->kind == RECORD_CALL && event->verb == verb && event->file == file;
}

/* Whether a flush (SYNC of a file, SYNC_DIR of a folder) that began after the event ended was over
 * by then, and none in between had failed. */
static bool is_flushed(const struct build *build, uint32_t from, enum kv_disk_verb verb,
                       uint32_t target)
{
    const struct record_event *what = &build->recorder->events[from];
    if (!record_succeeded(what, build->tick)) return false;
    for (uint32_t i = from + 1; i < build->recorder->event_count; i++) {
        const struct record_event *event = &build->recorder->events[i];
        if (!record_began(event, build->tick)) return false;
        if (!is_call(event, verb, target) || event->begun < what->ended) continue;
        if (event->ended >= build->tick) continue;
        return event->result == 0;
    }
    return false;
}

/* ---- names ---- */

/* The event that made the file. */
static uint32_t created_by(const struct recorder *recorder, uint32_t file)
{
    uint32_t i = 0;
    while (!is_call(&recorder->events[i], KV_DISK_CREATE, file))
        i++;
    return i;
}

static bool is_made(const struct build *build, uint32_t file)
{
    const struct recorder *recorder = build->recorder;
    if (recorder->files[file].found) return true;
    const uint32_t create = created_by(recorder, file);
    const struct record_event *event = &recorder->events[create];
    if (!record_began(event, build->tick)) return false;
    if (event->ended < build->tick && event->result < 0) return false;
    return is_flushed(build, create, KV_DISK_SYNC_DIR, recorder->files[file].dir) ||
           ex_random_percent(build->random, 50);
}

static bool has_name(const struct build *build, uint32_t file)
{
    const struct recorder *recorder = build->recorder;
    if (!is_made(build, file)) return false;
    for (uint32_t i = 0; i < recorder->event_count; i++) {
        if (!is_call(&recorder->events[i], KV_DISK_UNLINK, file)) continue;
        if (!record_began(&recorder->events[i], build->tick)) break;
        if (is_flushed(build, i, KV_DISK_SYNC_DIR, recorder->files[file].dir)) return false;
        return ex_random_percent(build->random, 50);
    }
    return true;
}

/* The old one, or the new one: both are never there, nor neither. */
static const char *name_of(const struct build *build, uint32_t file)
{
    const struct recorder *recorder = build->recorder;
    const char *name = recorder->files[file].name;
    for (uint32_t i = 0; i < recorder->event_count; i++) {
        const struct record_event *event = &recorder->events[i];
        if (!is_call(event, KV_DISK_RENAME, file)) continue;
        if (!record_began(event, build->tick)) break;
        if (event->ended < build->tick && event->result < 0) continue;
        if (is_flushed(build, i, KV_DISK_SYNC_DIR, recorder->files[file].dir) ||
            ex_random_percent(build->random, 50))
            name = event->to;
    }
    return name;
}

/* ---- bytes ---- */

static void grow(struct build *build, uint64_t size)
{
    if (size <= build->size) return;
    build->bytes = realloc(build->bytes, size);
    assert(build->bytes != NULL);
    memset(build->bytes + build->size, 0, size - build->size);
    build->size = size;
}

static void put(struct build *build, const struct record_event *event, uint64_t from, uint64_t end)
{
    if (from >= end) return;
    grow(build, event->offset + end);
    memcpy(build->bytes + event->offset + from, event->data + from, end - from);
}

/* A prefix of it, or any of its sectors. */
static void put_torn(struct build *build, const struct record_event *event, uint64_t bytes)
{
    const uint64_t unit = ex_random_percent(build->random, 50) ? 512 : 4096;
    const uint32_t units = (uint32_t)((bytes + unit - 1) / unit);
    const bool prefix = ex_random_percent(build->random, 50);
    const uint32_t kept = ex_random_below(build->random, units + 1);
    for (uint32_t i = 0; i < units; i++) {
        if (prefix ? i < kept : ex_random_percent(build->random, 50))
            put(build, event, i * unit, KV_MIN(bytes, (i + 1) * unit));
    }
}

/* Bytes of the write that may have reached the file. */
static uint64_t reach(const struct record_event *event, uint64_t tick)
{
    const bool known = event->ended < tick && event->result >= 0;
    return known ? KV_MIN((uint64_t)event->result, event->bytes) : event->bytes;
}

static void put_lied(struct build *build, const struct record_event *event)
{
    if (build->lie == IMAGE_TORN) put(build, event, 0, event->bytes / 2 / 512 * 512);
    if (build->lie != IMAGE_FLIP) return;
    const uint32_t bit = ex_random_below(build->random, (uint32_t)event->bytes * 8);
    put(build, event, 0, event->bytes);
    build->bytes[event->offset + bit / 8] ^= (uint8_t)(1u << bit % 8);
}

static void put_write(struct build *build, uint32_t i)
{
    const struct record_event *event = &build->recorder->events[i];
    const uint64_t bytes = reach(event, build->tick);
    if (i == build->lied && build->lie != IMAGE_SWAP) {
        put_lied(build, event);
    } else if (is_flushed(build, i, KV_DISK_SYNC, event->file)) {
        put(build, event, 0, bytes);
    } else {
        const uint32_t luck = ex_random_below(build->random, 3);
        if (luck == 0) put(build, event, 0, bytes);
        if (luck == 1) put_torn(build, event, bytes);
    }
}

static void fill(struct build *build, uint32_t file)
{
    const struct record_file *found = &build->recorder->files[file];
    build->bytes = NULL;
    build->size = 0;
    if (found->found) grow(build, found->size);
    if (found->size > 0) memcpy(build->bytes, found->bytes, found->size);
    for (uint32_t i = 0; i < build->recorder->event_count; i++) {
        const struct record_event *event = &build->recorder->events[i];
        if (!record_began(event, build->tick)) break;
        if (is_call(event, KV_DISK_WRITE, file)) put_write(build, i);
        if (!is_call(event, KV_DISK_RESERVE, file)) continue;
        if (event->ended < build->tick && event->result < 0) continue;
        if (is_flushed(build, i, KV_DISK_SYNC, file) || ex_random_percent(build->random, 50))
            grow(build, event->bytes);
    }
}

/* ---- lies ---- */

/* A flushed page that nothing written later covers, or UINT32_MAX.  `like`: with the page it
 * replaced it shares all that a header is compared by, but for the generation. */
static uint32_t pick(const struct build *build, bool like)
{
    const struct recorder *recorder = build->recorder;
    uint32_t chosen = UINT32_MAX, seen = 0;
    for (uint32_t i = 0; i < recorder->event_count; i++) {
        const struct record_event *event = &recorder->events[i];
        if (event->kind != RECORD_CALL || event->verb != KV_DISK_WRITE ||
            strncmp(recorder->files[event->file].name, "segment-", 8) != 0 ||
            event->offset < KV_SEGMENT_HEADER_BYTES ||
            !is_flushed(build, i, KV_DISK_SYNC, event->file))
            continue;
        const struct record_event *before = NULL;
        bool last = true;
        for (uint32_t j = 0; j < recorder->event_count; j++) {
            const struct record_event *other = &recorder->events[j];
            if (j == i || !is_call(other, KV_DISK_WRITE, event->file) ||
                other->offset != event->offset || !record_began(other, build->tick))
                continue;
            if (j < i) before = other;
            last &= j < i;
        }
        if (!last) continue;
        if (like &&
            (before == NULL || before->bytes != event->bytes ||
             memcmp(before->data + PAGE_HEADER_SAME_FROM, event->data + PAGE_HEADER_SAME_FROM,
                    PAGE_HEADER_SAME_BYTES) != 0 ||
             memcmp(before->data + PAGE_USER_AT, event->data + PAGE_USER_AT, PAGE_USER_BYTES) != 0))
            continue;
        if (ex_random_below(build->random, ++seen) == 0) chosen = i;
    }
    return chosen;
}

/* Two pages of finished files change places. */
static void swap(struct kv_disk *disk, const struct build *build, uint32_t a, uint32_t b)
{
    const struct record_event *events[2] = {&build->recorder->events[a],
                                            &build->recorder->events[b]};
    uint8_t *at[2] = {NULL, NULL};
    struct mem_disk_file file;
    for (uint32_t i = 0; mem_disk_file(disk, i, &file); i++) {
        for (uint32_t j = 0; j < 2; j++) {
            if (strcmp(build->recorder->files[events[j]->file].name, file.name) == 0 &&
                events[j]->offset + events[j]->bytes <= file.size)
                at[j] = file.bytes + events[j]->offset;
        }
    }
    if (at[0] == NULL || at[1] == NULL || events[0]->bytes != events[1]->bytes) return;
    for (uint64_t i = 0; i < events[0]->bytes; i++) {
        const uint8_t kept = at[0][i];
        at[0][i] = at[1][i];
        at[1][i] = kept;
    }
}

/* ---- all of it ---- */

static uint32_t batches_kept(const struct build *build)
{
    uint32_t answered = 0, begun = 0;
    for (uint32_t i = 0; i < build->recorder->event_count; i++) {
        const struct record_event *event = &build->recorder->events[i];
        if (event->kind != RECORD_BATCH || !record_began(event, build->tick)) continue;
        begun++;
        if (record_succeeded(event, build->tick)) answered = begun;
    }
    return ex_random_between(build->random, answered, begun);
}

static uint32_t dir_of(const struct recorder *recorder, const char *path, size_t bytes)
{
    uint32_t i = 0;
    while (i < recorder->dir_count &&
           (strlen(recorder->dirs[i]) != bytes || memcmp(recorder->dirs[i], path, bytes) != 0))
        i++;
    return i;
}

/* A folder's name is durable with a flush of the folder it is in. */
static bool has_dir(const struct build *build, uint32_t dir)
{
    const struct recorder *recorder = build->recorder;
    const char *path = recorder->dirs[dir];
    const char *slash = strrchr(path, '/');
    if (recorder->dirs_found[dir]) return true;
    for (uint32_t i = 0; i < recorder->event_count; i++) {
        if (!is_call(&recorder->events[i], KV_DISK_MAKE_DIR, dir)) continue;
        if (!record_began(&recorder->events[i], build->tick)) return false;
        const uint32_t parent = dir_of(recorder, path, (size_t)(slash - path));
        return is_flushed(build, i, KV_DISK_SYNC_DIR, parent) ||
               ex_random_percent(build->random, 50);
    }
    return true; /* Not made in this run. */
}

/* Which files there are: a name is one file, the newer one's. */
static void choose_files(const struct build *build, const char *names[FILES_MAX])
{
    const struct recorder *recorder = build->recorder;
    bool dirs[KV_ARRAY_COUNT(recorder->dirs)];
    for (uint32_t i = 0; i < recorder->dir_count; i++)
        dirs[i] = has_dir(build, i);
    for (uint32_t i = 0; i < recorder->file_count; i++) {
        const bool there = has_name(build, i) && dirs[recorder->files[i].dir];
        names[i] = there ? name_of(build, i) : NULL;
        for (uint32_t j = 0; there && j < i; j++) {
            if (names[j] != NULL && recorder->files[j].dir == recorder->files[i].dir &&
                strcmp(names[j], names[i]) == 0)
                names[j] = NULL;
        }
    }
}

void image_build(const struct recorder *recorder, uint64_t tick, enum image_lie lie,
                 const char *dir, struct ex_random *random, struct image *ret_image)
{
    struct build build = {
        .recorder = recorder, .tick = tick, .random = random, .lied = UINT32_MAX, .lie = lie};
    uint32_t other = UINT32_MAX;
    if (lie != IMAGE_HONEST) build.lied = pick(&build, lie == IMAGE_LOST);
    if (lie == IMAGE_LOST && build.lied == UINT32_MAX) build.lied = pick(&build, false);
    if (lie == IMAGE_SWAP) other = pick(&build, false);
    if (build.lied == UINT32_MAX || (lie == IMAGE_SWAP && other == build.lied)) {
        build.lie = IMAGE_HONEST;
        build.lied = UINT32_MAX;
    }

    *ret_image = (struct image){.disk = mem_disk_create(dir, ex_random_next(random)),
                                .batches = batches_kept(&build),
                                .lie = build.lie,
                                .tick = tick};
    const char *names[FILES_MAX];
    choose_files(&build, names);
    for (uint32_t i = 0; i < recorder->file_count; i++) {
        if (names[i] == NULL) continue;
        fill(&build, i);
        mem_disk_add(ret_image->disk, recorder->dirs[recorder->files[i].dir], names[i], build.bytes,
                     build.size);
    }
    if (build.lie == IMAGE_SWAP) swap(ret_image->disk, &build, build.lied, other);
}

/* In one write, which leaves what they would have left one by one, and costs one sync. */
kv_status image_manifest(const struct recorder *recorder, const struct image *image,
                         struct kv_manifest *manifest)
{
    struct kv_manifest_put *puts = NULL;
    uint32_t count = 0, left = image->batches;
    for (uint32_t i = 0; left > 0; i++) {
        const struct record_event *event = &recorder->events[i];
        if (event->kind != RECORD_BATCH) continue;
        left--;
        puts = realloc(puts, (count + event->put_count + 1u) * sizeof(*puts));
        assert(puts != NULL);
        if (event->put_count > 0)
            memcpy(puts + count, event->puts, event->put_count * sizeof(*puts));
        count += event->put_count;
    }
    const kv_status status =
        count == 0 ? KV_OK : kv_manifest_write_now(manifest, puts, count, NULL);
    free(puts);
    return status;
}
