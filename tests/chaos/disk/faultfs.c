/* faultfs: a library for LD_PRELOAD that counts, records, fails and ends file-system calls below one folder.
 *
 * A page of shared memory (the file named by FAULTFS_CONTROL, laid out as `struct control`) says what to do. A test maps
 * the same file (tests/chaos/disk/faultfs.py), so it can change its mind while a daemon runs, and see what happened.
 *
 * Invariant: a call that changes the folder is counted before it is made, so "crash at N" ends the process with N - 1
 * changes made. A recorded call is one that succeeded. Calls outside the folder pass unchanged.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum op { CREATE, WRITE, FSYNC, RENAME, LINK, UNLINK, TRUNCATE, ALLOCATE, MKDIR, RMDIR, READ, OPEN, MAP, MARK };

struct control {
    uint64_t count;      /* changes seen */
    uint64_t crash_at;   /* end the process before this change; 0: never */
    uint64_t torn;       /* and if that is a write: after half of it */
    uint64_t fail_mask;  /* the ops that fail, as bits */
    uint64_t fail_errno;
    uint64_t fail_after; /* let so many pass first */
    uint64_t hits;       /* calls that failed */
    uint64_t recording;
    char fail_path[512]; /* only paths that contain it */
    char root[1024];
    char record[1024];   /* the file that recorded calls are appended to */
};

struct record {
    uint32_t op, path_bytes, other_bytes, data_bytes;
    uint64_t inode;
    int64_t offset, extra;
};

static struct control *control;
static int record_fd = -1;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("FAULTFS_CONTROL");
    if (!path) return;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) return;
    void *found = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (found != MAP_FAILED) control = found;
}

static int below(const char *path) {
    size_t length;
    if (!control || !path || !(length = strlen(control->root))) return 0;
    return !strncmp(path, control->root, length) && (path[length] == '/' || !path[length]);
}

/* The path of an open file; of one that was removed, what it was and " (deleted)". */
static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0;
}

static const char *full(int at, const char *path, char *buffer) {
    if (!path || path[0] == '/') return path;
    char folder[PATH_MAX];
    if (at == AT_FDCWD) {
        if (!getcwd(folder, sizeof folder)) return path;
    } else if (!path_of(at, folder)) {
        return path;
    }
    if (snprintf(buffer, PATH_MAX, "%s/%s", folder, path) >= PATH_MAX) return path;
    return buffer;
}

static void crash(void) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

/* Return whether the call may go on. `torn`: the place to store that half of a write is made before the crash. */
static int enter(enum op op, const char *path, int *torn) {
    if (op < READ) {
        uint64_t number = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST);
        if (control->crash_at && number == control->crash_at) {
            if (torn && control->torn) *torn = 1;
            else crash();
        }
    }
    if (!(control->fail_mask >> op & 1) || (control->fail_path[0] && !strstr(path, control->fail_path))) return 1;
    if (control->fail_after) {
        control->fail_after--;
        return 1;
    }
    __atomic_add_fetch(&control->hits, 1, __ATOMIC_SEQ_CST);
    errno = (int)control->fail_errno;
    return 0;
}

static void record(enum op op, uint64_t inode, const char *path, const char *other, const void *data, size_t size,
                   int64_t offset, int64_t extra) {
    if (!control || !control->recording) return;
    int before = errno;
    if (record_fd < 0) {
        int fd = syscall(SYS_openat, AT_FDCWD, control->record, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        record_fd = fcntl(fd, F_DUPFD_CLOEXEC, 500); /* out of the way of what tests count */
        syscall(SYS_close, fd);
    }
    struct record head = {op, path ? strlen(path) : 0, other ? strlen(other) : 0, size, inode, offset, extra};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)path, head.path_bytes}, {(void *)other, head.other_bytes},
                            {(void *)data, size}};
    if (syscall(SYS_writev, record_fd, parts, 4) < 0) abort();
    errno = before;
}

void faultfs_mark(const char *text) { record(MARK, 0, text, NULL, NULL, 0, 0, 0); }

static uint64_t inode_of(int fd) {
    struct stat info;
    return fstat(fd, &info) ? 0 : info.st_ino;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* -- names ------------------------------------------------------------------------------------------------------- */

static int opened(int at, const char *given, int flags, mode_t mode) {
    char buffer[PATH_MAX];
    const char *path = full(at, given, buffer);
    if (!below(path)) return syscall(SYS_openat, at, given, flags, mode);
    struct stat info;
    int is_new = flags & O_CREAT && lstat(path, &info);
    int empties = !is_new && flags & O_TRUNC;
    enum op op = is_new ? CREATE : empties ? TRUNCATE : OPEN;
    if (!enter(op, path, NULL)) return -1;
    int fd = syscall(SYS_openat, at, given, flags, mode);
    if (fd >= 0 && op != OPEN) record(op, inode_of(fd), path, NULL, NULL, 0, 0, 0);
    return fd;
}

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return opened(AT_FDCWD, path, flags, mode); \
    }
#define OPENS_AT(name) \
    int name(int at, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return opened(at, path, flags, mode); \
    }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

static int renamed(int at, const char *from, int to_at, const char *to, unsigned flags) {
    char buffer[PATH_MAX], to_buffer[PATH_MAX];
    const char *path = full(at, from, buffer), *other = full(to_at, to, to_buffer);
    int ours = below(path) || below(other);
    if (ours && !enter(RENAME, path, NULL)) return -1;
    struct stat info = {0};
    if (ours) (void)lstat(path, &info);
    int result = flags ? syscall(SYS_renameat2, at, from, to_at, to, flags) : syscall(SYS_renameat, at, from, to_at, to);
    if (ours && !result) record(RENAME, info.st_ino, path, other, NULL, 0, 0, 0);
    return result;
}

int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int at, const char *from, int to_at, const char *to) { return renamed(at, from, to_at, to, 0); }
int renameat2(int at, const char *from, int to_at, const char *to, unsigned flags) {
    return renamed(at, from, to_at, to, flags);
}

int linkat(int at, const char *from, int to_at, const char *to, int flags) {
    char buffer[PATH_MAX], to_buffer[PATH_MAX];
    const char *path = full(at, from, buffer), *other = full(to_at, to, to_buffer);
    int ours = below(other);
    if (ours && !enter(LINK, other, NULL)) return -1;
    int result = syscall(SYS_linkat, at, from, to_at, to, flags);
    if (ours && !result) record(LINK, 0, path, other, NULL, 0, 0, 0);
    return result;
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

static int removed(int at, const char *given, int flags) {
    char buffer[PATH_MAX];
    const char *path = full(at, given, buffer);
    enum op op = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    int ours = below(path);
    struct stat info;
    if (ours && lstat(path, &info)) ours = 0; /* there is nothing to remove: no change */
    if (ours && !enter(op, path, NULL)) return -1;
    int result = syscall(SYS_unlinkat, at, given, flags);
    if (ours && !result) record(op, info.st_ino, path, NULL, NULL, 0, 0, 0);
    return result;
}
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int at, const char *path, int flags) { return removed(at, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int at, const char *given, mode_t mode) {
    char buffer[PATH_MAX];
    const char *path = full(at, given, buffer);
    int ours = below(path);
    struct stat info;
    if (ours && !lstat(path, &info)) ours = 0; /* it exists: no change */
    if (ours && !enter(MKDIR, path, NULL)) return -1;
    int result = syscall(SYS_mkdirat, at, given, mode);
    if (ours && !result) record(MKDIR, lstat(path, &info) ? 0 : info.st_ino, path, NULL, NULL, 0, 0, 0);
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* -- content ------------------------------------------------------------------------------------------------------ */

#define OURS(fd) \
    char path[PATH_MAX]; \
    int ours = control && control->root[0] && path_of(fd, path) && below(path)

static ssize_t written(int fd, const void *data, size_t size, off_t offset, int is_positional) {
    OURS(fd);
    int torn = 0;
    if (ours && !enter(WRITE, path, &torn)) return -1;
    if (ours && !is_positional) {
        offset = lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
    }
    ssize_t result = is_positional ? syscall(SYS_pwrite64, fd, data, torn ? size / 2 : size, offset)
                                   : syscall(SYS_write, fd, data, torn ? size / 2 : size);
    if (torn) crash();
    if (ours && result >= 0) record(WRITE, inode_of(fd), path, NULL, data, result, offset, 0);
    return result;
}
ssize_t write(int fd, const void *data, size_t size) { return written(fd, data, size, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return written(fd, data, size, offset, 1); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return written(fd, data, size, offset, 1); }

static int synced(int fd, long number) {
    OURS(fd);
    if (ours && !enter(FSYNC, path, NULL)) return -1;
    int result = syscall(number, fd);
    if (ours && !result) record(FSYNC, inode_of(fd), path, NULL, NULL, 0, 0, 0);
    return result;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

static int truncated(int fd, off_t size) {
    OURS(fd);
    if (ours && !enter(TRUNCATE, path, NULL)) return -1;
    int result = syscall(SYS_ftruncate, fd, size);
    if (ours && !result) record(TRUNCATE, inode_of(fd), path, NULL, NULL, 0, size, 0);
    return result;
}
int ftruncate(int fd, off_t size) { return truncated(fd, size); }
int ftruncate64(int fd, off64_t size) { return truncated(fd, size); }

int posix_fallocate(int fd, off_t offset, off_t size) {
    REAL(posix_fallocate);
    OURS(fd);
    if (ours && !enter(ALLOCATE, path, NULL)) return errno;
    int result = real(fd, offset, size);
    if (ours && !result) record(ALLOCATE, inode_of(fd), path, NULL, NULL, 0, offset, size);
    return result;
}
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }

/* -- reads: never counted, only failed ----------------------------------------------------------------------------- */

static int may_read(int fd, enum op op) {
    if (!control || !(control->fail_mask & (1u << READ | 1u << MAP))) return 1;
    OURS(fd);
    return !ours || enter(op, path, NULL);
}
ssize_t read(int fd, void *data, size_t size) { return may_read(fd, READ) ? syscall(SYS_read, fd, data, size) : -1; }
ssize_t pread(int fd, void *data, size_t size, off_t offset) {
    return may_read(fd, READ) ? syscall(SYS_pread64, fd, data, size, offset) : -1;
}
ssize_t pread64(int fd, void *data, size_t size, off64_t offset) { return pread(fd, data, size, offset); }
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) {
    return may_read(fd, READ) ? syscall(SYS_preadv, fd, parts, count, offset, 0) : -1;
}
ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return preadv(fd, parts, count, offset);
}
void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset) {
    if (fd >= 0 && control && !may_read(fd, MAP)) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}
void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t offset) {
    return mmap(address, size, protection, flags, fd, offset);
}
