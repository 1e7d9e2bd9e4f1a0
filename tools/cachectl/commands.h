#pragma once

/* One description per command, each in the file that runs it. */

#include "tools/cachectl/ctl.h"

extern const struct command command_status;
extern const struct command command_doctor;
extern const struct command command_session_list;
extern const struct command command_session_show;
extern const struct command command_session_fork;
extern const struct command command_session_checkpoint;
extern const struct command command_session_compact;
extern const struct command command_session_pin;
extern const struct command command_session_touch;
extern const struct command command_session_usage;
extern const struct command command_session_delete;
extern const struct command command_user_erase;
extern const struct command command_why;
extern const struct command command_purge;
extern const struct command command_quota_set;
extern const struct command command_quota_get;
extern const struct command command_quota_list;
extern const struct command command_quota_delete;
extern const struct command command_quota_plan;
extern const struct command command_stats;
extern const struct command command_du;
extern const struct command command_key_rotate;
extern const struct command command_scrub_start;
extern const struct command command_scrub_status;
extern const struct command command_scrub_stop;
extern const struct command command_scrub_release;
extern const struct command command_explain;
extern const struct command command_demo;
extern const struct command command_bench;
extern const struct command command_bench_echo;
extern const struct command command_model_inspect;
extern const struct command command_model_verify;
extern const struct command command_model_run;
extern const struct command command_trace_replay;
