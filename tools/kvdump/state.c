/*
 * Opening a state directory for reading: its lock, its superblock, its manifest, its segment files,
 * then users and sessions.
 *
 * The lock is shared and held as long as the program runs, so that no daemon starts under it.  What
 * is wrong with one segment or one session is noted and the rest is read; without a superblock or a
 * manifest there is nothing to read.
 */

#include "tools/kvdump/kvdump.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/format/segment_header.h"
#include "kvstore/store/directory.h"
#include "kvstore/tier/ssd_segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 4096u
#define TELL_EVERY_NS 2000000000ull

void dump_error(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    (void)fprintf(stderr, "kvdump: ");
    (void)vfprintf(stderr, fmt, args);
    (void)fprintf(stderr, "\n");
    va_end(args);
}

void dump_damage(struct dump *dump, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    (void)vfprintf(dump->damage_out, fmt, args);
    (void)fprintf(dump->damage_out, "\n");
    va_end(args);
    dump->counts.damages++;
}

void dump_tell(struct dump *dump)
{
    const uint64_t now = kv_clock_stopwatch_ns();
    if (now - dump->told_ns < TELL_EVERY_NS) return;
    dump->told_ns = now;
    const double seconds = (double)(now - dump->begun_ns) / 1e9;
    const double bytes = (double)dump->pages_read * dump->superblock.page_bytes;
    (void)fprintf(
        stderr, "kvdump: %" PRIu64 " checkpoints, %" PRIu64 " pages, %.0f MiB read, %.0f MiB/s\n",
        dump->counts.checkpoints, dump->pages_read, bytes / (1 << 20), bytes / (1 << 20) / seconds);
}

void dump_hex(const uint8_t *bytes, uint32_t count, char *text)
{
    for (uint32_t i = 0; i < count; i++)
        (void)snprintf(text + (size_t)2 * i, 3, "%02x", bytes[i]);
}

void dump_label(const struct dump_session *session, char label[DUMP_LABEL_BYTES])
{
    (void)snprintf(label, DUMP_LABEL_BYTES, "%s/%s",
                   session->user == NULL ? "?" : session->user->record.name, session->name);
    for (char *p = label; *p != '\0'; p++)
        if (*p <= ' ' || *p > '~') *p = '?';
}

uint64_t dump_offset(const struct dump *dump, uint32_t ssd_page)
{
    return KV_SEGMENT_HEADER_BYTES +
           (uint64_t)(ssd_page % dump->pages_per_segment) * dump->superblock.page_bytes;
}

/* ---- the directory ---- */

static int take_lock(struct dump *dump)
{
    char path[PATH_BYTES];
    struct stat info;
    if (stat(dump->dir, &info) != 0) {
        dump_error("%s: %s", dump->dir, strerror(errno));
        return errno == ENOENT ? DUMP_NOT_FOUND : DUMP_FAILED;
    }
    (void)snprintf(path, sizeof(path), "%s/lock", dump->dir);
    dump->lock_fd = open(path, O_RDONLY | O_CLOEXEC);
    if (dump->lock_fd < 0 && errno == ENOENT) return DUMP_OK; /* A copy: nobody runs on it. */
    if (dump->lock_fd < 0) {
        dump_error("open %s: %s", path, strerror(errno));
        return DUMP_FAILED;
    }
    if (flock(dump->lock_fd, LOCK_SH | LOCK_NB) == 0) return DUMP_OK;
    char pid[24] = {0};
    (void)!pread(dump->lock_fd, pid, sizeof(pid) - 1, 0);
    dump_error("a daemon (pid %ld) uses the state directory %s: stop it first",
               strtol(pid, NULL, 10), dump->dir);
    return DUMP_IN_USE;
}

static int open_superblock(struct dump *dump)
{
    struct kv_error err = {0};
    struct kv_disk disk = kv_disk_calls();
    const kv_status status =
        kv_directory_read(&disk, dump->dir, &dump->superblock, &dump->superblock_damaged, &err);
    if (status == KV_MISS) {
        dump_error("%s is no state directory: it has no superblock", dump->dir);
        return DUMP_NOT_FOUND;
    }
    if (status == KV_CORRUPT) {
        dump_damage(dump, "superblock: %s", err.text);
        return DUMP_DAMAGED;
    }
    if (status != KV_OK) {
        dump_error("%s", err.text);
        return DUMP_FAILED;
    }
    const uint64_t pages =
        (dump->superblock.segment_bytes - KV_SEGMENT_HEADER_BYTES) / dump->superblock.page_bytes;
    if (dump->superblock.segment_bytes <= KV_SEGMENT_HEADER_BYTES || pages == 0 ||
        pages > UINT32_MAX) {
        dump_damage(dump, "superblock: segment_bytes %" PRIu64 " holds %" PRIu64 " pages",
                    dump->superblock.segment_bytes, pages);
        return DUMP_DAMAGED;
    }
    dump->pages_per_segment = (uint32_t)pages;
    return DUMP_OK;
}

/* ---- segments ---- */

static void check_header(struct dump *dump, struct dump_segment *segment, uint32_t number)
{
    struct kv_segment_header header;
    uint32_t version = 0;
    char *cause = segment->cause;
    const kv_status status = kv_segment_header_decode(dump->page, &header, &version);
    segment->is_unfinished = status == KV_MISS;
    if (status == KV_MISS)
        (void)snprintf(cause, DUMP_CAUSE_BYTES, "no header: making it was interrupted");
    else if (status == KV_INVALID)
        (void)snprintf(cause, DUMP_CAUSE_BYTES, "layout version %" PRIu32 ", expected %u", version,
                       KV_LAYOUT_VERSION);
    else if (status != KV_OK)
        (void)snprintf(cause, DUMP_CAUSE_BYTES, "header damaged");
    else if (!kv_id_equal(header.directory.bytes, dump->superblock.id.bytes))
        (void)snprintf(cause, DUMP_CAUSE_BYTES, "belongs to another state directory");
    else if (header.number != number)
        (void)snprintf(cause, DUMP_CAUSE_BYTES, "is segment %" PRIu32 " under another name",
                       header.number);
    else if (header.page_bytes != dump->superblock.page_bytes)
        (void)snprintf(cause, DUMP_CAUSE_BYTES, "page_bytes %" PRIu32 ", expected %" PRIu32,
                       header.page_bytes, dump->superblock.page_bytes);
    else if (header.segment_bytes != dump->superblock.segment_bytes)
        (void)snprintf(cause, DUMP_CAUSE_BYTES, "segment_bytes %" PRIu64 ", expected %" PRIu64,
                       header.segment_bytes, dump->superblock.segment_bytes);
    else if (segment->file_bytes < dump->superblock.segment_bytes)
        (void)snprintf(cause, DUMP_CAUSE_BYTES, "cut to %" PRIu64 " of %" PRIu64 " B",
                       segment->file_bytes, dump->superblock.segment_bytes);
}

int dump_segment_open(struct dump *dump, uint32_t number)
{
    char path[PATH_BYTES];
    if (dump->segment_fd >= 0 && dump->segment_open == number) return dump->segment_fd;
    if (dump->segment_fd >= 0) (void)close(dump->segment_fd);
    (void)snprintf(path, sizeof(path), "%s/ssd/segment-%06" PRIu32 ".kv", dump->dir, number);
    /* Past the page cache where the file system allows it: it would hide what the disk holds. */
    dump->segment_fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (dump->segment_fd < 0) dump->segment_fd = open(path, O_RDONLY | O_CLOEXEC);
    dump->segment_open = number;
    return dump->segment_fd;
}

static void open_segment(struct dump *dump, uint32_t number)
{
    struct dump_segment *segment = &dump->segments[number];
    struct stat info;
    segment->is_there = true;
    const int fd = dump_segment_open(dump, number);
    if (fd < 0 || fstat(fd, &info) != 0) {
        (void)snprintf(segment->cause, sizeof(segment->cause), "open: %s", strerror(errno));
        return;
    }
    segment->file_bytes = (uint64_t)info.st_size;
    const ssize_t got = pread(fd, dump->page, KV_SEGMENT_HEADER_BYTES, 0);
    if (got < 0) {
        (void)snprintf(segment->cause, sizeof(segment->cause), "read: %s", strerror(errno));
    } else if (got == 0) {
        (void)snprintf(segment->cause, sizeof(segment->cause), "empty");
        segment->is_unfinished = true;
    } else {
        memset(dump->page + got, 0xff, KV_SEGMENT_HEADER_BYTES - (size_t)got);
        check_header(dump, segment, number);
    }
}

/* Opens each, or only finds how many numbers there are. */
static kv_status walk_segments(struct dump *dump, bool open_each, struct kv_error *err)
{
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof(path), "%s/ssd", dump->dir);
    DIR *entries = opendir(path);
    if (entries == NULL && errno == ENOENT) return KV_OK;
    if (entries == NULL) return KV_FAIL_ERRNO(err, KV_IO, "open directory '%s'", path);
    for (const struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        uint32_t number;
        if (!kv_ssd_segment_parse(entry->d_name, &number)) continue;
        if (open_each && number < dump->segment_count) open_segment(dump, number);
        if (!open_each) dump->segment_count = KV_MAX(dump->segment_count, number + 1);
    }
    (void)closedir(entries);
    return KV_OK;
}

static kv_status open_segments(struct dump *dump, struct kv_error *err)
{
    kv_status status = walk_segments(dump, false, err);
    if (status != KV_OK) return status;
    const uint64_t pages = (uint64_t)dump->segment_count * dump->pages_per_segment;
    dump->page = aligned_alloc(KV_IO_ALIGN, dump->superblock.page_bytes);
    dump->segments = calloc(KV_MAX(dump->segment_count, 1u), sizeof(*dump->segments));
    dump->claims = calloc(KV_MAX(pages, 1u), sizeof(*dump->claims));
    if (dump->page == NULL || dump->segments == NULL || dump->claims == NULL)
        return KV_FAIL(err, KV_NOMEM, "read %" PRIu32 " segments", dump->segment_count);
    return walk_segments(dump, true, err);
}

/* ---- users and sessions ---- */

static int compare_users(const void *a, const void *b)
{
    return memcmp(((const struct dump_user *)a)->id.bytes, ((const struct dump_user *)b)->id.bytes,
                  16);
}

static int compare_sessions(const void *a, const void *b)
{
    return memcmp(((const struct dump_session *)a)->id.bytes,
                  ((const struct dump_session *)b)->id.bytes, 16);
}

static kv_status visit_user(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct dump_user user;
    if (kv_record_user_decode(put->value, put->value_bytes, &user.record) != KV_OK) {
        dump_damage(dump, "manifest: a user's record is damaged");
        return KV_OK;
    }
    user.id = kv_user_id_of(user.record.name);
    if (put->key_bytes != 17 || !kv_id_equal(user.id.bytes, put->key + 1)) {
        dump_damage(dump, "manifest: a user's record stands under the key of another");
        return KV_OK;
    }
    dump_keys_user(dump, &user);
    if (dump->user_count == dump->user_capacity) {
        const uint32_t capacity = dump->user_capacity == 0 ? 64 : 2 * dump->user_capacity;
        struct dump_user *users = realloc(dump->users, capacity * sizeof(*users));
        if (users == NULL) return KV_NOMEM;
        dump->users = users;
        dump->user_capacity = capacity;
    }
    dump->users[dump->user_count++] = user; /* Keys are sorted, so these are. */
    return KV_OK;
}

static kv_status add_session(struct dump *dump, const struct kv_session_id *id,
                             const struct kv_record_session *record)
{
    if (dump->session_count == dump->session_capacity) {
        const uint32_t capacity = dump->session_capacity == 0 ? 64 : 2 * dump->session_capacity;
        struct dump_session *sessions = realloc(dump->sessions, capacity * sizeof(*sessions));
        if (sessions == NULL) return KV_NOMEM;
        dump->sessions = sessions;
        dump->session_capacity = capacity;
    }
    const struct dump_user key = {.id = record->user};
    struct dump_session *session = &dump->sessions[dump->session_count];
    *session = (struct dump_session){
        .id = *id,
        .user = dump->user_count == 0
                    ? NULL
                    : bsearch(&key, dump->users, dump->user_count, sizeof(key), compare_users),
        .name = strdup(record->name),
        .parent_name = strdup(record->parent_name),
        .created_ms = record->created_ms,
        .used_ms = record->used_ms,
        .ttl_ms = record->ttl_ms,
        .head = record->head,
        .head_tokens = record->head_tokens,
        .checkpoints = record->checkpoints,
        .has_head = record->has_head,
        .kind = record->kind,
        .has_tree = record->has_tree,
        .tree = record->has_tree ? record->tree : *id,
        .has_origin = record->has_origin,
        .origin = record->origin,
        .origin_tokens = record->origin_tokens,
    };
    dump->session_count++;
    dump->forked_count += record->has_tree;
    return session->name == NULL || session->parent_name == NULL ? KV_NOMEM : KV_OK;
}

static kv_status visit_session(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct kv_record_session record;
    char hex[33] = "?";
    if (put->key_bytes == 17) dump_hex(put->key + 1, 16, hex);
    if (put->key_bytes != 17 ||
        kv_record_session_decode(put->value, put->value_bytes, &record) != KV_OK) {
        dump_damage(dump, "manifest: the record of session %s is damaged", hex);
        dump->counts.unread++;
        return KV_OK;
    }
    const struct kv_session_id id = kv_session_id_of(&record.user, record.name);
    if (!kv_id_equal(id.bytes, put->key + 1)) {
        dump_damage(dump, "manifest: the record of session %s is another session's", hex);
        return KV_OK;
    }
    const kv_status status = add_session(dump, &id, &record);
    if (status == KV_OK && record.has_tree && kv_id_equal(record.tree.bytes, id.bytes))
        dump_damage(dump, "manifest: session %s names its own tree as another's", hex);
    if (status == KV_OK && record.has_tree && (dump->superblock.features & KV_FEATURE_FORKS) == 0)
        dump_damage(dump, "superblock: session %s is forked, its features lack bit 4", hex);
    if (status == KV_OK && dump->sessions[dump->session_count - 1].user == NULL)
        dump_damage(dump, "manifest: the user of session %s has no record", hex);
    return status;
}

static kv_status visit_store(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    if (put->key_bytes != 1) return KV_OK;
    dump->has_store = kv_record_store_decode(put->value, put->value_bytes, &dump->store) == KV_OK;
    if (!dump->has_store)
        dump_damage(dump, "manifest: the store's record is damaged");
    else if (!kv_id_equal(dump->store.directory.bytes, dump->superblock.id.bytes))
        dump_damage(dump, "manifest: belongs to another state directory");
    return KV_OK;
}

static kv_status visit_commit(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct kv_record_commit record;
    if (put->key_bytes != 1) return KV_OK;
    if (kv_record_commit_decode(put->value, put->value_bytes, &record) == KV_OK)
        dump->commit = record.number;
    else
        dump_damage(dump, "manifest: the number of its last batch is damaged");
    return KV_OK;
}

static kv_status visit_clock(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct kv_record_clock record;
    if (put->key_bytes != 1) return KV_OK;
    if (kv_record_clock_decode(put->value, put->value_bytes, &record) == KV_OK)
        dump->clock_floor_ms = record.floor_ms;
    else
        dump_damage(dump, "manifest: the clock's record is damaged");
    return KV_OK;
}

static kv_status visit_deleted(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct kv_record_deleted record;
    dump->deleted_count++;
    if (put->key_bytes != KV_KEY_DELETED_BYTES ||
        kv_record_deleted_decode(put->value, put->value_bytes, &record) != KV_OK)
        dump_damage(dump, "manifest: the record of a deleted session is damaged");
    else if ((dump->superblock.features & KV_FEATURE_HISTORY) == 0)
        dump_damage(dump, "superblock: a deleted session is recorded, its features lack bit 5");
    return KV_OK;
}

static void check_quotas(struct dump *dump, bool is_good, const char *what)
{
    if (!is_good)
        dump_damage(dump, "manifest: the record of a %s is damaged, or another's", what);
    else if ((dump->superblock.features & KV_FEATURE_QUOTAS) == 0)
        dump_damage(dump, "superblock: a %s is recorded, its features lack bit 6", what);
}

static kv_status visit_plan(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct kv_record_plan record;
    uint8_t key[KV_KEY_QUOTA_MAX];
    dump->plan_count++;
    const bool is_good = kv_record_plan_decode(put->value, put->value_bytes, &record) == KV_OK &&
                         put->key_bytes == kv_key_plan(record.name, key) &&
                         memcmp(put->key, key, put->key_bytes) == 0;
    check_quotas(dump, is_good, "plan");
    return KV_OK;
}

static kv_status visit_quota(void *context, const struct kv_manifest_put *put)
{
    struct dump *dump = context;
    struct kv_record_quota record;
    uint8_t key[KV_KEY_QUOTA_MAX];
    bool is_good = kv_record_quota_decode(put->value, put->value_bytes, &record) == KV_OK;
    dump->quota_count++;
    if (is_good) {
        const struct kv_user_id id = kv_user_id_of(record.user);
        is_good =
            put->key_bytes == kv_key_quota(&id, key) && memcmp(put->key, key, put->key_bytes) == 0;
    }
    check_quotas(dump, is_good, "user's quota");
    return KV_OK;
}

/* Notes, not damage of the directory as a whole: it is read without them. */
static kv_status read_acknowledged(struct dump *dump, struct kv_error *err)
{
    uint8_t bytes[KV_ACKNOWLEDGED_BYTES] = {0};
    char path[PATH_BYTES];
    uint32_t slot;
    (void)snprintf(path, sizeof(path), "%s/" KV_ACKNOWLEDGED_NAME, dump->dir);
    dump->noted_status = KV_MISS;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return KV_OK; /* An older build made the directory. */
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "open '%s'", path);
    const ssize_t got = pread(fd, bytes, sizeof(bytes), 0);
    const kv_status status = got < 0 ? KV_FAIL_ERRNO(err, KV_IO, "read '%s'", path) : KV_OK;
    (void)close(fd);
    if (status == KV_OK)
        dump->noted_status =
            kv_acknowledged_decode(bytes, &dump->noted, &slot, &dump->noted_damaged);
    return status;
}

static kv_status open_records(struct dump *dump, struct kv_error *err)
{
    static const struct {
        const char *prefix;
        kv_manifest_visit_fn *visit;
    } passes[] = {{"M", visit_store}, {"C", visit_commit},  {"W", visit_clock},
                  {"U", visit_user},  {"S", visit_session}, {"D", visit_deleted},
                  {"Y", visit_plan},  {"B", visit_quota},   {"G", dump_visit_segment}};
    char path[PATH_BYTES];
    (void)snprintf(path, sizeof(path), "%s/manifest", dump->dir);
    struct kv_error damage = {0};
    kv_status status = kv_manifest_open_read(path, &dump->manifest, &damage, err);
    if (status == KV_OK && damage.status != KV_OK)
        dump_damage(dump, "manifest: %s: a daemon reads what is in front of it, and so does this",
                    damage.text);
    if (status == KV_OK) status = dump_keys_read(dump, err);
    for (size_t i = 0; status == KV_OK && i < KV_ARRAY_COUNT(passes); i++)
        status = kv_manifest_scan_now(dump->manifest, (const uint8_t *)passes[i].prefix, 1,
                                      passes[i].visit, dump, err);
    if (status == KV_OK) dump_keys_check(dump);
    if (status == KV_OK) status = dump_quarantine_read(dump, err);
    if (status == KV_OK) status = dump_old_branches_read(dump, err);
    if (status == KV_NOMEM) (void)KV_FAIL(err, KV_NOMEM, "read users and sessions: no memory");
    return status;
}

struct dump_session *dump_session_find(const struct dump *dump, const struct kv_session_id *id)
{
    const struct dump_session key = {.id = *id};
    if (dump->session_count == 0) return NULL;
    return bsearch(&key, dump->sessions, dump->session_count, sizeof(key), compare_sessions);
}

struct dump_session *dump_head_next(const struct dump *dump, const struct kv_session_id *tree,
                                    const struct dump_session *after)
{
    struct dump_session *own = after == NULL ? dump_session_find(dump, tree) : NULL;
    if (own != NULL && !own->has_tree) return own;
    const uint32_t from =
        after == NULL || !after->has_tree ? 0 : (uint32_t)(after - dump->sessions) + 1;
    for (uint32_t i = dump->forked_count == 0 ? dump->session_count : from; i < dump->session_count;
         i++) {
        struct dump_session *session = &dump->sessions[i];
        if (session->has_tree && kv_id_equal(session->tree.bytes, tree->bytes)) return session;
    }
    return NULL;
}

int dump_open(struct dump *dump, const char *dir, const char *master_key_file, FILE *damage_out)
{
    struct kv_error err = {0};
    const uint64_t now = kv_clock_stopwatch_ns();
    *dump = (struct dump){.dir = dir,
                          .master_key_file = master_key_file,
                          .damage_out = damage_out,
                          .lock_fd = -1,
                          .segment_fd = -1,
                          .begun_ns = now,
                          .told_ns = now};
    int code = take_lock(dump);
    if (code == DUMP_OK) code = open_superblock(dump);
    if (code != DUMP_OK) return code;
    kv_status status = open_segments(dump, &err);
    if (status == KV_OK) status = read_acknowledged(dump, &err);
    if (status == KV_OK) status = open_records(dump, &err);
    if (status == KV_CORRUPT) {
        dump_damage(dump, "manifest: %s", err.text);
        return DUMP_DAMAGED;
    }
    if (status != KV_OK) {
        dump_error("%s", err.text);
        return DUMP_FAILED;
    }
    return DUMP_OK;
}

void dump_close(struct dump *dump)
{
    kv_manifest_close(dump->manifest);
    dump_keys_close(dump);
    if (dump->segment_fd >= 0) (void)close(dump->segment_fd);
    for (uint32_t i = 0; i < dump->session_count; i++) {
        free(dump->sessions[i].name);
        free(dump->sessions[i].parent_name);
    }
    for (uint32_t i = 0; i < dump->segment_count && dump->segments != NULL; i++)
        free(dump->segments[i].bits);
    free(dump->segments);
    free(dump->claims);
    free(dump->quarantined);
    free(dump->old_branches);
    free(dump->users);
    free(dump->sessions);
    free(dump->page);
    if (dump->lock_fd >= 0) (void)close(dump->lock_fd);
}
