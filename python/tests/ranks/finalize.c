/* Windows and memory that a program still has when it calls MPI_Finalize: the functions that delete the attributes of MPI_COMM_SELF use
 * and free them, as libraries do that clean up after themselves. */
#include "check.h"

enum { WORDS = 20000 };

static MPI_Win in_pool, over_own;
static long *part, *memory, own[4];

/* What all ranks put round in a ring. */
static void ring(MPI_Win window, const long *words, const char *what) {
    const long sent = rank + 1;
    MPI_Win_fence(0, window);
    MPI_Put(&sent, 1, MPI_LONG, (rank + 1) % ranks, 3, 1, MPI_LONG, window);
    MPI_Win_fence(0, window);
    expect(words[3] == (rank + ranks - 1) % ranks + 1, what);
}

static int clean(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)value, (void)extra;
    ring(in_pool, part, "a window");
    MPI_Win_free(&in_pool);
    ring(over_own, own, "a window over own memory");
    MPI_Win_free(&over_own);
    for (int i = 0; i < WORDS; i++) expect(memory[i] == i + rank, "memory");
    MPI_Sendrecv(memory, 1, MPI_LONG, (rank + 1) % ranks, 1, memory + 1, 1, MPI_LONG, (rank + ranks - 1) % ranks, 1, WORLD,
                 MPI_STATUS_IGNORE);
    expect(memory[1] == (rank + ranks - 1) % ranks, "a message");
    MPI_Free_mem(memory);
    long *late;
    MPI_Alloc_mem(WORDS * sizeof *late, MPI_INFO_NULL, &late);
    memset(late, 1, WORDS * sizeof *late);
    MPI_Free_mem(late);
    MPI_Win_allocate(4 * sizeof *part, sizeof *part, MPI_INFO_NULL, WORLD, &part, &in_pool);
    ring(in_pool, part, "a late window");
    MPI_Win_free(&in_pool);
    return MPI_SUCCESS;
}

int main(int count, char **arguments) {
    int key;
    begin(&count, &arguments);
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, clean, &key, NULL);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
    MPI_Win_allocate(4 * sizeof *part, sizeof *part, MPI_INFO_NULL, WORLD, &part, &in_pool);
    MPI_Win_create(own, sizeof own, sizeof *own, MPI_INFO_NULL, WORLD, &over_own);
    MPI_Alloc_mem(WORDS * sizeof *memory, MPI_INFO_NULL, &memory);
    for (int i = 0; i < WORDS; i++) memory[i] = i + rank;
    MPI_Finalize();
    if (!wrong) printf("rank %d is done\n", rank);
    return wrong != 0;
}
