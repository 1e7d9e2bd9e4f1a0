/*
 * The directory of a model before anything is written: whose it is, whether there is room, and the
 * removal of what an earlier run left.
 *
 * Every weight file that mkmodel makes begins with MKMODEL_MARK.  Where one of the names that a
 * model has stands for something else, or there are files but no model, the directory is
 * somebody's, and only --force touches it.
 * Files are removed in an order that leaves a marked one to the end, so that a run that was killed
 * leaves a directory that the next one knows as its own.
 */

#include "kvstore/base/bytes.h"
#include "tools/mkmodel.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* In the order of removal. */
enum kind { KIND_CONFIG, KIND_SIDE, KIND_TEMPORARY, KIND_WEIGHTS, KIND_COUNT, KIND_OTHER };

bool complain(const char *path)
{
    (void)fprintf(stderr, "mkmodel: %s: %s\n", path, strerror(errno));
    return false;
}

static enum kind kind_of(const char *name)
{
    static const struct {
        const char *pattern;
        enum kind kind;
    } patterns[] = {
        {"config.json", KIND_CONFIG},
        {"model.safetensors.index.json", KIND_SIDE},
        {"engram_ids.bin", KIND_SIDE},
        {"model.safetensors", KIND_WEIGHTS},
        {"model-[0-9]*-of-[0-9]*.safetensors", KIND_WEIGHTS},
        {"config.json.tmp", KIND_TEMPORARY},
        {"model.safetensors.index.json.tmp", KIND_TEMPORARY},
        {"engram_ids.bin.tmp", KIND_TEMPORARY},
        {"model.safetensors.tmp", KIND_TEMPORARY},
        {"model-[0-9]*-of-[0-9]*.safetensors.tmp", KIND_TEMPORARY},
    };
    for (size_t i = 0; i < KV_ARRAY_COUNT(patterns); i++)
        if (fnmatch(patterns[i].pattern, name, 0) == 0) return patterns[i].kind;
    return KIND_OTHER;
}

/* Is it a file of weights that mkmodel made?  No, if it cannot be read. */
static bool is_marked(int dir_fd, const char *name)
{
    char begin[8 + sizeof(MKMODEL_MARK) - 1];
    struct stat info;
    /* A pipe without a writer would hold up an open that waits. */
    const int fd = openat(dir_fd, name, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return false;
    const bool marked = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
                        pread(fd, begin, sizeof(begin), 0) == (ssize_t)sizeof(begin) &&
                        memcmp(begin + 8, MKMODEL_MARK, sizeof(MKMODEL_MARK) - 1) == 0;
    (void)close(fd);
    return marked;
}

/* The next entry of that kind; NULL: no more (errno 0), or not readable. */
static const char *next_of(DIR *entries, enum kind kind)
{
    const struct dirent *entry;

    while ((errno = 0, entry = readdir(entries)) != NULL)
        if (kind_of(entry->d_name) == kind) return entry->d_name;
    return NULL;
}

/* Without a model in it: a directory of other things is not one for models, but what a mkmodel
 * left that was killed before its first weights were whole is no other thing. */
static bool check_empty(const struct plan *plan, DIR *entries)
{
    const struct dirent *entry;

    rewinddir(entries);
    while ((entry = readdir(entries)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        if (kind_of(entry->d_name) != KIND_OTHER) continue;
        (void)fprintf(stderr,
                      "mkmodel: %s is not empty and holds no model that mkmodel made (%s): name "
                      "another directory, or write into it with --force\n",
                      plan->dir, entry->d_name);
        return false;
    }
    return true;
}

/* May its model be replaced?  Yes, if there is none and nothing else either. */
static bool check_owner(const struct plan *plan, DIR *entries)
{
    char foreign[256] = "";
    bool marked = false;
    const char *name;

    if (plan->force) return true;
    rewinddir(entries);
    while ((name = next_of(entries, KIND_WEIGHTS)) != NULL) {
        if (is_marked(dirfd(entries), name))
            marked = true;
        else
            (void)snprintf(foreign, sizeof(foreign), "%s", name);
    }
    /* Of config.json and its like nothing shows who made them: the weights beside them do. */
    for (enum kind kind = KIND_CONFIG; !marked && kind <= KIND_SIDE && foreign[0] == '\0'; kind++) {
        rewinddir(entries);
        if ((name = next_of(entries, kind)) != NULL)
            (void)snprintf(foreign, sizeof(foreign), "%s", name);
    }
    if (foreign[0] == '\0') return marked || check_empty(plan, entries);
    (void)fprintf(stderr,
                  "mkmodel: %s holds a model that mkmodel did not make (%s): name another "
                  "directory, or replace it with --force\n",
                  plan->dir, foreign);
    return false;
}

/* Before anything is removed or written.  Tensors are nearly all of a model. */
static bool check_space(const struct plan *plan, DIR *entries, uint64_t weight_bytes)
{
    struct statvfs space;

    if (statvfs(plan->dir, &space) != 0) return complain(plan->dir);
    uint64_t room = (uint64_t)space.f_bavail * space.f_frsize;
    /* What the files of an earlier model will give back. */
    rewinddir(entries);
    for (const struct dirent *entry; (entry = readdir(entries)) != NULL;) {
        struct stat info;
        if (kind_of(entry->d_name) != KIND_OTHER &&
            fstatat(dirfd(entries), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0)
            room += (uint64_t)info.st_blocks * 512;
    }
    if (room >= weight_bytes) return true;
    (void)fprintf(stderr, "mkmodel: %s: the weights have %llu bytes, there is room for %llu\n",
                  plan->dir, (unsigned long long)weight_bytes, (unsigned long long)room);
    return false;
}

static bool remove_file(const char *dir, DIR *entries, const char *name)
{
    if (unlinkat(dirfd(entries), name, 0) == 0 || errno == ENOENT) return true;
    (void)fprintf(stderr, "mkmodel: %s/%s: %s\n", dir, name, strerror(errno));
    return false;
}

static bool remove_earlier(const struct plan *plan, DIR *entries)
{
    for (enum kind kind = KIND_CONFIG; kind < KIND_COUNT; kind++) {
        const char *name;
        rewinddir(entries);
        while ((name = next_of(entries, kind)) != NULL)
            if (!remove_file(plan->dir, entries, name)) return false;
        if (errno != 0) return complain(plan->dir);
    }
    return true;
}

bool dir_prepare(const struct plan *plan, uint64_t weight_bytes)
{
    const bool made = mkdir(plan->dir, 0755) == 0;

    if (!made && errno == ENOENT) {
        (void)fprintf(stderr, "mkmodel: %s: the directory above it does not exist; make it first\n",
                      plan->dir);
        return false;
    }
    if (!made && errno != EEXIST) return complain(plan->dir);
    DIR *entries = opendir(plan->dir);
    if (entries == NULL) return complain(plan->dir);
    const bool may = check_owner(plan, entries) && check_space(plan, entries, weight_bytes);
    const bool ok = may && remove_earlier(plan, entries);
    (void)closedir(entries);
    if (made && !may) (void)rmdir(plan->dir);
    return ok;
}
