/*
 * What goes into a pass.
 *
 * Goal: a step is in every pass, nobody starves, users share fairly, a pass is never too large nor
 * emptier than it must be.
 * Method: a model of the worker (jobs that shrink by what they were given) with a judge that looks
 * at every pass; named cases with exact numbers; random crowds.  Planners with planted errors must
 * not get past the same judge.
 */

#include "cached/worker/batch.h"

#include "kvstore/base/bytes.h"
#include "tests/harness.h"

enum { JOBS_MAX = 600 };

struct sim {
    struct batch batch;
    struct batch_user users[JOBS_MAX];
    struct batch_job jobs[JOBS_MAX];
    bool present[JOBS_MAX];
    uint32_t waited[JOBS_MAX]; /* Passes since the job last got a row. */
    uint32_t count;
    uint32_t pass_encode, pass_decode; /* Rows of prefills in the last pass. */
    void (*plant)(struct sim *sim);
    const char *wrong; /* First rule that was broken. */
};

static struct sim *sim_open(uint32_t pass_rows, uint32_t chunk_tokens)
{
    struct sim *sim = calloc(1, sizeof(*sim));
    EXPECT(sim != NULL);
    batch_init(&sim->batch, pass_rows, chunk_tokens, sim->users, JOBS_MAX);
    return sim;
}

static struct kv_user_id user_id(uint32_t user)
{
    struct kv_user_id id = {{(uint8_t)user, (uint8_t)(user >> 8), 1}};
    return id;
}

static uint32_t sim_add(struct sim *sim, uint32_t user, bool is_step, uint32_t encode,
                        uint32_t decode)
{
    const uint32_t i = sim->count++;
    EXPECT(i < JOBS_MAX);
    sim->jobs[i] = (struct batch_job){
        .user = user_id(user), .is_step = is_step, .encode = encode, .decode = decode};
    sim->present[i] = true;
    batch_add(&sim->batch, &sim->jobs[i]);
    return i;
}

static void sim_remove(struct sim *sim, uint32_t i)
{
    batch_remove(&sim->batch, &sim->jobs[i]);
    batch_remove(&sim->batch, &sim->jobs[i]); /* Twice is fine. */
    sim->present[i] = false;
}

/* ---- the judge ---- */

static void claim(struct sim *sim, bool ok, const char *rule)
{
    if (!ok && sim->wrong == NULL) sim->wrong = rule;
}

struct sums {
    uint32_t steps, steps_served, prefills;
    uint32_t step_rows, encode, decode;
    bool encode_wanted, decode_wanted; /* By a prefill that got less. */
};

static struct sums add_up(struct sim *sim)
{
    struct sums sums = {0};
    for (uint32_t i = 0; i < sim->count; i++) {
        const struct batch_job *job = &sim->jobs[i];
        if (!sim->present[i]) continue;
        claim(sim, job->take_encode <= job->encode && job->take_decode <= job->decode,
              "nobody gets more than it needs");
        if (job->is_step) {
            claim(sim, job->take_encode == job->take_decode, "a step is whole");
            sums.steps++;
            sums.steps_served += job->take_encode > 0;
            sums.step_rows += job->take_encode;
            continue;
        }
        claim(sim, job->take_decode == 0 || job->take_encode == job->encode,
              "decoder rows come behind the last encoder row");
        sums.prefills++;
        sums.encode += job->take_encode;
        sums.decode += job->take_decode;
        sums.encode_wanted |= job->take_encode < job->encode;
        sums.decode_wanted |= job->take_encode == job->encode && job->take_decode < job->decode;
    }
    return sums;
}

static uint32_t users_of(const struct sim *sim)
{
    uint32_t count = 0;
    for (const struct batch_user *user = sim->batch.ring_first; user != NULL; user = user->next)
        count++;
    return count;
}

static void judge(struct sim *sim)
{
    const struct sums sums = add_up(sim);
    const uint32_t rows = sim->batch.pass_rows;
    const uint32_t chunk = sim->batch.chunk_tokens;
    const uint32_t room = sums.prefills == 0 ? rows : rows - KV_MIN(chunk, KV_MAX(rows / 4, 1u));

    claim(sim, sums.step_rows + sums.encode <= rows, "encoder rows fit the pass");
    claim(sim, sums.step_rows + sums.decode <= rows, "decoder rows fit the pass");
    claim(sim, sums.steps_served == KV_MIN(sums.steps, room), "every step is in the pass");
    claim(sim, sums.steps == 0 || (sums.encode <= chunk && sums.decode <= chunk),
          "a step waits one chunk at most");
    claim(sim, sums.prefills == 0 || sums.encode + sums.decode > 0, "some prefill goes on");

    /* Nothing left free that somebody could use: one user fills its chunk, two fill the pass. */
    const uint32_t share = sums.steps > 0 || users_of(sim) <= 1 ? chunk : 2 * chunk;
    const uint32_t most = KV_MIN(rows - sums.step_rows, share);
    claim(sim,
          !sums.encode_wanted || users_of(sim) > 1 || sums.encode == most || sums.decode == most,
          "the pass is filled");
    sim->pass_encode = sums.encode;
    sim->pass_decode = sums.decode;
    for (uint32_t i = 0; i < sim->count; i++) {
        if (!sim->present[i]) continue;
        const bool got = sim->jobs[i].take_encode + sim->jobs[i].take_decode > 0;
        /* Steps and users take turns: nobody is passed over more often than there are others. */
        const bool front = sim->jobs[i].is_step || sim->jobs[i].prev == NULL;
        sim->waited[i] = got || !front ? 0 : sim->waited[i] + 1;
        claim(sim, sim->waited[i] <= 2 + sim->count, "nobody starves");
    }
}

/* One pass: plan, judge, compute.  Jobs that are done leave. */
static void sim_pass(struct sim *sim)
{
    EXPECT(batch_plan(&sim->batch));
    if (sim->plant != NULL) sim->plant(sim);
    judge(sim);
    for (uint32_t i = 0; i < sim->count; i++) {
        struct batch_job *job = &sim->jobs[i];
        if (!sim->present[i] || job->is_step) continue;
        job->encode -= job->take_encode;
        job->decode -= job->take_decode;
        if (job->encode == 0 && job->decode == 0) sim_remove(sim, i);
    }
}

static void sim_close(struct sim *sim)
{
    if (sim->wrong != NULL) (void)fprintf(stderr, "broken: %s\n", sim->wrong);
    EXPECT(sim->wrong == NULL);
    free(sim);
}

/* ---- cases ---- */

static void test_alone(void)
{
    struct sim *sim = sim_open(256, 128);
    EXPECT(batch_is_empty(&sim->batch));
    EXPECT(!batch_plan(&sim->batch));
    const uint32_t job = sim_add(sim, 1, false, 300, 128);
    EXPECT(!batch_is_empty(&sim->batch));
    sim_pass(sim);
    EXPECT_EQ_U32(sim->jobs[job].encode, 300 - 128);
    sim_pass(sim);
    EXPECT_EQ_U32(sim->jobs[job].encode, 44);
    EXPECT_EQ_U32(sim->jobs[job].decode, 128);
    sim_pass(sim); /* The rest of the encoder, and the decoder behind it. */
    EXPECT(!sim->present[job]);
    EXPECT(batch_is_empty(&sim->batch));
    sim_close(sim);
}

/* One user with ten long prompts, another with a short turn. */
static void test_two_users(bool decodes)
{
    struct sim *sim = sim_open(256, 128);
    for (uint32_t i = 0; i < 10; i++)
        (void)sim_add(sim, 1, false, 8192, 128);
    if (decodes) (void)sim_add(sim, 3, true, 1, 1);
    for (uint32_t i = 0; i < 7; i++)
        sim_pass(sim);
    EXPECT_EQ_U32(sim->jobs[0].encode, 8192 - 7 * 128);
    EXPECT_EQ_U32(sim->jobs[1].encode, 8192); /* First come, first served. */

    /* It comes while a pass of the other computes: that is the first chunk. */
    uint32_t before = sim->pass_encode;
    EXPECT_EQ_U32(before, 128);
    const uint32_t turn = sim_add(sim, 2, false, 50, 50);
    const uint32_t others = sim->jobs[0].encode;
    while (sim->present[turn])
        sim_pass(sim);
    before += others - sim->jobs[0].encode;
    (void)printf("  a turn of 50 tokens waited for %u rows of somebody else\n", before);
    EXPECT(before <= 2 * 128);
    sim_close(sim);
}

static void test_long_prompts_share(void)
{
    struct sim *sim = sim_open(512, 128);
    for (uint32_t user = 0; user < 4; user++)
        for (uint32_t i = 0; i <= user; i++)
            (void)sim_add(sim, user, false, 4096, 128);
    (void)sim_add(sim, 9, true, 1, 1);
    for (uint32_t i = 0; i < 50; i++)
        sim_pass(sim);
    /* 50 passes of 128 rows: 1,600 rows each, however many prompts they have. */
    for (uint32_t user = 0, at = 0; user < 4; at += ++user) {
        const uint32_t got = 4096 - sim->jobs[at].encode;
        EXPECT(got >= 1600 - 16 && got <= 1600 + 16);
    }
    sim_close(sim);
}

static void test_replays_fill_a_pass(void)
{
    /* Sixteen expired sessions of one user, window 16: eight a pass of 128. */
    struct sim *sim = sim_open(256, 128);
    for (uint32_t i = 0; i < 16; i++)
        (void)sim_add(sim, 1, false, 16, 16);
    sim_pass(sim);
    EXPECT_EQ_U32(sim->pass_encode, 128);
    EXPECT_EQ_U32(sim->pass_decode, 128);
    sim_pass(sim);
    EXPECT(batch_is_empty(&sim->batch));
    sim_close(sim);

    /* Of sixteen users, window 128: the pass is as large as it may be. */
    sim = sim_open(2048, 128);
    for (uint32_t i = 0; i < 16; i++)
        (void)sim_add(sim, i, false, 128, 128);
    sim_pass(sim);
    EXPECT_EQ_U32(sim->pass_encode, 2048);
    EXPECT(batch_is_empty(&sim->batch));
    sim_close(sim);
}

static void test_drafts(void)
{
    struct sim *sim = sim_open(16, 8);
    const uint32_t first = sim_add(sim, 1, true, 6, 6);
    const uint32_t second = sim_add(sim, 2, true, 6, 6);
    const uint32_t third = sim_add(sim, 3, true, 6, 6);
    sim_pass(sim);
    EXPECT_EQ_U32(sim->jobs[first].take_encode, 6);
    EXPECT_EQ_U32(sim->jobs[second].take_encode, 6);
    EXPECT_EQ_U32(sim->jobs[third].take_encode, 4);
    (void)sim_add(sim, 4, false, 100, 16);
    sim_pass(sim); /* A quarter is kept for it. */
    EXPECT_EQ_U32(sim->jobs[first].take_encode, 6);
    EXPECT_EQ_U32(sim->jobs[second].take_encode, 5);
    EXPECT_EQ_U32(sim->jobs[third].take_encode, 1);
    EXPECT_EQ_U32(sim->pass_encode, 4);
    sim_close(sim);
}

static void test_more_steps_than_room(void)
{
    struct sim *sim = sim_open(16, 8);
    uint32_t served[50] = {0};
    for (uint32_t i = 0; i < 50; i++)
        (void)sim_add(sim, i, true, 1, 1);
    (void)sim_add(sim, 99, false, 4000, 16);
    for (uint32_t pass = 0; pass < 100; pass++) {
        sim_pass(sim);
        EXPECT_EQ_U32(sim->pass_encode, 4);
        for (uint32_t i = 0; i < 50; i++)
            served[i] += sim->jobs[i].take_encode;
    }
    for (uint32_t i = 0; i < 50; i++)
        EXPECT_EQ_U32(served[i], 12 * 100 / 50);
    for (uint32_t i = 0; i < 50; i += 2)
        sim_remove(sim, i);
    sim_pass(sim);
    sim_close(sim);
}

/* Crowds that come and go; every pass is judged. */
static void crowd(struct sim *sim, uint64_t seed, uint32_t passes)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (uint32_t pass = 0; pass < passes; pass++) {
        for (uint32_t i = 0; i < 3; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            const uint32_t draw = (uint32_t)(state >> 33);
            if (sim->count == JOBS_MAX) continue;
            if (draw % 7 == 0) (void)sim_add(sim, draw % 11, true, 1 + draw % 5, 1 + draw % 5);
            if (draw % 7 == 1) (void)sim_add(sim, draw % 5, false, 1 + draw % 900, 1 + draw % 128);
            if (draw % 7 == 2) (void)sim_add(sim, draw % 13, false, 128, 128);
            const uint32_t gone = draw % (sim->count + 1);
            if (draw % 5 == 0 && gone < sim->count && sim->present[gone]) sim_remove(sim, gone);
        }
        if (!batch_is_empty(&sim->batch)) sim_pass(sim);
    }
}

static void test_crowds(void)
{
    static const uint32_t sizes[][2] = {{2, 1}, {3, 3}, {16, 8}, {64, 64}, {256, 128}, {1024, 128}};
    const uint64_t rounds = harness_count(20);
    for (uint64_t seed = 0; seed < rounds; seed++) {
        for (uint32_t i = 0; i < KV_ARRAY_COUNT(sizes); i++) {
            struct sim *sim = sim_open(sizes[i][0], sizes[i][1]);
            crowd(sim, seed, 400);
            sim_close(sim);
        }
    }
}

/* With nobody new everything ends, in the number of passes the rows need and a little more. */
static void test_no_starvation(void)
{
    struct sim *sim = sim_open(64, 16);
    uint32_t rows = 0;
    for (uint32_t i = 0; i < 300; i++) {
        (void)sim_add(sim, i % 37, false, 1 + i * 7 % 200, 1 + i % 16);
        rows += 1 + i * 7 % 200;
    }
    (void)sim_add(sim, 50, true, 1, 1);
    uint32_t passes = 0;
    while (sim->batch.ring_first != NULL) {
        sim_pass(sim);
        EXPECT(++passes <= rows / 16 + rows / 64 + 400);
    }
    sim_close(sim);
}

/* ---- planted errors ---- */

static struct batch_job *some_job(struct sim *sim, bool is_step)
{
    for (uint32_t i = 0; i < sim->count; i++)
        if (sim->present[i] && sim->jobs[i].is_step == is_step) return &sim->jobs[i];
    return NULL;
}

static void plant_no_step(struct sim *sim)
{
    struct batch_job *job = some_job(sim, true);
    if (job != NULL) job->take_encode = job->take_decode = 0;
}

static void plant_decoder_first(struct sim *sim)
{
    struct batch_job *job = some_job(sim, false);
    if (job != NULL && job->decode > 0 && job->encode > job->take_encode) job->take_decode = 1;
}

static void plant_all_of_it(struct sim *sim)
{
    struct batch_job *job = some_job(sim, false);
    if (job != NULL) job->take_encode = job->encode;
}

static void plant_more_than_needed(struct sim *sim)
{
    struct batch_job *job = some_job(sim, false);
    if (job != NULL) job->take_encode = job->encode + 1;
}

static void plant_starve(struct sim *sim)
{
    const struct batch_user *user = sim->batch.ring_first;
    for (; user != NULL; user = user->next)
        if (user->id.bytes[0] == 2)
            for (struct batch_job *job = user->jobs.first; job != NULL; job = job->next)
                job->take_encode = job->take_decode = 0;
}

static void plant_half_a_step(struct sim *sim)
{
    struct batch_job *job = some_job(sim, true);
    if (job != NULL) job->take_decode = 0;
}

static void test_plants(void)
{
    static void (*const plants[])(struct sim *) = {plant_no_step,          plant_decoder_first,
                                                   plant_all_of_it,        plant_starve,
                                                   plant_more_than_needed, plant_half_a_step};
    for (uint32_t i = 0; i < KV_ARRAY_COUNT(plants); i++) {
        struct sim *sim = sim_open(64, 32);
        sim->plant = plants[i];
        (void)sim_add(sim, 2, false, 800, 16);
        (void)sim_add(sim, 3, false, 100000, 16);
        (void)sim_add(sim, 4, true, 1, 1);
        for (uint32_t pass = 0; pass < 20 && sim->wrong == NULL; pass++)
            sim_pass(sim);
        (void)printf("  planted error %u: %s\n", i, sim->wrong == NULL ? "missed" : sim->wrong);
        EXPECT(sim->wrong != NULL);
        free(sim);
    }
}

int main(void)
{
    test_alone();
    test_two_users(false);
    test_two_users(true);
    test_long_prompts_share();
    test_replays_fill_a_pass();
    test_drafts();
    test_more_steps_than_room();
    test_crowds();
    test_no_starvation();
    test_plants();
    HARNESS_END();
}
