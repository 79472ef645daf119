/* Rank 0 computes: it calls nothing of MPI until another rank, which calls MPI alone, has put into its memory. The memory of the
 * window is the program's own, of MPI_Alloc_mem, attached, or allocated with the window. Prints how long each access took. */
#include <time.h>

#include "check.h"

enum { WORDS = 16384, TIMES = 50 };
enum { OWN, ALLOC_MEM, DYNAMIC, ALLOCATE, KINDS };

static const char *const kinds[KINDS] = {"MPI_Win_create", "MPI_Alloc_mem", "dynamic", "MPI_Win_allocate"};
static long own[WORDS];

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e6 + at.tv_nsec / 1e3;
}

/* Computes until a word has this value. */
static void compute(volatile long *word, long value) {
    while (*word != value) {
    }
}

static long *make(int kind, MPI_Win *window, MPI_Aint *base) {
    long *memory = own;
    MPI_Aint bytes = rank == 0 ? sizeof own : 0;
    if (kind == ALLOC_MEM) MPI_Alloc_mem(sizeof own, MPI_INFO_NULL, &memory);
    if (kind == ALLOCATE) MPI_Win_allocate(bytes, sizeof(long), MPI_INFO_NULL, WORLD, &memory, window);
    if (kind == DYNAMIC) MPI_Win_create_dynamic(MPI_INFO_NULL, WORLD, window);
    if (kind == DYNAMIC && rank == 0) MPI_Win_attach(*window, memory, bytes);
    if (kind == OWN || kind == ALLOC_MEM) {
        MPI_Win_create(memory, bytes, sizeof(long), MPI_INFO_NULL, WORLD, window);
    }
    if (rank == 0) memset(memory, 0, bytes);
    *base = 0;
    if (kind == DYNAMIC) {
        MPI_Get_address(memory, base);
        MPI_Bcast(base, 1, MPI_AINT, 0, WORLD);
    }
    MPI_Barrier(WORLD);
    return memory;
}

/* What one access took, on average. */
static void tell(const char *what, int kind, double since) {
    if (rank == 1) printf("%s, %s: %.1f us\n", kinds[kind], what, (now() - since) / TIMES);
    MPI_Barrier(WORLD);
}

/* One access after another of rank 1, while rank 0 computes until the last is there. */
static void accesses(int kind) {
    MPI_Win window;
    MPI_Aint base;
    long *memory = make(kind, &window, &base), got = 0;
    int unit = kind == DYNAMIC ? sizeof(long) : 1;
    double since = now();
    if (rank == 1) MPI_Win_lock_all(0, window);
    for (long time = 1; rank == 1 && time <= TIMES; time++) {
        MPI_Put(&time, 1, MPI_LONG, 0, base, 1, MPI_LONG, window);
        MPI_Win_flush(0, window);
        MPI_Get(&got, 1, MPI_LONG, 0, base, 1, MPI_LONG, window);
        MPI_Win_flush(0, window);
        expect(got == time, "what was put and got back");
    }
    if (rank == 1) MPI_Win_unlock_all(window);
    if (rank == 0) compute(memory, TIMES);
    tell("put, flush, get, flush", kind, since);
    since = now();
    for (long time = 1; rank == 1 && time <= TIMES; time++) {
        MPI_Win_lock(MPI_LOCK_EXCLUSIVE, 0, 0, window);
        MPI_Put(&time, 1, MPI_LONG, 0, base + 1 * unit, 1, MPI_LONG, window);
        MPI_Win_unlock(0, window);
    }
    if (rank == 0) compute(memory + 1, TIMES);
    tell("lock, put, unlock", kind, since);
    MPI_Barrier(WORLD);
    if (kind == DYNAMIC && rank == 0) MPI_Win_detach(window, memory);
    MPI_Win_free(&window);
    if (kind == ALLOC_MEM) MPI_Free_mem(memory);
}

int main(int count, char **arguments) {
    begin(&count, &arguments);
    for (int kind = 0; kind < KINDS; kind++) {
        if (count < 2 || kind == atoi(arguments[1])) accesses(kind);
    }
    return end();
}
