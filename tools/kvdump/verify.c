/*
 * kvdump verify: every record, every page, each against the others.
 */

#include "tools/kvdump/kvdump.h"

#include "kvstore/base/bytes.h"

#include <inttypes.h>
#include <stdio.h>

/* One slot that is not whole is what a power cut may leave, and the other one counts. */
static void check_acknowledged(struct dump *dump)
{
    const struct kv_acknowledged *noted = &dump->noted;
    if (dump->noted_status == KV_CORRUPT)
        dump_damage(dump, KV_ACKNOWLEDGED_NAME ": damaged; the next start of a daemon writes it "
                                               "anew");
    if (dump->noted_status != KV_OK) return;
    if (!kv_id_equal(noted->directory.bytes, dump->superblock.id.bytes))
        dump_damage(dump, KV_ACKNOWLEDGED_NAME ": belongs to another state directory");
    else if (noted->number > dump->commit)
        dump_damage(dump,
                    "manifest: lacks the last %" PRIu64 " batches of records: %" PRIu64
                    " were acknowledged, it holds %" PRIu64,
                    noted->number - dump->commit, noted->number, dump->commit);
}

static void check_files(struct dump *dump)
{
    if (dump->superblock_damaged > 0)
        dump_damage(dump,
                    "superblock: one of its two copies is damaged; the next start of a daemon "
                    "puts it right");
    for (uint32_t i = 0; i < dump->segment_count; i++)
        if (dump->segments[i].cause[0] != '\0' && !dump->segments[i].is_unfinished)
            dump_damage(dump, "segment-%06" PRIu32 ".kv: %s", i, dump->segments[i].cause);
}

/* With pages it was finished once, and lost its header. */
static void check_unfinished(struct dump *dump)
{
    for (uint32_t i = 0; i < dump->segment_count; i++) {
        const struct dump_segment *segment = &dump->segments[i];
        if (segment->is_unfinished && segment->used > 0)
            dump_damage(dump, "segment-%06" PRIu32 ".kv: %s", i, segment->cause);
        else if (segment->is_unfinished)
            (void)printf("unfinished: segment-%06" PRIu32 ".kv: %s; the next start completes it\n",
                         i, segment->cause);
    }
}

int dump_verify(struct dump *dump)
{
    struct kv_error err = {0};
    check_files(dump);
    check_acknowledged(dump);
    const kv_status status = dump_trees(dump, NULL, dump_check_tree, NULL, &err);
    if (status == KV_OK) dump_check_counted(dump);
    check_unfinished(dump);
    if (status == KV_CORRUPT)
        dump_damage(dump, "manifest: %s", err.text);
    else if (status != KV_OK)
        dump_error("%s", err.text);
    if (status != KV_OK && status != KV_CORRUPT) return DUMP_FAILED;

    const struct dump_counts *counts = &dump->counts;
    dump_quarantine_print(dump);
    if (counts->damages == 0 && counts->unlisted > 0)
        (void)fprintf(stderr,
                      "kvdump: %" PRIu64 " pages that no checkpoint needs are freed when their "
                      "session is next used\n",
                      counts->unlisted);
    if (dump->is_doubted)
        (void)fprintf(stderr, "kvdump: a daemon found records that did not fit together; its next "
                              "start counts places and checkpoints again\n");
    if (counts->encrypted > 0)
        (void)printf("encrypted: %" PRIu64 " pages%s\n", counts->encrypted,
                     dump_keys_are_open(dump)
                         ? ", opened with the master key"
                         : "; without --master-key their token ids and rows are not compared");
    if (dump->keys != NULL && counts->plain > 0)
        (void)printf("not encrypted: %" PRIu64 " pages\n", counts->plain);
    if (counts->damages == 0) {
        (void)printf("OK: %" PRIu64 " checkpoints, %" PRIu64 " pages, %" PRIu64 " bytes\n",
                     counts->checkpoints, counts->pages,
                     counts->pages * dump->superblock.page_bytes);
        return DUMP_OK;
    }
    (void)printf("DAMAGED: %" PRIu64 " of %" PRIu64 " pages, %" PRIu64 " of %" PRIu64
                 " checkpoints cannot be used\n",
                 counts->bad_pages, counts->pages, counts->hurt_checkpoints, counts->checkpoints);
    return DUMP_DAMAGED;
}
