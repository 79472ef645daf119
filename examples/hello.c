/* Every rank says who it is and whether it is in the pool, and the last one adds up all numbers that the others have sent.
 *
 *     mpicc hello.c -o hello
 *     polder mpi run -n 4 --emulate 2 ./hello */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A megabyte: `polder mpi run` says how much went through the pool. */
enum { NUMBERS = 250000 };

/* Whether this process has mapped the pool, as only Polder's libfabric provider does. */
static int has_pool(const char *pool) {
    char line[4096];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && !found && fgets(line, sizeof line, maps)) found = strstr(line, pool) != NULL;
    if (maps) fclose(maps);
    return found;
}

int main(int count, char **arguments) {
    int rank, ranks;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);

    const char *pool = getenv("POLDER_POOL"), *host = getenv("POLDER_HOST");
    if (pool && has_pool(pool))
        printf("rank %d of %d runs on host %s of the pool\n", rank, ranks, host ? host : "0");
    else
        printf("rank %d of %d runs without a pool\n", rank, ranks);

    static int numbers[NUMBERS], sums[NUMBERS];
    for (int i = 0; i < NUMBERS; i++) numbers[i] = rank;
    MPI_Reduce(numbers, sums, NUMBERS, MPI_INT, MPI_SUM, ranks - 1, MPI_COMM_WORLD);
    if (rank == ranks - 1) printf("the sum of all ranks is %d\n", sums[NUMBERS - 1]);
    return MPI_Finalize();
}
