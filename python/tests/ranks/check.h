/* What MPI programs of the tests share: a count of what is wrong, and an end that tells it. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORLD MPI_COMM_WORLD

static int rank, ranks, wrong;

static inline void begin(int *count, char ***arguments) {
    MPI_Init(count, arguments);
    MPI_Comm_rank(WORLD, &rank);
    MPI_Comm_size(WORLD, &ranks);
}

static inline void expect(int is_right, const char *what) {
    if (is_right) return;
    wrong++;
    fprintf(stderr, "rank %d: %s is wrong\n", rank, what);
}

static inline int end(void) {
    MPI_Barrier(WORLD);
    if (!wrong) printf("rank %d is done\n", rank);
    MPI_Finalize();
    return wrong != 0;
}
