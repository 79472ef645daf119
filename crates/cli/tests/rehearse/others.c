// others NAME HOST FILE [LIBRARY]: programs that are rehearsed in part, or not at all, or in a way of their own.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <immintrin.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 1 << 16 };
static int host;

// Host 0 stores and writes back, and host 1 waits for it.
static void meet(volatile uint64_t *word) {
    if (host == 0) *word = 7;
    do { _mm_clflush((void *)word); _mm_mfence(); } while (*word != 7);
}

// Maps the file elsewhere. Memory that lies then where it lay, as the C library gives itself some, is none of the file.
static int moved(volatile uint64_t *lines) {
    void *place = mmap(NULL, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    _mm_clflush((void *)lines);
    volatile uint64_t *there = mremap((void *)lines, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    syscall(SYS_mmap, lines, BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    _mm_stream_si64((long long *)lines, 8);
    _mm_sfence();
    return there != MAP_FAILED && *lines == 8 && *there == 7;
}

void flush_one(void *line) { _mm_clflush(line); }

// Flushes ten times by a library, which is unloaded each time.
static int reloaded(volatile uint64_t *lines, const char *path) {
    for (int round = 0; round < 10; round++) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        void (*flush)(void *) = library ? (void (*)(void *))dlsym(library, "flush_one") : NULL;
        if (!flush) return 0;
        flush((void *)lines);
        if (dlclose(library)) return 0;
    }
    return 1;
}

static volatile uint64_t *all;
static volatile int is_over;
static void *flushes(void *unused) {
    while (!is_over) {
        munmap(mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 4096);
        _mm_clflush((void *)&all[64]);
    }
    return unused;
}

// Children flush that were forked while another thread did.
static int forked(volatile uint64_t *lines) {
    pthread_t thread;
    all = lines;
    pthread_create(&thread, NULL, flushes, NULL);
    int failed = 0;
    for (int child = 0; child < 300; child++) {
        pid_t process = fork();
        if (process == 0) {
            _mm_clflush((void *)lines);
            _exit(*lines != 7);
        }
        int status;
        failed += waitpid(process, &status, 0) != process || status != 0;
    }
    is_over = 1;
    return pthread_join(thread, NULL) == 0 && failed == 0;
}

int main(int count, char **words) {
    if (count < 4) return 3;
    const char *name = words[1];
    host = atoi(words[2]);
    int file = open(words[3], O_RDWR);
    size_t bytes = !strcmp(name, "grows") ? 2 * BYTES : BYTES;
    if (bytes > BYTES && ftruncate(file, bytes)) return 3;
    volatile uint64_t *lines = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (lines == MAP_FAILED) return 3;
    if (!strcmp(name, "blocks")) {
        sigset_t all;
        sigfillset(&all);
        sigprocmask(SIG_SETMASK, &all, NULL);
    }
    if (!strcmp(name, "ignores")) signal(SIGTRAP, SIG_IGN);
    if (!strcmp(name, "heap")) lines = aligned_alloc(64, 64);
    if (!strcmp(name, "heap") || !strcmp(name, "alone")) {
        *lines = 7;
        if (!strcmp(name, "heap") || host == 0) _mm_clflush((void *)lines);
        return 0;
    }
    meet(lines);
    if (!strcmp(name, "moves")) return !moved(lines);
    if (!strcmp(name, "forks")) return !forked(lines);
    if (!strcmp(name, "reloads")) return !reloaded(lines, words[4]);
    return 0;
}
