/* Windows and memory that a program still has when it calls MPI_Finalize: the functions that delete the attributes of MPI_COMM_SELF use
 * and free them, as libraries do that clean up after themselves. Those that delete the attributes of a window use it too. */
#include "check.h"

enum { WORDS = 20000 };

static MPI_Win in_pool, over_own;
static long *part, *memory, own[4];
static int refuses;

/* What all ranks put round in a ring. */
static void ring(MPI_Win window, const long *words, const char *what) {
    const long sent = rank + 1;
    MPI_Win_fence(0, window);
    MPI_Put(&sent, 1, MPI_LONG, (rank + 1) % ranks, 3, 1, MPI_LONG, window);
    MPI_Win_fence(0, window);
    expect(words[3] == (rank + ranks - 1) % ranks + 1, what);
}

static int farewell(MPI_Win window, int key, void *words, void *extra) {
    (void)key, (void)extra;
    const long sent = rank + 100;
    MPI_Win_lock(MPI_LOCK_EXCLUSIVE, (rank + 1) % ranks, 0, window);
    MPI_Put(&sent, 1, MPI_LONG, (rank + 1) % ranks, 2, 1, MPI_LONG, window);
    MPI_Win_unlock((rank + 1) % ranks, window);
    MPI_Barrier(WORLD);
    MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, window);
    expect(((long *)words)[2] == (rank + ranks - 1) % ranks + 100, "a window that is freed");
    MPI_Win_unlock(rank, window);
    MPI_Barrier(WORLD);
    return refuses ? MPI_ERR_OTHER : MPI_SUCCESS;
}

static int clean(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)value, (void)extra;
    ring(in_pool, part, "a window");
    MPI_Win_free(&in_pool);
    ring(over_own, own, "a window over own memory");
    /* What is not let go of goes on. */
    refuses = 1;
    MPI_Win_set_errhandler(over_own, MPI_ERRORS_RETURN);
    expect(MPI_Win_free(&over_own) != MPI_SUCCESS, "a free that is refused");
    refuses = 0;
    own[3] = 0;
    MPI_Barrier(WORLD);
    ring(over_own, own, "a window that was not freed");
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
    int key, of_window;
    begin(&count, &arguments);
    MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, clean, &key, NULL);
    MPI_Comm_set_attr(MPI_COMM_SELF, key, NULL);
    MPI_Win_allocate(4 * sizeof *part, sizeof *part, MPI_INFO_NULL, WORLD, &part, &in_pool);
    MPI_Win_create(own, sizeof own, sizeof *own, MPI_INFO_NULL, WORLD, &over_own);
    MPI_Win_create_keyval(MPI_WIN_NULL_COPY_FN, farewell, &of_window, NULL);
    MPI_Win_set_attr(in_pool, of_window, part);
    MPI_Win_set_attr(over_own, of_window, own);
    MPI_Alloc_mem(WORDS * sizeof *memory, MPI_INFO_NULL, &memory);
    for (int i = 0; i < WORDS; i++) memory[i] = i + rank;
    MPI_Finalize();
    if (!wrong) printf("rank %d is done\n", rank);
    return wrong != 0;
}
