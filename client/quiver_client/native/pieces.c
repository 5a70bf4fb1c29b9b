/* The loops over the samples of a batch, without the GIL: copy each to its place, or hash it.
 *
 * Plain C without Python's headers, called by ctypes, which releases the GIL meanwhile. The hash is not here: it is the
 * XXH3 of the library `xxhash`, passed as a pointer. The caller has checked the addresses.
 *
 * Samples lie in mapped files. If a file was truncated, or its disk fails, the kernel answers a read of its memory with
 * SIGBUS, which ends the process. So each loop here is guarded: a piece that cannot be read is marked as torn, and the
 * loop goes on with the next. Any other SIGBUS goes to the handler that was installed before. */

#define _DEFAULT_SOURCE 1

#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define EXPORTED __attribute__((visibility("default")))
#define PREFETCH(address) __builtin_prefetch((const void *)(address), 0, 0)
#else
#define EXPORTED
#define PREFETCH(address) ((void)(address))
#endif

enum { LINE_BYTES = 64, AHEAD = 2, AHEAD_BYTES_MAX = 4096 };

_Static_assert(sizeof(uintptr_t) == 8 && sizeof(size_t) == 8, "addresses and sizes come as 64 bits");

typedef uint64_t (*Hash)(const void *data, size_t size);

/* Incremented when a signature changes, so that a library built from another version of this file is not used. */
EXPORTED int64_t quiver_pieces_version(void) { return 3; }

/* Where the guarded loop of this thread goes on after a SIGBUS. Small, so that it fits into the space that the loader
 * reserves for libraries opened late: a handler must not be the first to touch a thread's variable, which may allocate. */
static _Thread_local sigjmp_buf *volatile guard __attribute__((tls_model("initial-exec")));
static struct sigaction before;
static volatile sig_atomic_t passed_on;

/* The compiler must not move reads out of the guarded region. */
#define WATCH(place)                               \
    do {                                           \
        atomic_signal_fence(memory_order_seq_cst); \
        guard = (place);                           \
        atomic_signal_fence(memory_order_seq_cst); \
    } while (0)

static void on_bus(int number, siginfo_t *info, void *context) {
    (void)context;
    if (guard && info->si_code > 0) { /* of a read, and not sent by kill */
        sigjmp_buf *to = guard;
        guard = NULL;
        siglongjmp(*to, 1);
    }
    /* Not ours. The handler that we replaced may in turn call us, as the one that it replaced: then end the process. */
    struct sigaction ending = {.sa_handler = SIG_DFL};
    sigaction(number, passed_on ? &ending : &before, NULL);
    passed_on = 1;
    if (info->si_code <= 0)
        raise(number); /* else the same read raises it again */
}

/* Install our handler of SIGBUS. Others may have replaced it since the last time: torch in its workers, faulthandler. */
static void stand_guard(void) {
    struct sigaction now, ours = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    if (sigaction(SIGBUS, NULL, &now) || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus))
        return;
    before = now;
    passed_on = 0;
    sigaction(SIGBUS, &ours, NULL);
}

/* Samples are in random order: the processor prefetches within a sample, and never the next sample. */
static void prefetch(uintptr_t address, size_t size) {
    size_t end = size < AHEAD_BYTES_MAX ? size : AHEAD_BYTES_MAX;
    for (size_t at = 0; at < end; at += LINE_BYTES)
        PREFETCH(address + at);
}

/* Copy `size` bytes from each of `count` addresses into the rows of `out`, count x size bytes. */
EXPORTED void quiver_copy(int64_t count, const uintptr_t *addresses, int64_t size, uint8_t *out, uint8_t *torn) {
    sigjmp_buf here;
    volatile int64_t at = 0;
    stand_guard();
    if (sigsetjmp(here, 0))
        torn[at++] = 1;
    WATCH(&here);
    for (int64_t i = at; i < count; i++) {
        at = i;
        if (i + AHEAD < count)
            prefetch(addresses[i + AHEAD], (size_t)size);
        memcpy(out + i * size, (const void *)addresses[i], (size_t)size);
    }
    WATCH(NULL);
}

/* Copy `sizes[i]` bytes from each of `count` addresses to `out + offsets[i]`; then check the eight bytes before each
 * `ends[i]`. A piece whose eight are all 0 is torn like one that cannot be read: its file was truncated. */
EXPORTED void quiver_join(int64_t count, const uintptr_t *addresses, const int64_t *sizes, const int64_t *offsets,
                          const uintptr_t *ends, uint8_t *out, uint8_t *torn) {
    sigjmp_buf here;
    volatile int64_t at = 0; /* the piece to be copied, or past those, count + the end to be checked */
    stand_guard();
    if (sigsetjmp(here, 0))
        torn[at++ % count] = 1;
    WATCH(&here);
    for (int64_t i = at; i < count; i++) {
        at = i;
        if (i + AHEAD < count)
            prefetch(addresses[i + AHEAD], (size_t)sizes[i + AHEAD]);
        memcpy(out + offsets[i], (const void *)addresses[i], (size_t)sizes[i]);
    }
    atomic_signal_fence(memory_order_seq_cst); /* an end vouches only for what was read before it */
    for (int64_t i = at < count ? 0 : at - count; i < count; i++) {
        uint64_t tail;
        at = count + i;
        memcpy(&tail, (const void *)(ends[i] - sizeof tail), sizeof tail);
        torn[i] |= tail == 0;
    }
    WATCH(NULL);
}

/* Copy `size` bytes from one address; return whether they were read, and the eight bytes before `end` are not all 0. */
EXPORTED int64_t quiver_take(uintptr_t address, int64_t size, uint8_t *out, uintptr_t end) {
    sigjmp_buf here;
    uint64_t tail = 0;
    stand_guard();
    if (sigsetjmp(here, 0))
        return 0;
    WATCH(&here);
    memcpy(out, (const void *)address, (size_t)size);
    atomic_signal_fence(memory_order_seq_cst); /* the tail vouches only for what was read before it */
    memcpy(&tail, (const void *)(end - sizeof tail), sizeof tail);
    WATCH(NULL);
    return tail != 0;
}

/* Hash `sizes[i]` bytes from each of `count` addresses. */
EXPORTED void quiver_hash(Hash hash, int64_t count, const uintptr_t *addresses, const int64_t *sizes, uint64_t *out,
                          uint8_t *torn) {
    sigjmp_buf here;
    volatile int64_t at = 0;
    stand_guard();
    if (sigsetjmp(here, 0))
        torn[at++] = 1;
    WATCH(&here);
    for (int64_t i = at; i < count; i++) {
        at = i;
        if (i + AHEAD < count)
            prefetch(addresses[i + AHEAD], (size_t)sizes[i + AHEAD]);
        out[i] = hash((const void *)addresses[i], (size_t)sizes[i]);
    }
    WATCH(NULL);
}
