/*
 * Power cuts, enumerated.
 *
 * Goal: at whatever moment the power goes, and whatever the disk made of what it had not flushed,
 * everything acknowledged until then is there, whole and right, and nothing else is half there.
 * Method: runs of the real store are recorded (stack.h; one in three with a call that fails), every
 * second one on what a power cut left of the one before.  Images are built of random moments
 * (image.h) and a store is opened on each, in this process, twice: what the first start repairs the
 * second must find right.  Every fifth image is of a disk that lies besides: it lost, tore, swapped
 * or changed a page it had flushed; then no wrong byte may be given back.  Every 50th is written to
 * real files, with a real RocksDB.  Every tenth honest one lacks batches that `acknowledged` knows
 * of; then the store must say how many, once.  Every fourth pair of runs is encrypted, and its
 * master key is rotated now and then (with --encrypt, every one).  An image depends on seed and
 * number alone, so --case builds that one again.
 *
 * usage: crashimage [--images N] [--seed S] [--encrypt] [--plant NAME] [--expect-loss]
 *        crashimage --first K --count N ..., crashimage --case K ...
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/format/acknowledged.h"
#include "kvstore/format/manifest_record.h"
#include "tests/seam/check.h"
#include "tests/seam/image.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/mem_manifest.h"
#include "tests/seam/options.h"
#include "tests/seam/real.h"
#include "tests/seam/stack.h"
#include "tests/seam/world.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IMAGES_PER_PAIR 50u /* Half of them of each run. */
#define ROUNDS 40u
#define LYING_EVERY 5u
#define REAL_EVERY 50u
#define CUT_EVERY 10u /* Of these, number 3. */
#define FAULT_EVERY 3u
#define FAULT_CALLS 250u /* One of the first. */
#define TOLD_MAX 5u
#define ENCRYPTED_EVERY 4u /* Pairs. */

struct totals {
    struct check check;
    uint64_t encrypted;
    uint64_t images, runs, failures, lying, real, faults, refused_lying, cut;
};

static void tell(struct totals *totals, uint64_t number, const struct image *image, uint64_t ticks,
                 const struct check *check)
{
    static const char *const lies[IMAGE_LIES] = {"", ", a lost write", ", a torn write",
                                                 ", two swapped writes", ", a flipped bit"};
    if (totals->failures++ >= TOLD_MAX) return;
    (void)printf("case %llu, tick %llu of %llu%s: %s\n", (unsigned long long)number,
                 (unsigned long long)image->tick, (unsigned long long)ticks, lies[image->lie],
                 check->first);
}

static void add(struct check *sum, const struct check *check)
{
    sum->acknowledged += check->acknowledged;
    sum->found += check->found;
    sum->lost += check->lost;
    sum->torn += check->torn;
    sum->wrong += check->wrong;
    sum->undead += check->undead;
    sum->refused += check->refused;
    sum->uneven += check->uneven;
    sum->unopened += check->unopened;
    sum->alarms += check->alarms;
}

static void check_twice(struct check *check, const struct work *work, struct kv_disk *disk,
                        struct kv_manifest *manifest, uint64_t tick, bool lying)
{
    struct check again = {0};
    check_store(check, work, disk, manifest, tick, lying);
    if (check_failures(check) > 0) return;
    check_store(&again, work, disk, manifest, tick, lying);
    if (check_failures(&again) == 0) return;
    *check = again;
}

static void check_real(struct check *check, const struct work *work,
                       const struct recorder *recorder, const struct image *image, bool lying)
{
    struct real real;
    struct kv_error err = {0};
    struct work at_dir = *work; /* The same promises, of a store in another folder. */
    const kv_status status = real_open(&real, recorder, image, STACK_DIR, &err);
    if (status == KV_INVALID || status == KV_CORRUPT) { /* What is left is not taken for ours. */
        (void)snprintf(check->first, sizeof(check->first), "%s", err.text);
        check->unopened++;
        return;
    }
    if (status != KV_OK) {
        (void)fprintf(stderr, "a real image cannot be made here: %s\n", err.text);
        exit(2);
    }
    at_dir.options.dir = real.dir;
    check_twice(check, &at_dir, real.disk, real.manifest, image->tick, lying);
    real_close(&real);
}

/* ---- records that are gone ---- */

static uint64_t noted_in(struct kv_disk *disk)
{
    struct mem_disk_file file;
    struct kv_acknowledged found = {.number = 0};
    uint8_t bytes[KV_ACKNOWLEDGED_BYTES] = {0};
    uint32_t slot, damaged;
    for (uint32_t i = 0; mem_disk_file(disk, i, &file); i++) {
        if (strcmp(file.name, KV_ACKNOWLEDGED_NAME) != 0 || file.size == 0) continue;
        memcpy(bytes, file.bytes, KV_MIN(file.size, sizeof(bytes)));
        if (kv_acknowledged_decode(bytes, &found, &slot, &damaged) != KV_OK) return 0;
    }
    return found.number;
}

/* Number of the last of the recorder's first `count` batches. */
static uint64_t number_of(const struct recorder *recorder, uint32_t count)
{
    struct kv_record_commit record = {.number = 0};
    for (uint32_t i = 0; count > 0; i++) {
        const struct record_event *event = &recorder->events[i];
        if (event->kind != RECORD_BATCH) continue;
        count--;
        for (uint32_t j = 0; j < event->put_count; j++) {
            const struct kv_manifest_put *put = &event->puts[j];
            if (put->key_bytes != 1 || put->key[0] != 'C') continue;
            const kv_status status = kv_record_commit_decode(put->value, put->value_bytes, &record);
            assert(status == KV_OK);
        }
    }
    return record.number;
}

/* Takes batches away until some are missing that were noted; how many are.  0: none was noted. */
static uint64_t cut(const struct recorder *recorder, struct image *image, struct ex_random *random)
{
    const uint64_t noted = noted_in(image->disk);
    uint32_t most = image->batches;
    while (most > 0 && number_of(recorder, most) >= noted)
        most--;
    if (noted == 0) return 0;
    image->batches = ex_random_below(random, most + 1);
    return noted - number_of(recorder, image->batches);
}

/* The store says of it what is missing, once.  What it forgot it may give back. */
static void check_cut(struct check *check, const struct work *work, struct kv_disk *disk,
                      struct kv_manifest *manifest, uint64_t tick, uint64_t missing)
{
    struct check first = {0}, again = {0};
    check_store(&first, work, disk, manifest, tick, true);
    check_store(&again, work, disk, manifest, tick, true);
    first.undead = again.undead = 0;
    *check = check_failures(&first) > 0 ? first : again;
    if (first.lost_batches == missing && again.lost_batches == 0) return;
    check->alarms++;
    (void)snprintf(check->first, sizeof(check->first),
                   "%llu acknowledged batches are missing, and it says %llu, then %llu",
                   (unsigned long long)missing, (unsigned long long)first.lost_batches,
                   (unsigned long long)again.lost_batches);
}

/* At a moment from tick `from` on. */
static void run_image(const struct options *options, uint64_t number, const struct work *work,
                      const struct recorder *recorder, uint64_t from, struct totals *totals)
{
    struct ex_random random = {ex_mix(ex_mix(options->seed) ^ number)};
    const uint64_t tick = from + ex_random_below(&random, (uint32_t)(recorder->tick - from) + 1);
    enum image_lie lie = IMAGE_HONEST;
    if (number % LYING_EVERY == 0)
        lie = (enum image_lie)(1 + number / LYING_EVERY % (IMAGE_LIES - 1));
    struct image image;
    struct check check = {0};
    image_build(recorder, tick, lie, STACK_DIR, &random, &image);
    const bool lying = image.lie != IMAGE_HONEST;
    const uint64_t missing = number % CUT_EVERY == 3 ? cut(recorder, &image, &random) : 0;
    totals->cut += missing > 0;
    if (number % REAL_EVERY == REAL_EVERY - 1) {
        check_real(&check, work, recorder, &image, lying);
        totals->real++;
    } else {
        struct kv_manifest *manifest = mem_manifest_create();
        const kv_status status = image_manifest(recorder, &image, manifest);
        assert(status == KV_OK);
        if (missing > 0)
            check_cut(&check, work, image.disk, manifest, tick, missing);
        else
            check_twice(&check, work, image.disk, manifest, tick, lying);
        kv_manifest_close(manifest);
    }
    kv_disk_destroy(image.disk);
    totals->images++;
    totals->encrypted += world_encrypts();
    totals->lying += lying;
    if (lying) totals->refused_lying += check.refused;
    if (check_failures(&check) > 0) tell(totals, number, &image, recorder->tick, &check);
    add(&totals->check, &check);
}

static void run_stack(const struct options *options, struct stack *stack, struct work *work,
                      const struct work *before, uint64_t tick, struct ex_random *random)
{
    /* A failed save would give space back that this bug has given back already. */
    bool fails = ex_random_below(random, FAULT_EVERY) == 0;
    if (options->plant == KV_PLANT_FLUSH_IGNORED) fails = true; /* Shows in nothing else. */
    stack->faulty.armed = fails && options->plant != KV_PLANT_REUSE_BEFORE_DELETE;
    stack->faulty.fault = FAULT_EIO;
    stack->faulty.flushes = ex_random_percent(random, 67);
    stack->faulty.from = ex_random_below(random, FAULT_CALLS);
    const struct work_options how = {.disk = stack->disk,
                                     .manifest = stack->manifest,
                                     .recorder = stack->recorder,
                                     .faulty = &stack->faulty,
                                     .dir = STACK_DIR,
                                     .seed = ex_random_next(random),
                                     .rounds = options->idle ? 0 : ROUNDS};
    if (before == NULL) {
        work_run(work, &how);
    } else {
        work_resume(work, &how, before, tick);
    }
    assert(!work->stuck);
}

/* Images of a run: those of numbers first .. end - 1 that are asked for. */
static void run_images(const struct options *options, uint64_t first, uint64_t end,
                       const struct work *work, const struct stack *stack, uint64_t from,
                       struct totals *totals)
{
    for (uint64_t number = first; number < end; number++) {
        if (number >= options->first && number - options->first < options->count)
            run_image(options, number, work, stack->recorder, from, totals);
    }
    totals->runs++;
    for (uint32_t i = 0; i < FAULT_COUNT; i++)
        totals->faults += stack->faulty.fired[i];
}

/* A run, images of it, and then the power really goes: the store goes on from what is left, and
 * there are images of that. */
static void run_pair(const struct options *options, uint64_t pair, struct totals *totals)
{
    const uint64_t first = pair * IMAGES_PER_PAIR, middle = first + IMAGES_PER_PAIR / 2;
    struct stack stack, stack_after;
    struct work *work = malloc(sizeof(*work)), *work_after = malloc(sizeof(*work_after));
    struct ex_random random = {ex_mix(options->seed + (pair << 32))};
    struct image image;
    assert(work != NULL && work_after != NULL);
    world_encrypt(options->encrypt || pair % ENCRYPTED_EVERY == 2);
    stack_init(&stack, options->plant, mem_disk_create(STACK_DIR, ex_random_next(&random)));
    run_stack(options, &stack, work, NULL, 0, &random);
    run_images(options, first, middle, work, &stack, 1, totals);

    const uint64_t tick = ex_random_below(&random, (uint32_t)stack.recorder->tick + 1);
    image_build(stack.recorder, tick, IMAGE_HONEST, STACK_DIR, &random, &image);
    stack_init(&stack_after, options->plant, image.disk);
    const kv_status status = image_manifest(stack.recorder, &image, stack_after.recording_records);
    assert(status == KV_OK);
    const uint64_t from = stack_after.recorder->tick; /* What is left is there, and durable. */
    run_stack(options, &stack_after, work_after, work, tick, &random);
    run_images(options, middle, first + IMAGES_PER_PAIR, work_after, &stack_after, from, totals);
    stack_fini(&stack_after);
    stack_fini(&stack);
    free(work_after);
    free(work);
}

/* Images in which nothing was at stake prove nothing. */
static uint64_t judge_totals(const struct options *options, const struct totals *totals)
{
    uint64_t failures = totals->failures;
    if (options->expect_loss) return failures;
    if (options->one) return failures + (totals->images == 0);
    if (totals->check.acknowledged < totals->images) {
        (void)printf("too little was compared\n");
        failures++;
    }
    if (totals->images >= 100 && (totals->lying == 0 || totals->refused_lying == 0 ||
                                  totals->real == 0 || totals->faults == 0 || totals->cut == 0)) {
        (void)printf("no lie was met, no file was real, no record was gone, or no fault fired\n");
        failures++;
    }
    if (totals->images >= IMAGES_PER_PAIR * ENCRYPTED_EVERY && totals->encrypted == 0) {
        (void)printf("none was encrypted\n");
        failures++;
    }
    return failures;
}

int main(int argc, char **argv)
{
    struct options options = {.count = 500, .seed = 1};
    struct totals totals = {.images = 0};
    const uint64_t begun_ns = kv_clock_stopwatch_ns();
    options_parse("crashimage", argc, argv, &options);
    (void)printf("seed %llu, plant %s\n", (unsigned long long)options.seed,
                 plant_name(options.plant));
    for (uint64_t pair = options.first / IMAGES_PER_PAIR;
         pair * IMAGES_PER_PAIR < options.first + options.count; pair++)
        run_pair(&options, pair, &totals);
    const struct check *check = &totals.check;
    (void)printf("%llu runs, %llu faults fired, %llu lying disks with %llu pages refused, %llu on "
                 "real files, %llu without noted records, %llu encrypted, %.1f s\n",
                 (unsigned long long)totals.runs, (unsigned long long)totals.faults,
                 (unsigned long long)totals.lying, (unsigned long long)totals.refused_lying,
                 (unsigned long long)totals.real, (unsigned long long)totals.cut,
                 (unsigned long long)totals.encrypted,
                 (double)(kv_clock_stopwatch_ns() - begun_ns) / 1e9);
    (void)printf("%llu images, %llu acknowledged, %llu found, %llu lost, %llu torn, %llu wrong, "
                 "%llu undead, %llu uneven, %llu unopened, %llu alarms wrong\n",
                 (unsigned long long)totals.images, (unsigned long long)check->acknowledged,
                 (unsigned long long)check->found, (unsigned long long)check->lost,
                 (unsigned long long)check->torn, (unsigned long long)check->wrong,
                 (unsigned long long)check->undead, (unsigned long long)check->uneven,
                 (unsigned long long)check->unopened, (unsigned long long)check->alarms);
    return options_exit(&options, judge_totals(&options, &totals));
}
