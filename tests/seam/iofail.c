/*
 * Every call to the disk fails, one run after the other.
 *
 * Goal: whatever call fails, and however, nothing that was acknowledged is lost, no byte is wrong,
 * space adds up, and a failed flush is the last one of its file.
 * Method: the real store runs a fixed script on a disk in memory (stack.h).  A first run counts its
 * calls; then call N fails, for every N asked for, with each error, once and from then on; and lies
 * (faulty.h) once.  Each run is judged by what the store said, by a restart without faults, and by
 * a power cut at its end.
 *
 * Case K is way K % 17 of call 1 + K / 17; beyond the last call it goes on with the next seed.
 *
 * usage: iofail [--every N] [--from CALL] [--seed S] [--encrypt] [--plant NAME] [--expect-loss]
 *        iofail --first K --count N ..., iofail --case K ...
 */

#include "kvstore/base/clock.h"
#include "tests/seam/check.h"
#include "tests/seam/image.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/mem_manifest.h"
#include "tests/seam/options.h"
#include "tests/seam/stack.h"
#include "tests/seam/world.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS 40u
#define TOLD_MAX 5u
/* Per call: each error once and for ever, each lie once. */
#define WAYS (2u * FAULT_ERRORS + (FAULT_COUNT - FAULT_ERRORS))

struct totals {
    struct check check;
    uint64_t cases, failures, losses, saves, saves_refused, restores;
    uint64_t fired[FAULT_COUNT];
};

struct plan {
    uint64_t number; /* The case. */
    uint64_t seed;
    uint64_t call;
    enum fault fault;
    bool for_ever;
};

/* No flush of a file follows one that failed, until the store is opened anew. */
static bool flushed_again(const struct recorder *recorder, uint64_t restarted)
{
    for (uint32_t i = 0; i < recorder->event_count; i++) {
        const struct record_event *failed = &recorder->events[i];
        if (failed->kind != RECORD_CALL || failed->verb != KV_DISK_SYNC || failed->result == 0)
            continue;
        for (uint32_t j = i + 1; j < recorder->event_count; j++) {
            const struct record_event *event = &recorder->events[j];
            const bool same_run = (failed->begun < restarted) == (event->begun < restarted);
            if (event->kind == RECORD_CALL && event->verb == KV_DISK_SYNC && same_run &&
                event->file == failed->file && event->begun > failed->ended)
                return true;
        }
    }
    return false;
}

/* What the store said while it ran; NULL: as it should. */
static const char *judge_run(const struct plan *plan, const struct work *work,
                             const struct stack *stack)
{
    const struct faulty *faulty = &stack->faulty;
    const bool lies = plan->fault >= FAULT_DROP;
    const bool transient = plan->fault == FAULT_EINTR || plan->fault == FAULT_EAGAIN ||
                           plan->fault == FAULT_SHORT_WRITE || plan->fault == FAULT_SHORT_READ;
    const bool passing =
        transient && !plan->for_ever && !faulty->fired_sync && faulty->fired_call != KV_DISK_SYNC;
    if (work->stuck) return "something never ended";
    if (work->uneven) return "space in use is not what the records say";
    if (work->wrong > 0) return "a restore gave other bytes than were saved";
    if (work->damaged > 0 && !lies) return "a restore found a page damaged";
    /* Of a superblock that was never written nothing can be said. */
    if (work->open_status != KV_OK && work->open_status != KV_IO &&
        !(lies && work->open_status == KV_CORRUPT))
        return "the store did not open, and did not say KV_IO";
    if (lies || plan->call == 0) return NULL;
    if (faulty->fired_sync && !work->read_only) return "a flush failed and saves go on";
    if (faulty->fired_write && !transient && !work->read_only)
        return "a write failed and saves go on";
    if (flushed_again(stack->recorder, work->restarted))
        return "a file was flushed again after a failure";
    if (passing && (work->saves_failed > 0 || work->pages_missed > 0 || work->open_status != KV_OK))
        return "an error that passes was not survived";
    return NULL;
}

static void judge_disk(struct check *check, const struct plan *plan, const struct work *work,
                       struct stack *stack)
{
    const uint64_t tick = stack->recorder->tick;
    const bool lies = plan->fault >= FAULT_DROP && plan->call > 0;
    if (!lies) {
        struct ex_random random = {ex_mix(work->options.seed ^ plan->number)};
        struct image image;
        struct kv_manifest *manifest = mem_manifest_create();
        image_build(stack->recorder, tick, IMAGE_HONEST, STACK_DIR, &random, &image);
        const kv_status status = image_manifest(stack->recorder, &image, manifest);
        assert(status == KV_OK);
        check_store(check, work, image.disk, manifest, tick, false);
        kv_manifest_close(manifest);
        kv_disk_destroy(image.disk);
    }
    check_store(check, work, stack->memory, stack->records, tick, lies);
}

/* Returns the calls of the run. */
static uint64_t run_case(const struct options *options, const struct plan *plan,
                         struct totals *totals)
{
    struct stack stack;
    struct work *work = malloc(sizeof(*work));
    assert(work != NULL);
    stack_init(&stack, options->plant, mem_disk_create(STACK_DIR, ex_mix(plan->seed)));
    stack.faulty.armed = plan->call > 0;
    stack.faulty.fault = plan->fault;
    stack.faulty.from = plan->call;
    stack.faulty.for_ever = plan->for_ever;
    work_run(work, &(struct work_options){.disk = stack.disk,
                                          .manifest = stack.manifest,
                                          .recorder = stack.recorder,
                                          .faulty = &stack.faulty,
                                          .dir = STACK_DIR,
                                          .seed = plan->seed,
                                          .rounds = options->idle ? 0 : ROUNDS});
    stack.faulty.armed = false;

    struct check check = {0};
    const char *said = judge_run(plan, work, &stack);
    if (!work->stuck) judge_disk(&check, plan, work, &stack);
    const uint64_t failures = check_failures(&check) + (said != NULL);
    const bool lost = check.first[0] != '\0';
    if (failures > 0 && (totals->failures < TOLD_MAX || (lost && totals->losses < TOLD_MAX)))
        (void)printf("case %llu, call %llu, %s%s: %s%s%s\n", (unsigned long long)plan->number,
                     (unsigned long long)plan->call, fault_name(plan->fault),
                     plan->for_ever ? " for ever" : "", said == NULL ? "" : said,
                     said == NULL || check.first[0] == '\0' ? "" : "; ", check.first);
    totals->cases++;
    totals->failures += failures > 0;
    totals->losses += lost;
    totals->saves += work->saves;
    totals->saves_refused += work->saves_failed;
    totals->restores += work->restores;
    for (uint32_t i = 0; i < FAULT_COUNT; i++)
        totals->fired[i] += stack.faulty.fired[i];
    totals->check.acknowledged += check.acknowledged;
    totals->check.found += check.found;
    totals->check.lost += check.lost;
    totals->check.torn += check.torn;
    totals->check.wrong += check.wrong + work->wrong;
    totals->check.undead += check.undead;
    const uint64_t calls = stack.faulty.calls;
    if (work->stuck) exit(EXIT_FAILURE); /* What is in flight cannot be taken down. */
    stack_fini(&stack);
    free(work);
    return calls;
}

static void run_number(const struct options *options, uint64_t calls, uint64_t number,
                       struct totals *totals)
{
    const uint32_t way = (uint32_t)(number % WAYS);
    const uint64_t call = number / WAYS;
    const bool for_ever = way >= FAULT_COUNT;
    (void)run_case(options,
                   &(struct plan){.number = number,
                                  .seed = options->seed + call / calls,
                                  .call = 1 + call % calls,
                                  .fault = (enum fault)(for_ever ? way - FAULT_COUNT : way),
                                  .for_ever = for_ever},
                   totals);
}

static void run_all(const struct options *options, uint64_t calls, struct totals *totals)
{
    if (options->every == 0) {
        for (uint64_t i = 0; i < options->count; i++)
            run_number(options, calls, options->first + i, totals);
        return;
    }
    for (uint64_t call = options->from; call <= calls; call += options->every) {
        for (uint32_t way = 0; way < WAYS; way++)
            run_number(options, calls, (call - 1) * WAYS + way, totals);
    }
}

/* A run in which nothing was tried is none. */
static uint64_t judge_totals(const struct options *options, const struct totals *totals)
{
    uint64_t failures = totals->failures;
    if (options->expect_loss) return failures;
    if (totals->check.acknowledged < totals->cases) {
        (void)printf("too little was compared\n");
        failures++;
    }
    uint64_t fired = 0;
    for (uint32_t i = 0; i < FAULT_COUNT; i++) {
        fired += totals->fired[i];
        if (totals->fired[i] > 0 || options->every == 0) continue;
        (void)printf("no %s ever happened\n", fault_name((enum fault)i));
        failures++;
    }
    /* Some wait for a call that does not come any more. */
    if (fired < totals->cases / 2) {
        (void)printf("too few faults happened\n");
        failures++;
    }
    return failures;
}

int main(int argc, char **argv)
{
    struct options options = {.every = 20, .from = 1, .seed = 1};
    struct totals totals = {.cases = 0}, without = {.cases = 0};
    const uint64_t begun_ns = kv_clock_stopwatch_ns();
    options_parse("iofail", argc, argv, &options);
    world_encrypt(options.encrypt);

    const uint64_t calls = run_case(&options, &(struct plan){.seed = options.seed}, &without);
    (void)printf("seed %llu, plant %s: %llu calls without faults, %llu checkpoints saved, %llu "
                 "restored\n",
                 (unsigned long long)options.seed, plant_name(options.plant),
                 (unsigned long long)calls, (unsigned long long)without.saves,
                 (unsigned long long)without.restores);
    if (without.saves_refused > 0 || without.failures > 0) {
        (void)printf("it refused %llu saves, and failed %llu times\n",
                     (unsigned long long)without.saves_refused,
                     (unsigned long long)without.failures);
        return EXIT_FAILURE;
    }
    run_all(&options, calls, &totals);
    for (uint32_t i = 0; i < FAULT_COUNT; i++)
        (void)printf("  %-14s %6llu fired\n", fault_name((enum fault)i),
                     (unsigned long long)totals.fired[i]);
    (void)printf("%llu cases, %llu saves, %llu refused, %llu acknowledged, %llu found, %llu lost, "
                 "%llu torn, %llu wrong, %llu undead, %llu failed cases, %.1f s\n",
                 (unsigned long long)totals.cases, (unsigned long long)totals.saves,
                 (unsigned long long)totals.saves_refused,
                 (unsigned long long)totals.check.acknowledged,
                 (unsigned long long)totals.check.found, (unsigned long long)totals.check.lost,
                 (unsigned long long)totals.check.torn, (unsigned long long)totals.check.wrong,
                 (unsigned long long)totals.check.undead, (unsigned long long)totals.failures,
                 (double)(kv_clock_stopwatch_ns() - begun_ns) / 1e9);
    return options_exit(&options, judge_totals(&options, &totals));
}
