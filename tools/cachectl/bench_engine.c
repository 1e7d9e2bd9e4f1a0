/*
 * Models, sessions and runs for the benchmarks of the engine.
 *
 * Passes are filled the way the daemon fills them: every session's next rows, as many as fit.
 */

#include "tools/cachectl/bench_engine.h"

#include "kvstore/base/bytes.h"
#include "kvstore/base/clock.h"
#include "kvstore/base/limits.h"
#include "tools/cachectl/spawn.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

double bench_now(void)
{
    return (double)kv_clock_stopwatch_ns() * 1e-9;
}

const char *bench_tmp_dir(void)
{
    const char *tmp = getenv("TMPDIR");
    return tmp != NULL && tmp[0] != '\0' ? tmp : "/tmp";
}

static bool go_on(void *progress)
{
    return bench_go_on(progress);
}

/* False: it failed, with the sentence printed. */
static bool run_to_end(struct bench_progress *progress, char *const argv[])
{
    int status = 0;
    const pid_t pid = spawn_tool(argv);

    if (pid == 0) {
        ctl_error("cannot start %s", argv[0]);
    } else if (!spawn_wait(pid, go_on, progress, &status)) {
        ctl_error("cannot wait for %s: %s", argv[0], strerror(errno));
    } else if (spawn_interrupted()) {
        return false;
    } else if (WIFSIGNALED(status)) {
        ctl_error("%s was ended by signal %d", argv[0], WTERMSIG(status));
    } else if (WEXITSTATUS(status) != 0) {
        ctl_error("%s ended with code %d", argv[0], WEXITSTATUS(status));
    } else {
        return true;
    }
    return false;
}

int bench_model_dir_make(struct bench_progress *progress,
                         const struct bench_engine_options *options,
                         struct bench_model_dir *ret_dir)
{
    char tool[1024], quiet[] = "--config", name[] = "small", seed[] = "--seed", one[] = "1";

    *ret_dir = (struct bench_model_dir){.made = options->model_dir == NULL};
    if (options->model_dir != NULL) {
        if (strlen(options->model_dir) < sizeof(ret_dir->path)) {
            (void)snprintf(ret_dir->path, sizeof(ret_dir->path), "%s", options->model_dir);
            progress->doing = "opening the model";
            return CLIENT_EXIT_OK;
        }
        ctl_error("--model: at most %zu bytes", sizeof(ret_dir->path) - 1);
        return CLIENT_EXIT_USAGE;
    }
    (void)snprintf(ret_dir->path, sizeof(ret_dir->path), "%.120s/cachectl.XXXXXX", bench_tmp_dir());
    if (!spawn_self_path("mkmodel", tool, sizeof(tool)) || access(tool, X_OK) != 0) {
        ctl_error("no mkmodel beside cachectl: give --model DIR");
        ret_dir->made = false;
        return CLIENT_EXIT_NOT_FOUND;
    }
    if (mkdtemp(ret_dir->path) == NULL) {
        ctl_error("cannot make the directory %s: %s", ret_dir->path, strerror(errno));
        ret_dir->made = false;
        return CLIENT_EXIT_FAILED;
    }
    progress->doing = "making the model";
    bench_say(progress, "making the model `small` in %s", ret_dir->path);
    char flag[32] = "";
    if (options->make_flag != NULL) (void)snprintf(flag, sizeof(flag), "%s", options->make_flag);
    char *const argv[] = {
        tool, quiet, name, seed, one, ret_dir->path, flag[0] != '\0' ? flag : NULL, NULL};
    if (run_to_end(progress, argv)) {
        progress->doing = "opening the model";
        return CLIENT_EXIT_OK;
    }
    bench_model_dir_drop(ret_dir);
    ret_dir->made = false;
    return CLIENT_EXIT_FAILED;
}

void bench_model_dir_drop(struct bench_model_dir *dir)
{
    char path[BENCH_DIR_BYTES + 260];
    DIR *list = dir->made ? opendir(dir->path) : NULL;
    if (list == NULL) return;

    for (struct dirent *entry = readdir(list); entry != NULL; entry = readdir(list)) {
        (void)snprintf(path, sizeof(path), "%s/%s", dir->path, entry->d_name);
        (void)unlink(path);
    }
    (void)closedir(list);
    (void)rmdir(dir->path);
}

struct eng_model *bench_model_open(const struct bench_model_dir *dir, uint32_t threads,
                                   bool prefill_all)
{
    const struct eng_options options = {
        .backend = ENG_BACKEND_CPU,
        .model_dir = dir->path,
        .spare_tokens = KV_SPARE_TOKENS_MIN,
        .threads = threads,
        .prefill_all = prefill_all,
    };
    struct eng_model *model = NULL;
    struct kv_error err = {0};

    if (spawn_interrupted()) return NULL; /* Opening reads all weights. */
    if (eng_model_open(&options, &model, &err) == KV_OK) return model;
    ctl_error("%s", err.text);
    return NULL;
}

uint64_t bench_session_page_bytes(const struct bench_session *own)
{
    return (uint64_t)own->page_count * eng_model_layout(own->model)->page_bytes;
}

bool bench_session_init(struct bench_session *own, struct eng_model *model, uint32_t tokens,
                        bool all_layers, struct bench_progress *progress)
{
    const size_t page_bytes = eng_model_layout(model)->page_bytes;
    const uint32_t context = eng_model_layout(model)->context_tokens;
    struct kv_error err = {0};

    if (tokens > context) {
        *own = (struct bench_session){0};
        ctl_error("a session of %u tokens, the model takes at most %u (max_position_embeddings)",
                  tokens, context);
        return false;
    }
    *own = (struct bench_session){.model = model,
                                  .page_count = kv_pages_for(tokens),
                                  .all_layers = all_layers,
                                  .progress = progress};
    own->memory = aligned_alloc(KV_IO_ALIGN, own->page_count * page_bytes);
    own->pages = calloc(own->page_count, sizeof(*own->pages));
    if (own->memory == NULL || own->pages == NULL ||
        eng_session_create(model, &own->session, &err) != KV_OK) {
        ctl_error("no memory for a session of %u tokens", tokens);
        bench_session_fini(own);
        return false;
    }
    memset(own->memory, 0, own->page_count * page_bytes);
    for (uint32_t i = 0; i < own->page_count; i++)
        own->pages[i] = own->memory + i * page_bytes;
    bench_session_reset(own);
    return true;
}

void bench_session_fini(struct bench_session *own)
{
    eng_session_destroy(own->session);
    free(own->memory);
    free(own->pages);
    *own = (struct bench_session){0};
}

void bench_session_reset(struct bench_session *own)
{
    eng_session_reset(own->session);
    eng_session_set_pages(own->session, own->pages, own->page_count);
}

void bench_session_copy(struct bench_session *to, const struct bench_session *from)
{
    assert(to->model == from->model && to->page_count >= from->page_count);
    memcpy(to->memory, from->memory, bench_session_page_bytes(from));
    eng_session_copy(to->session, from->session);
    eng_session_set_pages(to->session, to->pages, to->page_count);
}

/* What `session` may do in a pass that has `encode` and `decode` rows left. */
static struct eng_piece piece_of(const struct bench_session *own, uint32_t encode, uint32_t decode)
{
    const struct eng_run_left left = eng_run_left(own->session);
    struct eng_piece piece = {.session = own->session, .encode = KV_MIN(left.encode, encode)};
    const uint32_t encode_after = left.encode - piece.encode;

    if (own->all_layers) {
        piece.decode = KV_MIN(left.decode - encode_after, decode);
        piece.encode = KV_MIN(piece.encode, piece.decode);
    } else if (encode_after == 0) {
        piece.decode = KV_MIN(left.decode, decode);
    }
    return piece;
}

bool bench_finish_runs(struct bench_session *const *sessions, uint32_t count)
{
    struct eng_model *model = sessions[0]->model;
    struct eng_piece pieces[64];
    uint32_t used;
    assert(count <= KV_ARRAY_COUNT(pieces));

    do {
        uint32_t encode = eng_model_pass_rows(model), decode = encode;
        used = 0;
        for (uint32_t i = 0; i < count; i++) {
            const struct eng_piece piece = piece_of(sessions[i], encode, decode);
            if (piece.encode == 0 && piece.decode == 0) continue;
            pieces[used++] = piece;
            encode -= piece.encode;
            decode -= piece.decode;
        }
        if (used > 0) eng_pass(model, pieces, used);
        if (!bench_go_on(sessions[0]->progress)) return false;
    } while (used > 0);
    return true;
}

void bench_ids(const struct eng_model *model, uint32_t seed, uint32_t *ids, uint32_t count)
{
    const uint32_t vocab = eng_model_layout(model)->vocab_tokens;
    uint64_t state = seed;

    for (uint32_t i = 0; i < count; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        ids[i] = 3 + (uint32_t)(state >> 33) % (vocab - 5);
    }
}
