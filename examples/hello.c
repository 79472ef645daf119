/* Every rank says who and where it is, and the last one adds up all numbers that the others have sent.
 *
 *     mpicc hello.c -o hello
 *     polder mpi run -n 4 --emulate 2 -- ./hello */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **arguments) {
    int rank, ranks;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);

    const char *host = getenv("POLDER_HOST");
    printf("rank %d of %d runs on host %s of the pool\n", rank, ranks, host ? host : "0");

    int sum = 0;
    MPI_Reduce(&rank, &sum, 1, MPI_INT, MPI_SUM, ranks - 1, MPI_COMM_WORLD);
    if (rank == ranks - 1) printf("the sum of all ranks is %d\n", sum);
    return MPI_Finalize();
}
