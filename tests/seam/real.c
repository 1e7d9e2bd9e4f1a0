/* An image on a real file system. */

#include "tests/seam/real.h"

#include "kvstore/base/limits.h"
#include "kvstore/base/ring.h"
#include "tests/seam/mem_disk.h"
#include "tests/seam/world.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 512u

static kv_status write_file(const char *path, const struct mem_disk_file *file,
                            struct kv_error *err)
{
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return KV_FAIL_ERRNO(err, KV_IO, "create %s", path);
    errno = 0;
    const bool ok = write(fd, file->bytes, file->size) == (ssize_t)file->size;
    kv_status status = KV_OK;
    if (!ok) status = KV_FAIL_ERRNO(err, KV_IO, "write %s", path);
    (void)close(fd);
    return status;
}

static kv_status write_files(const struct real *real, const struct image *image,
                             const char *image_dir, struct kv_error *err)
{
    struct mem_disk_file file;
    for (uint32_t i = 0; mem_disk_file(image->disk, i, &file); i++) {
        char path[PATH_BYTES];
        const char *below = file.dir + strlen(image_dir);
        (void)snprintf(path, sizeof(path), "%s%s", real->dir, below);
        if (mkdir(path, 0700) != 0 && errno != EEXIST)
            return KV_FAIL_ERRNO(err, KV_IO, "create %s", path);
        (void)snprintf(path, sizeof(path), "%s%s/%s", real->dir, below, file.name);
        const kv_status status = write_file(path, &file, err);
        if (status != KV_OK) return status;
    }
    return KV_OK;
}

kv_status real_open(struct real *real, const struct recorder *recorder, const struct image *image,
                    const char *image_dir, struct kv_error *err)
{
    char path[PATH_BYTES];
    const char *io = getenv("CACHED_TEST_IO");
    const bool is_pool = io != NULL && strcmp(io, "pool") == 0;
    *real = (struct real){.dir = "crashimage.XXXXXX"};
    if (mkdtemp(real->dir) == NULL) return KV_FAIL_ERRNO(err, KV_IO, "make a folder");
    (void)snprintf(path, sizeof(path), "%s/manifest", real->dir);
    kv_status status = write_files(real, image, image_dir, err);
    if (status == KV_OK)
        status =
            kv_ring_create(KV_RING_DEPTH, is_pool ? KV_RING_POOL : KV_RING_AUTO, &real->disk, err);
    if (status == KV_OK) status = world_directory(real->disk, real->dir, err);
    if (status == KV_OK) status = kv_manifest_open(path, &real->manifest, err);
    if (status == KV_OK) status = image_manifest(recorder, image, real->manifest);
    kv_manifest_close(real->manifest);
    real->manifest = NULL;
    if (status == KV_OK) status = kv_manifest_open(path, &real->manifest, err);
    if (status != KV_OK) real_close(real);
    return status;
}

static void remove_files(const char *path)
{
    DIR *list = opendir(path);
    for (const struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;)
        if (entry->d_name[0] != '.') (void)unlinkat(dirfd(list), entry->d_name, 0);
    if (list != NULL) (void)closedir(list);
    (void)rmdir(path);
}

void real_close(struct real *real)
{
    static const char *const folders[] = {"manifest", "ssd"};
    kv_manifest_close(real->manifest);
    kv_disk_destroy(real->disk);
    for (size_t i = 0; i < 2; i++) {
        char path[PATH_BYTES];
        (void)snprintf(path, sizeof(path), "%s/%s", real->dir, folders[i]);
        remove_files(path);
    }
    remove_files(real->dir);
    *real = (struct real){.disk = NULL};
}
