/*
 * Layout version 1, whole: tests/data/format-v1, and the same encrypted: format-v1-encrypted.
 *
 * Goal: what this code writes for a fixed input is, byte for byte, what is kept there, and a store
 * opened on it finds every checkpoint and every page.
 * Method: a small directory is made in memory by the encoders and compared with the files; the
 * files (not what was made) are then put into a fresh directory, records into a fresh RocksDB, and
 * the real store loads trees and reads pages.  What is random in an encrypted one is fixed here,
 * and its records are made as docs/format.md says, not by the functions that a store makes them
 * with.
 *
 *   test_format_golden                compares; a difference fails and names the file and the byte
 *   test_format_golden --write        writes tests/data/format-v1* anew: only for another version
 *   test_format_golden --unpack DIR   makes a state directory from the files
 *   test_format_golden --unpack-encrypted DIR   likewise; its master key is bytes 0x00 to 0x1f
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/ring.h"
#include "kvstore/format/acknowledged.h"
#include "kvstore/format/manifest_record.h"
#include "kvstore/format/page.h"
#include "kvstore/format/segment_header.h"
#include "kvstore/store/segments.h"
#include "kvstore/store/store.h"
#include "tests/harness.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PAGE_BYTES = 20480,
    SEGMENT_BYTES = 262144,
    RECORDS_MAX = 16384,
    COMMIT = 9, /* Batches in the manifest. */
    RECORD_COUNT = 15,
    KEY_COUNT = 2, /* Records more, where it is encrypted. */
};

static const char *const files[] = {"superblock", "segment-000000.kv", "acknowledged",
                                    "records.txt"};
enum { SUPERBLOCK, SEGMENT, ACKNOWLEDGED, RECORDS, FILES };

/* What is made and what is kept. */
static uint8_t made[FILES][SEGMENT_BYTES], kept[FILES][SEGMENT_BYTES];
static size_t made_bytes[FILES], kept_bytes[FILES];

/* ---- the fixed input ---- */

static struct kv_superblock superblock = {
    .id = {{0xd0, 0xd1, 0xd2, 0xd3, 0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda, 0xdb, 0xdc, 0xdd,
            0xde, 0xdf}},
    .page_bytes = PAGE_BYTES,
    .window_tokens = 16,
    .segment_bytes = SEGMENT_BYTES,
    .created_ms = 1796000000000u,
};

static struct kv_layout layout; /* That of the model tiny. */
static struct kv_digest model;
static uint32_t main_ids[300], side_ids[200], other_ids[64];

struct golden_user {
    struct kv_record_user record;
    struct kv_user_id id;
};
static struct golden_user alice = {.record = {.name = "alice"}}, bob = {.record = {.name = "bob"}};

/* A page on disk: whose, in which history, where, and under which uid and generation. */
struct golden_page {
    const struct golden_user *user;
    const char *session;
    const uint32_t *ids;
    uint32_t position, count, place;
    uint64_t uid, generation;
};
static const struct golden_page pages[] = {
    {&alice, "s", main_ids, 0, 128, 0, 0x100000001, 0x100000002},
    {&alice, "s", main_ids, 128, 128, 3, 0x100000003, 0x100000009},
    {&alice, "s", main_ids, 256, 44, 4, 0x100000005, 0x10000000a},
    {&alice, "s", side_ids, 128, 72, 6, 0x200000001, 0x200000002},
    {&bob, "t.1", other_ids, 0, 64, 1, 0x200000003, 0x200000004},
};

struct golden_node {
    const struct golden_user *user;
    const char *session;
    const uint32_t *ids;
    uint32_t tokens, kind, replay; /* replay 0: none. */
    int parent;                    /* -1: none. */
    uint32_t page_count;
    uint64_t uids[3];
};
static const struct golden_node nodes[] = {
    {&alice, "s", main_ids, 150, 1, 0, -1, 2, {0x100000001, 0x100000003}},
    {&alice, "s", main_ids, 300, 2, 0, 0, 2, {0x100000003, 0x100000005}},
    {&alice, "s", side_ids, 200, 1, 150, 0, 1, {0x200000001}},
    {&bob, "t.1", other_ids, 64, 4, 0, -1, 1, {0x200000003}},
};
static struct kv_checkpoint_id node_ids[KV_ARRAY_COUNT(nodes)];

static void fill(void *bytes, size_t count, uint8_t from)
{
    for (size_t i = 0; i < count; i++)
        ((uint8_t *)bytes)[i] = (uint8_t)(from + i);
}

/* ---- the fixed keys ---- */

static bool encrypted;
static uint8_t master[KV_KEY_BYTES], run_id[KV_RUN_BYTES];
static struct kv_aead *aead;

static void data_key_of(const struct golden_user *user, uint8_t key[KV_KEY_BYTES])
{
    fill(key, KV_KEY_BYTES, user == &alice ? 0xa0 : 0xb0);
}

/* Seals with a key that is derived for one purpose. */
static void seal_fixed(const uint8_t from[KV_KEY_BYTES], const char *label, const uint8_t *nonce,
                       const uint8_t *about, uint32_t about_bytes, const uint8_t *text,
                       uint32_t bytes, uint8_t *to, uint8_t *tag)
{
    uint8_t key[KV_KEY_BYTES];
    kv_derive(from, label, NULL, 0, key);
    kv_aead_seal(aead, &(struct kv_aead_with){key, nonce, about, about_bytes}, text, bytes, to,
                 tag);
}

static void encryption_make(void)
{
    uint8_t id[KV_KEY_BYTES], nothing[1] = {0};
    struct kv_key_check *check = &superblock.master;
    EXPECT(kv_aead_create(&aead, NULL) == KV_OK);
    fill(master, sizeof(master), 0);
    fill(run_id, sizeof(run_id), 0x70);
    superblock.features = KV_FEATURE_ENCRYPTION;
    kv_derive(master, "cached master key id", NULL, 0, id);
    memcpy(check->master.bytes, id, KV_MASTER_ID_BYTES);
    fill(check->nonce, KV_NONCE_BYTES, 0x10);
    seal_fixed(master, "cached master key check", check->nonce, superblock.id.bytes, 16, nothing, 0,
               nothing, check->tag);
}

static void input_make(void)
{
    layout = (struct kv_layout){.vocab_tokens = 512,
                                .context_tokens = KV_PROMPT_TOKENS_MAX,
                                .window_tokens = 16,
                                .spare_tokens = 16,
                                .encoder_layers = 8,
                                .decoder_layers = 8,
                                .window_row_bytes = 66,
                                .source_count = 4};
    for (uint32_t i = 0; i < 4; i++)
        layout.sources[i] = (struct kv_source){2 + 2 * i, i < 3 ? 2 : 1, 36, 17, i < 3 ? 512 : 0};
    EXPECT(kv_layout_finish(&layout, NULL) == KV_OK);
    EXPECT_EQ_U32(layout.page_bytes, PAGE_BYTES);
    fill(&model, sizeof(model), 0x40);
    fill(alice.record.salt, 32, 0x60);
    fill(bob.record.salt, 32, 0x80);
    alice.id = kv_user_id_of(alice.record.name);
    bob.id = kv_user_id_of(bob.record.name);
    for (uint32_t i = 0; i < 300; i++)
        main_ids[i] = (i * 37 + 11) % 512;
    for (uint32_t i = 0; i < 200; i++)
        side_ids[i] = i < 150 ? main_ids[i] : (i * 53 + 5) % 512;
    for (uint32_t i = 0; i < 64; i++)
        other_ids[i] = (i * 91 + 3) % 512;
}

/* D_k of a history at page `k`. */
static struct kv_digest chain_at(const struct golden_user *user, const uint32_t *ids, uint32_t k)
{
    struct kv_digest chain = kv_digest_root(&model, user->record.salt);
    for (uint32_t i = 0; i < k; i++)
        chain = kv_digest_next(&chain, ids + (size_t)i * KV_PAGE_TOKENS);
    return chain;
}

static struct kv_digest digest_of(const struct golden_node *node)
{
    const uint32_t k = node->tokens / KV_PAGE_TOKENS;
    const struct kv_digest chain = chain_at(node->user, node->ids, k);
    return kv_digest_at(&chain, node->tokens, node->ids + (size_t)k * KV_PAGE_TOKENS);
}

/* ---- making ---- */

static void record_add(const uint8_t *key, uint32_t key_bytes, const uint8_t *value,
                       uint32_t value_bytes)
{
    char *text = (char *)made[RECORDS];
    size_t *at = &made_bytes[RECORDS];
    EXPECT(*at + 2 * ((size_t)key_bytes + value_bytes) + 3 < RECORDS_MAX);
    for (uint32_t i = 0; i < key_bytes; i++, *at += 2)
        (void)snprintf(text + *at, 3, "%02x", key[i]);
    text[(*at)++] = ' ';
    for (uint32_t i = 0; i < value_bytes; i++, *at += 2)
        (void)snprintf(text + *at, 3, "%02x", value[i]);
    text[(*at)++] = '\n';
}

static void make_page(const struct golden_page *page)
{
    uint8_t *bytes = made[SEGMENT] + KV_SEGMENT_HEADER_BYTES + (size_t)page->place * PAGE_BYTES;
    const struct kv_digest chain = chain_at(page->user, page->ids, page->position / KV_PAGE_TOKENS);
    const struct kv_page_header header = {
        .count = page->count,
        .position = page->position,
        .generation = page->generation,
        .user = page->user->id,
        .model = model,
        .chain = chain,
        .directory = superblock.id,
    };
    for (uint32_t i = 0; i < PAGE_BYTES; i++)
        bytes[i] = (uint8_t)(i % 251 + page->place);
    for (uint32_t i = 0; i < page->count; i++)
        kv_page_set_id(bytes, i, page->ids[page->position + i]);
    kv_page_clear_after(&layout, bytes, page->count);
    kv_page_seal(&layout, bytes, &header);
    if (encrypted) {
        static uint8_t plain[PAGE_BYTES];
        struct kv_page_cipher cipher = {.key_id = 1, .ssd_page = page->place};
        uint8_t data[KV_KEY_BYTES], key[KV_KEY_BYTES];
        memcpy(cipher.run, run_id, sizeof(run_id));
        memcpy(plain, bytes, PAGE_BYTES);
        data_key_of(page->user, data);
        kv_derive(data, "cached pages", run_id, sizeof(run_id), key);
        kv_page_encrypt(aead, &layout, key, &cipher, plain, bytes);
    }

    const struct kv_record_page record = {
        .uid = page->uid,
        .ssd_page = page->place,
        .generation = page->generation,
        .position = page->position,
        .count = page->count,
        .tag = kv_load64(chain.bytes),
    };
    const struct kv_session_id session = kv_session_id_of(&page->user->id, page->session);
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_PAGE_MAX];
    const uint32_t key_bytes = kv_key_page(&session, page->uid, key);
    record_add(key, key_bytes, value, kv_record_page_encode(&record, value));
}

static void make_node(uint32_t index)
{
    const struct golden_node *node = &nodes[index];
    const struct kv_digest digest = digest_of(node);
    uint8_t named[36], uids[24], key[KV_RECORD_KEY_MAX], value[512];
    struct kv_digest hash;
    struct kv_record_node record = {
        .has_parent = node->parent >= 0,
        .model_tag = kv_load64(model.bytes),
        .kernels = kv_kernels_tag("fp32"),
        .tokens = node->tokens,
        .digest = digest,
        .kind = (uint8_t)node->kind,
        .created_ms = superblock.created_ms + 1000 * index,
        .used_ms = superblock.created_ms + 1000 * index + 500,
        .replays = {node->replay},
        .replay_count = node->replay > 0,
        .page_count = node->page_count,
        .page_uids = uids,
    };
    memcpy(named, digest.bytes, 32);
    kv_store32(named + 32, node->replay);
    kv_sha256(named, node->replay > 0 ? 36 : 32, &hash);
    memcpy(record.id.bytes, hash.bytes, sizeof(record.id.bytes));
    node_ids[index] = record.id;
    if (node->parent >= 0) record.parent = node_ids[node->parent];
    for (uint32_t i = 0; i < node->page_count; i++)
        kv_store64(uids + 8u * i, node->uids[i]);
    const struct kv_session_id session = kv_session_id_of(&node->user->id, node->session);
    const uint32_t key_bytes = kv_key_node(&session, &record.id, key);
    record_add(key, key_bytes, value, kv_record_node_encode(&record, value));
}

static void make_session(const struct golden_user *user, const char *name, const char *parent,
                         uint32_t head, uint32_t checkpoints)
{
    struct kv_record_session record = {
        .user = user->id,
        .kind = parent[0] == '\0' ? 1 : 2,
        .created_ms = superblock.created_ms,
        .used_ms = superblock.created_ms + 5000,
        .ttl_ms = 259200000,
        .epoch = 1,
        .has_head = true,
        .head = node_ids[head],
        .head_tokens = nodes[head].tokens,
        .claimed_tokens = nodes[head].tokens,
        .checkpoints = checkpoints,
    };
    const struct kv_session_id id = kv_session_id_of(&user->id, name);
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_SESSION_MAX];
    memcpy(record.name, name, strlen(name));
    memcpy(record.parent_name, parent, strlen(parent));
    const uint32_t key_bytes = kv_key_session(&id, key);
    record_add(key, key_bytes, value, kv_record_session_encode(&record, value));
}

/* Record K of the user, and his salt under the key in it. */
static void make_key(const struct golden_user *user, struct kv_record_user *record)
{
    uint8_t name[KV_KEY_KEY_BYTES], value[KV_RECORD_KEY_BYTES], about[36], data[KV_KEY_BYTES];
    struct kv_record_key key = {.master = superblock.master.master};
    memcpy(about, superblock.id.bytes, 16);
    memcpy(about + 16, user->id.bytes, 16);
    kv_store32(about + 32, 1);
    data_key_of(user, data);
    fill(key.nonce, KV_NONCE_BYTES, data[0]);
    seal_fixed(master, "cached master key wrap", key.nonce, about, sizeof(about), data,
               KV_KEY_BYTES, key.wrapped, key.tag);
    const uint32_t name_bytes = kv_key_key(&user->id, 1, name);
    record_add(name, name_bytes, value, kv_record_key_encode(&key, value));

    record->sealed.key_id = 1;
    fill(record->sealed.nonce, KV_NONCE_BYTES, (uint8_t)(data[0] + 1));
    seal_fixed(data, "cached user salt", record->sealed.nonce, about, sizeof(about),
               user->record.salt, KV_SALT_BYTES, record->sealed.salt, record->sealed.tag);
}

static void make_user(const struct golden_user *user)
{
    struct kv_record_user record = user->record;
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_USER_MAX];
    if (encrypted) make_key(user, &record);
    const uint32_t key_bytes = kv_key_user(&user->id, key);
    record_add(key, key_bytes, value, kv_record_user_encode(&record, value));
}

static void make_all(void)
{
    const struct kv_segment_header header = {.segment_bytes = SEGMENT_BYTES,
                                             .page_bytes = PAGE_BYTES,
                                             .number = 0,
                                             .directory = superblock.id};
    const struct kv_record_store store = {.directory = superblock.id, .model = model, .boots = 2};
    const struct kv_record_commit commit = {.number = COMMIT};
    uint8_t key[KV_RECORD_KEY_MAX], value[KV_RECORD_STORE_MAX];

    memset(made, 0, sizeof(made));
    memset(made_bytes, 0, sizeof(made_bytes));
    kv_superblock_encode(&superblock, made[SUPERBLOCK]);
    made_bytes[SUPERBLOCK] = KV_SUPERBLOCK_BYTES;
    kv_segment_header_encode(&header, made[SEGMENT]);
    made_bytes[SEGMENT] = SEGMENT_BYTES;

    for (uint32_t i = 0; i < 2; i++)
        kv_acknowledged_encode(
            &(struct kv_acknowledged){.directory = superblock.id, .number = COMMIT - i},
            made[ACKNOWLEDGED] + (size_t)i * KV_ACKNOWLEDGED_SLOT_BYTES);
    made_bytes[ACKNOWLEDGED] = KV_ACKNOWLEDGED_BYTES;

    uint32_t key_bytes = kv_key_store(key);
    record_add(key, key_bytes, value, kv_record_store_encode(&store, value));
    key_bytes = kv_key_commit(key);
    record_add(key, key_bytes, value, kv_record_commit_encode(&commit, value));
    make_user(&alice);
    make_user(&bob);
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(nodes); i++)
        make_node(i);
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(pages); i++)
        make_page(&pages[i]);
    make_session(&alice, "s", "", 1, 3);
    make_session(&bob, "t.1", "t", 3, 1);
}

/* ---- files ---- */

static void path_in_data(uint32_t file, char path[512])
{
    const char *source = getenv("CACHED_SOURCE_ROOT");
    (void)snprintf(path, 512, "%s/tests/data/format-v1%s/%s", source == NULL ? "." : source,
                   encrypted ? "-encrypted" : "", files[file]);
}

static void write_file(const char *path, const uint8_t *bytes, size_t count)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    EXPECT(fd >= 0);
    EXPECT(write(fd, bytes, count) == (ssize_t)count);
    EXPECT(close(fd) == 0);
}

static void read_kept(void)
{
    for (uint32_t i = 0; i < FILES; i++) {
        char path[512];
        path_in_data(i, path);
        const int fd = open(path, O_RDONLY);
        if (fd < 0) (void)fprintf(stderr, "%s: not there\n", path);
        EXPECT(fd >= 0);
        const ssize_t got = read(fd, kept[i], sizeof(kept[i]));
        EXPECT(got > 0);
        kept_bytes[i] = (size_t)got;
        (void)close(fd);
    }
}

static uint8_t hex_byte(const char *at)
{
    char digits[3] = {at[0], at[1], '\0'};
    return (uint8_t)strtoul(digits, NULL, 16);
}

/* Puts the kept records into a fresh RocksDB. */
static void unpack_records(const char *dir)
{
    static uint8_t bytes[RECORDS_MAX];
    struct kv_manifest_put puts[RECORD_COUNT + KEY_COUNT];
    const uint32_t want = RECORD_COUNT + (encrypted ? KEY_COUNT : 0);
    struct kv_manifest *manifest;
    const char *at = (const char *)kept[RECORDS], *end = at + kept_bytes[RECORDS];
    uint32_t count = 0;
    size_t used = 0;

    for (; at < end; count++, at++) {
        uint32_t lengths[2] = {0, 0};
        uint8_t *begins[2];
        for (int part = 0; part < 2; part++) {
            begins[part] = bytes + used;
            for (; *at != ' ' && *at != '\n'; at += 2, lengths[part]++)
                bytes[used++] = hex_byte(at);
            if (part == 0) at++;
        }
        EXPECT(count < want);
        puts[count] = (struct kv_manifest_put){begins[0], lengths[0], begins[1], lengths[1]};
    }
    EXPECT_EQ_U32(count, want);
    EXPECT(kv_manifest_open(dir, &manifest, NULL) == KV_OK);
    EXPECT(kv_manifest_write_now(manifest, puts, count, NULL) == KV_OK);
    kv_manifest_close(manifest);
}

static void unpack(const char *dir)
{
    char path[512];
    read_kept();
    (void)mkdir(dir, 0700);
    (void)snprintf(path, sizeof(path), "%s/superblock", dir);
    write_file(path, kept[SUPERBLOCK], kept_bytes[SUPERBLOCK]);
    (void)snprintf(path, sizeof(path), "%s/acknowledged", dir);
    write_file(path, kept[ACKNOWLEDGED], kept_bytes[ACKNOWLEDGED]);
    (void)snprintf(path, sizeof(path), "%s/ssd", dir);
    EXPECT(mkdir(path, 0700) == 0);
    (void)snprintf(path, sizeof(path), "%s/ssd/segment-000000.kv", dir);
    write_file(path, kept[SEGMENT], kept_bytes[SEGMENT]);
    (void)snprintf(path, sizeof(path), "%s/manifest", dir);
    unpack_records(path);
}

static void test_same_bytes(void)
{
    read_kept();
    for (uint32_t i = 0; i < FILES; i++) {
        (void)printf("  %s: %zu bytes\n", files[i], made_bytes[i]);
        (void)fflush(stdout);
        EXPECT_EQ_U64(made_bytes[i], kept_bytes[i]);
        EXPECT_EQ_MEM(made[i], kept[i], kept_bytes[i]);
    }
}

/* ---- the store on it ---- */

struct world {
    struct kv_store *store;
    struct kv_disk *disk;
    struct kv_manifest *manifest;
    struct kv_mailbox *mailbox;
    struct kv_clock *clock;
    bool done;
};
static struct world world;

static void wait_done(void)
{
    while (!world.done) {
        (void)kv_disk_run(world.disk, kv_mailbox_fd(world.mailbox), 100);
        (void)kv_mailbox_run(world.mailbox, UINT32_MAX);
    }
    world.done = false;
}

static void load_done(void *context, struct kv_session *session, kv_status status)
{
    (void)context;
    (void)session;
    EXPECT(status == KV_OK);
    world.done = true;
}

static void read_done(struct kv_read *read)
{
    (void)read;
    world.done = true;
}

static void world_open(const char *dir)
{
    world.clock = kv_clock_create_real();
    EXPECT(world.clock != NULL);
    EXPECT(kv_ring_create(16, KV_RING_AUTO, &world.disk, NULL) == KV_OK);
    EXPECT(kv_mailbox_create(&world.mailbox, NULL) == KV_OK);
    struct kv_store_options options = {
        .dir = dir,
        .layout = &layout,
        .model = model,
        .kernels = kv_kernels_tag("fp32"),
        .kernels_made = kv_kernels_tag("fp32"),
        .clock = world.clock,
        .disk = world.disk,
        .mailbox = world.mailbox,
        .hbm_bytes = 4u << 20,
        .pool_bytes = 4u << 20,
        .ssd_bytes = 2 * SEGMENT_BYTES,
        .segment_bytes = SEGMENT_BYTES,
        .index_bytes = 4u << 20,
        .pool_ttl_ms = 1000,
        .rows_ttl_ms = 1000,
        .sessions_max = 16,
        .encryption = {.on = encrypted, .master = encrypted ? master : NULL},
    };
    struct kv_error err = {0};
    char path[512];
    (void)snprintf(path, sizeof(path), "%s/manifest", dir);
    kv_status status = kv_store_directory(&options, &err);
    if (status == KV_OK) status = kv_manifest_open(path, &world.manifest, &err);
    options.manifest = world.manifest;
    if (status == KV_OK) status = kv_store_open(&options, &world.store, &err);
    if (status != KV_OK) (void)fprintf(stderr, "%s\n", err.text);
    EXPECT(status == KV_OK);
}

static void world_close(void)
{
    kv_store_close(world.store);
    kv_manifest_close(world.manifest);
    kv_mailbox_destroy(world.mailbox);
    kv_disk_destroy(world.disk);
    kv_clock_destroy(world.clock);
}

/* Every page up to the checkpoint, from disk, with its chain and its ids. */
static void read_checkpoint(const struct golden_node *golden, struct kv_node *node)
{
    uint32_t path[3], slots[3];
    bool fresh[3];
    struct kv_read read = {.count = kv_pages_for(golden->tokens),
                           .pages = path,
                           .slots = slots,
                           .fresh = fresh,
                           .done = read_done};
    kv_index_path_pages(node, golden->tokens, path);
    const kv_status status = kv_store_read_start(world.store, &read);
    EXPECT(status == KV_OK || status == KV_MISS);
    if (status == KV_OK) wait_done();
    for (uint32_t k = 0; k < read.count; k++) {
        const uint32_t position = k * KV_PAGE_TOKENS;
        const struct kv_digest chain = chain_at(golden->user, golden->ids, k);
        EXPECT(slots[k] != KV_HBM_SLOT_NONE);
        EXPECT(kv_store_read_check(&read, k, &chain, golden->ids + position,
                                   KV_MIN(golden->tokens - position, KV_PAGE_TOKENS)) == KV_OK);
        kv_hbm_unpin(world.store->hbm, slots[k]);
    }
}

/* The directory is of a build that had no segment records: the first start reads all trees, writes
 * the records and says so in the superblock; the second finds the same without a tree. */
static void test_store_reads_it(const char *dir, bool again)
{
    world_open(dir);
    EXPECT_EQ_U64(world.store->recovery.scan_why == NULL, again);
    EXPECT_EQ_U64(world.store->options.superblock.features,
                  KV_FEATURE_SEGMENTS | KV_FEATURE_HISTORY | KV_FEATURE_PLAN_TTL |
                      (encrypted ? KV_FEATURE_ENCRYPTION : 0));
    EXPECT_EQ_U32(kv_store_segment(world.store, 0).pages_used, KV_ARRAY_COUNT(pages));
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(pages); i++)
        EXPECT(kv_store_segment_recorded(world.store, pages[i].place));
    EXPECT(kv_store_segment(world.store, 0).used_ms >= superblock.created_ms + 3500);
    EXPECT_EQ_U64(world.store->recovery.checkpoints, KV_ARRAY_COUNT(nodes));
    EXPECT_EQ_U64(world.store->recovery.pages, KV_ARRAY_COUNT(pages));
    EXPECT_EQ_U64(world.store->recovery.sessions, 2);
    EXPECT_EQ_U64(world.store->recovery.dropped, 0);
    EXPECT_EQ_U64(world.store->recovery.lost_batches, 0);
    EXPECT_EQ_U64(world.store->commit, COMMIT + 2 + (again ? 1 : 0)); /* Starts, records. */
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(nodes); i++) {
        const struct kv_session_id id = kv_session_id_of(&nodes[i].user->id, nodes[i].session);
        struct kv_session *session = kv_index_session_find(world.store->index, &id);
        EXPECT(session != NULL);
        if (session->tree->load == KV_LOAD_NONE) {
            kv_store_load_start(world.store, session, load_done, NULL);
            wait_done();
        }
        struct kv_node *node = kv_index_node_find(session, &node_ids[i]);
        EXPECT(node != NULL);
        EXPECT_EQ_U32(node->tokens, nodes[i].tokens);
        EXPECT_EQ_U32(node->kind, nodes[i].kind);
        EXPECT_EQ_U32(node->approx_from, nodes[i].replay > 0 ? nodes[i].replay : UINT32_MAX);
        read_checkpoint(&nodes[i], node);
    }
    EXPECT_EQ_U64(world.store->counters.corrupt_pages, 0);
    EXPECT_EQ_U64(world.store->counters.pages_decrypted, encrypted ? KV_ARRAY_COUNT(pages) : 0);
    EXPECT_EQ_U64(world.store->counters.pages_verified, KV_ARRAY_COUNT(pages));
    world_close();
}

static int remove_tree(const char *dir)
{
    char command[600];
    (void)snprintf(command, sizeof(command), "rm -rf '%s'", dir);
    return system(command);
}

static void write_kept(void)
{
    for (uint32_t i = 0; i < FILES; i++) {
        char path[512];
        path_in_data(i, path);
        write_file(path, made[i], made_bytes[i]);
    }
}

static void test_all(void)
{
    char dir[] = "test_format_golden.XXXXXX";
    test_same_bytes();
    EXPECT(mkdtemp(dir) != NULL);
    unpack(dir);
    test_store_reads_it(dir, false);
    test_store_reads_it(dir, true);
    EXPECT(remove_tree(dir) == 0);
}

int main(int argc, char **argv)
{
    const bool writes = argc == 2 && strcmp(argv[1], "--write") == 0;
    const bool unpacks = argc == 3 && strcmp(argv[1], "--unpack") == 0;
    input_make();
    make_all();
    if (writes)
        write_kept();
    else if (unpacks)
        unpack(argv[2]);
    else if (argc == 1)
        test_all();
    if (unpacks) HARNESS_END();

    encrypted = true;
    encryption_make();
    make_all();
    if (writes)
        write_kept();
    else if (argc == 3 && strcmp(argv[1], "--unpack-encrypted") == 0)
        unpack(argv[2]);
    else
        test_all();
    kv_aead_destroy(aead);
    HARNESS_END();
}
