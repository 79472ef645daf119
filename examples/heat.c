/* Heat in a plate: ranks hold rows, exchange the rows at their edges, and agree on how much has changed.
 *
 *     mpicc -O2 heat.c -o heat && mpiexec -n 2 ./heat [rows [steps]] */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **words) {
    int rank, ranks;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int width = count > 1 ? atoi(words[1]) : 1024, steps = count > 2 ? atoi(words[2]) : 500;
    int rows = width / ranks;
    size_t cells = (size_t)(rows + 2) * width;
    double *now = calloc(cells, sizeof *now), *next = calloc(cells, sizeof *next);
    if (!now || !next) MPI_Abort(MPI_COMM_WORLD, 1);
    if (!rank)
        for (int x = 0; x < width; x++) now[x] = next[x] = 100;
    int above = rank ? rank - 1 : MPI_PROC_NULL, below = rank + 1 < ranks ? rank + 1 : MPI_PROC_NULL;
    double change = 0, all = 0;
    for (int step = 0; step < steps; step++) {
        MPI_Request requests[4];
        MPI_Irecv(now, width, MPI_DOUBLE, above, 0, MPI_COMM_WORLD, &requests[0]);
        MPI_Irecv(now + (size_t)(rows + 1) * width, width, MPI_DOUBLE, below, 1, MPI_COMM_WORLD, &requests[1]);
        MPI_Isend(now + width, width, MPI_DOUBLE, above, 1, MPI_COMM_WORLD, &requests[2]);
        MPI_Isend(now + (size_t)rows * width, width, MPI_DOUBLE, below, 0, MPI_COMM_WORLD, &requests[3]);
        MPI_Waitall(4, requests, MPI_STATUSES_IGNORE);
        change = 0;
        for (int y = 1; y <= rows; y++)
            for (int x = 1; x < width - 1; x++) {
                double *at = now + (size_t)y * width + x;
                double mean = (at[-1] + at[1] + at[-width] + at[width]) / 4;
                change += (mean - *at) * (mean - *at);
                next[(size_t)y * width + x] = mean;
            }
        MPI_Allreduce(&change, &all, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
        double *swap = now;
        now = next;
        next = swap;
    }
    if (!rank) printf("%d steps on %d ranks, the last changed %.6f\n", steps, ranks, all);
    free(now);
    free(next);
    MPI_Finalize();
    return 0;
}
