/* What a message takes between two ranks, as options of `polder plan mpi`.
 *
 *     mpicc -O2 ping.c -o ping && mpiexec -n 2 ./ping */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { SHORT = 8, LONG = 1 << 20, ROUNDS = 25 };
static char message[LONG];

/* The median of half a round trip, in seconds. */
static double half(int rank, int bytes, int turns) {
    double taken[ROUNDS];
    for (int round = 0; round < ROUNDS; round++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double begin = MPI_Wtime();
        for (int turn = 0; turn < turns; turn++)
            for (int sender = 0; sender < 2; sender++) {
                if (rank == sender) MPI_Send(message, bytes, MPI_CHAR, 1 - rank, 0, MPI_COMM_WORLD);
                if (rank == 1 - sender) MPI_Recv(message, bytes, MPI_CHAR, sender, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            }
        taken[round] = (MPI_Wtime() - begin) / turns / 2;
        for (int at = round; at && taken[at] < taken[at - 1]; at--) {
            double swap = taken[at];
            taken[at] = taken[at - 1];
            taken[at - 1] = swap;
        }
    }
    return taken[ROUNDS / 2];
}

int main(int count, char **words) {
    int rank, ranks;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (ranks != 2) MPI_Abort(MPI_COMM_WORLD, 1);
    double latency = half(rank, SHORT, 1000), all = half(rank, LONG, 20);
    if (all <= latency) {
        if (!rank) fprintf(stderr, "a long message took no longer than a short one: run it where less else runs\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    if (!rank) printf("--latency=%.0fns --bandwidth=%.0fMB/s\n", latency * 1e9, LONG / (all - latency) / 1e6);
    MPI_Finalize();
    return 0;
}
