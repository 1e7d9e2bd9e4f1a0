/*
 * A backend with memory of its own gives the bits of the CPU backend, through every kind of
 * movement; a copy that is forgotten is found.
 */

#include "tests/unit/engine_apart.h"
#include "tests/unit/engine_schedule.h"
#include "tests/unit/test_engine_fixture.h"

#include <signal.h>
#include <sys/wait.h>

static struct eng_model *open_with(const char *dir, const struct eng_backend_ops *ops,
                                   uint32_t pass_rows)
{
    const struct eng_options options = {.backend = ENG_BACKEND_CPU,
                                        .model_dir = dir,
                                        .spare_tokens = RIG_SPARE,
                                        .pass_rows = pass_rows};
    struct eng_model *model = NULL;
    EXPECT(eng_model_open_with(&options, ops, &model, NULL) == KV_OK);
    return model;
}

static uint8_t *apart_page_take(struct eng_model *model)
{
    return apart_take(apart_of(model), eng_model_layout(model)->page_bytes);
}

static void apart_page_give_back(struct eng_model *model, uint8_t *page)
{
}

static void apart_page_read(struct eng_model *model, const uint8_t *page, uint8_t *copy)
{
    apart_read(apart_of(model), page, copy, eng_model_layout(model)->page_bytes);
}

static const struct page_memory apart_pages = {
    .take = apart_page_take, .give_back = apart_page_give_back, .read = apart_page_read};

static void forget_tails(struct eng_session *session, uint32_t position, const uint8_t *tails)
{
}

static void forget_old_rows(struct eng_session *session, uint32_t layer, uint32_t first,
                            uint32_t count, const uint8_t *rows)
{
    const uint32_t bytes = session->model->layout.window_row_bytes;
    if (count > 1) apart_window_write(session, layer, first + 1, count - 1, rows + bytes);
}

/* The addresses really are closed to everybody else. */
static void test_memory_is_closed(const char *dir)
{
    struct eng_model *model = open_with(dir, &apart_ops, 0);
    const uint8_t *page = apart_page_take(model);
    int status = 0;
    const pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        (void)signal(SIGSEGV, SIG_DFL);
        _exit(memcmp(page, dir, 1));
    }
    EXPECT(waitpid(child, &status, 0) == child);
    EXPECT(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    eng_model_close(model);
}

int main(void)
{
    char dir[64];
    static const uint32_t sizes[] = {1, 24, 256};

    fixture_make_model(dir, 6);
    test_memory_is_closed(dir);
    struct eng_model *cpu = open_with(dir, &eng_backend_cpu, 1);
    struct reference *reference = reference_make(cpu, &host_pages, 3, false);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        struct eng_model *model = open_with(dir, &apart_ops, sizes[i]);
        EXPECT_EQ_U32(schedule_differing(reference, model, &apart_pages, 5 + i, false), 0);
        EXPECT(apart_of(model)->copies > 1000);
        eng_model_close(model);
    }
    for (int i = 0; i < 2; i++) {
        struct eng_backend_ops ops = apart_ops;
        if (i == 0) ops.tails_write = forget_tails;
        if (i == 1) ops.window_write = forget_old_rows;
        struct eng_model *model = open_with(dir, &ops, 24);
        EXPECT(schedule_differing(reference, model, &apart_pages, 6, false) > 0);
        eng_model_close(model);
    }
    free(reference);
    eng_model_close(cpu);
    fixture_remove_model(dir);
    HARNESS_END();
}
