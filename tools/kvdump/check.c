/*
 * A tree against its pages.
 *
 * Pages first, in the order they lie on disk: each must be where its record says, claimed by nobody
 * else, whole, and the page that record means.  Then the checkpoints from the root on: parents,
 * page lists, and the digest chain computed again from the token ids in the pages, which binds
 * every page to the tokens before it and every checkpoint to its tokens.  The chain goes on behind
 * a bad page with the value that the next page's header holds, so that one bad page is one line.
 */

#include "tools/kvdump/kvdump.h"

#include "kvstore/base/bytes.h"
#include "kvstore/format/page.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* The first cause is the one to tell. */
static void blame(char **cause, const char *fmt, ...) KV_PRINTF(2, 3);
static void blame(char **cause, const char *fmt, ...)
{
    char text[DUMP_CAUSE_BYTES];
    va_list args;
    if (*cause != NULL) return;
    va_start(args, fmt);
    (void)vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    *cause = strdup(text);
}

/* ---- pages ---- */

bool dump_claim(struct dump *dump, const struct dump_tree *tree, struct dump_page *page)
{
    const uint32_t place = page->record.ssd_page;
    const uint32_t number = place / dump->pages_per_segment;
    if (number >= dump->segment_count || !dump->segments[number].is_there) {
        blame(&page->cause, "its segment file is missing");
        return false;
    }
    const uint32_t before = dump->claims[place];
    if (before == 0) {
        dump->claims[place] =
            tree->session == NULL ? UINT32_MAX : (uint32_t)(tree->session - dump->sessions) + 1;
        dump->segments[number].used++;
        return true;
    }
    char label[DUMP_LABEL_BYTES] = "a session without a record";
    if (before != UINT32_MAX) dump_label(&dump->sessions[before - 1], label);
    blame(&page->cause, "claimed by two records, the other one of session %s", label);
    return false;
}

static bool read_page(struct dump *dump, struct dump_page *page)
{
    const uint32_t number = page->record.ssd_page / dump->pages_per_segment;
    const struct dump_segment *segment = &dump->segments[number];
    const int fd = dump_segment_open(dump, number);
    const uint64_t offset = dump_offset(dump, page->record.ssd_page);
    const uint32_t bytes = dump->superblock.page_bytes;
    if (fd < 0) {
        blame(&page->cause, "open: %s", strerror(errno));
        return false;
    }
    if (offset + bytes > segment->file_bytes) {
        blame(&page->cause, "beyond the end of its segment file (%" PRIu64 " B)",
              segment->file_bytes);
        return false;
    }
    for (uint32_t done = 0; done < bytes;) {
        const ssize_t got = pread(fd, dump->page + done, bytes - done, (off_t)(offset + done));
        if (got <= 0) {
            blame(&page->cause, "read: %s", got < 0 ? strerror(errno) : "end of file");
            return false;
        }
        done += (uint32_t)got;
    }
    dump->pages_read++;
    return true;
}

/* Against what the record and the session say; the chain is looked at later. */
static void check_page(struct dump *dump, const struct dump_tree *tree, struct dump_page *page)
{
    const struct kv_layout layout = {.page_bytes = dump->superblock.page_bytes};
    struct kv_page_header header, want;
    struct kv_error err = {0};
    if (!dump_claim(dump, tree, page)) return;
    page->is_leaving = dump_quarantine_find(dump, page->record.ssd_page) != NULL;
    if (page->is_leaving) {
        blame(&page->cause, "its place is quarantined");
        return;
    }
    if (!read_page(dump, page)) return;

    kv_status status = kv_page_decode(&layout, dump->page, &header, &err);
    if (status == KV_OK) {
        want = header;
        want.count = page->record.count;
        want.position = page->record.position;
        want.generation = page->record.generation;
        want.directory = dump->superblock.id;
        if (tree->session != NULL && tree->session->user != NULL)
            want.user = tree->session->user->id;
        status = kv_page_verify(&layout, dump->page, &want, &err);
    }
    if (status == KV_OK && kv_load64(header.chain.bytes) != page->record.tag)
        status = KV_FAIL(&err, KV_CORRUPT, "page: stands after other tokens");
    if (status != KV_OK) {
        const char *text = strncmp(err.text, "page: ", 6) == 0 ? err.text + 6 : err.text;
        blame(&page->cause, "%s", text);
        return;
    }
    status = dump_decrypt(dump, &header, page->record.ssd_page, &err);
    page->is_sealed = status == KV_MISS;
    if (status == KV_CORRUPT) {
        blame(&page->cause, "%s", err.text + strlen("page: "));
        return;
    }
    page->is_good = true;
    page->chain = header.chain;
    page->model = header.model;
    for (uint32_t i = 0; !page->is_sealed && i < KV_PAGE_TOKENS; i++)
        page->ids[i] = kv_page_id(dump->page, i);
}

static int compare_places(const void *a, const void *b)
{
    const struct dump_page *x = *(struct dump_page *const *)a, *y = *(struct dump_page *const *)b;
    return x->record.ssd_page < y->record.ssd_page ? -1 : x->record.ssd_page > y->record.ssd_page;
}

static kv_status check_pages(struct dump *dump, struct dump_tree *tree)
{
    struct dump_page **order = malloc(sizeof(struct dump_page *) * KV_MAX(tree->page_count, 1u));
    if (order == NULL) return KV_NOMEM;
    for (uint32_t i = 0; i < tree->page_count; i++)
        order[i] = &tree->pages[i];
    qsort(order, tree->page_count, sizeof(struct dump_page *), compare_places);
    for (uint32_t i = 0; i < tree->page_count; i++) {
        check_page(dump, tree, order[i]);
        dump_tell(dump);
    }
    free(order);
    return KV_OK;
}

/* ---- checkpoints ---- */

struct chain {
    struct kv_digest at; /* The start of the page looked at. */
    bool is_known;
};

/* D_0, from the model that the first page names. */
static struct chain chain_begin(const struct dump *dump, const struct dump_tree *tree,
                                const struct dump_node *node)
{
    if (node->parent != NULL)
        return (struct chain){.at = node->parent->chain, .is_known = node->parent->has_chain};
    const struct dump_page *first =
        node->record.page_count == 0 ? NULL : dump_page_find(tree, kv_load64(node->uids));
    const struct kv_digest *model = NULL;
    if (first != NULL && first->is_good)
        model = &first->model;
    else if (dump->has_store)
        model = &dump->store.model;
    if (model == NULL || kv_load64(model->bytes) != node->record.model_tag) model = NULL;
    if (model == NULL || tree->session == NULL || tree->session->user == NULL ||
        !tree->session->user->has_salt)
        return (struct chain){.is_known = false};
    return (struct chain){.at = kv_digest_root(model, tree->session->user->record.salt),
                          .is_known = true};
}

/* One page of an edge, which this checkpoint needs up to `end`. */
static void edge_page(struct dump_node *node, struct dump_page *page, uint32_t position,
                      uint32_t end, struct chain *chain)
{
    page->is_listed = true;
    if (page->record.position != position || position + page->record.count < end) {
        blame(&node->cause,
              "lists a page of %" PRIu32 " tokens at %" PRIu32 " for %" PRIu32 " to %" PRIu32,
              page->record.count, page->record.position, position, end);
        return;
    }
    if (page->is_good && kv_load64(page->model.bytes) != node->record.model_tag) {
        page->is_good = false;
        blame(&page->cause, "made by another model");
    }
    if (page->is_good && chain->is_known &&
        memcmp(page->chain.bytes, chain->at.bytes, sizeof(chain->at.bytes)) != 0) {
        page->is_good = false;
        blame(&page->cause, "stands after other tokens");
    }
    if (!page->is_good) {
        node->bad_position = KV_MIN(node->bad_position, position);
        chain->is_known = false;
        return;
    }
    if (!chain->is_known) *chain = (struct chain){.at = page->chain, .is_known = true};
}

/* The id is made of the digest and the clipped replays of the path; where checkpoints of several
 * kernels meet it can be made of more, and is not judged here. */
static bool is_id_right(const struct dump_tree *tree, const struct dump_node *node)
{
    struct kv_sha256_state state;
    struct kv_digest hash;
    const struct dump_node *path[2 * KV_REPLAYS_MAX];
    uint32_t count = 0;
    for (uint32_t i = 0; i < tree->node_count; i++)
        if (tree->nodes[i].record.kernels != node->record.kernels) return true;
    for (const struct dump_node *up = node; up != NULL; up = up->parent) {
        if (up->record.replay_count == 0) continue;
        if (count == KV_ARRAY_COUNT(path)) return true;
        path[count++] = up;
    }
    kv_sha256_init(&state);
    kv_sha256_update(&state, node->record.digest.bytes, sizeof(node->record.digest.bytes));
    while (count-- > 0) {
        for (uint32_t i = 0; i < path[count]->record.replay_count; i++) {
            uint8_t bytes[4];
            kv_store32(bytes, path[count]->record.replays[i]);
            kv_sha256_update(&state, bytes, sizeof(bytes));
        }
    }
    kv_sha256_final(&state, &hash);
    return kv_id_equal(hash.bytes, node->record.id.bytes);
}

static void check_digest(const struct dump_tree *tree, struct dump_node *node,
                         const struct dump_page *last)
{
    static const uint32_t none[1] = {0};
    const uint32_t t = node->record.tokens;
    if (last->is_sealed) { /* The id says at least that the record belongs together. */
        if (!is_id_right(tree, node)) blame(&node->cause, "its id is not made of its digest");
        return;
    }
    const struct kv_digest digest =
        kv_digest_at(&node->chain, t, t % KV_PAGE_TOKENS == 0 ? none : last->ids);
    if (memcmp(digest.bytes, node->record.digest.bytes, sizeof(digest.bytes)) != 0)
        blame(&node->cause, "its digest is not that of the tokens in its pages");
    else if (!is_id_right(tree, node))
        blame(&node->cause, "its id is not made of its digest and replays");
}

static void check_edge(const struct dump *dump, const struct dump_tree *tree,
                       struct dump_node *node)
{
    const struct kv_record_node *record = &node->record;
    const uint32_t from = node->parent == NULL ? 0 : node->parent->record.tokens;
    const uint32_t first = from / KV_PAGE_TOKENS;
    struct chain chain = chain_begin(dump, tree, node);
    const struct dump_page *last = NULL;

    if (record->tokens <= from || record->page_count != kv_pages_for(record->tokens) - first) {
        blame(&node->cause, "%" PRIu32 " pages do not lead from %" PRIu32 " to %" PRIu32,
              record->page_count, from, record->tokens);
        return;
    }
    for (uint32_t i = 0; i < record->page_count; i++) {
        const uint32_t position = (first + i) * KV_PAGE_TOKENS;
        struct dump_page *page = dump_page_find(tree, kv_load64(node->uids + (size_t)8 * i));
        if (page == NULL) {
            blame(&node->cause, "its page at %" PRIu32 " has no record", position);
            return;
        }
        edge_page(node, page, position, KV_MIN(record->tokens, position + KV_PAGE_TOKENS), &chain);
        if (node->cause != NULL) return;
        if (position + KV_PAGE_TOKENS <= record->tokens) {
            /* The next page's header says where it goes on. */
            chain.is_known &= !page->is_sealed;
            if (chain.is_known) chain.at = kv_digest_next(&chain.at, page->ids);
        }
        last = page;
    }
    node->chain = chain.at;
    node->has_chain = chain.is_known;
    if (chain.is_known || last->is_sealed) check_digest(tree, node, last);
}

/* The page at `position` of the checkpoint above is also this one's: its own edge does not begin
 * with another for that position. */
static bool inherits(const struct dump_node *node, uint32_t position)
{
    const uint32_t from = node->parent->record.tokens;
    return position < from - from % KV_PAGE_TOKENS;
}

static void check_nodes(const struct dump *dump, struct dump_tree *tree)
{
    for (uint32_t i = 0; i < tree->node_count; i++) {
        struct dump_node *node = &tree->nodes[i];
        node->bad_position = UINT32_MAX;
        if (node->record.has_parent) {
            node->parent = dump_node_find(tree, &node->record.parent);
            /* Sorted by position: a parent was looked at before. */
            if (node->parent == NULL || node->parent >= node) {
                blame(&node->cause, "its parent checkpoint has no record");
                node->parent = NULL;
                node->is_broken = true;
                continue;
            }
            node->is_broken = node->parent->is_broken;
            if (inherits(node, node->parent->bad_position))
                node->bad_position = node->parent->bad_position;
        }
        check_edge(dump, tree, node);
        node->is_broken |= node->cause != NULL;
    }
}

/* ---- telling ---- */

/* Checkpoints whose rows are in the page: those that list it, and those below that have no other
 * page for its position. */
static uint32_t count_owners(struct dump_tree *tree, const struct dump_page *page)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < tree->node_count; i++) {
        struct dump_node *node = &tree->nodes[i];
        node->is_owner =
            node->parent != NULL && node->parent->is_owner && inherits(node, page->record.position);
        for (uint32_t j = 0; !node->is_owner && j < node->record.page_count; j++)
            node->is_owner = kv_load64(node->uids + (size_t)8 * j) == page->record.uid;
        count += node->is_owner;
    }
    return count;
}

static void report(struct dump *dump, struct dump_tree *tree)
{
    char label[DUMP_LABEL_BYTES], id[33];
    if (tree->session != NULL) {
        dump_label(tree->session, label);
    } else {
        dump_hex(tree->id.bytes, 16, id);
        (void)snprintf(label, sizeof(label), "%s", id);
        dump_damage(dump, "session %s: no record, %" PRIu32 " checkpoints, %" PRIu32 " pages", id,
                    tree->node_count, tree->page_count);
    }
    for (uint32_t i = 0; i < tree->page_count; i++) {
        const struct dump_page *page = &tree->pages[i];
        if ((page->is_good || page->is_leaving) && !page->is_listed) {
            dump->counts.unlisted++;
            continue;
        }
        if (page->is_good) continue;
        const uint32_t owners = count_owners(tree, page);
        dump->counts.bad_pages++;
        dump_damage(dump,
                    "segment-%06" PRIu32 ".kv page %" PRIu32 " (offset %" PRIu64
                    "): %s, owners: %" PRIu32 " %s of session %s",
                    page->record.ssd_page / dump->pages_per_segment,
                    page->record.ssd_page % dump->pages_per_segment,
                    dump_offset(dump, page->record.ssd_page),
                    page->cause == NULL ? "damaged" : page->cause, owners,
                    owners == 1 ? "checkpoint" : "checkpoints", label);
    }
    for (uint32_t i = 0; i < tree->node_count; i++) {
        const struct dump_node *node = &tree->nodes[i];
        dump->counts.hurt_checkpoints += node->is_broken || node->bad_position != UINT32_MAX;
        if (node->cause == NULL) continue;
        dump_hex(node->record.id.bytes, 16, id);
        dump_damage(dump, "checkpoint %s at position %" PRIu32 " of session %s: %s", id,
                    node->record.tokens, label, node->cause);
    }
}

kv_status dump_check_tree(struct dump *dump, struct dump_tree *tree, void *context)
{
    (void)context;
    const kv_status status = check_pages(dump, tree);
    if (status != KV_OK) return status;
    check_nodes(dump, tree);
    dump->counts.checkpoints += tree->node_count;
    dump->counts.pages += tree->page_count;
    dump_count_tree(dump, tree);
    report(dump, tree);
    return KV_OK;
}
