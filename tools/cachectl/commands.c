/*
 * The list of commands, in the order `cachectl --help` prints them, and the two verbs whose flags
 * are parsed by the trace tools themselves.
 */

#include "tools/cachectl/commands.h"

#include "tools/cachectl/trace.h"

static int run_trace_convert(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    (void)ctl;
    (void)command;
    return cachectl_trace_convert(argc, argv);
}

static int run_trace_stats(struct ctl *ctl, const struct command *command, int argc, char **argv)
{
    (void)ctl;
    (void)command;
    return cachectl_trace_stats(argc, argv);
}

static const struct command command_trace_convert = {
    .name = "trace convert",
    .summary = "turn recorded request logs into a trace file",
    .run = run_trace_convert,
    .own_flags = true,
};

static const struct command command_trace_stats = {
    .name = "trace stats",
    .summary = "turns, classes, gaps and ideal hits of a trace file",
    .run = run_trace_stats,
    .own_flags = true,
};

const struct command *const commands[] = {
    &command_status,
    &command_doctor,
    &command_session_list,
    &command_session_show,
    &command_session_fork,
    &command_session_checkpoint,
    &command_session_compact,
    &command_session_pin,
    &command_session_touch,
    &command_session_usage,
    &command_session_delete,
    &command_user_erase,
    &command_why,
    &command_purge,
    &command_quota_set,
    &command_quota_get,
    &command_quota_list,
    &command_quota_delete,
    &command_quota_plan,
    &command_stats,
    &command_du,
    &command_scrub_start,
    &command_scrub_status,
    &command_scrub_stop,
    &command_key_rotate,
    &command_scrub_release,
    &command_explain,
    &command_demo,
    &command_bench,
    &command_model_inspect,
    &command_model_verify,
    &command_model_run,
    &command_trace_convert,
    &command_trace_stats,
    &command_trace_replay,
    &command_bench_echo,
    NULL,
};
