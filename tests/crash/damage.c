/*
 * Damage by one bit.
 *
 * Pages are found as a stranger would find them, by magic at the places the layout of a segment
 * gives; their tokens say whose they are, since no two sessions of this test share any.  Old pages,
 * which nothing points to any more, look the same: a flip there is harmless.  Tokens of encrypted
 * pages are read with the master key and the records of keys, by the encoders and nothing else.
 */

#include "tests/crash/damage.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"
#include "kvstore/index/manifest.h"
#include "kvstore/format/segment_header.h"
#include "tests/harness.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- files ---- */

static void copy_file(const char *from, const char *to)
{
    struct stat stat_of;
    const int in = open(from, O_RDONLY | O_CLOEXEC);
    const int out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    EXPECT(in >= 0 && out >= 0 && fstat(in, &stat_of) == 0);
    for (off_t left = stat_of.st_size; left > 0;) {
        const ssize_t count = sendfile(out, in, NULL, (size_t)left);
        EXPECT(count > 0);
        left -= count;
    }
    (void)close(in);
    (void)close(out);
}

void cr_copy_tree(const char *from, const char *to)
{
    DIR *dir = opendir(from);
    const struct dirent *entry;
    EXPECT(dir != NULL && mkdir(to, 0700) == 0);
    while ((entry = readdir(dir)) != NULL) {
        char a[CR_PATH_BYTES], b[CR_PATH_BYTES];
        struct stat stat_of;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        EXPECT(snprintf(a, sizeof(a), "%s/%s", from, entry->d_name) < CR_PATH_BYTES);
        EXPECT(snprintf(b, sizeof(b), "%s/%s", to, entry->d_name) < CR_PATH_BYTES);
        EXPECT(stat(a, &stat_of) == 0);
        if (S_ISDIR(stat_of.st_mode))
            cr_copy_tree(a, b);
        else if (S_ISREG(stat_of.st_mode))
            copy_file(a, b);
    }
    (void)closedir(dir);
}

static bool is_segment(const char *name)
{
    return strncmp(name, "segment-", 8) == 0;
}

/* LOG and OPTIONS are for people; LOCK is empty. */
static bool is_index(const char *name)
{
    const size_t length = strlen(name);
    if (strcmp(name, "CURRENT") == 0 || strncmp(name, "MANIFEST-", 9) == 0) return true;
    return length > 4 &&
           (strcmp(name + length - 4, ".sst") == 0 || strcmp(name + length - 4, ".log") == 0);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* Sorted: the order of a folder is not the same on every machine. */
static uint32_t list(const char *state, const char *folder, bool (*wanted)(const char *name),
                     char (*ret_paths)[CR_PATH_BYTES])
{
    char path[CR_PATH_BYTES];
    uint32_t count = 0;
    const struct dirent *entry;
    EXPECT(snprintf(path, sizeof(path), "%s/%s", state, folder) < CR_PATH_BYTES);
    DIR *dir = opendir(path);
    EXPECT(dir != NULL);
    while ((entry = readdir(dir)) != NULL && count < CR_FILES_MAX) {
        struct stat stat_of;
        if (!wanted(entry->d_name)) continue;
        EXPECT(snprintf(ret_paths[count], CR_PATH_BYTES, "%s/%s", path, entry->d_name) <
               CR_PATH_BYTES);
        if (stat(ret_paths[count], &stat_of) == 0 && stat_of.st_size > 0) count++;
    }
    (void)closedir(dir);
    qsort(ret_paths, count, CR_PATH_BYTES, by_name);
    return count;
}

/* ---- keys ---- */

enum { KEYS_MAX = 64 };

struct opener {
    struct kv_aead *aead;
    const uint8_t *master;
    struct kv_directory_id directory;
    struct {
        struct kv_user_id user;
        uint32_t key_id;
        uint8_t data[KV_KEY_BYTES];
    } keys[KEYS_MAX];
    uint32_t count;
};

static kv_status take_key(void *context, const struct kv_manifest_put *put)
{
    struct opener *opener = context;
    struct kv_record_key record;
    struct kv_key_owner owner = {.directory = opener->directory};
    EXPECT(opener->count < KEYS_MAX);
    EXPECT(kv_key_key_parse(put->key, put->key_bytes, &owner.user, &owner.key_id));
    EXPECT(kv_record_key_decode(put->value, put->value_bytes, &record) == KV_OK);
    opener->keys[opener->count].user = owner.user;
    opener->keys[opener->count].key_id = owner.key_id;
    EXPECT(kv_key_unwrap(opener->aead, opener->master, &owner, &record,
                         opener->keys[opener->count++].data));
    return KV_OK;
}

static void opener_init(struct opener *opener, const char *state, const uint8_t *master)
{
    char path[CR_PATH_BYTES];
    struct kv_manifest *manifest;
    *opener = (struct opener){.master = master};
    if (master == NULL) return;
    (void)snprintf(path, sizeof(path), "%s/superblock", state);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    EXPECT(fd >= 0 && pread(fd, opener->directory.bytes, 16, 16) == 16);
    (void)close(fd);
    EXPECT(kv_aead_create(&opener->aead, NULL) == KV_OK);
    (void)snprintf(path, sizeof(path), "%s/manifest", state);
    EXPECT(kv_manifest_open_read(path, &manifest, NULL, NULL) == KV_OK);
    EXPECT(kv_manifest_scan_now(manifest, (const uint8_t *)"K", 1, take_key, opener, NULL) ==
           KV_OK);
    kv_manifest_close(manifest);
    EXPECT(opener->count > 0);
}

/* False: a page that says nothing here. */
static bool make_plain(struct opener *opener, uint32_t page_bytes, uint8_t *page)
{
    const struct kv_layout layout = {.page_bytes = page_bytes};
    struct kv_page_header header;
    uint8_t key[KV_KEY_BYTES];
    kv_page_peek(page, &header);
    if (header.cipher.key_id == 0) return true;
    for (uint32_t i = 0; i < opener->count; i++) {
        if (!kv_id_equal(opener->keys[i].user.bytes, header.user.bytes)) continue;
        kv_page_key(opener->keys[i].data, header.cipher.run, key);
        return kv_page_decrypt(opener->aead, &layout, key, page, NULL) == KV_OK;
    }
    return false;
}

/* ---- pages ---- */

static struct cr_session *owner_of(struct cr_writer *writers, uint32_t writer_count,
                                   const uint8_t *page)
{
    const uint32_t count = kv_load32(page + 12), position = kv_load32(page + 16);
    for (uint32_t w = 0; w < writer_count; w++) {
        for (uint32_t s = 0; s < writers[w].session_count; s++) {
            struct cr_session *session = writers[w].sessions[s];
            if (position >= session->talk_count) continue;
            const uint32_t most = KV_MIN(KV_MIN(count, 4u), session->talk_count - position);
            uint32_t same = 0;
            while (same < most && kv_page_id(page, same) == session->talk[position + same])
                same++;
            if (same == most && most > 0) return session;
        }
    }
    return NULL;
}

static void scan_segment(struct cr_damage *damage, uint32_t file, struct opener *opener,
                         struct cr_writer *writers, uint32_t writer_count)
{
    uint8_t *page = malloc(damage->page_bytes);
    const int fd = open(damage->segments[file], O_RDONLY | O_CLOEXEC);
    EXPECT(page != NULL && fd >= 0);
    for (uint64_t at = KV_SEGMENT_HEADER_BYTES; damage->page_count < CR_PAGES_MAX;
         at += damage->page_bytes) {
        if (pread(fd, page, damage->page_bytes, (off_t)at) != (ssize_t)damage->page_bytes) break;
        if (memcmp(page, "KVPAGE1\n", 8) != 0) continue;
        if (!make_plain(opener, damage->page_bytes, page)) continue;
        struct cr_session *owner = owner_of(writers, writer_count, page);
        if (owner != NULL)
            damage->pages[damage->page_count++] =
                (struct cr_page){.file = file, .offset = at, .owner = owner};
    }
    (void)close(fd);
    free(page);
}

void cr_damage_files(struct cr_damage *damage, const char *state)
{
    damage->segment_count = list(state, "ssd", is_segment, damage->segments);
    damage->index_count = list(state, "manifest", is_index, damage->index);
}

void cr_damage_scan(struct cr_damage *damage, const char *state, uint32_t page_bytes,
                    const uint8_t *master, struct cr_writer *writers, uint32_t writer_count)
{
    struct opener opener;
    opener_init(&opener, state, master);
    damage->page_bytes = page_bytes;
    damage->page_count = 0;
    cr_damage_files(damage, state);
    for (uint32_t i = 0; i < damage->segment_count; i++)
        scan_segment(damage, i, &opener, writers, writer_count);
    kv_aead_destroy(opener.aead);
}

/* ---- flips ---- */

static void flip(const char *path, uint64_t offset, struct ex_random *random,
                 struct cr_flip *ret_flip)
{
    uint8_t byte = 0;
    const uint32_t bit = ex_random_below(random, 8);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    EXPECT(fd >= 0 && pread(fd, &byte, 1, (off_t)offset) == 1);
    byte ^= (uint8_t)(1u << bit);
    EXPECT(pwrite(fd, &byte, 1, (off_t)offset) == 1);
    (void)close(fd);
    (void)snprintf(ret_flip->text, sizeof(ret_flip->text), "bit %u of byte %llu of %s", bit,
                   (unsigned long long)offset, path);
}

bool cr_flip_page(struct cr_damage *damage, struct ex_random *random, struct cr_flip *ret_flip)
{
    const uint32_t from = ex_random_below(random, damage->page_count);
    const uint32_t part = ex_random_below(random, 100);
    uint32_t at = ex_random_between(random, KV_PAGE_ROWS_OFFSET, damage->page_bytes - 1);
    if (part < 20) at = ex_random_below(random, KV_PAGE_HEADER_BYTES);
    if (part >= 80) at = ex_random_between(random, KV_PAGE_IDS_OFFSET, KV_PAGE_ROWS_OFFSET - 1);
    for (uint32_t i = 0; i < damage->page_count; i++) {
        const struct cr_page *page = &damage->pages[(from + i) % damage->page_count];
        if (page->owner->in_flight) continue; /* Marked: one flip a session and start. */
        page->owner->in_flight = true;
        flip(damage->segments[page->file], page->offset + at, random, ret_flip);
        ret_flip->owner = page->owner;
        return true;
    }
    return false;
}

void cr_flip_segment_header(struct cr_damage *damage, struct ex_random *random,
                            struct cr_flip *ret_flip)
{
    const uint32_t file = ex_random_below(random, damage->segment_count);
    /* Half of them where something stands. */
    const uint32_t most = ex_random_percent(random, 50) ? 28 : KV_SEGMENT_HEADER_BYTES;
    flip(damage->segments[file], ex_random_below(random, most), random, ret_flip);
    ret_flip->owner = NULL;
}

void cr_flip_index(struct cr_damage *damage, struct ex_random *random, struct cr_flip *ret_flip)
{
    struct stat stat_of;
    const char *path = damage->index[ex_random_below(random, damage->index_count)];
    EXPECT(stat(path, &stat_of) == 0);
    flip(path, ex_random_below(random, (uint32_t)stat_of.st_size), random, ret_flip);
    ret_flip->owner = NULL;
}

void cr_flip_twin(const char *state, const char *name, struct ex_random *random,
                  struct cr_flip *ret_flip)
{
    enum { COPY_BYTES = 4096, FIELDS_END = 64 };
    char path[CR_PATH_BYTES];
    EXPECT(snprintf(path, sizeof(path), "%s/%s", state, name) < CR_PATH_BYTES);
    const uint32_t copy = ex_random_below(random, 2) * COPY_BYTES;
    /* Half of them where something stands. */
    const uint32_t most = ex_random_percent(random, 50) ? FIELDS_END : COPY_BYTES;
    flip(path, copy + ex_random_below(random, most), random, ret_flip);
    ret_flip->owner = NULL;
}
