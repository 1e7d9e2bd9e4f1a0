/*
 * `cachectl bench resume`: what a turn of 50 new tokens costs, by how the session comes back.
 *
 * live    the session never left memory.
 * EXACT   its pages and its window image are read from files with O_DIRECT, then 50 tokens.
 * REPLAY  its pages are there, its windows are not: the last window of tokens is run again.
 *
 * Each way ends in the same place, and EXACT with the same bits as live, which is checked.
 */

#include "kvstore/base/bytes.h"
#include "kvstore/base/limits.h"
#include "kvstore/format/image.h"
#include "tools/cachectl/bench_list.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NEW_TOKENS 50u
#define READ_BYTES (1u << 20)

/* One context length.  Owned by: bench_resume(). */
struct resume {
    struct bench_session kept; /* Stands at `tokens`; copied, never run. */
    struct bench_session work;
    uint32_t tokens;
    const uint32_t *ids; /* tokens + 2 x window + NEW_TOKENS */
    uint8_t *image;
    uint64_t image_bytes; /* Rounded up to a block. */
    struct kv_image_state state;
    int fd; /* The pages, then the image. */
    float *logits;
    uint64_t differing; /* Logits of EXACT that are not those of live. */
};

static bool read_all(int fd, uint8_t *bytes, uint64_t count, uint64_t offset)
{
    for (uint64_t done = 0; done < count;) {
        const ssize_t got = pread(fd, bytes + done, KV_MIN(count - done, (uint64_t)READ_BYTES),
                                  (off_t)(offset + done));
        if (got <= 0) {
            ctl_error("cannot read the session back from its file in %s: %s", bench_tmp_dir(),
                      got < 0 ? strerror(errno) : "short file");
            return false;
        }
        done += (uint64_t)got;
    }
    return true;
}

static bool write_all(int fd, const uint8_t *bytes, uint64_t count)
{
    for (uint64_t done = 0; done < count;) {
        const ssize_t put = write(fd, bytes + done, KV_MIN(count - done, (uint64_t)READ_BYTES));
        if (put <= 0) {
            ctl_error("cannot write the session to its file in %s: %s", bench_tmp_dir(),
                      put < 0 ? strerror(errno) : "nothing was written");
            return false;
        }
        done += (uint64_t)put;
    }
    return true;
}

/* For file systems that have no files without a name: one that loses it at once.  flags: O_DIRECT,
 * or 0. */
static int open_named(const char *dir, int flags)
{
    char path[PATH_MAX];
    const int length = snprintf(path, sizeof(path), "%s/cachectl-rows.XXXXXX", dir);
    if (length < 0 || (size_t)length >= sizeof(path)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    const int fd = mkostemp(path, O_CLOEXEC | flags);
    const int error = errno;
    /* With O_DIRECT a file system may make the file and only then refuse to open it. */
    if (fd >= 0) (void)unlink(path);
    errno = error;
    return fd;
}

/* The file has no name, so it is gone whatever happens.  -1: not possible, the sentence is
 * printed. */
static int open_file(void)
{
    const char *dir = bench_tmp_dir();
    static const int tries[] = {O_DIRECT, 0}; /* tmpfs has no O_DIRECT in older kernels. */
    int fd = -1;

    for (size_t i = 0; i < KV_ARRAY_COUNT(tries) && fd < 0; i++) {
        fd = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC | tries[i], 0600);
        if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == ENOENT))
            fd = open_named(dir, tries[i]);
        if (fd < 0 && errno != EINVAL) break;
    }
    if (fd < 0) ctl_error("cannot make a file in %s: %s", dir, strerror(errno));
    return fd;
}

static bool sync_file(int fd)
{
    if (fdatasync(fd) == 0) return true;
    ctl_error("cannot sync the session's file in %s: %s", bench_tmp_dir(), strerror(errno));
    return false;
}

static bool resume_init(struct resume *own, struct eng_model *model, const uint32_t *ids,
                        uint32_t tokens, struct bench_progress *progress)
{
    const struct kv_layout *layout = eng_model_layout(model);
    struct kv_image_header header = {0};
    struct bench_session *one[] = {&own->kept};
    const uint32_t room = tokens + 2 * layout->window_tokens + NEW_TOKENS;

    *own = (struct resume){.tokens = tokens, .ids = ids, .fd = -1};
    own->image_bytes = kv_round_up(layout->image_bytes, KV_IO_ALIGN);
    own->image = aligned_alloc(KV_IO_ALIGN, own->image_bytes);
    own->logits = malloc(layout->vocab_tokens * sizeof(float));
    if (own->image == NULL || own->logits == NULL) {
        ctl_error("no memory for the window image of a session");
        return false;
    }
    own->fd = open_file();
    if (own->fd < 0) return false;
    if (!bench_session_init(&own->kept, model, room, false, progress) ||
        !bench_session_init(&own->work, model, room, false, progress))
        return false;
    eng_prefill_begin(own->kept.session, ids, 0, tokens);
    if (!bench_finish_runs(one, 1)) return false;
    own->state = header.state = eng_session_state(own->kept.session);
    memset(own->image, 0, own->image_bytes);
    eng_session_export(own->kept.session, own->image);
    kv_image_seal(layout, own->image, &header);
    return write_all(own->fd, own->kept.memory, bench_session_page_bytes(&own->kept)) &&
           write_all(own->fd, own->image, own->image_bytes) && sync_file(own->fd);
}

static void resume_fini(struct resume *own)
{
    bench_session_fini(&own->kept);
    bench_session_fini(&own->work);
    free(own->image);
    free(own->logits);
    if (own->fd >= 0) (void)close(own->fd);
}

static bool run_to(struct resume *own, uint32_t from, uint32_t to)
{
    struct bench_session *one[] = {&own->work};
    eng_prefill_begin(own->work.session, own->ids, from, to);
    return bench_finish_runs(one, 1);
}

static bool time_live(struct resume *own, uint32_t new_tokens, double *ret_seconds)
{
    bench_session_copy(&own->work, &own->kept);
    const double began = bench_now();
    if (!run_to(own, own->tokens, own->tokens + new_tokens)) return false;
    *ret_seconds = bench_now() - began;
    return true;
}

static bool time_read(struct resume *own, double *ret_seconds)
{
    const uint64_t pages =
        (uint64_t)kv_pages_for(own->tokens) * eng_model_layout(own->work.model)->page_bytes;
    const double began = bench_now();
    const bool ok =
        read_all(own->fd, own->work.memory, pages, 0) &&
        read_all(own->fd, own->image, own->image_bytes, bench_session_page_bytes(&own->kept));
    *ret_seconds = bench_now() - began;
    return ok;
}

/* Live 50 tokens, and the reading alone. */
static bool run_live_and_read(void *context, double *ret_seconds)
{
    struct resume *own = context;
    double reading = 0, live;

    if (!time_live(own, NEW_TOKENS, &live)) return false;
    memcpy(own->logits, eng_session_logits(own->work.session),
           eng_model_layout(own->work.model)->vocab_tokens * sizeof(float));
    if (!time_read(own, &reading)) return false;
    *ret_seconds = live + reading;
    return true;
}

static bool restore(struct resume *own, double *ret_reading)
{
    struct kv_image_header header;
    struct kv_error err = {0};

    bench_session_reset(&own->work);
    if (!time_read(own, ret_reading)) return false;
    if (kv_image_decode(eng_model_layout(own->work.model), own->image, &header, &err) != KV_OK ||
        eng_session_import(own->work.session, own->image, &header.state, own->ids, own->tokens) !=
            KV_OK) {
        ctl_error("the image does not come back: %s", err.text);
        return false;
    }
    return true;
}

static bool run_exact(void *context, double *ret_seconds)
{
    struct resume *own = context;
    double reading = 0;

    const double began = bench_now();
    if (!restore(own, &reading)) return false;
    if (!run_to(own, own->tokens, own->tokens + NEW_TOKENS)) return false;
    *ret_seconds = bench_now() - began;
    const float *logits = eng_session_logits(own->work.session);
    for (uint32_t i = 0; i < eng_model_layout(own->work.model)->vocab_tokens; i++)
        own->differing += memcmp(&logits[i], &own->logits[i], sizeof(float)) != 0;
    return true;
}

static bool run_exact_without_reading(void *context, double *ret_seconds)
{
    struct resume *own = context;
    double reading = 0;

    const double began = bench_now();
    if (!restore(own, &reading)) return false;
    if (!run_to(own, own->tokens, own->tokens + NEW_TOKENS)) return false;
    *ret_seconds = bench_now() - began - reading;
    return true;
}

/* What a replay adds to the live turn of the same pair. */
static bool run_replay_added(void *context, double *ret_seconds)
{
    struct resume *own = context;
    const uint32_t window = eng_model_layout(own->work.model)->window_tokens;

    double live;

    if (!time_live(own, NEW_TOKENS, &live)) return false;
    bench_session_copy(&own->work, &own->kept);
    const double began = bench_now();
    eng_session_rows_only(own->work.session, own->ids, own->tokens);
    if (!run_to(own, own->tokens - window, own->tokens + NEW_TOKENS)) return false;
    *ret_seconds = bench_now() - began - live;
    return true;
}

static bool run_window_of_tokens(void *context, double *ret_seconds)
{
    struct resume *own = context;
    return time_live(own, eng_model_layout(own->work.model)->window_tokens, ret_seconds);
}

static int measure(struct bench_progress *progress, struct resume *near, struct resume *far,
                   uint32_t rounds, struct bench_pairs pairs[3])
{
    pairs[0] = (struct bench_pairs){.target = 1.2, .anchor = "live + reading"};
    pairs[1] = (struct bench_pairs){.target = 1.1, .anchor = "a window of tokens, live"};
    pairs[2] = (struct bench_pairs){.target = 0};
    (void)snprintf(pairs[0].what, sizeof(pairs[0].what), "EXACT + %u at %u", NEW_TOKENS,
                   far->tokens);
    (void)snprintf(pairs[1].what, sizeof(pairs[1].what), "added by REPLAY at %u", far->tokens);
    (void)snprintf(pairs[2].what, sizeof(pairs[2].what), "EXACT at %u, without reading",
                   far->tokens);
    (void)snprintf(pairs[2].anchor, sizeof(pairs[2].anchor), "EXACT at %u, without reading",
                   near->tokens);
    int code =
        bench_pairs_measure(progress, &pairs[0], rounds, run_exact, far, run_live_and_read, far);
    far->differing = 0;
    /* Once more in the order that leaves live logits to compare with. */
    double unused;
    if (code == 0 && (!run_live_and_read(far, &unused) || !run_exact(far, &unused)))
        code = CLIENT_EXIT_FAILED;
    if (code == 0 && far->differing > 0) {
        ctl_error("EXACT gave other logits than the live session: %llu differ",
                  (unsigned long long)far->differing);
        code = CLIENT_EXIT_FAILED;
    }
    if (code == 0)
        code = bench_pairs_measure(progress, &pairs[1], rounds, run_replay_added, far,
                                   run_window_of_tokens, far);
    if (code == 0)
        code = bench_pairs_measure(progress, &pairs[2], rounds, run_exact_without_reading, far,
                                   run_exact_without_reading, near);
    return code;
}

int bench_resume(struct bench_progress *progress, const struct bench_engine_options *options)
{
    const uint32_t far_tokens = options->quick ? 4096 : 16384, near_tokens = 1024;
    const uint32_t rounds = options->quick ? 5 : 7;
    struct bench_pairs pairs[3];
    struct resume near = {.fd = -1}, far = {.fd = -1};
    struct bench_model_dir dir;

    if (options->quick) bench_quick(progress, KV_ARRAY_COUNT(pairs));
    int code = bench_model_dir_make(progress, options, &dir);
    if (code != 0) return code;
    struct eng_model *model = bench_model_open(&dir, (uint32_t)options->threads, false);
    uint32_t *ids = calloc(far_tokens + 4096, sizeof(*ids));
    if (model != NULL && ids == NULL) ctl_error("no memory for %u token ids", far_tokens + 4096);
    if (model == NULL || ids == NULL) code = CLIENT_EXIT_FAILED;
    if (code == 0) bench_ids(model, 1, ids, far_tokens + 4096);
    progress->doing = "filling the sessions";
    if (code == 0 && (!resume_init(&near, model, ids, near_tokens, progress) ||
                      !resume_init(&far, model, ids, far_tokens, progress)))
        code = CLIENT_EXIT_FAILED;
    if (code == 0) code = measure(progress, &near, &far, rounds, pairs);
    if (code == 0)
        code = bench_pairs_report(progress->ctl, "resume", pairs, KV_ARRAY_COUNT(pairs),
                                  json_pack("{s:s, s:I, s:I}", "kernels", eng_model_family(model),
                                            "bytes read by EXACT (far)",
                                            (json_int_t)((uint64_t)kv_pages_for(far_tokens) *
                                                             eng_model_layout(model)->page_bytes +
                                                         far.image_bytes),
                                            "logits of EXACT that differ from live",
                                            (json_int_t)far.differing));
    resume_fini(&near);
    resume_fini(&far);
    eng_model_close(model);
    bench_model_dir_drop(&dir);
    free(ids);
    return code;
}
