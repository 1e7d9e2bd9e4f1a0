/*
 * Where `cachectl model run` may put its dump.
 *
 * The dump takes its place by a rename, so whatever stood there is gone without a question: over
 * the tokens, a file of the model or a device that would be a loss.  Files are compared by what
 * they are and not by name, because a model's directory may be links to files kept elsewhere.  A
 * name of the model's that is free is refused as well: the directory would be another model then.
 * The unfinished file needs no such care: it takes only a name that is free, and none of a model's.
 */

#include "engine/model/checkpoint.h"
#include "kvstore/base/bytes.h"
#include "tools/cachectl/ctl.h"
#include "tools/cachectl/model_run.h"
#include "tools/cachectl/model_run_dump.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define PATH_BYTES 4096u

struct guard {
    const char *dir, *path; /* Of the model; to be written. */
    bool exists, in_dir;
    struct stat found; /* What is at `path`, behind links. */
    bool taken;        /* The sentence is printed. */
};

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* Whether `path` would be an entry of `dir`. */
static bool stands_in(const char *path, const char *dir)
{
    char parent[PATH_BYTES];
    struct stat a, b;

    const size_t count = (size_t)(base_name(path) - path);
    if (count >= sizeof(parent)) return false;
    (void)snprintf(parent, sizeof(parent), "%.*s", (int)count, path);
    return stat(count > 0 ? parent : ".", &a) == 0 && stat(dir, &b) == 0 && same_file(&a, &b);
}

static bool compare(void *context, const char *name)
{
    struct guard *guard = context;
    char path[PATH_BYTES];
    struct stat file;

    const int length = snprintf(path, sizeof(path), "%s/%s", guard->dir, name);
    const bool fits = length > 0 && (size_t)length < sizeof(path);
    guard->taken =
        (guard->in_dir && strcmp(base_name(guard->path), name) == 0) ||
        (fits && guard->exists && stat(path, &file) == 0 && same_file(&file, &guard->found));
    if (guard->taken) ctl_error("%s: --dump would replace the model's %s", guard->path, name);
    return !guard->taken;
}

bool model_run_check_output(const struct model_run_options *options)
{
    const char *path = options->dump;
    struct guard guard = {.dir = options->dir, .path = path};
    struct stat tokens, itself;

    if (strlen(path) >= PATH_BYTES - MODEL_DUMP_SUFFIX_BYTES) {
        ctl_error("--dump: a name of at most %u bytes", PATH_BYTES - MODEL_DUMP_SUFFIX_BYTES - 1);
        return false;
    }
    guard.exists = stat(path, &guard.found) == 0;
    guard.in_dir = stands_in(path, options->dir);
    if (guard.exists && stat(options->tokens, &tokens) == 0 && same_file(&tokens, &guard.found)) {
        ctl_error("%s: --dump would replace the tokens", path);
        return false;
    }
    eng_checkpoint_files_each(options->dir, compare, &guard);
    if (guard.taken) return false;
    if (lstat(path, &itself) != 0 || S_ISREG(itself.st_mode)) return true;
    ctl_error("%s: not a regular file", path);
    return false;
}
