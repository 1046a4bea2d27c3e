/* A device that fails: loaded before libc (LD_PRELOAD), it refuses writes below one folder after so many bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[4096];
static int reason = 0;
static long long left = 0;

/* From now on files below `folder` take `after` bytes more, then every write ends with `number`. */
void fail_writes(const char *folder, int number, long long after) {
    snprintf(below, sizeof below, "%s/", folder);
    left = after;
    reason = number;
}

static int refused(int file, size_t bytes) {
    char link[64], path[4096];
    if (!reason) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    if (strncmp(path, below, strlen(below))) return 0;
    if ((long long)bytes <= left) {
        left -= bytes;
        return 0;
    }
    left = 0;
    errno = reason;
    return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int file, const void *from, size_t n) { return refused(file, n) ? -1 : REAL(write)(file, from, n); }
ssize_t pwrite(int file, const void *from, size_t n, off_t at) {
    return refused(file, n) ? -1 : REAL(pwrite)(file, from, n, at);
}
ssize_t pwrite64(int file, const void *from, size_t n, off64_t at) {
    return refused(file, n) ? -1 : REAL(pwrite64)(file, from, n, at);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    size_t n = 0;
    for (int i = 0; i < count; i++) n += parts[i].iov_len;
    return refused(file, n) ? -1 : REAL(writev)(file, parts, count);
}
/* A broken device says so when it is told to keep what it took, if not before. */
int fsync(int file) { return refused(file, reason == EIO) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return refused(file, reason == EIO) ? -1 : REAL(fdatasync)(file); }
