/* Two MPI jobs that find each other: `connect accept` waits for `connect connect`, which reads its port from the file `port`. */
#include <mpi.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    char port[MPI_MAX_PORT_NAME] = "";
    int rank, there, sent, got = -1, sum, expected;
    MPI_Comm both;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    if (!strcmp(argv[1], "accept")) {
        if (rank == 0) {
            MPI_Open_port(MPI_INFO_NULL, port);
            FILE *file = fopen("new", "w");
            fputs(port, file);
            fclose(file);
            rename("new", "port");
        }
        MPI_Comm_accept(port, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &both);
    } else {
        if (rank == 0) {
            FILE *file;
            while (!(file = fopen("port", "r")))
                usleep(1000);
            if (!fgets(port, sizeof port, file))
                MPI_Abort(MPI_COMM_WORLD, 2);
            fclose(file);
        }
        MPI_Comm_connect(port, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &both);
    }
    MPI_Comm_remote_size(both, &there);
    sent = rank + 10;
    MPI_Sendrecv(&sent, 1, MPI_INT, rank, 5, &got, 1, MPI_INT, rank, 5, both, MPI_STATUS_IGNORE);
    /* The sum of what the other job has. */
    MPI_Allreduce(&sent, &sum, 1, MPI_INT, MPI_SUM, both);
    expected = 10 * there + there * (there - 1) / 2;
    printf("%s rank %d: %s\n", argv[1], rank, got == sent && sum == expected ? "RIGHT" : "WRONG");
    MPI_Comm_disconnect(&both);
    MPI_Finalize();
    return got != sent || sum != expected;
}
