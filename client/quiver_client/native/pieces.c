/* What is done to each sample of a batch, without the interpreter and its lock: copied to its row, or hashed.
 *
 * Plain C without Python's headers, called by ctypes, which lets go of the lock meanwhile. The hash is not here: it is
 * the XXH3 of the library `xxhash`, handed over as a pointer. Addresses were checked by the caller. */

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

/* Raised when a signature changes, so that a library that was built from another version of this file is not used. */
EXPORTED int64_t quiver_pieces_version(void) { return 1; }

/* Samples lie where a shuffle put them: the processor guesses what comes next within one, and never the next one. */
static void prefetch(uintptr_t address, size_t size) {
    size_t end = size < AHEAD_BYTES_MAX ? size : AHEAD_BYTES_MAX;
    for (size_t at = 0; at < end; at += LINE_BYTES)
        PREFETCH(address + at);
}

/* Copy `size` bytes from each of `count` addresses into the rows of `out`, count x size bytes. */
EXPORTED void quiver_copy(int64_t count, const uintptr_t *addresses, int64_t size, uint8_t *out) {
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            prefetch(addresses[i + AHEAD], (size_t)size);
        memcpy(out + i * size, (const void *)addresses[i], (size_t)size);
    }
}

/* Hash `sizes[i]` bytes from each of `count` addresses. */
EXPORTED void quiver_hash(Hash hash, int64_t count, const uintptr_t *addresses, const int64_t *sizes, uint64_t *out) {
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            prefetch(addresses[i + AHEAD], (size_t)sizes[i + AHEAD]);
        out[i] = hash((const void *)addresses[i], (size_t)sizes[i]);
    }
}
