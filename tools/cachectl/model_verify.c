/*
 * `cachectl model verify`: is this directory a checkpoint that the engine will load, whole?
 *
 * Headers, index, config and compressed ids first, which takes no time; then every byte is read
 * once for its digest and for numbers that are none.  Weights are not kept in memory.  On stderr,
 * after two seconds and every second from then on: how far, how fast, how long still.
 */

#include "engine/model/checkpoint.h"
#include "kvstore/base/bytes.h"
#include "tools/cachectl/commands.h"
#include "tools/cachectl/model_common.h"
#include "tools/cachectl/out.h"

#include <jansson.h>
#include <stdio.h>
#include <unistd.h>

#define QUIET_MS 2000u
#define EVERY_MS 1000u

struct watch {
    const struct ctl *ctl;
    uint64_t began_ms, said_ms;
    bool terminal, line_open;
};

static bool on_progress(void *context, uint64_t done, uint64_t total)
{
    struct watch *watch = context;
    char at[OUT_TEXT_BYTES], of[OUT_TEXT_BYTES], rate[OUT_TEXT_BYTES], left[OUT_TEXT_BYTES];
    const uint64_t now = model_now_ms();
    const uint64_t spent = KV_MAX(now - watch->began_ms, 1u);

    if (watch->ctl->quiet || spent < QUIET_MS || now - watch->said_ms < EVERY_MS) return true;
    watch->said_ms = now;
    const double per_ms = KV_MAX((double)done / (double)spent, 1e-6);
    (void)fprintf(stderr, "%s%s of %s read, %s/s, %s left%s", watch->terminal ? "\r\033[K" : "",
                  out_bytes(at, done), out_bytes(of, total),
                  out_bytes(rate, (uint64_t)(per_ms * 1000)),
                  out_duration(left, (uint64_t)((double)(total - done) / per_ms)),
                  watch->terminal ? "" : "\n");
    (void)fflush(stderr);
    watch->line_open = watch->terminal;
    return true;
}

static void hex_text(const struct kv_digest *digest, char text[65])
{
    for (size_t i = 0; i < 32; i++)
        (void)snprintf(text + 2 * i, 3, "%02x", digest->bytes[i]);
}

static int print_result(const struct ctl *ctl, const struct eng_checkpoint *checkpoint,
                        const struct kv_digest *content, uint64_t spent_ms)
{
    const size_t tensors = eng_tensors_count(eng_checkpoint_config(checkpoint));
    const uint32_t shards = eng_checkpoint_shard_count(checkpoint);
    char hex[65];

    hex_text(content, hex);
    if (ctl->json)
        return out_json_take(json_pack("{s:b, s:s, s:s, s:I, s:I, s:I, s:I}", "ok", 1, "model",
                                       eng_checkpoint_config(checkpoint)->name, "sha256", hex,
                                       "tensors", (json_int_t)tensors, "shards", (json_int_t)shards,
                                       "bytes", (json_int_t)eng_checkpoint_bytes(checkpoint),
                                       "milliseconds", (json_int_t)spent_ms));
    (void)printf("%sOK%s %s sha256:%s\n", ctl_green(ctl), ctl_plain(ctl),
                 eng_checkpoint_config(checkpoint)->name, hex);
    (void)printf("%zu tensors in %u file%s, %llu bytes, %.1f s\n", tensors, shards,
                 shards == 1 ? "" : "s", (unsigned long long)eng_checkpoint_bytes(checkpoint),
                 (double)spent_ms / 1000);
    return CLIENT_EXIT_OK;
}

static int run(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    struct eng_checkpoint *checkpoint = NULL;
    struct kv_digest content;
    struct kv_error err = {0};
    int code = CLIENT_EXIT_OK;
    struct watch watch = {
        .ctl = ctl, .began_ms = model_now_ms(), .terminal = isatty(STDERR_FILENO) == 1};

    if (ctl_parse(ctl, command, NULL, 0, argc, argv, &code) < 0) return code;
    kv_status status = eng_checkpoint_open_max(argv[0], 0, &checkpoint, &err);
    if (status == KV_OK)
        status = eng_checkpoint_verify(checkpoint, on_progress, &watch, &content, &err);
    if (watch.line_open) (void)fputc('\n', stderr);
    code = status == KV_OK
               ? print_result(ctl, checkpoint, &content, model_now_ms() - watch.began_ms)
               : model_failure(&err, CLIENT_EXIT_CORRUPT);
    eng_checkpoint_close(checkpoint);
    return code;
}

const struct command command_model_verify = {
    .name = "model verify",
    .arguments = "DIR",
    .summary = "is the directory a whole checkpoint: config, headers, every value",
    .details = "Reads every byte once and keeps none.  OK comes with the digest: SHA-256 over the\n"
               "SHA-256 of each weight file, in order of their names.  What is refused is named:\n"
               "file, tensor or field, expected, found; exit code 7.",
    .example = "cachectl model verify /srv/models/tiny",
    .arguments_min = 1,
    .arguments_max = 1,
    .run = run,
};
